"""Segments cut the rows of a storage and say where each column is located in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._checkpoint.row_segments import MOST_FILES, SegmentLayout, bytes_of
from tests._checkpoint.helpers import Plain, columns


@given(
    rows=st.integers(0, 100), step=st.integers(1, 40), start=st.integers(0, 120), count=st.integers(0, 120)
)
def test_rows_touch_the_expected_segments(rows: int, step: int, start: int, count: int) -> None:
    layout = SegmentLayout(((torch.int64, ()),), rows, step)
    spans = [layout.span(number) for number in range(layout.count)]
    assert [row for first, last in spans for row in range(first, last)] == list(range(rows))
    wanted = [n for n, (first, last) in enumerate(spans) if first < min(start + count, rows) and last > start]
    assert layout.total == sum(layout.sizes()) == sum(map(layout.size, range(layout.count)))
    assert list(layout.touched(start, start + count)) == (wanted if count else [])


def test_columns_of_a_segment_are_consecutive_and_aligned() -> None:
    given, layout = columns(50), Plain(columns(50), 20).layout
    assert list(layout.places(2)) == [(0, 80), (128, 60), (192, 0), (192, 10)]
    assert [layout.size(number) for number in range(3)] == [64 * 3 + 64 * 2 + 64, 384, 256]
    data = np.concatenate(layout.pieces(2, given))
    assert np.array_equal(data, np.concatenate(layout.pieces(2, [bytes_of(column) for column in given])))
    for part, column in zip(layout.columns(2, data), given, strict=True):
        assert torch.equal(part, column[40:])
    assert not data[80:128].any() and not data[202:].any()


def test_single_number_with_any_stride_is_written() -> None:
    for stride in (0, 7):
        one = torch.tensor([1.5, 2.5]).as_strided((1,), (stride,), 1)
        assert bytes_of(one).tobytes() == np.float32(2.5).tobytes()


@pytest.mark.parametrize(
    ("width", "capacity"), [(60, 1_000_000), (56_000, 20_000), (8, 100), (1 << 24, 50), (4, 10**9)]
)
def test_one_percent_of_the_rows_touches_few_bytes(width: int, capacity: int) -> None:
    layout = SegmentLayout.fitting([(torch.uint8, (width,))], capacity, capacity)
    size = layout.size(0)
    assert size <= max(1 << 24, width + 64) + 64
    changed = capacity // 100
    touched = [
        {number // layout.together for number in layout.touched(start, start + changed)}
        for start in range(0, capacity, capacity // 40 + 1)
    ]
    if width * capacity > 1 << 25:
        most = max(map(len, touched)) * layout.together * size
        assert most <= 0.05 * width * capacity or layout.step == 1
    # The sizes of segments and files don't depend on how full a storage is.
    other = SegmentLayout.fitting([(torch.uint8, (width,))], 1, capacity)
    assert (other.step, other.together) == (layout.step, layout.together)


@given(st.integers(0, 1 << 16), st.integers(1, 1 << 33))
def test_rows_of_any_size_have_a_bounded_number_of_files(width: int, capacity: int) -> None:
    layout = SegmentLayout.fitting([(torch.uint8, (width,)), (torch.int64, ())], capacity, capacity)
    files, size = -(-layout.count // layout.together), width * layout.step
    assert 1 <= files <= MOST_FILES
    assert files * (1 << 18) <= max(layout.total, 1 << 18) and size <= 3 << 21


def test_tensors_returns_all_rows() -> None:
    source = Plain(columns(50), 20)
    assert all(torch.equal(a, b) for a, b in zip(source.tensors(), source.columns, strict=True))
    assert not source.is_open
