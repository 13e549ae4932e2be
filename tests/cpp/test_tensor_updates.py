"""`TensorUpdates` accepts plain tensors and then equals an update by address."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Priorities, TensorUpdates

pytestmark = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't offer the interface")

ROWS = 12


@pytest.fixture
def updates():
    return TensorUpdates(EXCHANGE, torch.Tensor)


def a_table():
    """Return priorities of 1 for every row, none drawn yet, and the write count of each row."""
    table, written = Priorities(ROWS, True), torch.ones(ROWS, dtype=torch.int64)
    table.fill(0, ROWS, 1.0)
    return table, written


def raw_of(table):
    index, found = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.float64)
    table.get(index.data_ptr(), ROWS, found.data_ptr())
    return found.tolist()


INDEX, PRIORITY, GENERATION = (
    torch.tensor([3, 0, -1, 3]),
    torch.tensor([2.0, 0.5, 9.0, 4.0]),
    torch.tensor([1, 1, 1, 1]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("generation", [None, GENERATION, torch.tensor([1, 0, 1, 1])])
def test_plain_vectors_are_taken(updates, dtype, generation):
    (table, written), (other, _) = a_table(), a_table()
    priority = PRIORITY.to(dtype).requires_grad_()
    found = updates.update(table, INDEX, priority, generation, ROWS, written.data_ptr())
    expected = other.update(
        INDEX.data_ptr(),
        priority.data_ptr(),
        4,
        ROWS,
        written.data_ptr(),
        0 if generation is None else generation.data_ptr(),
        dtype == torch.float32,
    )
    assert found == expected and raw_of(table) == raw_of(other) and raw_of(table)[3] == 4.0
    table.check_valid()


def test_update_of_no_rows_changes_nothing(updates):
    table, written = a_table()
    none = torch.empty(0, dtype=torch.int64)
    assert updates.update(table, none, torch.empty(0), none, ROWS, written.data_ptr()) == 0
    assert raw_of(table) == [1.0] * ROWS


@pytest.mark.parametrize(
    ("index", "priority", "generation"),
    [
        (INDEX.int(), PRIORITY, None),
        (INDEX.view(2, 2), PRIORITY.view(2, 2), None),
        (INDEX[:3], PRIORITY, None),
        (INDEX.repeat_interleave(2)[::2], PRIORITY, None),
        (INDEX.tolist(), PRIORITY, None),
        (torch.nn.Parameter(INDEX, requires_grad=False), PRIORITY, None),
        (INDEX.to("meta"), PRIORITY, None),
        (INDEX, PRIORITY.half(), None),
        (INDEX, PRIORITY.view(torch.int32), None),
        (INDEX, PRIORITY.repeat_interleave(2)[::2], None),
        (INDEX, PRIORITY[:1].expand(4), None),
        (INDEX, torch.nn.Parameter(PRIORITY), None),
        (INDEX, torch._efficientzerotensor((4,)), None),
        (INDEX, PRIORITY.numpy(), None),
        (INDEX, 2.0, None),
        (INDEX, PRIORITY, GENERATION.int()),
        (INDEX, PRIORITY, GENERATION.double()),
        (INDEX, PRIORITY, GENERATION[:3]),
        (INDEX, PRIORITY, GENERATION.tolist()),
    ],
)
def test_unsupported_tensors_are_left_to_the_caller(updates, index, priority, generation):
    table, written = a_table()
    assert updates.update(table, index, priority, generation, ROWS, written.data_ptr()) is None
    assert raw_of(table) == [1.0] * ROWS


@pytest.mark.parametrize(
    ("index", "priority", "error"),
    [
        (torch.tensor([1, ROWS]), torch.ones(2), IndexError),
        (torch.tensor([1, -2]), torch.ones(2), IndexError),
        (torch.tensor([1, 2]), torch.tensor([2.0, -1.0]), ValueError),
        (torch.tensor([1, 2]), torch.tensor([2.0, float("nan")]), ValueError),
        (
            torch.tensor([1]),
            torch.from_numpy(np.frombuffer(bytearray(9), np.float64, 1, 1)),
            ValueError,
        ),  # not aligned
    ],
)
def test_bad_numbers_change_nothing(updates, index, priority, error):
    table, written = a_table()
    with pytest.raises(error, match="update"):
        updates.update(table, index, priority, None, ROWS, written.data_ptr())
    assert raw_of(table) == [1.0] * ROWS
    table.check_valid()


def test_many_rows_are_taken_without_the_lock(updates):
    count = 5000
    table, written = Priorities(count, False), torch.ones(count, dtype=torch.int64)
    index, priority = torch.randperm(count), torch.rand(count, dtype=torch.float64)
    before = sys.getrefcount(index), sys.getrefcount(priority)
    assert updates.update(table, index, priority, None, count, written.data_ptr()) == 0
    found = torch.zeros(count, dtype=torch.float64)
    table.get(index.data_ptr(), count, found.data_ptr())
    assert found.equal(priority)
    assert before == (sys.getrefcount(index), sys.getrefcount(priority))


def test_unknown_interface_is_refused():
    with pytest.raises(ValueError, match="exchange"):
        TensorUpdates(object(), torch.Tensor)
