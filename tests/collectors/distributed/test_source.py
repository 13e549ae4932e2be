"""The source of nodes handles weights, resets, seeds and states."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl import Checkpoint
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import IndexRangeError, LengthError, SchemaError
from tests.collectors.distributed.helpers import check_rows, rows
from tests.collectors.distributed.test_asynchronous import until
from tests.test_checkpoint_trajectories import unfinished


def test_each_batch_carries_the_version_of_its_weights(apart):
    apart.policy.become(0.0)
    apart.update_policy_weights_()
    first, puts = apart.policy_version, apart.source.weights.puts
    seen: dict[int, set[float]] = {}

    def look() -> None:
        batch = apart.next()
        (version,) = batch["policy_version"].unique().tolist()
        seen.setdefault(version, set()).update(batch["action"].unique().tolist())

    for step in range(1, 4):
        apart.policy.become(10.0 + step)
        apart.update_policy_weights_()
        for _ in range(3):
            look()
    until(lambda: look() or first + 3 in seen)
    assert apart.source.weights.puts == puts + 3
    assert all(seen[first + step] == {10.0 + step} for step in range(1, 4) if first + step in seen)
    assert seen[first + 3] == {13.0}


def test_one_node_can_have_separate_weights(apart):
    apart.policy.become(20.0)
    apart.update_policy_weights_()
    apart.update_policy_weights_(
        TensorDict.from_module(apart.policy).data.apply(lambda w: w + 1), worker_rank=2
    )
    wanted = {0: 20.0, 1: 21.0}
    found: dict[int, float] = {}

    def look() -> bool:
        batch = apart.next()
        (action,) = batch["action"].unique().tolist()
        found[int(batch["observation"][0, 0])] = action
        return found == wanted

    until(look)
    apart.update_policy_weights_()
    wanted[1] = 20.0
    until(look)
    for wrong in (0, 3):
        with pytest.raises(IndexRangeError, match="worker_"):
            apart.update_policy_weights_(worker_rank=wrong)
    with pytest.raises(SchemaError, match="missing"):
        apart.update_policy_weights_(TensorDict(other=torch.ones(2)))


def test_resets_discard_frames_in_progress(apart):
    before = apart.next()
    assert apart.reset([True, False]) is None
    batches: list = []
    until(lambda: batches.append(apart.next()) or 0 in rows(batches))
    frames = rows(batches)[0]
    assert frames[0][1] == 0 and frames[0][2] not in before["collector", "traj_ids"].tolist()
    check_rows(batches)
    assert apart.stats().reasons["reset"] >= 20
    with pytest.raises(LengthError, match="2 flags"):
        apart.reset([True])


def test_seeds_and_states_are_passed_to_nodes(apart):
    assert apart.set_seed(3) == 4
    state = apart.state_dict()
    batch = apart.next()
    with pytest.raises(SchemaError):
        apart.load_state_dict({**state, "worker1": {**state["worker1"], "more": 1}})
    assert apart.source.spent == state["frames"] + 20
    apart.load_state_dict(state)
    assert apart.source.spent == state["frames"]
    later = [apart.next() for _ in range(4)]
    check_rows(later)
    used = {name for frames in rows(later).values() for *_, name in frames}
    assert not used & set(batch["collector", "traj_ids"].tolist())
    stats = apart.stats()
    assert stats.stepped == stats.delivered + stats.discarded
    assert len(stats.workers) == 2 and all(worker.frames > 0 for worker in stats.workers)


def test_trajectories_that_cannot_resume_are_marked_in_buffers(apart, tmp_path):
    buffer: ReplayBuffer = ReplayBuffer(storage=LazyTensorStorage(5_000), batch_size=4)
    checkpoint = Checkpoint(collector=apart, buffer=buffer)
    until(lambda: buffer.extend(apart.next()) is not None and len(unfinished(buffer)) == 2)
    expected, stored, cut = unfinished(buffer), len(buffer), apart.stats().cut
    checkpoint.save(tmp_path)
    buffer.extend(apart.next())
    checkpoint.load(tmp_path)
    assert len(buffer) == stored and not unfinished(buffer) and apart.stats().cut == cut + 2
    ends = buffer[:][buffer[:]["next", "truncated"].squeeze(-1)]
    assert expected <= {*ends["collector", "traj_ids"].tolist()}
    assert apart.state_dict()["source"]["under_way"] == []
