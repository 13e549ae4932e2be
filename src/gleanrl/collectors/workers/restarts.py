"""What becomes of workers that were lost: the error is raised, or another one takes the place."""

from __future__ import annotations

from gleanrl.arguments import non_negative
from gleanrl.errors import InvalidArgumentError
from gleanrl.system.clock import Deadline

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_IN_A_ROW = 5


class Restarts:
    """How often, and how soon, workers are made anew.

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
        self._left = non_negative("max_restarts", max_restarts) if on_worker_error == "restart" else 0
        self._most = self._left
        self._in_a_row: dict[int, tuple[int, int]] = {}
        self.count = 0
        """Workers that were made anew."""

    def after_loss(self, worker: int, served: int) -> Deadline | str:
        """Return when a lost worker is to be replaced; or, in words for the error, why it isn't.

        Args:
            worker: its number.
            served: the shares that it and the ones before it have finished.
        """
        if not self._most:
            return "pass on_worker_error='restart' to have lost workers made anew"
        before, losses = self._in_a_row.get(worker, (served, 0))
        losses = losses + 1 if before == served else 1
        self._in_a_row[worker] = served, losses
        if losses >= _MOST_IN_A_ROW:
            return f"it was lost {losses} times without finishing a share: it isn't made anew again"
        if not self._left:
            return f"max_restarts={self._most} are spent"
        self._left -= 1
        self.count += 1
        pause = _FIRST_PAUSE_S * 2 ** (losses - 2) if losses > 1 else 0.0
        return Deadline(min(pause, _LONGEST_PAUSE_S))
