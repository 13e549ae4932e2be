"""The stepper writes fitting results into columns by every path, and names results that don't fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.plan import GraphBlock
from gleanrl._rollout.tensordict_stepper import Column
from gleanrl.errors import EnvironmentContractError

PATH = ("next", "value")
T = 3


def column(dtype: torch.dtype = torch.float32, kind: Any = Block, **how: Any) -> tuple[Column, Block]:
    field = Field(torch.Size([2]), dtype)
    block = kind(Schema({PATH: field}), (4,), T)
    options = {"accepted": dtype, "casts": False, **how}
    return Column(block, PATH, PATH[1:], field, **options), block


@pytest.mark.parametrize("kind", [Block, GraphBlock])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.uint8])
def test_rows_are_written(kind: Any, dtype: torch.dtype) -> None:
    target, block = column(dtype, kind)
    values = (torch.arange(T * 8).reshape(T, 4, 2) % 2).to(dtype)
    for t, value in enumerate(values):
        target.write(t, value)
    assert torch.equal(block.column(PATH).movedim(1, 0), values)


@pytest.mark.parametrize("kind", [Block, GraphBlock])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_row_of_the_roots_column_gets_the_same_values(kind: Any, dtype: torch.dtype) -> None:
    paths = (PATH[1:], PATH)
    field = Field(torch.Size([2]), dtype)
    block = kind(Schema(dict.fromkeys(paths, field)), (4,), T)
    root = Column(block, paths[0], PATH[1:], field, dtype, False)
    after = Column(block, PATH, PATH[1:], field, dtype, False, root)
    values = torch.randn(T, 4, 2).to(dtype)
    root.write(0, values[0] + 1)
    for t, value in enumerate(values):
        after.write(t, value)
    assert torch.equal(block.column(PATH).movedim(1, 0), values)
    assert torch.equal(block.column(PATH[1:]).movedim(1, 0), torch.stack([values[0] + 1, *values[:-1]]))


def test_values_with_a_graph_are_detached() -> None:
    target, block = column()
    with torch.no_grad():
        target.write(1, torch.ones(4, 2, requires_grad=True))
    assert (block.column(PATH)[:, 1] == 1).all() and not block.column(PATH).requires_grad


def test_gradients_flow_where_the_block_lets_them() -> None:
    target, block = column(kind=GraphBlock)
    value = torch.ones(4, 2, requires_grad=True)
    target.write(0, value)
    block.rows(PATH)[0].sum().backward()
    assert value.grad is not None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(4, 1), r"'value' expected shape \(4, 2\) torch.float32, got \(4, 1\)"),
        (torch.ones(4, 2, dtype=torch.float64), "expected dtype torch.float32, got torch.float64"),
        (None, r"expected shape \(4, 2\) torch.float32, got NoneType"),
    ],
)
def test_unfitting_values_are_named(value: Any, message: str) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        column()[0].write(0, value)


def test_accepted_dtypes_are_cast() -> None:
    target, block = column(casts=True)
    target.write(0, torch.ones(4, 2, dtype=torch.float64))
    target, later = column(accepted=torch.int32)
    target.write(0, torch.ones(4, 2, dtype=torch.int32))
    assert (block.column(PATH)[:, 0] == 1).all() and (later.column(PATH)[:, 0] == 1).all()
    with pytest.raises(EnvironmentContractError, match="expected dtype torch.int32, got torch.float32"):
        target.write(0, torch.ones(4, 2))
