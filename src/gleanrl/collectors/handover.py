"""The way of a batch from its source to the user, or into a buffer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDictBase

from gleanrl.collectors.background import Background
from gleanrl.collectors.budget import Budget, Grant, Grants
from gleanrl.collectors.delivery import Delivery
from gleanrl.collectors.feed import Feed
from gleanrl.collectors.progress import CollectorProgress
from gleanrl.collectors.source import BudgetSpent, Collected, Source
from gleanrl.errors import ClosedError

Packed = TypeVar("Packed")
Finish = Callable[[TensorDictBase], Any]


class Handover:
    """Collects batches and hands them over. One caller at a time.

    A batch is counted as delivered as the very last thing: an interrupt comes before that, and the batch is lost and
    counted as discarded, or it comes when the caller has the batch. So nothing may follow in any of the callers.

    Args:
        source: makes the batches.
        budget: how many frames of them.
        delivery: what becomes of them.
        feed: the buffer that they go into; None for the user.
        before: called before each is collected.
        progress: shows the counters; None for nowhere.

    Attributes:
        closed: whether there is nothing to be handed over any more; whoever owns the source sets it.
        background: what has them collected in a thread, once there is one.
    """

    closed = False
    background: Background | None = None

    def __init__(
        self,
        source: Source,
        budget: Budget,
        delivery: Delivery,
        feed: Feed | None = None,
        before: Callable[[], Any] | None = None,
        progress: CollectorProgress | None = None,
    ) -> None:
        self.source, self.feed = source, feed
        self._budget, self._delivery, self._before, self._progress = budget, delivery, before, progress

    def require_open(self) -> None:
        """Raise `ClosedError` if there is nothing to be handed over any more."""
        if self.closed:
            raise ClosedError(
                "the collector was shut down, or its budget is spent, and its environment is closed: make a new "
                "collector; to evaluate afterwards use an environment of its own, or collect with total_frames=-1 and "
                "end with shutdown(close_env=False)"
            )

    def next(self, finish: Finish | None = None) -> TensorDictBase | None:
        """Return the next batch that the budget grants, or put it into the buffer and return None.

        Args:
            finish: called on a batch before it's handed out.

        Raises:
            BudgetSpent: there is none.
            ClosedError: nothing is handed over any more.
        """
        if not self.source.more(self._budget):
            raise BudgetSpent
        collect = partial(self.source.next, self._budget, self._lends)
        return self._carried_out(collect, finish if self.feed is None else None, self.feed)

    def aside(self, grant: Grant) -> TensorDictBase | None:
        """Return a batch outside the budget, to the user in any case."""
        return self._carried_out(lambda: self.source.collect(grant))

    def serve(
        self, grants: Grants, pack: Callable[[TensorDictBase, tuple[int, int]], Packed]
    ) -> Packed | None:
        """Collect a batch for somebody else, who grants it; None if nothing is granted.

        Args:
            grants: in place of the budget.
            pack: called on the batch and `Collected.part`; its result, which is returned, is read before the next call.
        """
        if not self.source.more(grants):
            return None
        packed: list[Packed] = []
        part = (0, 1)

        def collect() -> Collected:
            nonlocal part
            collected = self.source.next(grants, lend=True)
            part = collected.part
            return collected

        self._carried_out(collect, lambda batch: packed.append(pack(batch, part)))
        return packed[0]

    def _carried_out(
        self, collect: Callable[[], Collected], finish: Finish | None = None, feed: Feed | None = None
    ) -> TensorDictBase | None:
        """Return what is made of a batch, or put it into a buffer."""
        self.require_open()
        self.show_progress()
        try:
            if self._before is not None:
                self._before()
            with nullcontext() if self.background is None else self.background.making():
                collected = collect()
            batch = self._finished(collected.batch, finish)
            if feed is None:
                return self.source.deliver(collected, batch)
            try:
                feed.put(batch, lambda: self.source.deliver(collected, batch))
                return None
            except Exception:
                self.source.lose("buffer")
                raise
        except BaseException:
            self.source.lose("interrupted")
            raise

    @property
    def _lends(self) -> bool:
        """Whether whoever gets a batch copies it at once, so that it may stand in memory that is written again."""
        return self._delivery.copies or (
            self.feed is not None and self.feed.copies and self._delivery.is_plain
        )

    def _finished(self, batch: TensorDictBase, finish: Finish | None) -> TensorDictBase:
        try:
            batch = self._delivery(batch)
            if finish is not None:
                finish(batch)
            return batch
        except Exception:
            self.source.lose("postproc")
            raise

    def show_progress(self, last: bool = False) -> None:
        """Show the counters, for the `last` time, if they are shown."""
        if self._progress is not None:
            self._progress.update(self.source.spent, self.source.stats())
            if last:
                self._progress.close()
