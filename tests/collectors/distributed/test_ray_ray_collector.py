"""`RayCollector` checks its arguments and accepts nodes that are added later."""

from __future__ import annotations

import pytest

from gleanrl.collectors import MultiaSyncDataCollector, aSyncDataCollector
from gleanrl.collectors.distributed import RayCollector
from gleanrl.data import LazyTensorStorage, RayReplayBuffer
from gleanrl.envs import Timeouts
from gleanrl.errors import ClosedError, UnsupportedError, WorkerTimeoutError
from tests.collectors.distributed.helpers import Says, check_rows, environments, make_cartpole, rows


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("num_collectors", {"num_collectors": None}),
        ("create_env_fn: expected 3", {"create_env_fn": environments(2), "num_collectors": 3}),
        ("frames_per_batch", {"frames_per_batch": 0}),
        (
            "collector_class='sync'",
            {"collector_class": "async", "num_workers_per_collector": 2, "sync": True},
        ),
        ("num_workers_per_collector=2", {"num_workers_per_collector": 2}),
        (
            "leave out max_weight_update_interval",
            {"update_after_each_batch": True, "max_weight_update_interval": 0},
        ),
        ("on_worker_error", {"on_worker_error": "ignore"}),
        ("max_restarts", {"remote_configs": {"max_restarts": 2}}),
        ("collector_kwargs", {"collector_kwargs": {"postproc": print}}),
        ("replay_buffer", {"replay_buffer": 3}),
    ],
)
def test_invalid_arguments_are_refused(message, given):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        RayCollector(**{"create_env_fn": make_cartpole, "frames_per_batch": 10, "num_collectors": 2, **given})


def test_exception_of_a_node_constructor_is_raised(ray_session):
    with pytest.raises(ZeroDivisionError):
        RayCollector(lambda: 1 / 0, num_collectors=1, frames_per_batch=10, remote_configs={"num_cpus": 0})
    assert ray_session.is_initialized()


def test_node_without_resources_times_out_with_its_request(ray_session):
    with pytest.raises(
        WorkerTimeoutError, match=r"node 0 didn't start within 0.2 s: it asks for .*'nowhere'"
    ):
        RayCollector(
            make_cartpole,
            num_collectors=1,
            frames_per_batch=10,
            remote_configs={"num_cpus": 0, "resources": {"nowhere": 1}},
            timeouts=Timeouts(start_s=0.2),
        )


def test_nodes_can_be_added(growing):
    assert "num_collectors=2" in repr(growing) and growing.num_workers == 2 == len(
        growing.remote_collectors()
    )
    with pytest.raises(UnsupportedError, match="one policy"):
        growing.add_collectors(environments(1), policy=Says())
    names = {name for batch in (growing.next(), growing.next()) for *_, name in rows([batch]).popitem()[1]}
    growing.add_collectors([environments(3)[2]])
    assert growing.num_workers == 3
    batches: list = []
    while 2 not in rows(batches):
        batches.append(growing.next())
    check_rows(batches)
    assert min(name for *_, name in rows(batches)[2]) >= 2**40 > max(names)
    assert growing.local_policy() is growing.policy


def test_adding_nodes_to_fixed_shares_is_refused(together):
    with pytest.raises(UnsupportedError, match="fixed number of nodes"):
        together.add_collectors(environments(1))


@pytest.mark.filterwarnings("ignore:total_frames=220 isn't a multiple")
@pytest.mark.parametrize(("kind", "workers"), [(MultiaSyncDataCollector, 2), (aSyncDataCollector, 1)])
def test_nodes_with_workers_that_collect_ahead_meet_their_budget(ray_session, kind, workers):
    collector = RayCollector(
        make_cartpole,
        num_collectors=1,
        collector_class=kind,
        num_workers_per_collector=workers,
        frames_per_batch=50,
        total_frames=220,
        remote_configs={"num_cpus": 0},
        collector_kwargs={"max_frames_per_traj": 7},
        timeouts=Timeouts(start_s=400.0),
    )
    batches = list(collector)
    assert sorted(len(batch) for batch in batches) == [20, 50, 50, 50, 50]
    names = [set(batch["collector", "traj_ids"].tolist()) for batch in batches]
    assert all(len({name % workers for name in own}) == 1 for own in names)
    assert all(bool((batch["step_count"] <= 7).all()) for batch in batches)
    assert collector.closed and collector.state_dict()["frames"] == 220
    stats = collector.stats()
    assert stats.delivered == 220 and stats.stepped == 220 + stats.discarded
    with pytest.raises(ClosedError):
        collector.reset()
    assert ray_session.is_initialized()


def test_batches_reach_a_remote_buffer_without_the_learner(ray_session):
    buffer = RayReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=5)
    collector = RayCollector(
        environments(1),
        Says(),
        frames_per_batch=20,
        total_frames=100,
        replay_buffer=buffer,
        remote_configs={"num_cpus": 0},
        timeouts=Timeouts(start_s=400.0),
    )
    assert collector.next() is None and len(buffer) == 20
    assert list(collector) == [None] * 4
    assert collector.stats().delivered == len(buffer) == 100
    check_rows([buffer[:]])
    buffer.shutdown()
