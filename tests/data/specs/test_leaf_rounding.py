"""Rounding to the nearest integer agrees with Python's unbounded integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.specs.leaf import integer_limits, nearest_integer, ordered, require_real
from gleanrl.errors import InvalidArgumentError
from tests.data.specs.cases import INT64

whole = st.integers(INT64.min, INT64.max)


@given(whole, whole, st.one_of(whole, st.floats(allow_nan=False)))
def test_nearest_integer_agrees_with_python(a, b, value):
    low, high = min(a, b), max(a, b)
    got = nearest_integer(
        torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64),
        torch.tensor(low),
        torch.tensor(high),
        torch.int64,
    )
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        expected = high if value > 0 else low
    else:
        expected = min(max(round(value), low), high)
    # Bounds beyond 2**53 are compared as float64, so the result may be the bound itself.
    tolerance = 2**11 if isinstance(value, float) and max(abs(low), abs(high)) > 2**53 else 0
    assert low <= int(got) <= high and abs(int(got) - expected) <= tolerance


def test_limits():
    assert integer_limits(torch.bool) == (0, 1) and integer_limits(torch.uint8) == (0, 255)
    assert integer_limits(torch.uint16) == (0, 65535) and integer_limits(torch.int64) == (
        INT64.min,
        INT64.max,
    )
    for dtype in (torch.float32, torch.complex64, torch.uint64):
        with pytest.raises(InvalidArgumentError, match=str(dtype)):
            integer_limits(dtype)


def test_ordered():
    for dtype, expected in (
        (torch.uint16, torch.int64),
        (torch.uint32, torch.int64),
        (torch.int8, torch.int8),
    ):
        assert ordered(torch.zeros(2, dtype=dtype)).dtype == expected


def test_require_real_accepts_dtypes_that_can_be_bounded():
    for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.uint16, torch.int64):
        require_real(dtype)
    for dtype in (torch.complex64, torch.uint64):
        with pytest.raises(InvalidArgumentError, match="dtype"):
            require_real(dtype)
