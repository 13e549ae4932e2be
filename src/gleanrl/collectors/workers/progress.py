"""Where a collection in worker processes stands, as one immutable value.

What becomes of workers that were lost: the error is raised, or another one takes the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gleanrl._os.clock import Deadline
from gleanrl._util import non_negative
from gleanrl.collectors.frame_accounting import FrameCounts
from gleanrl.collectors.workers.shared_counters import Share
from gleanrl.errors import InvalidArgumentError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_IN_A_ROW = 5


class Losses(NamedTuple):
    """The processes that one worker has lost."""

    number: int = 0
    in_a_row: int = 0
    """Those that were lost since the worker last finished a share."""
    served: int = 0
    """Shares that it had finished when the last one was lost."""
    frames: int = 0
    """Frames of the shares that they hadn't finished."""
    verdict: Deadline | str = ""
    """When the last one is to be replaced; or, in words for the error, why it isn't."""


class Restarts:
    """How often, and how soon, workers are made anew. Never changes.

    The first time a lost worker is replaced at once. One that is lost again before it has finished a share waits, twice
    as long each time, while the others go on; the fifth such loss in a row is final.

    Args:
        on_worker_error: ``"raise"`` or ``"restart"``.
        max_restarts: of all workers together, during the collector's life.

    Raises:
        InvalidArgumentError: for anything else.
    """

    def __init__(self, on_worker_error: str, max_restarts: int) -> None:
        if on_worker_error not in ("raise", "restart"):
            raise InvalidArgumentError(
                f"on_worker_error: expected 'raise' or 'restart', got {on_worker_error!r}"
            )
        self._most = non_negative("max_restarts", max_restarts) if on_worker_error == "restart" else 0

    def after_loss(self, before: Sequence[Losses], worker: int, served: int, frames: int) -> Losses:
        """Return a worker's losses after another one.

        Args:
            before: those of all workers so far.
            worker: its number.
            served: the shares that it has finished, whatever process it had.
            frames: of the share that it hadn't.
        """
        own = before[worker]
        in_a_row = own.in_a_row + 1 if own.number and own.served == served else 1
        verdict = self._verdict(sum(losses.number for losses in before), in_a_row)
        return Losses(own.number + 1, in_a_row, served, own.frames + frames, verdict)

    def _verdict(self, so_far: int, in_a_row: int) -> Deadline | str:
        if not self._most:
            return "pass on_worker_error='restart' to have lost workers made anew"
        if in_a_row >= _MOST_IN_A_ROW:
            return f"it was lost {in_a_row} times without finishing a share: it isn't made anew again"
        if so_far >= self._most:
            return f"max_restarts={self._most} are spent"
        pause = _FIRST_PAUSE_S * 2 ** (in_a_row - 2) if in_a_row > 1 else 0.0
        return Deadline(min(pause, _LONGEST_PAUSE_S))


class Consumed(NamedTuple):
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


class Progress(NamedTuple):
    """Where a collection stands. It goes from one to the next by one assignment, which no interrupt can cut."""

    ledger: FrameCounts
    taken: tuple[int, ...]
    """Shares of each worker that were delivered or discarded."""
    unwanted: tuple[str, ...]
    """Why the shares that a worker has under way will be discarded; nothing if they are wanted."""
    resets: tuple[bool, ...]
    """Whether a worker's next share begins with a reset."""
    losses: tuple[Losses, ...]
    """Processes that each worker has lost. What they had under way is in the ledger."""

    @classmethod
    def begin(cls, count: int) -> Progress:
        """Return that of so many workers that have done nothing yet."""
        return cls(FrameCounts(), (0,) * count, ("",) * count, (False,) * count, (Losses(),) * count)

    def with_worker(self, worker: int, **changes: Any) -> Progress:
        """Return it with other values for one worker."""
        fresh: dict[str, Any] = {}
        for name, value in changes.items():
            entries = getattr(self, name)
            fresh[name] = (*entries[:worker], value, *entries[worker + 1 :])
        return self._replace(**fresh)

    def without(self, worker: int, share: Share) -> Progress:
        """Return it after a worker's next share was discarded: it failed or is unwanted."""
        reason = share.reason if share.failed else self.unwanted[worker]
        ledger = self.ledger.discarding(share.frames, reason).discarding(share.excess, "budget")
        return self._replace(ledger=ledger).with_worker(worker, taken=self.taken[worker] + 1)

    def losing(self, worker: int, frames: int, reason: str, losses: Losses) -> Progress:
        """Return it after a worker was lost, with a share of so many frames; whoever comes next begins afresh."""
        after = self.with_worker(worker, unwanted="", resets=False, losses=losses)
        return after._replace(ledger=self.ledger.discarding(frames, reason))

    def delivering(self, taken: Consumed) -> Progress:
        """Return it after a batch was handed out; the same if it was already."""
        if any(self.taken[worker] != number for worker, number in taken.shares.items()):
            return self
        ledger = self.ledger.delivering(taken.frames, taken.flagged, taken.counted, taken.seconds)
        numbers = list(self.taken)
        for worker in taken.shares:
            numbers[worker] += 1
        return self._replace(ledger=ledger.discarding(taken.excess, "budget"), taken=tuple(numbers))
