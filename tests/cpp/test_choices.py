"""The core finds the ones in one-hot rows and makes one-hot rows from positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._arrays.native import positions_of_ones, write_ones

DTYPES = ["?", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8"]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.integers(0, 4), max_size=9))
def test_written_positions_are_read_back(dtype: str, positions: list[int]) -> None:
    column = np.full((len(positions), 5), 1, dtype)
    assert write_ones(np.array(positions, np.int64), column)
    assert np.array_equal(column, np.eye(5, dtype=dtype)[positions])
    assert positions_of_ones(column) == positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [[0, 0, 0], [1, 0, 1], [0, 2, 0], [1, 2, 0]])
def test_row_that_is_not_one_hot_has_no_position(dtype: str, row: list[int]) -> None:
    column = np.array([[0, 1, 0], row, [0, 0, 1]]).astype(dtype)
    known = [int(flags.argmax()) for flags in column]
    one_hot = bool((column.astype(int).sum(-1) == 1).all())
    assert positions_of_ones(column) == (known if one_hot else None)


@pytest.mark.parametrize("odd", [np.nan, -0.0, np.inf])
def test_floats_are_compared_by_their_bits(odd: float) -> None:
    assert positions_of_ones(np.array([[1.0, odd]])) is None


@pytest.mark.parametrize(
    "column",
    [
        np.eye(3)[:, ::2],
        np.eye(3),
        np.ones(3),
        np.ones((3, 1), np.complex64),
        np.ones((3, 1), object),
        np.frombuffer(bytes(25), np.uint8)[1:].view(np.float64).reshape(3, 1),
    ],
    ids=["strided", "other length", "one dimension", "complex", "objects", "unaligned"],
)
def test_unsupported_columns_are_left_unchanged(column: Any) -> None:
    before = column.copy()
    assert not write_ones(np.zeros(4, np.int64), column)
    assert np.array_equal(column, before)
    if column.shape != (3, 3):
        assert positions_of_ones(column) is None


@pytest.mark.parametrize("position", [-1, 2, 2**40])
def test_positions_outside_write_nothing(position: int) -> None:
    column = np.full((2, 2), 7)
    assert not write_ones(np.array([0, position]), column) and (column == 7).all()
    assert not write_ones(np.array([0.0, 1.0]), column) and (column == 7).all()
