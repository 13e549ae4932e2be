"""Outputs of transforms are written into the columns of the block."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.row_writers import batched_row_writer
from gleanrl.envs.transforms import row_columns as module
from gleanrl.envs.transforms.row_columns import Output, Outputs
from gleanrl.errors import EnvironmentContractError

SIZE = torch.Size((2,))
VALUE = Field(SIZE, torch.float32)


def block(batch=(), steps=3):
    fields = {("a",): VALUE, ("next", "a"): VALUE, ("next", "r"): VALUE}
    made = Block(Schema(fields), batch, steps)
    for column in made.columns:
        column.zero_()
    return made


@pytest.mark.parametrize("batch", [(), (4,)])
def test_an_outcome_is_the_root_of_the_next_row(batch):
    made = block(batch)
    output = Output(made, ("a",))
    shape = (*batch, 2)
    for t in range(3):
        output.write(t, torch.full(shape, t + 1.0))
    output.write_root(0, torch.full(shape, 9.0))
    time = len(batch)
    assert made.column(("next", "a")).select(time, 2).unique().tolist() == [3.0]
    roots = [made.column(("a",)).select(time, t).unique().tolist() for t in range(3)]
    assert roots == [[9.0], [1.0], [2.0]]
    only_after = Output(made, ("r",))
    only_after.write(1, torch.full(shape, 4.0))
    assert made.column(("next", "r")).select(time, 1).unique().tolist() == [4.0]


def test_outputs_of_another_shape_or_dtype_are_refused():
    output = Output(block(), ("a",))
    for value in (torch.zeros(1), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2)):
        with pytest.raises(EnvironmentContractError, match="'a' expected shape"):
            output.write(0, value)
        with pytest.raises(EnvironmentContractError, match="'a' expected shape"):
            output.write_root(0, value)


def test_dtypes_unknown_to_numpy_are_written():
    field = Field(SIZE, torch.bfloat16)
    made = Block(Schema({("a",): field, ("next", "a"): field}), (), 2)
    output = Output(made, ("a",))
    output.write(0, torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    assert made.column(("a",))[1].tolist() == [1.5, 2.5]


def test_rows_are_the_same_whether_the_core_writes_them_or_not(monkeypatch):
    alone = []
    write = Output.write
    monkeypatch.setattr(
        Output, "write", lambda self, t, value: (alone.append((self, t)), write(self, t, value))
    )
    made, want = block((4,)), block((4,))
    outputs, plain = Outputs(made, ["a"], {("a",), ("r",)}), [Output(want, ("a",)), Output(want, ("r",))]
    for t, keys in enumerate(["ar", "ar", "ra"]):
        values = {key: torch.randn(4, 2) for key in keys}
        outputs.write(t, {**values, "_private": torch.zeros(4)} if t == 1 else values)
        for output in plain:
            output.write(t, values[output.key])
    assert {t for output, t in alone if output not in plain} == {
        1
    }  # row 1 has a private key, and private keys have no column
    outputs.write_root(1, {"a": torch.ones(4, 2), "_private": torch.zeros(4)})
    plain[0].write_root(1, torch.ones(4, 2))
    for path in made.schema.paths:
        assert torch.equal(made.column(path), want.column(path)), path
    assert set(outputs.by_key) <= {"a", "r"}


def test_undeclared_outputs_are_refused():
    outputs = Outputs(block(), ["a"], {("a",)})
    for _ in range(2):  # twice, because a column exists after the first write
        with pytest.raises(EnvironmentContractError, match="'r', which the transformed specs don't declare"):
            outputs.write(0, {"a": torch.zeros(2), "r": torch.zeros(2)})
    with pytest.raises(EnvironmentContractError, match="'a' expected shape"):
        outputs.write(0, {"a": torch.zeros(3)})


def test_cache_of_key_sets_is_bounded(monkeypatch):
    made_for = []
    monkeypatch.setattr(
        module, "batched_row_writer", lambda *args: made_for.append(args[1]) or batched_row_writer(*args)
    )
    fields = {path: VALUE for n in range(40) for path in ((f"k{n}",), ("next", f"k{n}"))}
    made = Block(Schema(fields), (), 3)
    outputs = Outputs(made, [], {(f"k{n}",) for n in range(40)})
    for n in range(40):
        outputs.write(1, {f"k{n}": torch.full((2,), float(n)), "_private": torch.zeros(1)})
        outputs.write(0, {f"k{n}": torch.full((2,), float(n))})
    for n in range(40):
        assert made.column(("next", f"k{n}"))[:2].unique().tolist() == [n]
        assert made.column((f"k{n}",))[1:].unique().tolist() == [n]
    assert 4 < len(made_for) <= 16


@pytest.mark.parametrize("private", [{}, {"_private": torch.zeros(1)}])
def test_roots_of_another_form_than_outcomes_are_refused_by_name(private):
    other = Field(SIZE, torch.float64)
    made = Block(Schema({("a",): other, ("next", "a"): VALUE}), (), 3)
    outputs = Outputs(made, [], {("a",)})
    with pytest.raises(EnvironmentContractError, match="'a' expected shape .*float32.* got .*float64"):
        outputs.write_root(0, {"a": torch.zeros(2, dtype=torch.float64), **private})
    with pytest.raises(EnvironmentContractError, match="'a' expected shape .*float32.* got .*float64"):
        outputs.write(0, {"a": torch.zeros(2, dtype=torch.float64), **private})
