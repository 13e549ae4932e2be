"""What a node may collect: batches granted by the owner, who counts frames of all nodes."""

from __future__ import annotations

from collections.abc import Iterable

from gleanrl.collectors.budget import Grant


class Allowance:
    """A queue of grants, found by the frames that were collected since it was empty.

    A batch that holds fewer frames than it was granted (steps that turned out to be none) leaves the rest, which is
    granted again.

    Args:
        num_envs: environments that step at once.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._grants: list[tuple[int, Grant]] = []
        self._end = 0

    def clear(self, spent: int) -> None:
        """Forget what is left, after so many frames."""
        self._grants, self._end = [], spent

    def add(self, grants: Iterable[Grant], spent: int) -> None:
        """Add grants, and forget those that are used up after so many frames."""
        self._grants = [(end, grant) for end, grant in self._grants if end > spent]
        for grant in grants:
            self._end += self.frames(grant, self._num_envs)
            self._grants.append((self._end, grant))

    @staticmethod
    def frames(grant: Grant, num_envs: int) -> int:
        """Return how many frames a grant is for."""
        frames = grant.num_steps * num_envs
        return frames if grant.most is None else min(frames, grant.most)

    def left(self, spent: int) -> int:
        """Return the frames that are granted, after so many."""
        return max(self._end - spent, 0)

    def grant(self, frames: int) -> Grant | None:
        """Return what the next batch may hold, after so many frames; None if there is none."""
        for end, grant in self._grants:
            if end > frames:
                most = end - frames
                return Grant(min(grant.num_steps, -(-most // self._num_envs)), grant.random, most)
        return None
