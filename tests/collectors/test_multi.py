"""The public collectors with workers: arguments, shapes, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.collectors import MultiSyncDataCollector, aSyncDataCollector
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, LengthError
from tests.collectors.workers.crews import Stream, check_streams, collecting


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"frames_per_batch": 0}, InvalidArgumentError, "frames_per_batch"),
        ({"total_frames": 0}, InvalidArgumentError, "total_frames"),
        ({"cat_results": "cat"}, InvalidArgumentError, "cat_results"),
        ({"preemptive_threshold": "1"}, InvalidArgumentError, "preemptive_threshold"),
        ({"device": ["cpu"]}, LengthError, "device: expected 2 entries"),
        ({"num_sub_threads": 0}, InvalidArgumentError, "num_sub_threads"),
        ({"timeouts": 3}, InvalidTypeError, "timeouts"),
        ({"reset_when_done": False}, InvalidArgumentError, "reset_when_done"),
        ({"create_env_fn": Stream(0)}, InvalidTypeError, r"\[create_env_fn\] \* num_workers"),
        ({"create_env_fn": []}, LengthError, "create_env_fn"),
    ],
)
def test_bad_arguments_raise_before_workers_start(
    arguments: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiSyncDataCollector(**{"create_env_fn": [Stream(0)] * 2, "frames_per_batch": 4, **arguments})


def test_one_worker_collects_ahead() -> None:
    collector = aSyncDataCollector(Stream(0), frames_per_batch=6, total_frames=24)
    batches = list(collector)
    check_streams(batches)
    assert [batch.numel() for batch in batches] == [6, 6, 6, 6]
    with pytest.raises(LengthError, match="expected one, got 2"):
        aSyncDataCollector([Stream(0)] * 2, frames_per_batch=6)


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    with collecting("sync", num_threads=1) as collector:
        assert torch.get_num_threads() == 1
        assert (collector.num_workers, len(set(collector.processes))) == (2, 2)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whole_trajectories(kind: str) -> None:
    with collecting(kind, total_frames=240, trajs_per_batch=3) as collector:
        batches = list(collector)
    assert batches and all(batch.shape[0] == 3 for batch in batches)
    for batch in batches:
        last = batch["collector", "mask"].sum(-1) - 1
        assert batch["next", "done"].squeeze(-1)[torch.arange(3), last].all()
        assert (batch["observation"][:, 0, 2] == 0).all()
