"""What happens to a batch between its source and the user.

Where batches go instead of to the user: a replay buffer.

The progress bar of a collector: frames, frames per second, episodes, mean return, time to go.

The way of a batch from its source to the user, or into a buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_path, is_private
from gleanrl._os import clock
from gleanrl._os.interrupts import to_the_end
from gleanrl._util import is_native, optional_callable
from gleanrl.collectors.background import Background
from gleanrl.collectors.frame_accounting import CollectorStats
from gleanrl.collectors.source import Budget, BudgetSpent, Collected, Grant, Grants, Source
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.data.replay_buffers import RayReplayBuffer, ReplayBuffer
from gleanrl.data.replay_buffers.presets import copies_at_once
from gleanrl.envs.rollout import mark_truncated
from gleanrl.errors import ClosedError, InvalidTypeError


class PostProcessing:
    """Marks, moves, splits and post-processes batches.

    Args:
        device: where batches are moved to; None for where they are.
        truncated: the done keys of the environment if the last step of every batch is marked as truncated.
        split: whether batches are split into padded trajectories.
        postproc: called last; its result is delivered.
        reuse: whether batches are moved into the same memory, each overwriting the last.
        hook: called on every batch, as it is delivered.

    Raises:
        InvalidTypeError: if `postproc` or `hook` can't be called.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        truncated: Sequence[NestedKey] = (),
        split: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        reuse: bool = False,
        hook: Callable[[TensorDictBase], Any] | None = None,
    ) -> None:
        self._hook = optional_callable("post_collect_hook", hook)
        optional_callable("postproc", postproc)
        self._device, self._truncated, self._split, self._postproc = device, list(truncated), split, postproc
        self._reuse = reuse
        self._same: TensorDictBase | None = None
        self._private: list[NestedKey] | None = None  # of all batches, since they have one structure

    @property
    def copies(self) -> bool:
        """Whether batches are moved to other memory before anybody sees them."""
        return self._device is not None and self._device.type != "cpu"

    @property
    def is_plain(self) -> bool:
        """Whether nobody sees a batch before it's delivered."""
        return not self._split and self._postproc is None and self._hook is None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return what is handed out in place of a collected batch; private entries, ``"_noise"`` say, are left out."""
        if self._private is None:
            # What isn't here is a reference to a batch that was finished where it was collected.
            keys = batch.keys(True, True) if isinstance(batch, TensorDictBase) else ()
            self._private = [key for key in keys if is_private(as_path(key))]
        if self._private:
            batch = batch.exclude(*self._private)
        if self._truncated:
            mark_truncated(batch, self._truncated)
        if self._device is not None:
            batch = self._moved(batch.to(self._device))
        if self._split:
            batch = split_trajectories(batch, prefix="collector")
        if self._postproc is not None:
            batch = self._postproc(batch)
            if batch is None:
                raise InvalidTypeError(
                    f"postproc: expected the batch that is delivered, got None from {self._postproc!r}"
                )
        if self._hook is not None:
            self._hook(batch)
        return batch

    def _moved(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._reuse:
            return batch
        if self._same is None or self._same.batch_size != batch.batch_size:
            self._same = batch
            return batch
        return self._same.copy_(batch)


def place_postproc(postproc: Any, device: torch.device | None) -> None:
    """Move a `postproc` that has a method ``to`` to where batches are delivered; None for where it is."""
    if postproc is not None and hasattr(postproc, "to") and device is not None:
        postproc.to(device)


class BufferSink:
    """Puts batches into a buffer.

    Args:
        buffer: has `extend` and `add`; other threads may sample from it meanwhile if it allows that, as ours do.
        whole: whether a batch goes in by one `extend`; else step by step, by `add` for one environment, or several and
            a storage with their dimensions, by `extend` for several otherwise.

    Raises:
        InvalidTypeError: if `buffer` isn't one.
    """

    def __init__(self, buffer: Any, whole: bool = True) -> None:
        try:
            self._adders = buffer.add, buffer.extend
        except AttributeError as cause:
            raise InvalidTypeError(
                f"replay_buffer: expected a replay buffer, got {type(buffer).__name__}"
            ) from cause
        self.buffer, self._whole = buffer, whole

    @property
    def copies(self) -> bool:
        """Whether the buffer copies what it is given, and nobody else sees that."""
        return self._whole and (isinstance(self.buffer, RayReplayBuffer) or copies_at_once(self.buffer))

    @property
    def slot_dims(self) -> int:
        """The batch dimensions that the buffer's records stand in."""
        return self.buffer.storage.ndim if isinstance(self.buffer, ReplayBuffer) else 1

    def put(self, batch: Any, arrived: Callable[[], Any]) -> None:
        """Put a batch in, or what the buffer's `extend` takes in place of one, and call `arrived`, maybe twice.

        An interrupt comes before the batch is in, or after both; that holds for buffers of ours, whose writes end
        whatever comes.
        """
        if isinstance(batch, TensorDictBase) and not batch.batch_size.numel():
            arrived()
            return
        before = self._written()
        try:
            self._put(batch)
            arrived()
        except BaseException:
            try:
                self._settle(before, arrived)
            except BaseException:  # a second interrupt
                to_the_end(lambda: self._settle(before, arrived))
            raise

    def _settle(self, before: int | None, arrived: Callable[[], Any]) -> None:
        """Call `arrived` if a batch is in, given how many rows had been written before it."""
        if before is not None and self._written() != before:
            arrived()

    def _put(self, batch: TensorDictBase) -> None:
        if self._whole:
            self._adders[1](batch)
            return
        # To a storage of several batch dimensions a step of all environments is one record.
        put = self._adders[batch.ndim > self.slot_dims]
        for record in batch.unbind(-1):
            put(record)

    def _written(self) -> int | None:
        buffer = self.buffer
        return buffer.stats().rows_written if is_native(buffer, "stats", of=ReplayBuffer) else None


_SECONDS_BETWEEN_DRAWINGS = 0.25


class CollectorProgress:
    """Shows a collector's counters on the terminal.

    It is drawn when a batch is handed over, a few times a second at most.

    No thread of its own: while the learner is busy nothing is drawn.

    Args:
        total_frames: the collector's budget; None for endless (then there is no bar and no time to go).
        console: where to draw; None for the terminal.
    """

    def __init__(self, total_frames: int | None, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.completed:,.0f} frames"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]:,.0f} frames/s  {task.fields[episodes]:,} episodes"),
            TextColumn("mean return {task.fields[mean_return]:.1f}"),
            TimeRemainingColumn(),
            auto_refresh=False,
            console=console,
        )
        self._task = self._progress.add_task(
            "collect", total=total_frames, speed=0.0, episodes=0, mean_return=float("nan")
        )
        self._end: weakref.finalize[..., CollectorProgress] | None = None  # made with the first drawing
        self._drawn = 0.0

    def update(self, frames: int, stats: CollectorStats) -> None:
        """Show `frames` delivered frames and the counters; nothing after `close`, or once the program ends."""
        if self._end is not None and not self._end.alive:
            return
        self._progress.update(
            self._task,
            completed=frames,
            speed=stats.frames_per_s,
            episodes=stats.episodes,
            mean_return=stats.mean_return,
        )
        now = clock.monotonic()
        if self._end is None:
            self._progress.start()  # this draws, too
            # At exit, before Python takes the modules down that drawing needs.
            self._end, self._drawn = weakref.finalize(self, self._progress.stop), now
        elif now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._progress.refresh()
            self._drawn = now

    def close(self) -> None:
        """Draw the last state and give the terminal back; calling it again does nothing."""
        if self._end is not None:
            self._end()


Packed = TypeVar("Packed")
Finish = Callable[[TensorDictBase], Any]


class BatchDelivery:
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
        delivery: PostProcessing,
        feed: BufferSink | None = None,
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
        self, collect: Callable[[], Collected], finish: Finish | None = None, feed: BufferSink | None = None
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
