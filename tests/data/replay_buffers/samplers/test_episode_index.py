"""The table of trajectories agrees with a scan of all rows after any sequence of calls on a storage."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import fill
from tests.data.replay_buffers.samplers.acts import (
    CAPACITY,
    CLEARS,
    COPIES,
    EXCHANGES,
    WRITES,
    Kind,
    acts,
    new_buffer,
    perform,
    trajectories,
)

KINDS = [
    Kind(),
    Kind(ids=False),
    Kind(done=False),
    Kind(nstep=True),
    Kind(batch=(3,)),
    Kind(batch=(2, 2), nstep=True),
]


def runs(table: EpisodeTable, storage: Any) -> list[tuple[int, int]]:
    """Return the first slot and the length of every trajectory in the table."""
    native = table.of(storage)
    native.check_valid()
    count = native.num_runs(1)
    first, length = np.empty(count, np.int64), np.empty(count, np.int64)
    native.list_runs(1, first.ctypes.data, length.ctypes.data, count)
    return list(zip(first.tolist(), length.tolist(), strict=True))


def make_sampler() -> SliceSampler:
    return SliceSampler(slice_len=1, seed=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=60, deadline=None)
@given(script=acts(*WRITES, *CLEARS, *EXCHANGES, *COPIES))
def test_table_agrees_with_the_stored_rows(kind, script):
    buffer = new_buffer(kind, make_sampler())
    for name, number in script:
        buffer = perform(name, number, buffer, kind, make_sampler)
        if len(buffer):
            expected = trajectories(buffer.storage, kind)
            assert runs(buffer.sampler.unit.table, buffer.storage) == [(run[0], len(run)) for run in expected]


def test_ring_writes_are_followed_without_a_look_at_the_rest():
    buffer = new_buffer(Kind(), make_sampler())
    table = buffer.sampler.unit.table
    read: list[int] = []
    buffer.extend(Kind().rows(3, 0))
    original = table._reader.read
    table._reader.read = lambda rows: (read.append(rows.stop - rows.start), original(rows))[1]
    for number in range(1, 30):
        buffer.extend(Kind().rows(3, number))
    assert sum(read) == 29 * 3
    assert runs(table, buffer.storage) == [(r[0], len(r)) for r in trajectories(buffer.storage, Kind())]


def flags(*ends: int, count: int = 8, width: int = 1) -> torch.Tensor:
    found = torch.zeros(count, width, dtype=torch.bool)
    found[list(ends)] = True
    return found


def table_of(data: dict[Any, Any], *args: Any, capacity: int = 20, **keys: Any) -> tuple[EpisodeTable, Any]:
    rows = TensorDict({}, [8])
    for key, value in data.items():
        rows[key] = value
    storage = LazyTensorStorage(capacity)
    fill(storage, rows)
    return EpisodeTable(BoundaryKeys(**keys), *args), storage


IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
EVERY_FLAG = {("next", "done"): flags(1), ("next", "terminated"): flags(3), ("next", "truncated"): flags(5)}


@pytest.mark.parametrize(
    ("data", "keys", "lengths"),
    [
        ({("next", "done"): flags(2)}, {}, [3, 5]),
        (EVERY_FLAG, {}, [2, 2, 2, 2]),
        (EVERY_FLAG, {"ends": (("next", "done"),)}, [2, 6]),
        ({**EVERY_FLAG, "stop": flags(6)}, {"ends": (("stop",),)}, [2, 5, 1]),
        ({("next", "agents", "done"): flags(4), "x": IDS}, {}, [5, 3]),
        ({"done": flags(2), ("next", "done"): flags()}, {}, [8]),
        ({"episode": IDS}, {}, [3, 4, 1]),
        ({"episode": IDS[:, None]}, {}, [3, 4, 1]),
        ({"episode": IDS.to(torch.uint8)}, {}, [3, 4, 1]),
        ({("collector", "traj_ids"): IDS, "episode": torch.arange(8) // 4}, {}, [3, 1, 3, 1]),
        ({("collector", "traj_ids"): IDS, "mine": torch.arange(8) // 4}, {"trajectory": ("mine",)}, [3, 1, 3, 1]),
        ({"mine": IDS, "episode": torch.arange(8)}, {"trajectory": ("mine",)}, [3, 4, 1]),
        ({"episode": torch.tensor([0, 1, 0, 0, 2, 2, 0, 0])}, {}, [1, 1, 2, 2, 2]),
        ({("next", "done"): flags(1, 5), "steps_to_next_obs": torch.tensor([3, 2, 1, 3, 2, 1, 2, 1])}, {}, [6, 2]),
        ({"episode": IDS, "steps_to_next_obs": torch.full((8,), 3)}, {}, [3, 4, 1]),
    ],
)  # fmt: skip
def test_where_trajectories_end(data, keys, lengths):
    table, storage = table_of(data, **keys)
    assert [length for _, length in runs(table, storage)] == lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_flags_may_be_the_numbers_0_and_1(dtype):
    table, storage = table_of({("next", "done"): flags(2).to(dtype), ("next", "truncated"): flags(5)})
    assert [length for _, length in runs(table, storage)] == [3, 3, 2]


def test_the_cursor_of_a_full_ring_ends_a_trajectory():
    table, storage = table_of({"episode": torch.zeros(8, dtype=torch.int64)}, capacity=8)
    storage.end = 3
    assert runs(table, storage) == [(3, 8)]
    storage = LazyTensorStorage(8)
    buffer = ReplayBuffer(storage=storage, sampler=make_sampler())
    buffer.extend(TensorDict({"episode": torch.tensor([7] * 8 + [9] * 3)}, [11]))
    assert runs(buffer.sampler.unit.table, storage) == [(3, 5), (0, 3)]


@pytest.mark.parametrize("written", [8, 5])
@pytest.mark.parametrize(
    "given_ends",
    [
        {"ends": flags(2, 5)[:, 0]},
        {"ends": flags(2, 5)},
        {"ends": flags(2, 5)[:, 0].int()},
        {"trajectories": torch.tensor([4, 4, 4, 2, 2, 2, 9, 9])},
        {"trajectories": [4, 4, 4, 2, 2, 2, 9, 9]},
    ],
)
def test_ends_that_are_given(given_ends, written):
    data = {"x": torch.arange(8)}
    table, storage = table_of(data, given_ends.get("ends"), given_ends.get("trajectories"), capacity=8)
    assert runs(table, storage) == [(0, 3), (3, 3), (6, 2)]
    again = pickle.loads(pickle.dumps(table))
    assert runs(again, storage) == [(0, 3), (3, 3), (6, 2)]
    fill(storage, TensorDict({"x": torch.arange(written)}, [written]))
    with pytest.raises(UnsupportedError, match="the storage was written since; give end_key"):
        table.of(storage)


def test_given_ends_join_the_stored_ends():
    data = {("next", "done"): flags(0), ("collector", "traj_ids"): IDS}
    table, storage = table_of(data, flags(5)[:, 0])
    assert [length for _, length in runs(table, storage)] == [1, 2, 3, 1, 1]


def test_given_ends_of_another_length():
    table, storage = table_of({"x": IDS}, flags(2, count=7)[:, 0])
    with pytest.raises(SchemaError, match="ends: expected one value for each of the 8 stored rows, got 7"):
        table.of(storage)


@pytest.mark.parametrize("name", ["ends", "trajectories"])
@pytest.mark.parametrize(
    "values", [torch.zeros(8), torch.tensor(True), torch.zeros(8, dtype=torch.complex64)]
)
def test_invalid_ends_are_refused(name, values):
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected a tensor"):
        EpisodeTable(BoundaryKeys(), **{name: values})


@pytest.mark.parametrize(
    ("data", "keys", "error", "match"),
    [
        ({"x": IDS}, {}, MissingKeyError, "nothing stored tells where trajectories end: neither 'episode'"),
        ({"x": IDS}, {"trajectory": ("mine",)}, MissingKeyError, "neither 'mine'"),
        ({"episode": IDS}, {"ends": (("stop",),)}, MissingKeyError, "end_key: \\[.stop.\\] isn.t stored"),
        ({"episode": torch.full((8,), 0.5)}, {}, SchemaError, "expected whole numbers, got 0.5"),
        ({"episode": flags()[:, 0]}, {}, SchemaError, "expected one whole number for each row"),
        ({"episode": torch.zeros(8, 2, dtype=torch.int64)}, {}, SchemaError, "expected one whole number for each row"),
        ({"stop": IDS}, {"ends": (("stop",),)}, SchemaError, "'stop' expected bools, or the numbers 0 and 1, got"),
        ({("next", "done"): torch.full((8,), float("nan"))}, {}, SchemaError, "0 and 1, got nan .float32"),
    ],
)  # fmt: skip
def test_storage_without_keys_of_ends_raises(data, keys, error, match):
    table, storage = table_of(data, **keys)
    with pytest.raises(error, match=match):
        table.of(storage)


def test_missing_trajectory_key_warns():
    table, storage = table_of({("next", "done"): flags(2)}, trajectory=("mine",))
    with pytest.warns(UserWarning, match="trajectory key 'mine' isn't stored; .*'done'"):
        assert runs(table, storage) == [(0, 3), (3, 5)]


def test_storages_without_columns_raise():
    storage = ListStorage(3)
    fill(storage, [1, 2])
    with pytest.raises(UnsupportedError, match="a ListStorage holds single objects"):
        EpisodeTable(BoundaryKeys()).of(storage)
    with pytest.raises(EmptyBufferError, match="the storage is empty"):
        EpisodeTable(BoundaryKeys()).of(LazyTensorStorage(3))


def test_storage_without_keys_of_ends_raises_at_the_draw():
    table, storage = table_of({"x": IDS})
    sampler = make_sampler()
    sampler.follow(storage)
    with pytest.raises(MissingKeyError, match="nothing stored tells"):
        sampler.draw(storage, 1)


def test_an_agents_flag_ends_the_trajectory_of_all():
    ends = flags(count=8, width=3)
    ends[4, 1] = True
    table, storage = table_of({("next", "agents", "done"): ends})
    assert runs(table, storage) == [(0, 5), (5, 3)]


def test_capacity_is_rounded_up_to_whole_steps():
    kind = Kind(batch=(3,))
    buffer = new_buffer(kind, make_sampler())
    buffer.extend(kind.rows(CAPACITY + 4, 0))
    native = buffer.sampler.unit.table.of(buffer.storage)
    assert (native.capacity, native.num_streams, native.stored) == (CAPACITY, 3, CAPACITY)
