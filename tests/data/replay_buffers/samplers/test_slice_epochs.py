"""An epoch has one slice of each trajectory, also after writes, copies and loads during the epoch."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError
from tests.data.replay_buffers.oracle import fill
from tests.data.replay_buffers.samplers.acts import (
    CLEARS,
    COPIES,
    EXCHANGES,
    WRITES,
    Kind,
    acts,
    cut_by,
    new_buffer,
    perform,
    trajectories,
)

CAPACITY = 24


def rows(start: int, count: int, length: int = 3) -> TensorDict:
    """Return steps of trajectories of equal length; step t belongs to trajectory ``t // length``."""
    t = torch.arange(start, start + count)
    return TensorDict({"t": t, "next": {"done": (t % length == length - 1)[:, None]}}, [count])


def make_sampler(**options: Any) -> SliceSamplerWithoutReplacement:
    return SliceSamplerWithoutReplacement(**{"slice_len": 3, "seed": 0, **options})


def buffer_of(
    written: int = CAPACITY, batch_size: int = 6, prefetch: int | None = None, **options: Any
) -> Any:
    storage = LazyTensorStorage(CAPACITY)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=make_sampler(**options), batch_size=batch_size, prefetch=prefetch
    )
    if written:
        buffer.extend(rows(0, written))
    return buffer


def served(batch: TensorDict) -> list[int]:
    """Return the trajectories in a batch of whole trajectories."""
    t = batch["t"].view(-1, 3)
    assert torch.equal(t, t[:, :1] + torch.arange(3)) and bool((t[:, 0] % 3 == 0).all())
    return (t[:, 0] // 3).tolist()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    strict=st.booleans(),
    shuffle=st.booleans(),
)
def test_an_epoch_takes_one_slice_of_each_trajectory(lengths, sizes, strict, shuffle):
    ends = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    storage = LazyTensorStorage(sum(lengths))
    fill(storage, TensorDict({"next": {"done": ends}}, [len(ends)]))
    sampler = make_sampler(strict_length=strict, shuffle=shuffle, num_slices=None)
    runs = trajectories(storage, Kind(ids=False))
    due = [run for run in runs if len(run) >= (3 if strict else 1)]
    if not due:
        with pytest.raises(EmptyBufferError, match="no trajectory of 3 steps"):
            sampler.draw(storage, 3)
        return
    seen: list[list[int]] = []
    for count in sizes:
        drawn = sampler.draw(storage, 3 * count)
        pieces = cut_by(drawn.slots.tolist(), drawn.last.tolist())
        assert len(pieces) == min(count, len(due) - len(seen))
        for piece in pieces:
            (run,) = [run for run in due if piece[0] in run]
            assert run not in seen and len(piece) == min(3, len(run)) and set(piece) <= set(run)
            seen.append(run)
        assert sampler.ran_out == (len(seen) == len(due))
        if not shuffle:
            assert seen == due[: len(seen)]
        if sampler.ran_out:
            seen = []


@pytest.mark.parametrize("kind", [Kind(), Kind(batch=(3,)), Kind(nstep=True)], ids=str)
@pytest.mark.parametrize("strict", [True, False])
@settings(max_examples=40, deadline=None)
@given(script=acts(*WRITES, *CLEARS, *EXCHANGES, *COPIES, "draw"))
def test_slices_are_stored_trajectories_and_copies_draw_the_same(kind, strict, script):
    def make() -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(slice_len=2, strict_length=strict, seed=0)

    buffer = new_buffer(kind, make())
    for name, number in script:
        twin = new_buffer(kind, make())
        twin.load_state_dict(buffer.state_dict())
        buffer = perform(name, number, buffer, kind, make)
        runs = trajectories(buffer.storage, kind) if len(buffer) else []
        due = [run for run in runs if len(run) >= (2 if strict else 1)]
        if not due or name not in ("draw", *COPIES):
            continue
        drawn = buffer.sampler.draw(buffer.storage, 4)
        assert drawn.slots.tolist() == twin.sampler.draw(twin.storage, 4).slots.tolist()
        assert buffer.sampler.ran_out == twin.sampler.ran_out
        pieces = cut_by(drawn.slots.tolist(), drawn.last.tolist())
        assert len(pieces) == 2 or buffer.sampler.ran_out
        for piece in pieces:
            (run,) = [run for run in due if piece[0] in run]
            assert set(piece) <= set(run) and len(piece) == min(2, len(run))


def test_overwritten_trajectories_leave_the_epoch_and_new_ones_join_the_next():
    buffer = buffer_of(batch_size=6)
    first = served(buffer.sample())
    buffer.extend(rows(CAPACITY, 7))  # overwrites trajectories 0 and 1, and a step of 2
    rest: list[int] = []
    while not buffer.sampler.ran_out:
        rest += served(buffer.sample())
    assert sorted(rest) == sorted(set(range(3, 8)) - set(first))
    nxt: list[int] = []
    while not nxt or not buffer.sampler.ran_out:
        nxt += served(buffer.sample())
    assert sorted(nxt) == [3, 4, 5, 6, 7, 8, 9]  # trajectory 2 is too short now, and 10 has one step


def test_partly_overwritten_trajectory_gives_a_slice_of_the_rest():
    buffer = buffer_of(batch_size=3, shuffle=False, strict_length=False)
    assert buffer.sample()["t"].tolist() == [0, 1, 2]
    buffer.extend(rows(CAPACITY, 4))
    assert buffer.sample()["t"].tolist() == [4, 5]
    assert buffer.sample()["t"].tolist() == [6, 7, 8]


def test_extended_trajectory_is_served_once():
    buffer = buffer_of(written=5, batch_size=3, shuffle=False, strict_length=False)
    assert buffer.sample()["t"].tolist() == [0, 1, 2]
    buffer.extend(rows(5, 1))
    assert buffer.sample()["t"].tolist() == [3, 4, 5]
    assert buffer.sampler.ran_out


@pytest.mark.parametrize(("batch_size", "batches"), [(9, 2), (6, 4), (24, 1), (15, 1)])
def test_drop_last_leaves_out_the_rest(batch_size, batches):
    buffer = buffer_of(batch_size=batch_size, drop_last=True)
    for _ in range(3):
        for number in range(batches):
            assert len(served(buffer.sample())) == batch_size // 3
            assert buffer.sampler.ran_out == (number == batches - 1)


def test_drop_last_needs_enough_trajectories():
    buffer = buffer_of(batch_size=27, drop_last=True)
    with pytest.raises(InvalidArgumentError, match="asks for 9 trajectories of 3 steps, but only 8"):
        buffer.sample()


def test_iteration_is_one_epoch_and_emptying_ends_it():
    buffer = buffer_of(batch_size=9)
    next(iter(buffer))
    for _ in range(2):
        assert sorted(slice for batch in buffer for slice in served(batch)) == list(range(8))
    buffer.sample()
    buffer.empty()
    buffer.extend(rows(0, 6))
    assert sorted(served(buffer.sample())) == [0, 1] and buffer.sampler.ran_out


def continued(buffer: Any, how: str, batch_size: int) -> Any:
    if how in ("pickle", "deepcopy"):
        return copy.deepcopy(buffer) if how == "deepcopy" else pickle.loads(pickle.dumps(buffer))
    other = buffer if how == "itself" else buffer_of(17 if how == "used" else 0, batch_size)
    other.load_state_dict(buffer.state_dict())
    return other


@pytest.mark.parametrize("how", ["fresh", "used", "itself", "pickle", "deepcopy"])
@pytest.mark.parametrize("written", [CAPACITY, CAPACITY + 9, 3 * CAPACITY])
def test_restored_epoch_continues(written, how):
    buffer = buffer_of(batch_size=9)
    if written > CAPACITY:
        buffer.extend(rows(CAPACITY, written - CAPACITY))
    first = served(buffer.sample())
    reference = buffer_of(0, 9)
    reference.load_state_dict(buffer.state_dict())
    other = continued(buffer, how, 9)
    following = [served(other.sample()) for _ in range(6)]
    assert following == [served(reference.sample()) for _ in range(6)]
    rest = [slice for batch in following[:2] for slice in batch]
    assert sorted(first + rest) == list(range(written // 3 - 8, written // 3)), "not one epoch"


@pytest.mark.parametrize("how", ["fresh", "used", "itself"])
def test_restored_epoch_leaves_out_trajectories_overwritten_before_the_save(how):
    buffer = buffer_of(batch_size=6)
    first = served(buffer.sample())
    buffer.extend(rows(CAPACITY, 6))
    other = continued(buffer, how, 6)
    rest: list[int] = []
    while not other.sampler.ran_out:
        rest += served(other.sample())
    assert sorted(rest) == sorted(set(range(2, 8)) - set(first))


@pytest.mark.parametrize("seed", range(8))
def test_prefetched_epoch_loses_and_repeats_nothing_after_an_overwrite(seed):
    buffer = buffer_of(batch_size=6, prefetch=2, seed=seed)
    batches = iter(buffer)
    got = served(next(batches))
    buffer.extend(rows(CAPACITY, 3))  # overwrites trajectory 0
    for batch in batches:
        got += served(batch)
    assert sorted({0, *got}) == list(range(8)) and len(got) == len(set(got))


def test_redraw_keeps_stored_trajectories():
    buffer = buffer_of(shuffle=False)
    sampler, storage = buffer.sampler, buffer.storage
    drawn = sampler.draw(storage, 6)
    buffer.extend(rows(CAPACITY, 3))
    again = sampler.redraw(storage, drawn, torch.ones(6, dtype=torch.bool))
    assert again.slots.tolist() == [3, 4, 5, 6, 7, 8] and again.asked == 6


@pytest.mark.parametrize(
    "change",
    [
        {"position": 9},
        {"position": -1},
        {"position": None},
        {"items": torch.arange(3)},
        {"items": -torch.ones(8, dtype=torch.int64)},
        {"items": [1]},
        {"generations": torch.ones(7, dtype=torch.int64)},
    ],
)
def test_a_broken_state_changes_nothing(change):
    buffer = buffer_of(batch_size=6)
    first = served(buffer.sample())
    state = buffer.sampler.state_dict()
    with pytest.raises(SchemaError, match="load_state_dict"):
        buffer.sampler.load_state_dict({**state, "running": {**state["running"], **change}})
    rest: list[int] = []
    while not buffer.sampler.ran_out:
        rest += served(buffer.sample())
    assert sorted(first + rest) == list(range(8))


@pytest.mark.parametrize("seed", range(12))
def test_no_batch_has_a_trajectory_twice_despite_writes(seed):
    numbers, current = random.Random(seed), 0
    sampler = SliceSamplerWithoutReplacement(slice_len=1, seed=seed)
    storage = LazyTensorStorage(6)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, prefetch=1, batch_size=2)
    for number in range(100):
        if not number or numbers.random() < 0.7:
            ids = []
            for _ in range(numbers.randint(1, 3) if number else 6):
                current += numbers.random() < 0.5
                ids.append(current)
            buffer.extend(TensorDict({"episode": torch.tensor(ids)}, [len(ids)]))
        served = buffer.sample()["episode"].tolist()
        assert len(set(served)) == len(served)
