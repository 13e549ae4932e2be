"""The arguments of a collector are readable as its attributes, so programs can query the collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tensordict.nn import InteractionType

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import UnsupportedError
from tests.fakes_base import CountingEnv

DEFAULTS = {
    "replay_buffer": None,
    "extend_buffer": True,
    "split_trajs": False,
    "postproc": None,
    "exploration_type": InteractionType.RANDOM,
    "reset_at_each_iter": False,
    "reset_when_done": True,
    "max_frames_per_traj": 0,
    "interruptor": None,
    "set_truncated": False,
}


class Never:
    def collection_stopped(self) -> bool:
        return False


KINDS: list[Callable[..., Any]] = [
    lambda **given: SyncDataCollector(CountingEnv, None, frames_per_batch=4, total_frames=8, **given),
    lambda **given: MultiSyncDataCollector([CountingEnv], frames_per_batch=4, total_frames=8, **given),
    lambda **given: MultiaSyncDataCollector([CountingEnv], frames_per_batch=4, total_frames=8, **given),
]


@pytest.mark.parametrize("make", KINDS, ids=["sync", "multi-sync", "multi-async"])
def test_settings_can_be_read_and_not_be_set(make: Callable[..., Any]) -> None:
    collector = make()
    assert {name: getattr(collector, name) for name in DEFAULTS} == DEFAULTS
    for name in DEFAULTS:
        with pytest.raises(UnsupportedError, match=f"{name}: it is fixed when the collector is made"):
            setattr(collector, name, None)
    collector.shutdown()
    given = {
        "exploration_type": "mode",
        "max_frames_per_traj": 3,
        "reset_at_each_iter": True,
        "postproc": lambda batch: batch,
        "replay_buffer": ReplayBuffer(storage=LazyTensorStorage(20)),
        "split_trajs": True,
        "set_truncated": True,
    }
    collector = make(**given)
    found = {name: getattr(collector, name) for name in given}
    collector.shutdown()
    assert found == {**given, "exploration_type": InteractionType.MODE}


def test_single_process_collectors_have_additional_settings() -> None:
    stop = Never()
    collector = KINDS[0](return_same_td=True, interruptor=stop)
    assert collector.return_same_td and collector.interruptor is stop and collector.n_env == 1
    collector.shutdown()
    assert not any(hasattr(MultiSyncDataCollector, name) for name in ("return_same_td", "n_env"))


def test_collectors_with_workers_have_additional_settings() -> None:
    collector = KINDS[1](cat_results=-1, preemptive_threshold=0.5, update_at_each_batch=True)
    found = collector.cat_results, collector.preemptive_threshold, collector.update_at_each_batch
    collector.shutdown()
    assert found == (-1, 0.5, True)
