"""The batched row writer writes the same rows as torch."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from gleanrl._arrays.block import Block
from gleanrl._arrays.native import TensorRows, knows_exchange
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout import row_writers
from gleanrl._rollout.row_writers import batched_row_writer as rows_of
from gleanrl._rollout.row_writers import is_batch_writable
from tests.ways import both_ways

FIELDS = {
    ("a",): Field(torch.Size((2,)), torch.float32),
    ("next", "a"): Field(torch.Size((2,)), torch.float32),
    ("next", "done"): Field(torch.Size(()), torch.bool),
}
AFTER = {"a": ("next", "a"), "done": ("next", "done")}
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


way = both_ways(row_writers, autouse=True)


def zeros(batch):
    block = Block(Schema(FIELDS), batch, 3)
    for column in block.columns:
        column.zero_()
    return block


def values(batch, t):
    torch.manual_seed(t)
    return {"a": torch.randn(*batch, 2), "done": torch.rand(batch) > 0.5}


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_rows_and_next_roots_equal_torchs(batch):
    block, want = zeros(batch), zeros(batch)
    assert all(is_batch_writable(block, path) for path in FIELDS)
    rows = rows_of(block, AFTER, {"a": ("a",)}, ["done"])
    for t in range(3):
        found = values(batch, t)
        assert rows.write(t, found, True) is bool(found["done"].any())
        for key, path in AFTER.items():
            want.rows(path)[t].copy_(found[key])
        if t < 2:
            want.rows(("a",))[t + 1].copy_(found["a"])
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
        lambda a: a.to("meta"),
        lambda a: a.to_sparse(),
        lambda a: a.tolist(),
        lambda a: a.numpy(),
        lambda a: None,
    ],
)
def test_other_tensors_are_left_to_the_fallback(change):
    block = zeros((4,))
    rows = rows_of(block, AFTER)
    found = values((4,), 0)
    for key, value in found.items():
        changed = change(value.float())
        assert rows.write(0, {**found, key: changed}) is None
    assert not any(bool(column.any()) for column in block.columns)


def test_other_keys_are_ignored_or_refused():
    block, found = zeros((4,)), values((4,), 0)
    rows = rows_of(block, AFTER)
    more = {**found, "b": torch.zeros(4)}
    assert rows.write(0, {"a": found["a"]}) is None
    assert rows.write(0, more, True) is None
    assert not any(bool(column.any()) for column in block.columns)
    assert rows.write(0, more) is False, "nothing was said of flags"
    assert torch.equal(block.rows(("next", "a"))[0], found["a"])


def test_tensors_in_a_graph_are_written():
    block, found = zeros((4,)), values((4,), 0)
    weight = torch.ones(2, requires_grad=True)
    assert rows_of(block, AFTER).write(0, found | {"a": found["a"] * weight}) is False
    assert torch.equal(block.rows(("next", "a"))[0], found["a"])


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 3), max_size=2),
    st.lists(st.integers(0, 3), max_size=3),
    st.randoms(use_true_random=False),
)
def test_values_may_lie_in_any_order(dtype, batch, leaf, random):
    field = Field(torch.Size(leaf), dtype)
    block = Block(Schema({("a",): field}), batch, 2)
    block.column(("a",)).zero_()
    order = list(range(len(batch) + len(leaf)))
    random.shuffle(order)
    shape = [*batch, *leaf]
    mixed = torch.randint(0, 2, [shape[dim] + random.randint(0, 1) for dim in order]).to(dtype)
    for dim in range(len(order)):
        mixed = mixed.narrow(dim, mixed.shape[dim] - shape[order[dim]], shape[order[dim]])
    value = mixed.permute([order.index(dim) for dim in range(len(order))])
    if random.random() < 0.3 and value.numel():
        value = value[(..., *[slice(0, 1)] * value.ndim)].expand(shape)
    assert rows_of(block, {"a": ("a",)}, {}, ["a"]).write(1, {"a": value}) is bool(value.any())
    assert torch.equal(block.rows(("a",))[1], value)
    assert not bool(block.rows(("a",))[0].any())


def test_many_columns_are_written():
    names = [f"c{number}" for number in range(100)]
    block = Block(Schema({(name,): FIELDS["a",] for name in names}), (), 2)
    assert (
        rows_of(block, {name: (name,) for name in names}).write(
            1, {name: torch.full((2,), float(number)) for number, name in enumerate(names)}, exactly=True
        )
        is False
    )
    assert [float(block.column((name,))[1, 1]) for name in names] == list(range(100))


def test_a_value_may_be_the_row_that_it_is_written_to():
    block = zeros((4,))
    row = block.rows(("next", "a"))[1].fill_(3.0)
    rows_of(block, AFTER, {"a": ("a",)}).write(1, {"a": row, "done": values((4,), 0)["done"]})
    assert block.rows(("next", "a"))[1].unique().tolist() == [3.0]
    assert block.rows(("a",))[2].unique().tolist() == [3.0]


def test_large_non_contiguous_values_are_left_to_the_fallback(way):
    field = Field(torch.Size((20, 30)), torch.float32)
    block = Block(Schema({("a",): field}), (), 2)
    rows, value = rows_of(block, {"a": ("a",)}), torch.randn(30, 20).t()
    assert rows.write(0, {"a": value}) is (None if way == "core" else False)
    assert rows.write(1, {"a": value.contiguous()}) is False
    assert torch.equal(block.column(("a",))[1], value)


@pytest.mark.parametrize("batch", [(), (4,)])
def test_values_may_be_destination_rows_of_other_values(batch):
    fields = {(key,): FIELDS["a",] for key in ("a", "b")}
    block = Block(Schema(fields), batch, 3)
    for number, column in enumerate(block.columns):
        column.fill_(float(number))
    rows = rows_of(block, {"a": ("a",), "b": ("b",)}, {"a": ("b",)})
    assert rows.write(1, {"a": block.rows(("b",))[1], "b": block.rows(("a",))[1]}) is False
    time = len(batch)
    assert block.column(("a",)).select(time, 1).unique().tolist() == [1.0]
    assert block.column(("b",)).select(time, 1).unique().tolist() == [0.0]
    assert block.column(("b",)).select(time, 2).unique().tolist() == [1.0]


def test_tensors_without_memory_are_left_to_the_fallback(way):
    if way == "asked":
        pytest.skip("the core says by itself that an address is null")
    block, found = zeros((4,)), values((4,), 0)
    rows = rows_of(block, AFTER)
    assert rows.write(0, {**found, "a": torch._efficientzerotensor((4, 2))}) is None
    written = []

    def function(x):
        written.append(rows.write(0, {**found, "a": x * 2}))
        return x.sum()

    torch.func.functionalize(function)(found["a"])
    assert written == [None]


def test_values_removed_meanwhile_are_missing(way):
    if way == "asked":
        pytest.skip("nothing is read by address before all values are there")
    block, found = zeros((4,)), values((4,), 0)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found.clear()
            return function(*args, **(kwargs or {}))

    with Mode():
        assert rows_of(block, AFTER).write(0, found) is None
    assert not found
    assert not any(bool(column.any()) for column in block.columns)


def test_values_come_from_any_mapping():
    block = zeros((4,))
    assert rows_of(block, AFTER).write(0, MappingProxyType(values((4,), 0)), exactly=True) is False
    assert torch.equal(block.rows(("next", "a"))[0], values((4,), 0)["a"])


def test_non_contiguous_columns_are_not_written_as_batches():
    block = Block(Schema(FIELDS), (4,), 6)
    for column in block.columns:
        column.zero_()
    assert not is_batch_writable(block.leading(3), ("a",))
    assert is_batch_writable(block.part(0), ("a",))


def test_core_refuses_invalid_columns(way):
    if way == "asked":
        pytest.skip("there is nothing to refuse")
    exchange, flat = row_writers.EXCHANGE, torch.zeros(3, 2)
    assert TensorRows(exchange, torch.Tensor, {"a": flat}, {}, [], 0).write(2, {"a": torch.ones(2)}) is False
    for columns, roots, time_dim in (
        ({}, {}, 0),
        ({"a": flat, "b": torch.zeros(4, 2)}, {}, 0),
        ({"a": flat.t()}, {}, 0),
        ({"a": flat[:, :1].expand(3, 2)}, {}, 0),
        ({"a": flat}, {}, 2),
        ({"a": flat}, {}, -1),
        ({"a": flat}, {"a": flat.double()}, 0),
        ({"a": flat}, {"a": torch.zeros(3, 3)}, 0),
        ({"a": torch.zeros(2, 3, 4, device="meta")}, {}, 2),
    ):
        with pytest.raises((ValueError, RuntimeError, BufferError)):
            TensorRows(exchange, torch.Tensor, columns, roots, [], time_dim)
    with pytest.raises(ValueError, match="exchange"):
        TensorRows(object(), torch.Tensor, {"a": flat}, {}, [], 0)
    rows = TensorRows(exchange, torch.Tensor, {"a": flat}, {}, [], 0)
    for t in (-1, 3):
        with pytest.raises(IndexError, match="no such row"):
            rows.write(t, {"a": torch.ones(2)})
    with pytest.raises((TypeError, AttributeError)):
        rows.write(0, 3)


def test_only_a_known_interface_is_used():
    assert not knows_exchange(object())
    assert not knows_exchange(torch.zeros(1).__dlpack__())
