"""A collector reports the arguments of its construction."""

from __future__ import annotations

import pytest

from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.base import Setting
from gleanrl.errors import EndlessError, UnsupportedError
from tests.fakes_base import CountingEnv


def test_settings_are_read_from_the_collector_and_not_written() -> None:
    assert isinstance(SyncDataCollector.split_trajs, Setting)
    collector = SyncDataCollector(CountingEnv(), frames_per_batch=4, total_frames=8, max_frames_per_traj=3)
    assert collector.max_frames_per_traj == collector.settings.max_frames_per_traj == 3
    with pytest.raises(UnsupportedError, match="max_frames_per_traj: .* make a new collector to change it"):
        collector.max_frames_per_traj = 5
    assert len(collector) == 2 and collector
    collector.shutdown()


def test_endless_collector_has_no_length() -> None:
    collector = SyncDataCollector(CountingEnv(), frames_per_batch=4)
    with pytest.raises(EndlessError):
        len(collector)
    assert collector and collector.total_frames == float("inf")
    collector.shutdown()
