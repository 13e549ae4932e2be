"""Saves of several parts in the background: which calls wait for a save, and which parts pause during it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gleanrl import Checkpoint
from gleanrl._os import fault_points
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv
from gleanrl.errors import CheckpointError, InvalidTypeError


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    progress: dict[str, Any] = {"f": print}
    checkpoint = Checkpoint(progress=progress)
    checkpoint.save(tmp_path, wait=False)
    progress.clear()
    with pytest.raises(CheckpointError, match="progress"):
        checkpoint.save(tmp_path)
    checkpoint.save(tmp_path)


def test_wait_that_is_no_boolean_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    parts = (ReplayBuffer(storage=LazyTensorStorage(3)).dumps, Checkpoint(progress={"n": 1}).save)
    for save in parts:
        with pytest.raises(InvalidTypeError, match="wait: expected True or False, got 'no'"):
            save(tmp_path, wait="no")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_load_waits_for_the_save_under_way(tmp_path: Path) -> None:
    progress, leave = {"n": 1}, threading.Event()
    checkpoint = Checkpoint(progress=progress)
    checkpoint.save(tmp_path)
    progress["n"] = 2
    with fault_points.inject({"fs.sync": leave.wait}):
        checkpoint.save(tmp_path, wait=False)
        progress["n"] = 3
        threading.Timer(0.05, leave.set).start()
        checkpoint.load(tmp_path)
    assert progress["n"] == 2


def test_background_collector_pauses_during_a_save(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=4)
    collector = SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=10, replay_buffer=buffer)
    collector.start()
    checkpoint = Checkpoint(collector=collector, buffer=buffer)
    checkpoint.save(tmp_path)
    collector.stop()
    checkpoint.load(tmp_path)
    assert buffer.write_count == collector.stats().delivered
