"""All views of a block share its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl._arrays.block import Block, copy_columns
from gleanrl._arrays.schema import Schema, numpy_view
from tests.fields import FIELDS, SIZES


@pytest.mark.parametrize("size", SIZES, ids=str)
class TestBlock:
    T = 4

    def make(self, size: tuple[int, ...]) -> Block:
        block = Block(Schema(FIELDS), size, self.T)
        for number, column in enumerate(block.columns):
            column.copy_(torch.arange(column.numel()).reshape(column.shape) + number)
        return block

    def test_every_view_shows_the_columns(self, size: tuple[int, ...]) -> None:
        block = self.make(size)
        data = block.batch()
        assert data.batch_size == (*size, self.T) and block.time_dim == len(size)
        for path, field in FIELDS.items():
            column, rows = block.column(path), block.rows(path)
            arrays = np.moveaxis(block.array(path), len(size), 0)
            assert column.shape == (*size, self.T, *field.shape) and column.dtype == field.dtype
            assert data.get(path) is column and len(rows) == len(arrays) == self.T
            for t in range(self.T):
                assert rows[t].shape == (*size, *field.shape) and arrays[t, ...].shape == rows[t].shape
                assert torch.equal(rows[t], column.select(len(size), t))
                arrays[t, ...] = 0
                assert not rows[t].any() and not column.select(len(size), t).any(), (
                    "a write reaches the column"
                )
                rows[t].fill_(1)
                assert (
                    block.array(path).take(t, len(size)) == numpy_view(torch.ones(1).to(field.dtype))
                ).all()
            assert (column == 1).all()
            by_row = block.row_arrays(path)
            assert (by_row is None) == (field.dtype is torch.bfloat16)
            if by_row is not None:
                by_row[1, ...] = 0
                assert not rows[1].any() and rows[0].all()

    def test_columns_share_no_memory(self, size: tuple[int, ...]) -> None:
        block = self.make(size)
        storages = {column.untyped_storage().data_ptr() for column in block.columns}
        assert len(storages) == len(FIELDS)
        for column in block.columns:
            assert column.untyped_storage().nbytes() == column.numel() * column.itemsize

    def test_batch_has_names_and_device(self, size: tuple[int, ...]) -> None:
        block = self.make(size)
        for data in (block.batch(), block.batch(2)):
            for part in (data, data["next"], data["next", "stats"]):
                assert part.names == [None] * len(size) + ["time"] and part.device is None
        assert block.batch(device=torch.device("cpu")).device == torch.device("cpu")

    def test_batch_of_fewer_steps_shares_the_memory(self, size: tuple[int, ...]) -> None:
        block = self.make(size)
        for steps in range(self.T + 1):
            data = block.batch(steps)
            assert data.batch_size == (*size, steps)
            for path in FIELDS:
                expected = block.column(path).narrow(len(size), 0, steps)
                assert torch.equal(data.get(path), expected)
                assert data.get(path).data_ptr() == expected.data_ptr() or not expected.numel()

    def test_two_blocks_share_nothing(self, size: tuple[int, ...]) -> None:
        schema = Schema(FIELDS)
        first, second = Block(schema, size, self.T), Block(schema, size, self.T)
        for ours, theirs in zip(first.columns, second.columns, strict=True):
            ours.zero_(), theirs.fill_(1)
            assert not ours.any()


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_lazily_conjugated_and_negated_columns_are_copied_by_value(lazy):
    source = lazy(torch.tensor([1 + 2j, 3 - 4j]))
    target = torch.zeros(2, dtype=source.dtype)
    copy_columns([target], [source])
    torch.testing.assert_close(target, source.resolve_conj().resolve_neg(), rtol=0, atol=0)
