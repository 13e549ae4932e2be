"""Joined shares equal tensors joined by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.collectors.batch_columns import IDS
from gleanrl.collectors.workers.batching import ShareLayout, arrangement_dim
from gleanrl.data.trajectories import MASK
from gleanrl.errors import InvalidArgumentError, UnsupportedError

SCHEMA = Schema(
    {("observation",): Field(torch.Size((2,)), torch.float32), IDS: Field(torch.Size(), torch.int64)}
)
B, T = 3, 5


def filled(batch_size: tuple[int, ...]) -> Block:
    block = Block(SCHEMA, (B, *batch_size), T, borrowed=True)
    for column in block.columns:
        column.copy_(torch.arange(column.numel()).reshape(column.shape))
    return block


def arranged(dim: int | None, batch_size: tuple[int, ...], counts: dict[int, int], **kwargs: Any) -> Any:
    block = filled(batch_size)
    arrangement = ShareLayout(dim, torch.Size(batch_size), B, kwargs.pop("masked", False))
    return block, arrangement.batch(block, counts, BufferPool(), kwargs.pop("lend", False)).batch()


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("count", [T, 2])
@pytest.mark.parametrize("batch_size", [(), (2,), (2, 4)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_equal_shares_are_stacked_or_concatenated(
    dim: int | None, batch_size: tuple[int, ...], count: int, lend: bool
) -> None:
    block, batch = arranged(dim, batch_size, dict.fromkeys(range(B), count), lend=lend)
    parts = [block.part(worker).leading(count).batch() for worker in range(B)]
    time = len(batch_size)
    expected = torch.stack(parts) if dim is None else torch.cat(parts, 0 if dim == 0 else time)
    assert batch.shape == expected.shape and (batch == expected).all()
    assert batch.names == [None] * (batch.ndim - 1) + ["time"]
    if not lend:
        before = batch.clone()
        for column in block.columns:
            column.fill_(-7)
        assert (batch == before).all() and all(leaf.is_contiguous() for leaf in batch.values(True, True))


@pytest.mark.parametrize("batch_size", [(), (2,)])
@pytest.mark.parametrize("counts", [{0: 5, 1: 1, 2: 3}, {0: 2, 2: 4}, {1: 3}])
def test_unequal_shares_are_concatenated_along_time(
    batch_size: tuple[int, ...], counts: dict[int, int]
) -> None:
    block, batch = arranged(-1, batch_size, counts)
    parts = [block.part(worker).leading(count).batch() for worker, count in counts.items()]
    assert (batch == torch.cat(parts, len(batch_size))).all()


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_missing_steps_of_stacks_are_masked(batch_size: tuple[int, ...]) -> None:
    counts = {0: 4, 1: 1, 2: 3}
    block, batch = arranged(None, batch_size, counts, masked=True)
    assert batch.shape == (B, *batch_size, 4)
    for worker, count in counts.items():
        rows, source = batch[worker], block.part(worker).leading(count).batch()
        assert rows[MASK][..., :count].all() and not rows[MASK][..., count:].any()
        assert (rows[..., :count].exclude(MASK) == source).all()
        assert (rows[..., count:]["observation"] == 0).all() and (rows[..., count:][IDS] == -1).all()


def test_steps_of_workers_differ_by_one_at_most() -> None:
    assert ShareLayout(-1, torch.Size(), 3).steps(10) == [4, 3, 3]
    assert ShareLayout(-1, torch.Size((2,)), 3).steps(2) == [1, 1, 0]
    assert ShareLayout(None, torch.Size((2,)), 3).steps(4) == [4, 4, 4]
    assert [ShareLayout(dim, torch.Size((2,)), 3).num_envs for dim in (None, 0, -1)] == [6, 6, 2]
    assert [ShareLayout(dim, torch.Size(), 3).num_envs for dim in (None, 0, -1)] == [3, 1, 1]


def test_unsupported_layout_is_refused() -> None:
    ShareLayout(0, torch.Size(), 3, masked=True).check()
    with pytest.raises(UnsupportedError, match="preemptive_threshold: .* cat_results=0"):
        ShareLayout(0, torch.Size((2,)), 3, masked=True).check()


def test_cat_results_is_checked() -> None:
    assert [arrangement_dim(value) for value in (None, "stack", 0, -1)] == [None, None, 0, -1]
    for wrong in ("cat", 1, 0.5, True):
        with pytest.raises(InvalidArgumentError, match="cat_results: .* got"):
            arrangement_dim(wrong)
