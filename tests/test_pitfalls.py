"""Silent mistakes that no unit test can catch: rows are collected, stored, restored and sampled, end to end.

An observation is `(stream, episode, step)`, so every row shows its origin. docs/pitfalls.md lists the mistakes and
their tests.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from gleanrl.envs import GymWrapper
from tests.contract.helpers import IDS, check_stream
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(seed=3)
STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
SAMPLERS = {"random": RandomSampler, "epochs": SamplerWithoutReplacement}
CAPACITY = 60


def oracle() -> GymWrapper:
    return GymWrapper(OracleEnv(stream=1, script=SCRIPT))


def collected(frames: int, env: Any = None) -> list[TensorDictBase]:
    return list(SyncDataCollector(env or oracle(), frames_per_batch=20, total_frames=frames))


def check_rows(rows: TensorDictBase, episodes: dict[int, tuple[int, int]]) -> None:
    """Check single transitions in any order; `episodes` maps each trajectory id to its stream and episode."""
    roots, nexts = rows["observation"].long().tolist(), rows["next", "observation"].long().tolist()
    flags = torch.cat([rows["next", key] for key in ("done", "terminated", "truncated")], -1).tolist()
    for k, ((stream, episode, step), after) in enumerate(zip(roots, nexts, strict=True)):
        assert after == [stream, episode, step + 1]
        terminated, truncated = SCRIPT.flags(stream, episode, step + 1)
        assert flags[k] == [terminated or truncated, terminated, truncated]
        assert rows["next", "reward"][k].item() == SCRIPT.reward(stream, episode, step + 1)
        assert episodes.setdefault(rows[IDS][k].item(), (stream, episode)) == (stream, episode)
    assert len(set(episodes.values())) == len(episodes), "two ids for one episode"


def saved_and_loaded(state: Any) -> Any:
    """Save `state` to a file and load it. A list storage keeps objects, which need `weights_only=False`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only="items" not in state["_storage"])


@pytest.mark.parametrize("restored", [False, True], ids=["kept", "restored"])
@pytest.mark.parametrize("frames", [40, 60, 140], ids=["part", "full", "wrapped"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_samples_equal_the_collected_transitions(storage, sampler, frames, restored):
    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=STORAGES[storage](CAPACITY), sampler=SAMPLERS[sampler](seed=0), batch_size=15
        )

    buffer = make()
    batches = collected(frames)
    check_stream(batches, SCRIPT)
    for k, batch in enumerate(batches):
        buffer.extend(batch)
        if restored and k == max(len(batches) - 3, 0):  # the cut is then in the middle of the wrapped ring
            state = saved_and_loaded(buffer.state_dict())
            buffer = make()
            buffer.load_state_dict(state)
    kept = torch.cat(batches)[-CAPACITY:]
    stored = {tuple(row) for row in kept["observation"].tolist()}
    episodes: dict[int, tuple[int, int]] = {}
    seen: set[tuple[float, ...]] = set()
    for _ in range(-(-len(buffer) // 15) if sampler == "epochs" else 40):
        rows = buffer.sample()
        check_rows(rows, episodes)
        seen |= {tuple(row) for row in rows["observation"].tolist()}
    # 600 draws of 60 rows miss a given row with probability 4e-5, so the random sampler may miss one row.
    assert seen <= stored and len(stored) - len(seen) <= (sampler == "random")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_streams_stay_apart_in_two_dimensions(sampler):
    env = CountingEnv(SCRIPT, (4,))
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ndim=2), sampler=SAMPLERS[sampler](seed=0))
    for batch in collected(140, env):
        buffer.extend(batch)
    rows, info = buffer.sample(50, return_info=True)
    check_rows(rows, {})
    assert torch.equal(rows["observation"][:, 0].long(), info["index"][1])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sample_is_never_a_view_of_the_storage(storage):
    buffer = ReplayBuffer(storage=STORAGES[storage](CAPACITY), batch_size=30)
    for batch in collected(60):
        buffer.extend(batch)
    before = copy.deepcopy(buffer.state_dict()["_storage"])
    for _ in range(3):
        buffer.sample().apply_(lambda leaf: leaf.zero_())
    after = buffer.state_dict()["_storage"]
    if storage == "list":
        assert all((mine == kept).all() for mine, kept in zip(after["items"], before["items"], strict=True))
    else:
        pairs = zip(after["columns"], before["columns"], strict=True)
        assert all(torch.equal(mine, kept) for mine, kept in pairs)


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
def test_changing_a_written_batch_does_not_change_the_buffer(storage):
    buffer = ReplayBuffer(storage=STORAGES[storage](CAPACITY), batch_size=30)
    for batch in SyncDataCollector(oracle(), frames_per_batch=20, total_frames=40, return_same_td=True):
        buffer.extend(batch)
        batch.apply_(lambda leaf: leaf.zero_())
    check_rows(buffer.sample(), {})


@pytest.mark.parametrize("storage", STORAGES)
def test_a_dictionary_of_tensors_is_copied(storage):
    buffer = ReplayBuffer(storage=STORAGES[storage](CAPACITY), batch_size=20)
    data = {"x": torch.ones(20, 2), "y": torch.ones(20)}
    buffer.extend(data)
    for leaf in data.values():
        leaf.zero_()
    assert all(leaf.all() for leaf in buffer.sample().values())


def test_an_environment_that_resets_itself_is_recorded_right():
    env = GymWrapper(gymnasium.wrappers.Autoreset(OracleEnv(stream=1, script=SCRIPT)))
    check_stream(collected(100, env), SCRIPT)


def test_time_limits_truncate_and_never_terminate():
    inner = OracleEnv(stream=1, script=Script(ending="never"))
    env = GymWrapper(gymnasium.wrappers.TimeLimit(inner, max_episode_steps=6))
    check_stream(collected(60, env), Script(ending="never"), limit=6)


def test_a_trajectory_id_is_not_used_again_by_a_restored_collector():
    def make() -> SyncDataCollector:
        return SyncDataCollector(oracle(), frames_per_batch=20, total_frames=200)

    first = make()
    before = [first.next() for _ in range(3)]
    second = make()
    second.load_state_dict(first.state_dict())
    after = second.next()
    used = torch.cat(before)[IDS].tolist()
    assert set(used) & set(after[IDS].tolist()) <= {
        used[-1]
    }  # the id of the unfinished trajectory, which continues
    first.shutdown()
    second.shutdown()


def test_the_state_of_every_part_goes_through_a_safe_load():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, ndim=2), sampler=SamplerWithoutReplacement(seed=0), batch_size=7
    )
    buffer.extend(TensorDict({"x": torch.arange(8).view(4, 2)}, [4, 2]))
    buffer.sample()
    other = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ndim=2), sampler=SamplerWithoutReplacement())
    other.load_state_dict(saved_and_loaded(buffer.state_dict()))
    assert other[:].batch_size == buffer[:].batch_size
    assert torch.equal(other.sample(7)["x"], buffer.sample()["x"])
