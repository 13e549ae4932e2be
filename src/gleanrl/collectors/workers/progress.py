"""The state of a collection in worker processes as one immutable value, and the rules for replacing lost workers."""

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
    """The losses of one worker number, its replacements included."""

    number: int = 0
    in_a_row: int = 0
    """Losses since the worker last finished a share."""
    served: int = 0
    """Finished shares at the last loss."""
    frames: int = 0
    """Frames of the shares that the lost workers hadn't finished."""
    verdict: Deadline | str = ""
    """When the worker is to be replaced, or the reason why it isn't, as text for the error."""


class Restarts:
    """The rules for replacing lost workers; immutable.

    A worker is replaced at once if this is its first loss, or if it has finished a share since the last one. Otherwise
    the replacement is delayed by 0.1 s, and twice as long after each further loss, while the other workers continue.
    The fifth loss in a row is final.

    Args:
        on_worker_error: ``"raise"`` or ``"restart"``.
        max_restarts: maximal number of replacements of all workers together, during the collector's life.

    Raises:
        InvalidArgumentError: for another `on_worker_error`, or a negative `max_restarts`.
    """

    def __init__(self, on_worker_error: str, max_restarts: int) -> None:
        if on_worker_error not in ("raise", "restart"):
            raise InvalidArgumentError(
                f"on_worker_error: expected 'raise' or 'restart', got {on_worker_error!r}"
            )
        most = non_negative("max_restarts", max_restarts)
        self._most = most if on_worker_error == "restart" else None  # None: lost workers end the collector

    def after_loss(self, before: Sequence[Losses], worker: int, served: int, frames: int) -> Losses:
        """Return a worker's losses after one more.

        Args:
            before: the losses of all workers so far.
            worker: number of the lost worker.
            served: number of shares that it and its predecessors have finished.
            frames: frames of its unfinished share.
        """
        own = before[worker]
        in_a_row = own.in_a_row + 1 if own.number and own.served == served else 1
        verdict = self._verdict(sum(losses.number for losses in before), in_a_row)
        return Losses(own.number + 1, in_a_row, served, own.frames + frames, verdict)

    def _verdict(self, so_far: int, in_a_row: int) -> Deadline | str:
        if self._most is None:
            return "pass on_worker_error='restart' to replace lost workers"
        if in_a_row >= _MOST_IN_A_ROW:
            return f"it was lost {in_a_row} times without finishing a share, and isn't replaced again"
        if so_far >= self._most:
            return f"all max_restarts={self._most} replacements are used up"
        pause = _FIRST_PAUSE_S * 2 ** (in_a_row - 2) if in_a_row > 1 else 0.0
        return Deadline(min(pause, _LONGEST_PAUSE_S))


class Consumed(NamedTuple):
    """Shares that make up a batch on its way to the user."""

    shares: Mapping[int, Any]
    """By worker: the number of its share, or a reference to it."""
    frames: int
    """Frames that are delivered."""
    flagged: int
    excess: int
    """Frames that are masked because they exceed the budget."""
    counted: bool
    """Whether the frames count against the budget."""
    seconds: float


class Progress(NamedTuple):
    """The state of a collection. It changes by one assignment of a new value, which no interrupt can split."""

    counts: FrameCounts
    num_consumed: tuple[int, ...]
    """For each worker, the number of shares that were delivered or discarded."""
    unwanted: tuple[str, ...]
    """For each worker, the reason for discarding its shares under way; empty if they are wanted."""
    resets: tuple[bool, ...]
    """For each worker, whether its next share begins with a reset."""
    losses: tuple[Losses, ...]
    """The losses of each worker. `counts` includes their frames."""

    @classmethod
    def begin(cls, count: int) -> Progress:
        """Return the state of `count` workers before their first share."""
        return cls(FrameCounts(), (0,) * count, ("",) * count, (False,) * count, (Losses(),) * count)

    def with_worker(self, worker: int, **changes: Any) -> Progress:
        """Return the state with other values for one worker."""
        changed: dict[str, Any] = {}
        for name, value in changes.items():
            entries = getattr(self, name)
            changed[name] = (*entries[:worker], value, *entries[worker + 1 :])
        return self._replace(**changed)

    def without(self, worker: int, share: Share) -> Progress:
        """Return the state after a worker's next share, which failed or is unwanted, was discarded."""
        reason = share.reason if share.failed else self.unwanted[worker]
        counts = self.counts.discarding(share.frames, reason).discarding(share.excess, "budget")
        return self._replace(counts=counts).with_worker(worker, num_consumed=self.num_consumed[worker] + 1)

    def losing(self, worker: int, frames: int, reason: str, losses: Losses) -> Progress:
        """Return the state after a worker was lost, with an unfinished share of `frames` frames.

        A replacement starts with new environments, so it needs no reset.
        """
        after = self.with_worker(worker, unwanted="", resets=False, losses=losses)
        return after._replace(counts=self.counts.discarding(frames, reason))

    def delivering(self, consumed: Consumed) -> Progress:
        """Return the state after a batch was delivered; return `self` if it was counted already.

        That makes the call idempotent: after an interrupt it may be repeated for the same batch.
        """
        if any(self.num_consumed[worker] != number for worker, number in consumed.shares.items()):
            return self
        counts = self.counts.delivering(consumed.frames, consumed.flagged, consumed.counted, consumed.seconds)
        numbers = list(self.num_consumed)
        for worker in consumed.shares:
            numbers[worker] += 1
        return self._replace(counts=counts.discarding(consumed.excess, "budget"), num_consumed=tuple(numbers))
