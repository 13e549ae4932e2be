"""Delivery of batches: post-processing, the handover to the user or a replay buffer, and the progress bar."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_path, is_private
from gleanrl._os import clock
from gleanrl._os.interrupts import to_the_end
from gleanrl._util import is_native, optional_callable, rich_progress
from gleanrl.collectors.background import Background
from gleanrl.collectors.frame_accounting import CollectorStats
from gleanrl.collectors.source import Budget, BudgetSpent, Collected, Grant, Grants, Source
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.data.replay_buffers import RayReplayBuffer, ReplayBuffer
from gleanrl.data.replay_buffers.presets import copies_at_once
from gleanrl.envs.rollout import mark_truncated
from gleanrl.errors import ClosedError, InvalidTypeError


class PostProcessing:
    """Mark, move, split and post-process batches.

    Args:
        device: device that batches are moved to; None to leave them.
        truncated: the environment's done keys, if the last step of every batch is marked as truncated, in place.
        split: whether batches are split into padded trajectories.
        postproc: called last; its result is delivered.
        reuse: whether moved batches of one shape share their memory, each overwriting the one before. No effect
            without `device`.
        hook: called on every batch in its delivered form. Its result is ignored.

    Raises:
        InvalidTypeError: `postproc` or `hook` is not callable.
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
        self._private: list[NestedKey] | None = None  # the same for all batches, which have one structure

    @property
    def copies(self) -> bool:
        """Whether batches are copied from the CPU to another device before user code sees them."""
        return self._device is not None and self._device.type != "cpu"

    @property
    def is_plain(self) -> bool:
        """Whether no user code sees a batch before it is delivered."""
        return not self._split and self._postproc is None and self._hook is None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch to deliver in place of a collected one, without private entries such as ``"_noise"``.

        The first batch determines the private entries. Errors of `postproc` and `hook` are raised unchanged.

        Raises:
            InvalidTypeError: `postproc` returned None.
        """
        if self._private is None:
            # A Ray reference names a batch that was finished on its node.
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
                    f"postproc: expected the batch to deliver, got None from {self._postproc!r}; return the batch"
                )
        if self._hook is not None:
            self._hook(batch)
        return batch

    def _moved(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a moved batch, copied into the memory of the last one if `reuse` is set and the shapes agree."""
        if not self._reuse:
            return batch
        if self._same is None or self._same.batch_size != batch.batch_size:
            self._same = batch
            return batch
        return self._same.copy_(batch)


def move_postproc(postproc: Any, device: torch.device | None) -> None:
    """Move a `postproc` that has a method ``to`` to the device of delivered batches; None leaves it in place."""
    if postproc is not None and hasattr(postproc, "to") and device is not None:
        postproc.to(device)


class BufferSink:
    """Write batches to a buffer.

    Args:
        buffer: a replay buffer with `extend` and `add`. Other threads may sample from it meanwhile if the buffer
            supports that, as all buffers of this library do.
        by_extend: whether a batch is written by one `extend`. Otherwise it is written step by step. Each step goes in
            by `add` if the environment is a single one, or if the storage has the environments' dimensions, else by
            `extend`.

    Raises:
        InvalidTypeError: `buffer` is not a replay buffer.
    """

    def __init__(self, buffer: Any, by_extend: bool = True) -> None:
        try:
            self._adders = buffer.add, buffer.extend
        except AttributeError as cause:
            raise InvalidTypeError(
                f"replay_buffer: expected a replay buffer, got {type(buffer).__name__}"
            ) from cause
        self.buffer, self._by_extend = buffer, by_extend

    @property
    def copies(self) -> bool:
        """Whether the buffer copies a batch at once, and nothing else keeps a reference to it."""
        return self._by_extend and (isinstance(self.buffer, RayReplayBuffer) or copies_at_once(self.buffer))

    @property
    def slot_dims(self) -> int:
        """Number of batch dimensions of the buffer's storage; 1 for a buffer that is not a `ReplayBuffer`."""
        return self.buffer.storage.ndim if isinstance(self.buffer, ReplayBuffer) else 1

    def put(self, batch: Any, arrived: Callable[[], Any]) -> None:
        """Write a batch, or a Ray reference that the buffer's `extend` accepts, and call `arrived`, possibly twice.

        An empty batch is not written, but `arrived` is called. If writing raises after rows were written, `arrived` is
        called before the error is raised.

        An interrupt comes either before the batch is written, or after both. That holds for buffers of this library,
        which complete a write that has begun.
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
        """Call `arrived` if the batch was written.

        Args:
            before: number of rows that were written before the batch; None if the buffer does not count them.
            arrived: the callback of `put`.
        """
        if before is not None and self._written() != before:
            arrived()

    def _put(self, batch: TensorDictBase) -> None:
        """Write a batch with one `extend`, or step by step."""
        if self._by_extend:
            self._adders[1](batch)
            return
        # In a storage with several batch dimensions, one step of all environments is one record.
        put = self._adders[batch.ndim > self.slot_dims]
        for record in batch.unbind(-1):
            put(record)

    def _written(self) -> int | None:
        buffer = self.buffer
        return buffer.stats().rows_written if is_native(buffer, "stats", of=ReplayBuffer) else None


class _Lines:
    """Prints counters as lines of text. It has the methods of rich's `Progress` that `CollectorProgress` calls."""

    def __init__(self, total_frames: int | None) -> None:
        self._frames = "frames" if total_frames is None else f"of {total_frames:,} frames"
        self._next = self._printed = ""

    def add_task(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is one task."""

    def update(self, task: None, *, completed: int, speed: float, episodes: int, mean_return: float) -> None:
        self._next = (
            f"{completed:,} {self._frames}  {speed:,.0f} frames/s  {episodes:,} episodes  "
            f"mean return {mean_return:.1f}"
        )

    def refresh(self) -> None:
        """Print the counters, unless that line is the last printed one."""
        if self._next != self._printed:
            print(self._next, flush=True)
            self._printed = self._next

    start = stop = refresh


class CollectorProgress:
    """Show a collector's counters on the terminal: a bar, or lines of text if rich isn't installed.

    The bar is drawn at handovers, a few times a second at most. There is no drawing thread, so the bar stays unchanged
    while the learner is busy. Lines are printed at the first handover, then every ten seconds at most, and at the end.

    Args:
        total_frames: the collector's budget; None for endless, which shows neither a bar nor the remaining time.
        console: the `rich.console.Console` to draw on; None for the terminal.
    """

    def __init__(self, total_frames: int | None, console: Any = None) -> None:
        rich = rich_progress()
        self._pause_s = 10.0 if rich is None else 0.25
        self._progress: Any = _Lines(total_frames)
        if rich is not None:
            self._progress = rich.Progress(
                rich.TextColumn("{task.completed:,.0f} frames"),
                rich.BarColumn(),
                rich.TaskProgressColumn(),
                rich.TextColumn("{task.fields[speed]:,.0f} frames/s  {task.fields[episodes]:,} episodes"),
                rich.TextColumn("mean return {task.fields[mean_return]:.1f}"),
                rich.TimeRemainingColumn(),
                auto_refresh=False,
                console=console,
            )
        self._task = self._progress.add_task(
            "collect", total=total_frames, speed=0.0, episodes=0, mean_return=float("nan")
        )
        self._end: weakref.finalize[..., CollectorProgress] | None = None  # set at the first drawing
        self._drawn = 0.0

    def update(self, frames: int, stats: CollectorStats) -> None:
        """Show `frames` delivered frames and the counters. No effect after `close` or once the program ends."""
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
            self._progress.start()  # `start` draws the first state
            # `finalize` runs at exit, before Python unloads the modules that drawing needs.
            self._end, self._drawn = weakref.finalize(self, self._progress.stop), now
        elif now - self._drawn >= self._pause_s:
            self._progress.refresh()
            self._drawn = now

    def close(self) -> None:
        """Draw the last state and release the terminal. Further calls have no effect."""
        if self._end is not None:
            self._end()


Packed = TypeVar("Packed")
Finish = Callable[[TensorDictBase], Any]


class BatchDelivery:
    """Collect batches and hand them over. One caller thread at a time.

    Counting a batch as delivered is the very last action. If an interrupt comes before it, the batch is lost and
    counted as discarded. If it comes later, the caller already has the batch. Therefore no caller may do anything after
    this action.

    Args:
        source: makes the batches.
        budget: the number of frames to deliver.
        post_processing: post-processes each batch.
        sink: writes batches to a buffer; None hands them to the user.
        before: called before each batch is collected.
        progress: shows the counters; None for no display.

    Attributes:
        closed: whether the collector was shut down. The owner of the source sets it.
        background: collects batches in a thread; None before `start`.
    """

    closed = False
    background: Background | None = None

    def __init__(
        self,
        source: Source,
        budget: Budget,
        post_processing: PostProcessing,
        sink: BufferSink | None = None,
        before: Callable[[], Any] | None = None,
        progress: CollectorProgress | None = None,
    ) -> None:
        self.source, self.sink = source, sink
        self._budget, self._post_processing, self._before, self._progress = (
            budget,
            post_processing,
            before,
            progress,
        )

    def require_open(self) -> None:
        """Raise `ClosedError` if the collector was shut down."""
        if self.closed:
            raise ClosedError(
                "the collector was shut down, or its budget is spent, and its environment is closed: make a new "
                "collector; to evaluate afterwards, use a separate environment, or collect with total_frames=-1 and "
                "end with shutdown(close_env=False)"
            )

    def next(self, finish: Finish | None = None) -> TensorDictBase | None:
        """Return the next batch that the budget grants. With a buffer, write it there and return None.

        Args:
            finish: called on a batch before it is handed out; not called with a buffer.

        Raises:
            BudgetSpent: there is no further batch, whether or not the collector was shut down.
            ClosedError: the collector was shut down before its budget was spent.
        """
        if not self.source.more(self._budget):
            raise BudgetSpent
        collect = partial(self.source.next, self._budget, self._lends)
        return self._deliver_one(collect, finish if self.sink is None else None, self.sink)

    def collect_outside_budget(self, grant: Grant) -> TensorDictBase | None:
        """Return a post-processed batch outside the budget to the user, even if the collector has a buffer.

        Raises:
            UnsupportedError: the source can't collect outside the budget; see `Source.collect`.
            ClosedError: the collector was shut down.
        """
        return self._deliver_one(lambda: self.source.collect(grant))

    def serve(
        self, grants: Grants, pack: Callable[[TensorDictBase, tuple[int, int]], Packed]
    ) -> Packed | None:
        """Collect a batch for another component, such as a Ray node. Return None if `grants` grants no batch.

        The batch is post-processed and counted as delivered, but not written to the buffer.

        Args:
            grants: replaces the budget.
            pack: called with the batch and `Collected.part`. Its result is returned, and must be read before the next
                call.

        Raises:
            ClosedError: the collector was shut down.
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

        self._deliver_one(collect, lambda batch: packed.append(pack(batch, part)))
        return packed[0]

    def _deliver_one(
        self, collect: Callable[[], Collected], finish: Finish | None = None, sink: BufferSink | None = None
    ) -> TensorDictBase | None:
        """Collect, post-process and hand over one batch. Return it, or None after writing it to the buffer.

        If the batch fails after it was collected, its frames are discarded under the reason ``"postproc"``,
        ``"buffer"`` or ``"interrupted"``.
        """
        self.require_open()
        self.show_progress()
        try:
            if self._before is not None:
                self._before()
            with nullcontext() if self.background is None else self.background.making():
                collected = collect()
            batch = self._finished(collected.batch, finish)
            if sink is None:
                return self.source.deliver(collected, batch)
            try:
                sink.put(batch, lambda: self.source.deliver(collected, batch))
                return None
            except Exception:
                self.source.lose("buffer")
                raise
        except BaseException:
            # The source counts each batch once, so this has no effect after a more specific reason.
            self.source.lose("interrupted")
            raise

    @property
    def _lends(self) -> bool:
        """Whether each batch is copied before user code can keep it, so that its memory may be reused."""
        return self._post_processing.copies or (
            self.sink is not None and self.sink.copies and self._post_processing.is_plain
        )

    def _finished(self, batch: TensorDictBase, finish: Finish | None) -> TensorDictBase:
        """Return the post-processed batch. If user code raises, count the batch as discarded."""
        try:
            batch = self._post_processing(batch)
            if finish is not None:
                finish(batch)
            return batch
        except Exception:
            self.source.lose("postproc")
            raise

    def show_progress(self, last: bool = False) -> None:
        """Show the counters if there is a progress bar; `last` also closes it."""
        if self._progress is not None:
            self._progress.update(self.source.spent, self.source.stats())
            if last:
                self._progress.close()
