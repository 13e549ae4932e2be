"""User indices agree with torch's indexing of a grid of slot numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers.storages.indexing import (
    basic_index,
    is_position,
    members_at,
    slots_at,
    slots_of_update,
)
from gleanrl.errors import IndexRangeError, InvalidTypeError

ONE = torch.Size([6])
TWO = torch.Size([4, 3])
INDICES_1 = [
    0,
    -1,
    np.int64(3),
    slice(None),
    slice(1, 5, 2),
    slice(-2, None),
    slice(4, 1, -1),
    [0, 5, 5, -1],
    [],
    range(2, 5),
    np.array([1, 2]),
    torch.tensor([[0, 1], [5, -6]]),
    torch.tensor(2),
    torch.tensor([1, 3], dtype=torch.int32),
    torch.tensor([True, False, True, False, False, True]),
    [True, False, True, False, False, True],
    (slice(1, 3),),
    ...,
]
INDICES_2 = [
    2,
    (1, 2),
    (slice(None), 1),
    (..., -1),
    (slice(1, 3), [0, 2]),
    (torch.tensor([0, 3]), torch.tensor([2, 0])),
    torch.tensor([3, 0, 3]),
    torch.arange(12).view(4, 3) % 2 == 0,
    [1, 1],
]


@pytest.mark.parametrize("index", INDICES_1, ids=repr)
def test_indices_of_one_dimension_select_as_torch(index):
    check(index, ONE)


@pytest.mark.parametrize("index", INDICES_2, ids=repr)
def test_indices_of_two_dimensions_select_as_torch(index):
    check(index, TWO)


def check(index: object, shape: torch.Size) -> None:
    grid = np.arange(shape.numel()).reshape(shape)
    if isinstance(index, tuple):
        plain = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in index)
    else:
        plain = index.numpy() if isinstance(index, torch.Tensor) else index
        plain = np.array(plain, dtype=int) if isinstance(plain, list) and not plain else plain
    expected = np.asarray(grid[plain])
    slots, selected = slots_at(index, shape)
    assert slots.dtype == torch.int64 and slots.is_contiguous() and slots.ndim == 1
    assert slots.tolist() == expected.reshape(-1).tolist()
    assert tuple(selected) == expected.shape


def test_coordinates_as_extend_returns_them():
    slots, shape = slots_at(torch.tensor([[3, 0], [0, 2], [1, 1]]), TWO)
    assert slots.tolist() == [9, 2, 4]
    assert shape == (3,)


@pytest.mark.parametrize("index", [6, -7, [0, 6], torch.tensor([-7]), (0, 0), [10**12]], ids=repr)
def test_index_outside_the_stored_part_raises(index):
    with pytest.raises(IndexRangeError):
        slots_at(index, ONE)


@pytest.mark.parametrize("index", [(0, 3), (4, 0), torch.tensor([[0, 3]]), (0, 0, 0)], ids=repr)
def test_index_outside_in_two_dimensions_raises(index):
    with pytest.raises(IndexRangeError):
        slots_at(index, TWO)


@pytest.mark.parametrize(
    "index",
    [slice(None, None, -1), (0, slice(None, None, -1)), ([0, 1], slice(2, 0, -1)), (..., ...), (..., 0, ...)],
    ids=repr,
)
def test_negative_steps_and_two_ellipses_in_two_dimensions_raise(index):
    with pytest.raises(IndexRangeError):
        slots_at(index, TWO)


@pytest.mark.parametrize("shape", [ONE, TWO], ids=repr)
def test_slices_without_a_step_or_of_other_values_raise(shape):
    with pytest.raises(IndexRangeError, match="has the step 0"):
        slots_at(slice(None, None, 0), shape)
    with pytest.raises(InvalidTypeError, match="integers or None in a slice"):
        slots_at(slice("a", None), shape)


@pytest.mark.parametrize("index", [1.5, torch.tensor([0.5]), None, "x", {0}, [0.5]], ids=repr)
def test_values_that_are_no_index_raise(index):
    with pytest.raises(InvalidTypeError, match="an index is an int, a slice"):
        slots_at(index, ONE)


def test_basic_index_accepts_ints_and_slices_only():
    assert basic_index(2, ONE) == (2,)
    assert basic_index((slice(1, 2), -1), TWO) == (slice(1, 2), -1)
    assert basic_index([2], ONE) is None
    assert basic_index((0, torch.tensor([1])), TWO) is None


@pytest.mark.parametrize(
    "index, found",
    [
        (1, 1),
        (-1, 2),
        (np.int64(2), 2),
        (slice(1, None), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0], [2, 0]),
        (range(2), [0, 1]),
        (np.array([1, 1]), [1, 1]),
        (torch.tensor([0, -1]), [0, 2]),
        (torch.tensor(1), 1),
        ([True, False, True], [0, 2]),
        (torch.tensor([False, True, False]), [1]),
        (..., [0, 1, 2]),
    ],
)
def test_index_selects_members_of_an_ensemble(index, found):
    assert members_at(index, 3) == found


@pytest.mark.parametrize("index", [3, -4, [0, 3], torch.tensor([5]), [True, False], [], slice(3, None)])
def test_members_that_dont_exist(index):
    with pytest.raises(IndexRangeError, match="3 members of the ensemble"):
        members_at(index, 3)


@pytest.mark.parametrize("index", ["a", 1.5, None, True, {}, [1.5]])
def test_invalid_member_index_raises(index):
    with pytest.raises(InvalidTypeError):
        members_at(index, 3)


@pytest.mark.parametrize(
    "index, shape, slots",
    [
        (3, ONE, [3]),
        (np.int32(3), ONE, [3]),
        (-1, ONE, [-1]),
        ([5, 0, 5, -1], ONE, [5, 0, 5, -1]),
        ([], ONE, []),
        (torch.tensor(2), ONE, [2]),
        (torch.tensor([[1], [2]]), ONE, [1, 2]),
        (torch.tensor([1, 2], dtype=torch.uint8), ONE, [1, 2]),
        (torch.arange(6)[::2], ONE, [0, 2, 4]),
        (np.array([1, 2]), ONE, [1, 2]),
        ((torch.tensor([1, 2]),), ONE, [1, 2]),
        (torch.tensor([[3, 0], [0, 2], [1, 1]]), TWO, [9, 2, 4]),
        (torch.tensor([[[3, 0]], [[0, 2]]]), TWO, [9, 2]),
        (torch.tensor([3, 0]), TWO, [9]),
        ((torch.tensor([3, 0]), torch.tensor([0, 2])), TWO, [9, 2]),
        (([3, 0], np.array([0, 2])), TWO, [9, 2]),
        ((2, 1), TWO, [7]),
        (torch.tensor([[-1, 0], [0, -1], [-1, -1], [0, 1]]), TWO, [-1, -1, -1, 1]),
        (torch.tensor([[1, 0, 1]]), torch.Size([2, 2, 3]), [7]),
        (torch.empty(0, 2, dtype=torch.int64), TWO, []),
    ],
    ids=repr,
)
def test_index_of_an_update_gives_slots(index, shape, slots):
    found = slots_of_update(index, shape)
    assert found.tolist() == slots and found.dtype == torch.int64
    assert found.shape == (len(slots),) and found.is_contiguous()


@pytest.mark.parametrize(
    "index, shape",
    [
        (6, ONE),
        (-2, ONE),
        ([0, 6], ONE),
        (torch.zeros(2, 2, dtype=torch.int64), ONE),
        (torch.zeros(1, 1, 1, dtype=torch.int64), ONE),
        (1, TWO),
        (torch.tensor([0, 1, 2]), TWO),
        (torch.tensor([[4, 0]]), TWO),
        (torch.tensor([[0, 3]]), TWO),
        (torch.tensor([[0, -2]]), TWO),
        (torch.tensor([[2**62, 2]]), TWO),
        ((torch.tensor([0, 1]), torch.tensor([0])), TWO),
        (torch.tensor([0]), torch.Size([0])),
    ],
    ids=repr,
)
def test_update_outside_the_stored_part_raises(index, shape):
    with pytest.raises(IndexRangeError):
        slots_of_update(index, shape)


@pytest.mark.parametrize(
    "index", [1.5, [0.5], torch.tensor([0.5]), None, "x", [True] * 6, slice(2), ..., True]
)
def test_invalid_index_of_an_update_raises(index):
    with pytest.raises(InvalidTypeError):
        slots_of_update(index, ONE)


@pytest.mark.parametrize("index", [0, -3, np.int64(2), (1,), torch.tensor(1), np.array(2)])
def test_single_ints_are_one_position(index):
    assert is_position(index)


@pytest.mark.parametrize(
    "index", [True, (1, 2), slice(1), [1], (), "a", torch.tensor([1]), torch.tensor(True), torch.tensor(1.0)]
)
def test_values_other_than_one_int_are_no_position(index):
    assert not is_position(index)
