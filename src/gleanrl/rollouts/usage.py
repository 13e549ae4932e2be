"""Who uses an environment: a rollout must notice that somebody else stepped or reset it in between."""

from __future__ import annotations


class Usage:
    """The last user of one environment, by a token of that user's. Not thread-safe, as the environment isn't.

    Attributes:
        started: whether anybody has stepped or reset the environment.
    """

    def __init__(self) -> None:
        self._token: object | None = None
        self.started = False

    def by(self, token: object | None) -> None:
        """Note who steps or resets the environment; None for a direct call of its methods."""
        self._token = token
        self.started = True

    def is_by(self, token: object) -> bool:
        """Return whether the owner of `token` was the last user."""
        return self._token is token
