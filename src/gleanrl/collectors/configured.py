"""What a collector was made with, to be read as its attributes."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.budget import Budget
from gleanrl.collectors.settings import Settings
from gleanrl.collectors.source import Source
from gleanrl.errors import EndlessError, UnsupportedError


class Setting:
    """An argument of a collector's constructor, to be read as its attribute; see `Settings` for its form."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Note which one it is."""
        self._name = name

    def __get__(self, collector: ConfiguredCollector | None, owner: type) -> Any:
        """Return what the collector was made with."""
        return self if collector is None else getattr(collector.settings, self._name)

    def __set__(self, collector: ConfiguredCollector, value: Any) -> None:
        """Refuse: it would change nothing."""
        raise UnsupportedError(f"{self._name}: collectors are made with it; make another one to change it")


class ConfiguredCollector(DataCollectorBase):
    """Abstract: a collector that knows its arguments; it derives from `settings`.

    Args:
        settings: the arguments that all collectors have in common.
        budget: those about frames.
    """

    max_frames_per_traj = Setting()
    reset_at_each_iter = Setting()
    reset_when_done = Setting()
    exploration_type = Setting()
    interruptor = Setting()
    set_truncated = Setting()
    postproc = Setting()
    split_trajs = Setting()
    replay_buffer = Setting()
    extend_buffer = Setting()
    trajs_per_batch = Setting()
    trajs_per_write = Setting()
    traj_format = Setting()
    pre_collect_hook = Setting()
    post_collect_hook = Setting()

    def __init__(self, settings: Settings, budget: Budget) -> None:
        self.settings, self._budget = settings, budget

    @property
    @abstractmethod
    def source(self) -> Source:
        """What makes the batches."""

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer that batches go into."""
        return getattr(self.replay_buffer, attr)

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, after rounding."""
        return self._budget.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of a batch as they were asked for."""
        return self._budget.requested_frames_per_batch

    @property
    def total_frames(self) -> int | float:
        """Frames of the collector's life, after rounding; infinity for endless."""
        return math.inf if self._budget.total_frames is None else self._budget.total_frames

    @property
    def init_random_frames(self) -> int:
        """Random frames at the beginning, after rounding."""
        return self._budget.random_frames

    def __len__(self) -> int:
        """Return the number of batches, should all be full but the last one.

        Raises:
            EndlessError: the budget is endless.
        """
        if self._budget.total_frames is None or not self.source.steady:
            raise EndlessError(
                "a collector has a len() if it has total_frames, and if its batches aren't trajs_per_batch long"
            )
        return -(-self._budget.total_frames // self._budget.frames_per_batch)

    def __bool__(self) -> bool:
        """Return True: an endless collector, which has no length, is no less of one."""
        return True


def shown(collector: ConfiguredCollector, parts: str) -> str:
    """Return a collector's repr: its class, `parts` of it and the budget."""
    total = "endless" if collector.total_frames == math.inf else collector.total_frames
    frames = f"frames_per_batch={collector.frames_per_batch}, total_frames={total}"
    return f"{type(collector).__name__}({parts}, {frames})"
