"""Users' priorities agree with plain NumPy, and invalid ones are rejected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers.samplers.priority_table import (
    check_reduction,
    number,
    per_slot,
    reduce_priority,
)
from gleanrl.errors import GleanError, InvalidArgumentError, InvalidTypeError, SchemaError


@pytest.mark.parametrize("value", [0, 0.0, 2, 1.5, np.float32(0.25), torch.tensor(0.5), torch.tensor([3])])
def test_number_converts_to_float(value):
    assert number("alpha", value) == float(value)
    assert type(number("alpha", value)) is float


@pytest.mark.parametrize(
    "value", [-1, -1e-30, math.nan, math.inf, "a", None, True, False, [1], torch.zeros(2), 1j]
)
def test_number_refuses_values_below_zero_and_other_types(value):
    with pytest.raises(InvalidArgumentError, match="alpha: expected a finite number of 0 or more, got"):
        number("alpha", value)


VALUES = torch.tensor([[[4.0, 1.0], [3.0, 2.0]], [[0.0, 8.0], [7.0, 5.0]], [[6.0, 6.0], [6.0, 6.0]]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("max", [4, 8, 6]),
        ("min", [1, 0, 6]),
        ("mean", [2.5, 5, 6]),
        ("sum", [10, 20, 24]),
        ("median", [2, 5, 6]),
    ],
)
def test_values_of_a_record_are_reduced(reduction, expected):
    assert reduce_priority(VALUES, 3, reduction).tolist() == expected
    assert check_reduction(reduction) == reduction
    one = VALUES[:, :1, :1]
    assert torch.equal(reduce_priority(one, 3, reduction), one.reshape(3))
    assert torch.equal(reduce_priority(one.reshape(3), 3, reduction), one.reshape(3))


def test_sums_are_taken_in_double_precision():
    values = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert reduce_priority(values, 1, "sum").item() == 2**24 + 2
    assert reduce_priority(torch.tensor([[3e38, 3e38]]), 1, "mean").item() == pytest.approx(3e38)
    assert reduce_priority(torch.tensor([[5, 3]]), 1, "mean").item() == 4


def test_values_of_another_number_of_items():
    with pytest.raises(SchemaError, match=r"priority: expected 4 items, got shape \(3, 2, 2\)"):
        reduce_priority(VALUES, 4, "max")


@pytest.mark.parametrize("reduction", ["avg", "", None, "MAX"])
def test_unknown_reductions_raise(reduction):
    with pytest.raises(InvalidArgumentError, match="reduction: expected one of"):
        check_reduction(reduction)


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        (2, 3, [2.0, 2.0, 2.0]),
        (0.5, 1, [0.5]),
        (torch.tensor(4), 2, [4.0, 4.0]),
        (np.float64(1.5), 2, [1.5, 1.5]),
        ([1, 2, 3], 3, [1.0, 2.0, 3.0]),
        ((1.0, 2.0), 2, [1.0, 2.0]),
        (np.array([1, 2], np.uint8), 2, [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], requires_grad=True), 2, [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 2, [1.0, 2.0]),
        (torch.tensor([[1.0], [2.0]]), 2, [1.0, 2.0]),
        (torch.arange(8.0)[::4], 2, [0.0, 4.0]),
        ([7], 1, [7.0]),
        ([0.1, 1 / 3], 2, [0.1, 1 / 3]),
        (0.1, 2, [0.1, 0.1]),
        (torch.empty(0), 0, []),
        (1.0, 0, []),
    ],
)
def test_per_slot_returns_one_value_for_each_slot(values, count, expected):
    found = per_slot("priority", values, count, torch.float64)
    assert found.tolist() == expected and found.shape == (count,)
    assert found.dtype == torch.float64 and found.is_contiguous() and not found.requires_grad


def test_generations_are_integers():
    assert per_slot("generation", [2**40, 3], 2, torch.int64).tolist() == [2**40, 3]
    assert per_slot("generation", torch.tensor([1, 2], dtype=torch.int32), 2, torch.int64).tolist() == [1, 2]
    with pytest.raises(InvalidTypeError, match="generation: expected"):
        per_slot("generation", [1.0, 2.0], 2, torch.int64)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1.0, 2.0], SchemaError),
        ([[1.0, 2.0, 3.0]], SchemaError),
        (torch.ones(1), SchemaError),
        (torch.ones(3, 2), SchemaError),
        (torch.ones(4), SchemaError),
        (torch.ones(0), SchemaError),
        (torch.tensor([True, False, True]), InvalidTypeError),
        (torch.ones(3, dtype=torch.complex64), InvalidTypeError),
        ("abc", InvalidTypeError),
        (None, InvalidTypeError),
        (["a", "b", "c"], InvalidTypeError),
    ],
)
def test_per_slot_refuses_values_of_another_shape(values, error):
    with pytest.raises(error, match="priority: expected") as caught:
        per_slot("priority", values, 3, torch.float64)
    assert isinstance(caught.value, GleanError)
