"""Where a collection in worker processes stands, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gleanrl.collectors.ledger import Ledger
from gleanrl.collectors.workers.restarts import Losses
from gleanrl.collectors.workers.words import Share


class Taken(NamedTuple):
    """Shares that make a batch, on their way to the user."""

    shares: Mapping[int, Any]
    """What names the share of each worker: its number, or where it is."""
    frames: int
    """That are handed out."""
    flagged: int
    excess: int
    """Frames that are masked because they are beyond the budget."""
    counted: bool
    """Whether they count against the budget."""
    seconds: float


class Standing(NamedTuple):
    """Where a collection stands. It goes from one to the next by one assignment, which no interrupt can cut."""

    ledger: Ledger
    taken: tuple[int, ...]
    """Shares of each worker that were delivered or discarded."""
    unwanted: tuple[str, ...]
    """Why the shares that a worker has under way will be discarded; nothing if they are wanted."""
    resets: tuple[bool, ...]
    """Whether a worker's next share begins with a reset."""
    losses: tuple[Losses, ...]
    """Processes that each worker has lost. What they had under way is in the ledger."""

    @classmethod
    def begin(cls, count: int) -> Standing:
        """Return that of so many workers that have done nothing yet."""
        return cls(Ledger(), (0,) * count, ("",) * count, (False,) * count, (Losses(),) * count)

    def with_worker(self, worker: int, **changes: Any) -> Standing:
        """Return it with other values for one worker."""
        fresh: dict[str, Any] = {}
        for name, value in changes.items():
            entries = getattr(self, name)
            fresh[name] = (*entries[:worker], value, *entries[worker + 1 :])
        return self._replace(**fresh)

    def without(self, worker: int, share: Share) -> Standing:
        """Return it after a worker's next share was discarded: it failed or is unwanted."""
        reason = share.reason if share.failed else self.unwanted[worker]
        ledger = self.ledger.discarding(share.frames, reason).discarding(share.excess, "budget")
        return self._replace(ledger=ledger).with_worker(worker, taken=self.taken[worker] + 1)

    def losing(self, worker: int, frames: int, reason: str, losses: Losses) -> Standing:
        """Return it after a worker was lost, with a share of so many frames; whoever comes next begins afresh."""
        after = self.with_worker(worker, unwanted="", resets=False, losses=losses)
        return after._replace(ledger=self.ledger.discarding(frames, reason))

    def delivering(self, taken: Taken) -> Standing:
        """Return it after a batch was handed out; the same if it was already."""
        if any(self.taken[worker] != number for worker, number in taken.shares.items()):
            return self
        ledger = self.ledger.delivering(taken.frames, taken.flagged, taken.counted, taken.seconds)
        numbers = list(self.taken)
        for worker in taken.shares:
            numbers[worker] += 1
        return self._replace(ledger=ledger.discarding(taken.excess, "budget"), taken=tuple(numbers))
