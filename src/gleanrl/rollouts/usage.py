"""Who uses an environment: a rollout must notice that somebody else stepped or reset it in between."""

from __future__ import annotations


class Usage:
    """The last user of one environment. Not thread-safe, as the environment isn't.

    Attributes:
        started: whether anybody has stepped or reset the environment.
    """

    def __init__(self) -> None:
        self.holder: Lease | None = None
        self.started = False

    def direct(self) -> None:
        """Note a direct call of the environment's methods: nobody holds a lease any more."""
        self.holder = None
        self.started = True


class Lease:
    """One user's claim to an environment: held from the moment that it is taken until somebody else uses it.

    Args:
        usage: of the environment.
    """

    def __init__(self, usage: Usage | None = None) -> None:
        self._usage = usage or Usage()

    def take(self) -> None:
        """Note that the environment is stepped or reset by the lease's owner."""
        self._usage.holder = self
        self._usage.started = True

    @property
    def held(self) -> bool:
        """Whether the lease's owner was the last user."""
        return self._usage.holder is self

    def give_up(self) -> None:
        """Hold it no longer."""
        self._usage.direct()
