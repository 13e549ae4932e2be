"""The progress bar of a collector: frames, frames per second, episodes, mean return, time to go."""

from __future__ import annotations

import weakref

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gleanrl.collectors.ledger import CollectorStats
from gleanrl.system import clock

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
