"""Slices end at seams between writes where the content is discontinuous, and nowhere else."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)

CAPACITY = 40
Pairs = set[tuple[float, float]]


def steps(start: float, count: int, *, over: bool = False, dtype: torch.dtype = torch.float32) -> TensorDict:
    """Return steps of one trajectory whose observations count up; `over` ends it."""
    x = (start + torch.arange(count))[:, None].to(dtype)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = over
    after = {"x": x + 1, "done": done, "terminated": done.clone(), "truncated": done & False}
    return TensorDict({"x": x, "next": {**after, "reward": torch.ones(count, 1)}}, [count])


def buffer_of(
    sampler: Callable[..., Any] = SliceSampler, storage: Any = None, make: Any = ReplayBuffer, **options: Any
) -> Any:
    storage = LazyTensorStorage(CAPACITY) if storage is None else storage
    return make(storage=storage, sampler=sampler(slice_len=2, seed=0), batch_size=64, **options)


def pairs(buffer: Any) -> Pairs:
    """Return the observations of neighbouring steps in slices of two steps."""
    found = set()
    for _ in range(60):
        batch = buffer.sample()
        found |= set(map(tuple, batch["x"].reshape(-1, 2).tolist()))
    return found


def prioritized(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, **options)


STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "files": lambda: LazyMemmapStorage(CAPACITY),
}


@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", [SliceSampler, prioritized])
def test_slices_end_between_unfinished_rollouts_and_cross_chunks_of_one_rollout(sampler, storage, make):
    buffer = buffer_of(sampler, STORAGES[storage](), make)
    for start, count in ((0, 5), (100, 5), (105, 5), (200, 4)):
        buffer.extend(steps(start, count))
    found = pairs(buffer)
    assert {(4, 100), (109, 200)}.isdisjoint(found) and (104, 105) in found and (3, 4) in found


def test_an_epoch_of_trajectories_takes_unfinished_rollouts_apart():
    buffer = buffer_of(SliceSamplerWithoutReplacement)
    for start in (0, 100, 200):
        buffer.extend(steps(start, 2))
    assert sorted(buffer.sample()["x"].flatten().tolist()) == [0, 1, 100, 101, 200, 201]


def test_a_buffer_that_processes_share_ends_slices_between_their_unfinished_rollouts():
    buffer = buffer_of(shared=True)
    buffer.extend(steps(0, 5))
    pairs(buffer)
    for start in (100, 105):
        process = multiprocessing.get_context("fork").Process(target=buffer.extend, args=(steps(start, 5),))
        process.start()
        process.join()
        assert process.exitcode == 0
    found = pairs(buffer)
    assert (4, 100) not in found and (104, 105) in found


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_neighbours_in_slices_are_neighbours_in_time_and_all_of_them_are_drawn(script):
    """Chunks of trajectories go into a ring that wraps. The first chunk of a trajectory has at least two steps."""
    buffer = buffer_of(lambda **options: SliceSampler(strict_length=False, **options))
    time, number, written = 0.0, 0, list[float]()
    for count, other, over in script:
        if other:
            number, count = number + 1, max(count, 2)
            time = 1000.0 * number
        buffer.extend(steps(time, count, over=over and count > 1))
        written += [time + step for step in range(count)]
        time += count
        if over and count > 1:
            number += 1
            time = 1000.0 * number
    held = written[-CAPACITY:]
    expected = {(a, b) for a, b in zip(held, held[1:], strict=False) if b == a + 1}
    batches = [buffer.sample(return_info=True) for _ in range(40)]
    found = set()
    for batch, info in batches:
        x, last = batch["x"].flatten().tolist(), info["next", "truncated"].flatten().tolist()
        found |= {(a, b) for a, b, end in zip(x, x[1:], last, strict=False) if not end}
    assert found <= expected
    table = buffer.sampler._slices.table.of(buffer.storage)
    assert table.num_runs(1) == 1 + len(held) - 1 - len(expected)


# Writes without a seam


def other_order(data: TensorDict) -> TensorDict:
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(len(data)))]


def normalised(data: TensorDict) -> TensorDict:
    scale = torch.linspace(1, 2, len(data))[:, None]
    data["x"], data["next", "x"] = data["x"] / scale, data["next", "x"] / scale
    return data


def with_ids(data: TensorDict) -> TensorDict:
    return data.set(("collector", "traj_ids"), torch.zeros(len(data), dtype=torch.int64))


def with_episode(data: TensorDict) -> TensorDict:
    return data.set("episode", torch.zeros(len(data), dtype=torch.int64))


def with_mask(data: TensorDict) -> TensorDict:
    return data.set(("collector", "mask"), torch.ones(len(data), dtype=torch.bool))


def n_step(data: TensorDict) -> TensorDict:
    return data.set("steps_to_next_obs", torch.ones(len(data), dtype=torch.int64))


def without_twin(data: TensorDict) -> TensorDict:
    data["next", "y"] = data["next", "x"].double()
    return data.exclude(("next", "x")).set("y", data["x"])


def all_ended(data: TensorDict) -> TensorDict:
    data["next", "done"][:-1] = True
    return data


@pytest.mark.parametrize(
    "change",
    [other_order, normalised, with_ids, with_episode, with_mask, n_step, without_twin, all_ended],
)
def test_writes_without_comparable_content_have_no_seams(change):
    buffer = buffer_of()
    for start in (0, 100, 200):
        buffer.extend(change(steps(start, 6)))
    assert buffer.storage.pieces is None


def test_a_write_of_a_single_step_never_begins_a_trajectory():
    buffer = buffer_of()
    buffer.extend(steps(0, 3))
    buffer.extend(steps(100, 1))
    buffer.add(steps(200, 1)[0])
    assert buffer.storage.pieces is None


def test_a_seam_behind_a_flag_isnt_numbered():
    buffer = buffer_of()
    for start in (0, 100, 200):
        buffer.extend(steps(start, 5, over=True))
    assert buffer.storage.pieces is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.complex64])
def test_observations_of_any_dtype_are_compared(dtype):
    buffer = buffer_of()
    buffer.extend(steps(0, 5, dtype=dtype))
    buffer.extend(steps(5, 5, dtype=dtype))
    assert buffer.storage.pieces is None
    buffer.extend(steps(50, 5, dtype=dtype))
    assert buffer.storage.pieces is not None


def test_content_is_compared_bit_for_bit():
    zero, nan = torch.zeros(1), torch.full((1,), float("nan"))
    for value, goes_on in ((nan, True), (-zero, False), (zero, True)):
        buffer = buffer_of()
        first, second = steps(0, 3), steps(0, 3)
        first["next", "x"][-1] = value
        second["x"][0] = nan if goes_on and bool(value.isnan()) else zero
        buffer.extend(first)
        buffer.extend(second)
        assert (buffer.storage.pieces is None) is goes_on, value


def test_one_entry_that_doesnt_chain_leaves_the_content_open():
    buffer = buffer_of()
    for start in (0, 100):
        data = steps(start, 6)
        data["pixels"], data["next", "pixels"] = torch.rand(2, 6, 3)
        buffer.extend(data)
    assert buffer.storage.pieces is None


def test_one_discontinuous_entry_begins_a_trajectory():
    buffer = buffer_of()
    for start in (0, 100):
        data = steps(start, 6)
        data["goal"] = data["next", "goal"] = torch.zeros(6, 2)
        buffer.extend(data)
    assert (5, 100) not in pairs(buffer)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_goal_that_was_given_to_all_steps_of_a_write_afterwards_begins_no_trajectory(borrowed):
    chunks = [steps(0, 6), steps(6, 6), steps(100, 6)]
    for goal, chunk in enumerate(chunks):
        chunk["goal"] = chunk["next", "goal"] = torch.full((6, 2), float(goal))
    # Given tensors are compared without the core.
    first = TensorStorage(chunks[0].repeat(3)) if borrowed else None
    buffer = buffer_of(storage=first)
    buffer.extend(chunks[0])
    buffer.extend(chunks[1])
    before = buffer.storage.pieces
    assert before is None or before[5] == before[6]
    buffer.extend(chunks[2])
    assert (5, 6) in pairs(buffer) and (11, 100) not in pairs(buffer)


def test_content_that_is_the_same_in_each_write_is_compared():
    buffer = buffer_of()
    for value in (1.0, 1.0, 2.0):
        data = steps(0, 4)
        data["x"], data["next", "x"] = torch.full((2, 4, 1), value)
        buffer.extend(data)
    assert pairs(buffer) == {(1, 1), (2, 2)}


# Several streams


def test_each_stream_of_a_storage_of_streams_is_compared_for_itself():
    buffer = buffer_of(storage=LazyTensorStorage(CAPACITY, ndim=2))
    for left, right in ((0, 500), (5, 700), (100, 705), (200, 800), (205, 805), (210, 900)):
        buffer.extend(torch.stack([steps(left, 5), steps(right, 5)]))
    found = pairs(buffer)
    assert all(after == before + 1 for before, after in found)
    assert {(204, 205), (209, 210), (804, 805)} <= found


def test_three_batch_dimensions_have_their_streams():
    buffer = buffer_of(storage=LazyTensorStorage(80, ndim=3))
    for starts in ((0, 100, 200, 300), (5, 150, 205, 350)):
        data = torch.stack([steps(start, 5) for start in starts]).reshape(2, 2, 5).transpose(1, 2)
        buffer.extend(data.transpose(1, 2).contiguous())
    found = pairs(buffer)
    assert {(4, 5), (204, 205)} <= found and all(after == before + 1 for before, after in found)


# Copies and states


def filled(storage: Any = None) -> Any:
    """Return a wrapped ring with a seam in the middle."""
    buffer = buffer_of(storage=storage)
    for start, count in ((0, 30), (1000, 20), (1020, 5), (2000, 8)):
        buffer.extend(steps(start, count))
    return buffer


@pytest.mark.parametrize("size", [CAPACITY, CAPACITY + 7])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_restored_buffer_ends_slices_at_the_same_seams(storage, size, tmp_path):
    buffer = filled()
    expected = pairs(buffer)
    assert all(after == before + 1 for before, after in expected)
    restored = buffer_of(storage=storage(size))
    restored.load_state_dict(buffer.state_dict())
    assert pairs(restored) == expected
    buffer.dumps(tmp_path)
    loaded = buffer_of(storage=storage(size))
    loaded.loads(tmp_path)
    assert pairs(loaded) == expected
    for other in (restored, loaded):
        other.extend(steps(2008, 4))
        other.extend(steps(3000, 4))
        found = pairs(other)
        assert (2007, 2008) in found and (2011, 3000) not in found


@pytest.mark.parametrize("again", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_ends_slices_at_the_same_seams(again):
    buffer = filled()
    assert pairs(again(buffer)) == pairs(buffer)


def test_a_buffer_that_becomes_shared_ends_slices_at_the_same_seams():
    buffer = filled()
    expected = pairs(buffer)
    buffer.share()
    assert pairs(buffer) == expected


def test_an_emptied_buffer_has_no_seams():
    for options in ({}, {"shared": True}):
        buffer = buffer_of(**options)
        buffer.extend(steps(0, 5))
        buffer.extend(steps(100, 5))
        buffer.empty()
        assert buffer.storage.pieces is None
        buffer.extend(steps(0, 10))
        assert (4, 5) in pairs(buffer)


def test_corrections_leave_seams_and_a_whole_new_content_has_none():
    storage = LazyTensorStorage(20)
    buffer = buffer_of(storage=storage)
    for start in (0, 100):
        buffer.extend(steps(start, 10))
    storage.set(range(3, 12), storage.get(range(3, 12)).clone(), set_cursor=False)
    assert (9, 100) not in pairs(buffer)
    storage.set(range(20), steps(500, 20))
    assert (509, 510) in pairs(buffer)


def test_given_tensors_are_compared_with_later_writes():
    buffer = buffer_of(storage=TensorStorage(steps(0, 20)))
    buffer.extend(steps(100, 5))
    buffer.extend(steps(200, 5))
    found = pairs(buffer)
    assert (104, 200) not in found and (103, 104) in found


def test_goals_in_hindsight_come_from_the_same_rollout():
    buffer = HERReplayBuffer(
        lambda rows: rows["desired_goal"],
        her_ratio=1.0,
        storage=LazyTensorStorage(CAPACITY),
        batch_size=64,
        seed=0,
    )
    for start in (0, 100):
        data = steps(start, 6)
        data["achieved_goal"], data["desired_goal"] = data["x"].clone(), data["x"] * 0
        buffer.extend(data)
    for _ in range(10):
        batch = buffer.sample()
        assert torch.equal(batch["x"] < 100, batch["desired_goal"] < 100)
