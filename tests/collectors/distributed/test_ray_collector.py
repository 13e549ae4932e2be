"""The public collector on Ray: its arguments, and nodes that come later."""

from __future__ import annotations

import pytest

from gleanrl.collectors import MultiaSyncDataCollector
from gleanrl.collectors.distributed import RayCollector
from gleanrl.errors import ClosedError, UnsupportedError
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
def test_arguments(message, given):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        RayCollector(**{"create_env_fn": make_cartpole, "frames_per_batch": 10, "num_collectors": 2, **given})


def test_a_node_that_raises_while_it_is_made_and_workers_in_nodes(ray_session):
    with pytest.raises(ZeroDivisionError):
        RayCollector(lambda: 1 / 0, num_collectors=1, frames_per_batch=10, remote_configs={"num_cpus": 0})
    assert ray_session.is_initialized()


def test_nodes_can_be_added(apart):
    assert "num_collectors=2" in repr(apart) and apart.num_workers == 2 == len(apart.remote_collectors())
    with pytest.raises(UnsupportedError, match="one policy"):
        apart.add_collectors(environments(1), policy=Says())
    names = {name for batch in (apart.next(), apart.next()) for *_, name in rows([batch]).popitem()[1]}
    apart.add_collectors([environments(3)[2]])
    assert apart.num_workers == 3
    batches: list = []
    while 2 not in rows(batches):
        batches.append(apart.next())
    check_rows(batches)
    assert min(name for *_, name in rows(batches)[2]) >= 2**40 > max(names)
    assert apart.local_policy() is apart.policy


def test_shares_that_cannot_grow(together):
    with pytest.raises(UnsupportedError, match="fixed number of nodes"):
        together.add_collectors(environments(1))


@pytest.mark.slow
def test_programs_end_with_their_budget(ray_session):
    found = 0
    collector = RayCollector(
        make_cartpole,
        num_collectors=1,
        collector_class=MultiaSyncDataCollector,
        num_workers_per_collector=2,
        frames_per_batch=50,
        total_frames=200,
        remote_configs={"num_cpus": 0},
        collector_kwargs={"max_frames_per_traj": 7},
        trajs_per_batch=4,
    )
    for batch in collector:
        assert len(batch) == 4 and bool((batch["step_count"] <= 7).all())
        found += 1
    assert found and collector.closed and collector.state_dict()["frames"] == 200
    with pytest.raises(ClosedError):
        collector.next()
    assert ray_session.is_initialized()
