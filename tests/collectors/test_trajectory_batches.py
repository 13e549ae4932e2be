"""Trajectory batches hold each trajectory from its first step to its last, and every frame is counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import StepCounter
from gleanrl.errors import EndlessError, InvalidArgumentError, UnsupportedError
from tests.collectors.helpers import make, steps_of
from tests.fakes import Script
from tests.fakes_base import CountingEnv, CrookedEnv

LENGTHS = (3, 7, 1, 5)
SCRIPT = Script(lengths=LENGTHS)


def rows(batch: TensorDictBase) -> list[TensorDictBase]:
    """Return the trajectories of a padded batch."""
    return [row[mask] for row, mask in zip(batch, batch["collector", "mask"], strict=True)]


def check_whole(found: list[TensorDictBase]) -> None:
    """Check that each trajectory begins at step 0, has consecutive steps, ends once at its last, and has its own id."""
    for one in found:
        steps = one["observation"][:, 2].tolist()
        assert steps == list(range(len(steps)))
        assert one["next", "done"].flatten().tolist() == [False] * (len(steps) - 1) + [True]
        assert one["collector", "traj_ids"].unique().numel() == 1
    ids = [int(one["collector", "traj_ids"][0]) for one in found]
    assert len(set(ids)) == len(ids)


def check_counts(collector: SyncDataCollector, env: CountingEnv, delivered: int) -> None:
    stats = collector.stats()
    assert stats.delivered == delivered
    assert stats.stepped == stats.delivered + stats.flagged + stats.discarded
    if collector.closed:
        assert stats.stepped == steps_of(env)


@pytest.mark.parametrize("size", [(), (3,), (2, 2)])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("frames", [4, 24])
def test_every_row_is_a_whole_trajectory(size: tuple[int, ...], count: int, frames: int) -> None:
    env = CountingEnv(SCRIPT, size)
    collector = make(env, frames=frames, total_frames=240, trajs_per_batch=count)
    found: list[TensorDictBase] = []
    for batch in collector:
        lengths = [len(row) for row in rows(batch)]
        assert batch.shape == (count, max(lengths)) and batch.names[-1] == "time"
        assert not batch["next", "reward"][~batch["collector", "mask"]].any()
        found += rows(batch)
        check_counts(collector, env, sum(map(len, found)))
    check_whole(found)
    check_counts(collector, env, sum(map(len, found)))
    stats = collector.stats()
    assert stats.reasons == ({"unfinished": stats.discarded} if stats.discarded else {})
    assert stats.discarded < 240 / 2 and collector.next() is None


def test_buffer_gets_trajectories_as_they_end() -> None:
    rb, env = ReplayBuffer(storage=LazyTensorStorage(1_000)), CountingEnv(SCRIPT, (2,))
    collector = make(env, frames=4, total_frames=80, trajs_per_batch=3, replay_buffer=rb)
    assert set(collector) == {None}
    whole = rb[:]
    ends = whole["next", "done"].flatten().nonzero().flatten() + 1
    check_whole(list(whole.split(ends.diff(prepend=ends.new_zeros(1)).tolist())))
    check_counts(collector, env, len(rb))


def test_resets_and_failures_end_trajectories_in_progress() -> None:
    env = CrookedEnv("raise", 30, script=Script(lengths=(4,)), batch_size=(2,))
    collector = make(env, frames=6, trajs_per_batch=2)
    found = rows(collector.next())  # type: ignore[arg-type]
    collector.reset([1])
    found += rows(collector.next())  # type: ignore[arg-type]
    collector.reset()
    with pytest.raises(ValueError, match="on purpose"):
        while True:
            found += rows(collector.next())  # type: ignore[arg-type]
    found += rows(collector.next())  # type: ignore[arg-type]
    check_whole(found)
    collector.set_seed(3)
    collector.load_state_dict(collector.state_dict())
    found += rows(collector.next())  # type: ignore[arg-type]
    check_whole(found)
    collector.shutdown()
    stats = collector.stats()
    assert stats.delivered == sum(map(len, found)) and set(stats.reasons) == {"unfinished", "environment"}
    assert stats.stepped == stats.delivered + stats.discarded


def test_trajectories_stay_complete_after_loading_an_earlier_state() -> None:
    def make() -> SyncDataCollector:
        env = TransformedEnv(SerialEnv(3, partial(GymEnv, "CartPole-v1")), StepCounter())
        collector = SyncDataCollector(env, None, frames_per_batch=60, total_frames=3_000, trajs_per_batch=4)
        collector.set_seed(0)
        return collector

    used = make()
    used.next()
    state = used.state_dict()
    held = {int(name) for name in state["source"]["held"]["under_way"]}
    wanted = [used.next() for _ in range(3)]
    used.load_state_dict(state)
    for want in wanted:
        got = used.next()
        assert want is not None and got is not None
        assert (got["observation"] == want["observation"]).all()
        mask, ids = got["collector", "mask"], got["collector", "traj_ids"]
        assert (got["step_count"][:, 0] == 0).all()
        assert all(row[real].unique().numel() == 1 for row, real in zip(ids, mask, strict=True))
        before = set(want["collector", "traj_ids"][want["collector", "mask"]].tolist())
        assert not before & held & set(ids[mask].tolist())
    assert not used.stats().discarded


def test_a_batch_that_is_lost_on_the_way_is_discarded() -> None:
    calls: list[int] = []

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        calls.append(len(batch))
        if len(calls) == 2:
            raise ZeroDivisionError
        return batch

    collector = make(CountingEnv(SCRIPT), trajs_per_batch=2, postproc=postproc, total_frames=160)
    found = rows(collector.next())  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        collector.next()
    found += [row for batch in collector for row in rows(batch)]
    check_whole(found)
    stats = collector.stats()
    assert stats.delivered == sum(map(len, found)) and stats.reasons["postproc"] == 6
    assert stats.stepped == stats.delivered + stats.discarded == 160


def test_gymnasium_trajectories_are_padded_to_their_lengths() -> None:
    env = GymEnv("CartPole-v1")
    first = SyncDataCollector(env, frames_per_batch=10, total_frames=200, trajs_per_batch=3).next()
    assert first is not None and len(first) == 3
    lengths = first["collector", "mask"].sum(-1)
    assert first["next", "done"].squeeze(-1).int().argmax(-1).equal(lengths - 1)


def test_conflicting_options_are_refused() -> None:
    rb: Any = ReplayBuffer(storage=LazyTensorStorage(10))
    for name, kwargs in {
        "set_truncated": {"set_truncated": True},
        "return_same_td": {"return_same_td": True},
        "extend_buffer": {"extend_buffer": False, "replay_buffer": rb},
        "nonfinite": {"nonfinite": "mark"},
    }.items():
        with pytest.raises(UnsupportedError, match=f"trajs_per_batch: .*{name}"):
            make(CountingEnv(SCRIPT), trajs_per_batch=2, **kwargs)
    with pytest.raises(InvalidArgumentError, match="trajs_per_batch"):
        make(trajs_per_batch=0)
    collector = make(CountingEnv(SCRIPT), trajs_per_batch=2, total_frames=60)
    with pytest.raises(UnsupportedError, match="rollout"):
        collector.rollout()
    with pytest.raises(EndlessError, match="trajs_per_batch"):
        len(collector)
    assert torch.is_tensor(collector.next()["observation"])  # type: ignore[index]
