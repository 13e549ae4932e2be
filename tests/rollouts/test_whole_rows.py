from __future__ import annotations

import pytest
import torch

from gleanrl.block import Block
from gleanrl.rollouts.whole_rows import WholeRows, written_whole
from gleanrl.schema import Field, Schema

FIELDS = {
    ("a",): Field(torch.Size((2,)), torch.float32),
    ("next", "a"): Field(torch.Size((2,)), torch.float32),
    ("next", "done"): Field(torch.Size(()), torch.bool),
}
AFTER = [("next", "a"), ("next", "done")]


def zeros(batch):
    block = Block(Schema(FIELDS), batch, 3)
    for column in block.columns:
        column.zero_()
    return block


def values(batch, t):
    torch.manual_seed(t)
    return [torch.randn(*batch, 2), torch.rand(batch) > 0.5]


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_rows_and_the_roots_behind_them_are_those_that_torch_writes(batch):
    block, want = zeros(batch), zeros(batch)
    assert all(written_whole(block, path) for path in FIELDS)
    rows = WholeRows(block, AFTER, [("a",), None])
    for t in range(3):
        given = values(batch, t)
        assert rows.write(t, given)
        for path, value in zip(AFTER, given, strict=True):
            want.rows(path)[t].copy_(value)
        if t < 2:
            want.rows(("a",))[t + 1].copy_(given[0])
    for path in FIELDS:
        assert torch.equal(block.column(path), want.column(path)), path


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.double(),
        lambda a: a[..., :1],
        lambda a: a.expand(2, *a.shape),
        lambda a: torch.view_as_complex(torch.stack([a, a], -1)).conj().imag,
        lambda a: torch.nn.Parameter(a),
        lambda a: a.tolist(),
        lambda a: None,
    ],
)
def test_what_is_no_plain_tensor_as_declared_is_left_to_others(change):
    block = zeros((4,))
    rows = WholeRows(block, AFTER)
    a, done = values((4,), 0)
    assert not rows.write(0, [change(a), done])
    assert not rows.write(0, [a, change(done.float())])
    assert not any(bool(column.any()) for column in block.columns)


def test_values_in_several_pieces_are_written():
    block, (a, done) = zeros((4,)), values((4,), 0)
    halves = torch.cat([a, a + 1], -1).chunk(2, -1)
    assert WholeRows(block, AFTER).write(1, [halves[1], done])
    assert torch.equal(block.rows(("next", "a"))[1], a + 1)


def test_columns_in_several_pieces_are_not_written_whole():
    block = Block(Schema(FIELDS), (4,), 6)
    for column in block.columns:
        column.zero_()
    assert not written_whole(block.leading(3), ("a",))
    assert written_whole(block.part(0), ("a",))
