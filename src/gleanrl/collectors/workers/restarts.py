"""What becomes of workers that were lost: the error is raised, or another one takes the place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gleanrl.arguments import non_negative
from gleanrl.errors import InvalidArgumentError
from gleanrl.system.clock import Deadline

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
