"""Rows convert to trajectories and back bit for bit: interleaved streams, wrapped rings, unrepeated steps, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    StorageCheckpointerBase,
)
from gleanrl.data.replay_buffers.checkpointers.trajectories import (
    DONE,
    InMemory,
    Streams,
    check_rows,
    join,
    split,
)
from gleanrl.errors import CorruptCheckpointError

FORMS = [FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer]
NEXT = [("next", key) for key in ("observation", "reward", "done")]
KEYS = ["observation", "done", *NEXT, ("next", "next", "observation")]


def divided(paths: Any, columns: Any, streams: Streams, done: Any) -> tuple[list[Any], torch.Tensor]:
    values, offsets = split(paths, InMemory(columns), streams, done)
    return [value and value.tensor() for value in values], offsets


def ring(capacity: int, width: int) -> ReplayBuffer:
    storage = LazyTensorStorage(capacity * width, ndim=2) if width > 1 else LazyTensorStorage(capacity)
    return ReplayBuffer(storage=storage)


def fill(buffer: ReplayBuffer, lengths: list[int], width: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    for length in lengths:
        observation = torch.rand(length + 1, width, 2, generator=generator)
        observation[torch.rand(length + 1, generator=generator) < 0.2] = float("nan")
        after = observation[1:].clone()
        after[torch.rand(length, width, generator=generator) < noise] += 1
        flags = torch.rand(length + 1, width, 1, generator=generator) < 0.2
        rows = TensorDict(
            {
                "observation": observation[:-1],
                "done": flags[:-1],
                "next": {
                    "observation": after,
                    "done": flags[1:],
                    "reward": torch.ones(length, width, 1),
                    "next": {"observation": after.roll(-1, 0)},
                },
            },
            [length, width],
        )
        buffer.extend(rows.transpose(0, 1).contiguous() if width > 1 else rows[:, 0])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("form", FORMS)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    capacity=st.integers(1, 12),
    width=st.integers(1, 3),
    noise=st.floats(0, 1),
)
def test_every_row_comes_back_bit_for_bit(
    form: Any, lengths: list[int], capacity: int, width: int, noise: float
) -> None:
    made, loaded = ring(capacity, width), ring(capacity, width)
    fill(made, lengths, width, noise)
    loaded.storage.load_state_dict(StorageCheckpointerBase.unpacked(form().packed(made.storage.state_dict())))
    assert all(same_bits(made[:][key], loaded[:][key]) for key in KEYS)
    assert loaded.storage.end == made.storage.end


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_columns_of_any_dtype_and_shape_are_restored(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    column = torch.randint(0, 2, (5, *shape)).to(dtype)
    paths, streams = [("a",), ("next", "a")], Streams(np.array([2, 3, 4, 0, 1]), 5)
    columns = [column, column.roll(-1, 0)]
    packed, offsets = divided(paths, columns, streams, DONE)
    again = join(paths, packed, streams, offsets)
    assert all(same_bits(a, b) for a, b in zip(columns, again, strict=True))
    if shape != (0,):
        assert packed[1] is None and len(packed[0]) == 6 and offsets.tolist() == [0, 5]


def test_column_without_repeats_stays_whole_and_repeated_columns_are_shared() -> None:
    frames, noise = torch.arange(11), torch.rand(22)
    paths = [("frame",), ("noise",), ("next", "frame"), ("next", "noise")]
    columns = [frames[:-1], noise[:10], frames[1:], noise[10:20]]
    packed, offsets = divided(paths, columns, Streams(np.arange(10), 10), DONE)
    assert offsets.tolist() == [0, 10] and torch.equal(packed[0], frames) and packed[2] is None
    assert torch.equal(packed[1], noise[:10]) and torch.equal(packed[3], noise[10:20])


def test_flags_end_trajectories() -> None:
    paths = [("a",), ("next", "a"), ("next", "done"), ("next", "over")]
    columns = [torch.zeros(4), torch.zeros(4), torch.tensor([0, 1, 0, 0]), torch.tensor([1, 0, 0, 0])]
    streams = Streams(np.arange(4), 4)
    assert divided(paths, columns, streams, DONE)[1].tolist() == [0, 2, 4]
    assert divided(paths, columns, streams, ("over",))[1].tolist() == [0, 1, 4]


@pytest.mark.parametrize("offsets", [[], [1, 4], [0, 3], [0, 2, 2, 4], [0, 3, 2, 4], [0, 2, -(2**63), -1, 4]])
def test_trajectories_that_arent_the_rows_are_refused(offsets: list[int]) -> None:
    with pytest.raises(CorruptCheckpointError, match="trajectories"):
        join([("a",)], [torch.zeros(4)], Streams(np.arange(4), 4), torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize(
    "changes", [{"num_steps": 2**40}, {"batch_shape": [2**40]}, {"generations": [1] * 5}]
)
def test_invalid_counts_of_rows_are_refused_before_memory_is_taken(
    changes: dict[str, Any],
) -> None:
    buffer = ring(5, 1)
    fill(buffer, [5], 1, 0.0)
    state = buffer.storage.state_dict()
    check_rows(state)
    with pytest.raises(CorruptCheckpointError, match="a storage"):
        check_rows({**state, **changes})


@pytest.mark.parametrize("rows", [8, 24, 400])
def test_join_separates_shared_observations(rows: int) -> None:
    ends = np.sort(np.random.default_rng(rows).choice(np.arange(1, rows), rows // 8 - 1, replace=False))
    offsets = torch.from_numpy(np.concatenate(([0], ends, [rows])))
    steps = offsets.diff().tolist()
    # 13 MB for 400 rows, so two threads copy them.
    several = torch.arange((rows + len(steps)) << 12).reshape(-1, 1 << 12)
    trajectories = several.split([count + 1 for count in steps])
    beside = torch.cat([trajectory[:-1] for trajectory in trajectories])
    after = torch.cat([trajectory[1:] for trajectory in trajectories])
    found = join([("a",), ("next", "a")], [several, None], Streams(range(rows), rows), offsets)
    assert torch.equal(found[0], beside) and torch.equal(found[1], after)
