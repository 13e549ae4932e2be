"""A reusable block is free for the next batch unless user code keeps a reference to it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.block import ReusableBlock, can_keep
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.schema import Field, Schema

pytestmark = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't offer the interface")

SCHEMA = Schema({("a",): Field(torch.Size((2,)), torch.float32), ("b",): Field(torch.Size(()), torch.bool)})
PATHS = [("a",), ("b",)]


@pytest.fixture
def block():
    made = ReusableBlock(SCHEMA, (3,), 4)
    for column in made.columns:
        column.zero_()
    return made


def test_shown_rows_share_the_blocks_memory(block):
    rows = block.rows_by_step(PATHS)
    assert [tuple(row.shape) for row in rows[0]] == [(3, 2), (3,)]
    block.rows(("a",))[2].fill_(7.0)
    assert [float(step[0].max()) for step in rows] == [0.0, 0.0, 7.0, 0.0]
    assert block.rows_by_step(PATHS) is rows
    assert block.is_free
    assert block.borrowed


@pytest.mark.parametrize(
    "take",
    [
        lambda row: row,
        lambda row: row[..., :1],
        lambda row: row.detach(),
        lambda row: row.numpy(),
        lambda row: row.unsqueeze(0).expand(2, *row.shape),
        lambda row: row.view(torch.uint8),
        lambda row: row.__dlpack__(),
        lambda row: TensorDict({"a": row}),
        lambda row: row.untyped_storage(),
        lambda row: row._base,
        lambda row: torch.ones(1, requires_grad=True) * row,
    ],
)
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("t", [0, 3])
def test_block_is_free_unless_a_view_is_kept(block, take, column, t):
    kept = take(block.rows_by_step(PATHS)[t][column])
    assert not block.is_free
    del kept
    assert block.is_free


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.requires_grad_(),
        lambda row: setattr(row, "grad", torch.zeros_like(row)),
        lambda row: setattr(row, "seen", True),
        lambda row: row.unsqueeze_(0),
        lambda row: row.share_memory_(),
        lambda row: setattr(row, "data", row.clone()),
    ],
)
def test_block_with_changed_rows_is_not_free(block, change):
    change(block.rows_by_step(PATHS)[2][0])
    assert not block.is_free


def test_views_of_other_column_sets_count(block):
    kept = block.rows_by_step(PATHS)[0][0]
    assert block.rows_by_step(PATHS[:1])[0][0] is not kept
    assert not block.is_free
    del kept
    assert block.is_free
    assert block.rows_by_step(()) == [()] * 4
    assert block.is_free


@pytest.mark.parametrize(
    ("fields", "steps", "kept"),
    [
        ({("a",): Field(torch.Size((2,)), torch.float32)}, 100, True),
        ({("a",): Field(torch.Size((2,)), torch.float32)}, 0, False),
        ({("a",): Field(torch.Size((64, 64)), torch.float32)}, 100, False),
        ({("a",): Field(torch.Size((2,)), torch.bfloat16)}, 100, False),
        ({("a",): Field(torch.Size(()), None)}, 100, False),
    ],
)
def test_only_small_blocks_of_numpy_dtypes_are_reused(fields, steps, kept):
    assert can_keep(Schema(fields), (3,), steps) is kept


def test_block_made_in_inference_mode_is_usable_outside_it():
    with torch.inference_mode():
        made = ReusableBlock(SCHEMA, (3,), 4)
        rows = made.rows_by_step(PATHS)
    rows[0][0].fill_(1.0)
    assert rows[0][0]._version == 1
    with torch.inference_mode():
        rows[0][0].fill_(2.0)
        kept = rows[0][0][..., :1]
        assert not made.is_free
    del kept
    assert made.is_free
