"""Columns of a block are opened by key, and rows are read from them."""

from __future__ import annotations

import itertools

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.envs.transforms.row_columns import DoneFlags, OpenedColumns, SpareRow

SIZE = torch.Size((2,))


def block(batch=(), steps=3):
    flag, value = Field(torch.Size((1,)), torch.bool), Field(SIZE, torch.float32)
    fields = {("a",): value, ("next", "a"): value, ("next", "r"): value, ("next", "done"): flag}
    made = Block(Schema(fields), batch, steps)
    for column in made.columns:
        column.zero_()
    return made


@pytest.mark.parametrize("batch", [(), (4,)])
def test_columns_are_opened_by_key(batch):
    made = block(batch)
    root, after = OpenedColumns(made, False), OpenedColumns(made, True)
    assert list(root) == ["a"]
    assert list(after) == ["a", "r", "done"]
    after.get("a")[1].fill_(5.0)
    assert float(made.column(("next", "a")).select(len(batch), 1).min()) == 5
    assert root.get("x") is None


def test_spare_row_is_a_column_of_one_repeated_row():
    spare = SpareRow()
    column = spare.column(("a",), Field(SIZE, torch.float32), (4,), 3, None)
    assert column.shape == (4, 3, 2)
    column[:, 0] = 7.0
    assert float(column[:, 2].min()) == 7
    again = spare.column(("a",), Field(SIZE, torch.float32), (4,), 9, None)
    assert again.data_ptr() == column.data_ptr()
    rows = OpenedColumns(
        Block(Schema({("a",): Field(SIZE, torch.float32)}), (4,), 3, columns=[column]), False
    )
    assert rows.get("a")[0] is rows.get("a")[2]


@pytest.mark.parametrize("batch", [(), (4,), (2, 3), (100,)])
@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_any_done_reads_the_done_columns_of_a_row(batch, shape):
    flag = Field(torch.Size(shape), torch.bool)
    fields = {("next", *group, "done"): flag for group in ((), ("g",))}
    for t, last in itertools.product(range(3), (False, True)):
        made = Block(Schema(fields), batch, 3)
        for column in made.columns:
            column.zero_()
        column = made.column(("next", "done"))
        column[(*[-1 if last else 0] * len(batch), t, -1 if last else 0)] = True
        for groups in ([()], [(), ("g",)], [("g",), ()]):
            flags = DoneFlags(made, groups)
            assert [flags.any(row) for row in range(3)] == [row == t for row in range(3)]
        flags = DoneFlags(made, [("g",)])
        assert not any(flags.any(row) for row in range(3))


@pytest.mark.parametrize("batch", [(), (4,)])
def test_a_row_is_read_alone(batch):
    made = block(batch)
    root = OpenedColumns(made, False)
    root.row("a", 1).fill_(3.0)
    assert made.column(("a",)).select(len(batch), 1).unique().tolist() == [3.0]
    assert made.column(("a",)).select(len(batch), 2).unique().tolist() == [0.0]
    assert root.row("x", 1) is None
    opened = root.get("a")
    assert root.row("a", 2) is opened[2]
