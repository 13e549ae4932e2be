"""The core finds seams between writes, and ends inside slices, as a plain scan of the rows does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import EndColumns, TensorColumns

needs_exchange = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't show its tensors")


def columns_of(stored: list[torch.Tensor], pairs: int = 1) -> TensorColumns:
    """Return columns of flags, after pairs of columns of outcomes and their roots."""
    columns = TensorColumns(EXCHANGE, torch.Tensor, stored)
    columns.watch([*range(0, 2 * pairs, 2)], [*range(1, 2 * pairs, 2)], [2 * pairs])
    return columns


def expected(stored: list[torch.Tensor], newest: int, written: list[torch.Tensor]) -> list[int] | None:
    """Return the expected result of `seams` for columns of numbers: outcomes and roots in turn, then flags."""
    flag, (steps, streams) = written[-1], written[0].shape
    inner = [(t, s) for t in range(steps - 1) for s in range(streams) if not flag[t][s]]
    pairs = [*zip(written[0:-1:2], written[1::2], stored[0:-1:2], strict=False)]
    if not inner or any(coming[t][s] != root[t + 1][s] for coming, root, _ in pairs for t, s in inner):
        return None
    changing = [pair for pair in pairs if any(pair[1][t][s] != pair[1][t + 1][s] for t, s in inner)]
    begins = [
        int(
            not stored[-1][newest + s]
            and any(column[newest + s] != root[0][s] for _, root, column in changing or pairs)
        )
        for s in range(streams)
    ]
    return begins if any(begins) else None


@needs_exchange
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_seams_are_found_where_writes_do_not_continue(data):
    steps, streams = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    pairs = data.draw(st.integers(1, 2))

    def some(count: int) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))

    stored = [*(some(9) for _ in range(2 * pairs)), some(9) == 0]
    written = []
    for _ in range(pairs):
        root = some(steps * streams).view(steps, streams)
        if data.draw(st.booleans()):
            root = root[:1].repeat(steps, 1)
        coming = torch.cat([root[1:], torch.zeros(1, streams, dtype=torch.int64)])
        if data.draw(st.integers(0, 3)) == 0:
            coming = some(steps * streams).view(steps, streams)
        written += [coming.contiguous(), root.contiguous()]
    written.append(some(steps * streams).view(steps, streams) == 0)
    newest = data.draw(st.integers(0, 9 - streams))
    found = columns_of(stored, pairs).seams(newest, steps, streams, written)
    assert (None if found is None else [*found]) == expected(stored, newest, written)


@needs_exchange
def test_rows_are_compared_bit_for_bit():
    stored = [torch.tensor([0.0, float("nan")]), torch.zeros(2), torch.zeros(2, dtype=torch.bool)]
    columns, flag = columns_of(stored), torch.zeros(2, dtype=torch.bool)
    for newest, first, found in ((0, 0.0, None), (0, -0.0, b"\1"), (1, float("nan"), None), (1, 0.0, b"\1")):
        root = torch.tensor([first, 5.0])
        assert columns.seams(newest, 2, 1, [torch.tensor([5.0, 6.0]), root, flag]) == found


@needs_exchange
def test_rows_and_columns_out_of_range_are_refused():
    columns = columns_of([torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.bool)])
    leaves = [torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.bool)]
    for newest in (-1, 4):
        with pytest.raises(IndexError):
            columns.seams(newest, 2, 1, leaves)
    assert columns.seams(0, 3, 1, leaves) is None  # other leaves than it declares
    with pytest.raises(IndexError):
        columns.watch([0], [3], [])
    with pytest.raises(ValueError, match="a root for each"):
        columns.watch([0], [], [])
    with pytest.raises(ValueError, match="one size"):
        columns.watch([0], [2], [])


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_ends_inside_are_flags_and_changes_of_ids_before_the_last_row(data):
    count = data.draw(st.integers(1, 8))

    def column(dtype: Any, width: int = 1) -> np.ndarray[Any, Any]:
        values = data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=6 * width, max_size=6 * width))
        return np.array(values, dtype).reshape(6, width)

    flags = [column(np.bool_), column(np.bool_, 3)]
    ids = [
        column(dtype) for dtype in data.draw(st.lists(st.sampled_from(["i1", "u2", "i4", "i8"]), max_size=2))
    ]
    ahead = column(np.int64) if data.draw(st.booleans()) else None
    slots = np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), np.int64)
    inner = np.array([*data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), False])
    core = EndColumns(
        [address(flag) for flag in flags],
        [1, 3],
        [address(column) for column in ids],
        [column.itemsize for column in ids],
        *(() if ahead is None else (address(ahead), 8)),
    )
    found = False
    for row in np.flatnonzero(inner):
        here, following = slots[row], slots[row + 1]
        if ahead is None or ahead[here] == 1:
            found = found or any(flag[here].any() for flag in flags)
        found = found or any(column[here] != column[following] for column in ids)
    assert core.inside(address(slots), count, address(inner)) == found


def test_invalid_columns_and_rows_are_refused():
    numbers, marks = np.zeros(4, np.int64), np.ones(4, np.bool_)
    with pytest.raises(ValueError, match="a size for each"):
        EndColumns([], [], [address(numbers)], [])
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes"):
        EndColumns([], [], [address(numbers)], [3])
    with pytest.raises(ValueError, match="the last one of its slice"):
        EndColumns([], [], [], []).inside(address(numbers), 4, address(marks))
    assert not EndColumns([], [], [], []).inside(0, 0, 0)
