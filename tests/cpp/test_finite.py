"""The core finds NaN and infinity, and counts the writes of a ring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._arrays.native import are_finite, bump, bump_at, first_nonfinite_f32, first_nonfinite_f64

SCANS = [(np.float32, first_nonfinite_f32), (np.float64, first_nonfinite_f64)]
# Bits of a signalling NaN, of a quiet one with a payload, and of both infinities.
BITS = {
    np.float32: np.array([0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000], np.uint32),
    np.float64: np.array(
        [0x7FF0000000000001, 0xFFF8000000012345, 0x7FF0000000000000, 0xFFF0000000000000], np.uint64
    ),
}


@pytest.mark.parametrize(("dtype", "scan"), SCANS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_each_kind_is_found_at_the_ends_of_every_length(dtype, scan, n):
    for bad in BITS[dtype].view(dtype):
        for position in {0, n // 2, n - 1}:
            values = np.full(n, np.finfo(dtype).max)
            values[position:] = bad
            assert scan(values.ctypes.data, n) == position
            assert scan(values.ctypes.data, position) == -1


@pytest.mark.parametrize(("dtype", "scan"), SCANS)
def test_every_finite_value_passes(dtype, scan):
    info = np.finfo(dtype)
    values = np.array([0.0, -0.0, info.max, info.min, info.tiny, info.smallest_subnormal, 1.0, -1.0], dtype)
    values = np.tile(values, 300)
    assert scan(values.ctypes.data, len(values)) == -1
    assert scan(0, 0) == -1


@given(st.lists(st.floats(width=32), max_size=70))
def test_float32_agrees_with_numpy(numbers):
    values = np.array(numbers, np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    assert first_nonfinite_f32(values.ctypes.data, len(values)) == (bad[0] if len(bad) else -1)


@given(st.lists(st.floats(), max_size=70))
def test_float64_agrees_with_numpy(numbers):
    values = np.array(numbers, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    assert first_nonfinite_f64(values.ctypes.data, len(values)) == (bad[0] if len(bad) else -1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_several_arrays_are_checked_at_once(dtype, bad):
    arrays = [np.zeros((2, 3), dtype), np.zeros(0, np.float32), np.ones(2000, dtype), np.ones((), np.float64)]
    assert are_finite(arrays) and are_finite([])
    for array in arrays:
        if array.size:
            array.reshape(-1)[-1] = bad
            assert not are_finite(arrays)
            array.reshape(-1)[-1] = 1


def test_unsupported_arrays_do_not_count_as_finite():
    assert not any(are_finite([np.zeros((2, 2), kind)]) for kind in ("i8", "f2", "c8", object))
    assert not are_finite([np.zeros((4, 4))[:, ::2]]) and are_finite([np.zeros((4, 4))[::1]])


@pytest.mark.parametrize(("dtype", "scan"), SCANS)
def test_scan_refuses_bad_arguments(dtype, scan):
    values = np.zeros(4, dtype)
    with pytest.raises(ValueError, match="null address"):
        scan(0, 1)
    with pytest.raises(ValueError, match="got -1"):
        scan(values.ctypes.data, -1)
    with pytest.raises(ValueError, match="isn't aligned"):
        scan(values.ctypes.data + 1, 1)


@given(st.integers(1, 20), st.data())
def test_bump_counts_a_span_of_the_ring(num_rows, data):
    start, n = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(0, num_rows))
    counters = np.arange(num_rows)
    expected = counters.copy()
    expected[(start + np.arange(n)) % num_rows] += 1
    bump(counters.ctypes.data, start, n, num_rows)
    assert (counters == expected).all()


@given(st.integers(1, 20), st.data())
def test_bump_at_counts_duplicates(num_rows, data):
    index = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30)), np.int64)
    counters = np.zeros(num_rows, np.int64)
    bump_at(counters.ctypes.data, index.ctypes.data, len(index), num_rows)
    assert (counters == np.bincount(index, minlength=num_rows)).all()


def test_counters_wrap_around_their_type():
    counters = np.array([2**63 - 1, -1, 5], np.int64)
    bump(counters.ctypes.data, 0, 3, 3)
    assert counters.tolist() == [-(2**63), 0, 6]
    counters[0] = 2**63 - 1
    index = np.array([0, 0], np.int64)
    bump_at(counters.ctypes.data, index.ctypes.data, 2, 3)
    assert counters.tolist() == [-(2**63) + 1, 0, 6]


def test_bad_rows_change_no_counter():
    counters = np.zeros(5, np.int64)
    for bad in (-1, 5, 10**12):
        index = np.array([0, bad], np.int64)
        with pytest.raises(IndexError, match=rf"bump_at: row {bad} at position 1 of 2 .* \[0, 5\)"):
            bump_at(counters.ctypes.data, index.ctypes.data, 2, 5)
        with pytest.raises(IndexError, match=f"bump: start {bad}"):
            bump(counters.ctypes.data, bad, 1, 5)
    with pytest.raises(ValueError, match="expected 0 to num_rows rows, 5, got 6"):
        bump(counters.ctypes.data, 0, 6, 5)
    with pytest.raises(ValueError, match="null address"):
        bump(0, 0, 1, 5)
    assert not counters.any()
