"""Gather, ring write and scatter of registered columns equal NumPy's results."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._arrays.native import Columns
from tests.cpp.columns_model import Guarded, Table

# Every kernel: one per size up to 64 bytes, two kinds above it, and rows of several lines and pages.
WIDTHS = [*range(66), 68, 100, 136, 255, 1000, 1023, 1024, 1504, 4096, 5003]
widths = st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=5)


# Fewer rows than a gather prefetches (128 lines), exactly as many, and more.
@pytest.mark.parametrize("n", [1, 25, 127, 128, 129, 300])
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_and_put_copy_every_row_size(width, n):
    table = Table.random([width], 97)
    index = np.concatenate([[96, 0, 5, 5, 42], np.random.default_rng(n).integers(0, 97, n)])[:n]
    assert (table.gather(index)[0] == table.columns[0][index]).all()
    rows, expected = table.random_rows(len(index)), table.copy()
    for i, row in enumerate(index):
        expected[0][row] = rows[0][i]
    table.put(index, rows)
    assert (table.columns[0] == expected[0]).all()


@pytest.mark.parametrize("row_bytes", [[1, 1504, 16], [5003, 0, 4], [0, 68, 0], [16, 16, 4096, 1]])
@pytest.mark.parametrize("n", [2, 64, 200])
def test_long_and_short_rows_follow_each_other(row_bytes, n):
    table, index = Table.random(row_bytes, 50), np.random.default_rng(n).integers(0, 50, n)
    for wanted in (None, list(range(len(row_bytes)))[::-1]):
        chosen = table.columns if wanted is None else table.columns[::-1]
        for column, got in zip(chosen, table.gather(index, wanted), strict=True):
            assert (got == column[index]).all()


@given(widths, st.integers(1, 50), st.data())
def test_gather_equals_indexing(row_bytes, num_rows, data):
    table = Table.random(row_bytes, num_rows)
    index = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=60))
    wanted = data.draw(st.none() | st.lists(st.integers(0, len(row_bytes) - 1), max_size=4))
    chosen = range(len(row_bytes)) if wanted is None else wanted
    for j, got in zip(chosen, table.gather(index, wanted), strict=True):
        assert (got == table.columns[j][np.array(index, dtype=np.int64)]).all()


@given(widths, st.integers(1, 40), st.data())
def test_write_is_a_ring(row_bytes, num_rows, data):
    table = Table.random(row_bytes, num_rows)
    start, n = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(0, num_rows))
    rows, expected = table.random_rows(n), table.copy()
    for column, source in zip(expected, rows, strict=True):
        column[(start + np.arange(n)) % num_rows] = source
    table.write(start, rows)
    assert all((c == e).all() for c, e in zip(table.columns, expected, strict=True))


@given(widths, st.integers(1, 20), st.data())
def test_put_lets_the_last_duplicate_win(row_bytes, num_rows, data):
    table = Table.random(row_bytes, num_rows)
    index = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=60))
    rows, expected = table.random_rows(len(index)), table.copy()
    for i, row in enumerate(index):
        for column, source in zip(expected, rows, strict=True):
            column[row] = source[i]
    table.put(index, rows)
    assert all((c == e).all() for c, e in zip(table.columns, expected, strict=True))


@pytest.mark.parametrize("bad", [-1, 10, 10**12, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("position", [0, 3, 8])
def test_a_bad_row_number_is_named_and_nothing_is_written(bad, position):
    table = Table.random([4, 16], 10)
    index = np.zeros(9, np.int64)
    index[position] = bad
    out = [Guarded(9 * 4), Guarded(9 * 16)]
    with pytest.raises(IndexError, match=rf"gather: row {bad} at position {position} of 9 .* \[0, 10\)"):
        table.core.gather(index.ctypes.data, 9, [g.address for g in out])
    assert all(g.is_untouched() for g in out)


@pytest.mark.parametrize("bad", [-1, 10, 10**12])
def test_put_checks_before_it_writes(bad):
    table = Table.random([4, 16], 10)
    before = table.copy()
    with pytest.raises(IndexError, match=rf"put: row {bad} at position 1 of 2"):
        table.put([3, bad], table.random_rows(2))
    assert all((c == b).all() for c, b in zip(table.columns, before, strict=True))


def test_counts_and_starts_are_checked():
    table = Table.random([4], 10)
    rows = table.random_rows(11)
    before = table.copy()
    with pytest.raises(ValueError, match="expected 0 to num_rows rows, 10, got 11"):
        table.write(0, rows)
    for start in (-1, 10, 2**62):
        with pytest.raises(IndexError, match=f"write: start {start}"):
            table.write(start, table.random_rows(1))
    with pytest.raises(ValueError, match="got -1"):
        table.core.write(0, -1, [rows[0].ctypes.data])
    assert (table.columns[0] == before[0]).all()


def test_columns_that_dont_exist_and_lists_of_another_length():
    table = Table.random([4, 8], 10)
    for wanted in ([2], [-1], [10**12]):
        with pytest.raises(IndexError, match=r"column -?\d+ doesn't exist, there are 2"):
            table.core.gather(0, 0, [1], wanted)
    index = np.zeros(1, np.int64)
    for call in (table.core.gather, table.core.put):
        with pytest.raises(ValueError, match="one array per column, 2, got 1"):
            call(index.ctypes.data, 1, [1])
    with pytest.raises(ValueError, match="one array per column, 1, got 2"):
        table.core.gather(index.ctypes.data, 1, [1, 1], [0])
    with pytest.raises(ValueError, match="one array per column, 2, got 3"):
        table.core.write(0, 1, [1, 1, 1])


def test_null_addresses_are_refused():
    table = Table.random([4, 0], 10)
    index = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="gather: null address"):
        table.core.gather(0, 1, [1, 1])
    for call in (table.core.gather, table.core.put):
        with pytest.raises(ValueError, match="array 0 has a null address"):
            call(index.ctypes.data, 1, [0, 0])
    with pytest.raises(ValueError, match="array 0 has a null address"):
        table.core.write(0, 1, [0, 0])
    with pytest.raises(ValueError, match="isn't aligned"):
        table.core.gather(index.ctypes.data + 1, 1, [1, 1])
    with pytest.raises(ValueError, match="expected 0 or more values, got -1"):
        table.core.gather(index.ctypes.data, -1, [1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [1, 2], 3), "as many row sizes as addresses"),
        (([1], [-1], 3), "negative row size: -1"),
        (([1], [4], -1), "num_rows is negative: -1"),
        (([0], [4], 3), "column 0 has a null address"),
        (([1], [2**40], 2**40), "doesn't fit the address space"),
        (([1, 1], [2**62, 2**62], 1), "too long for 64 bits"),
    ],
)
def test_a_bad_registration_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Columns(*arguments)


@pytest.mark.parametrize("bad", [1.5, "a", None, 2**64, -1])
def test_addresses_are_ints(bad):
    error = OverflowError if isinstance(bad, int) else TypeError
    with pytest.raises(error):
        Columns([bad], [4], 1)
    with pytest.raises(TypeError):
        Columns(7, [4], 1)


def test_empty_things_are_legal():
    nothing = Columns([], [], 5)
    assert (nothing.num_columns, nothing.num_rows) == (0, 5)
    nothing.write(0, 5, [])
    empty = Table.random([4, 0], 0)
    assert [g.size for g in empty.gather([])] == [0, 0]
    empty.core.write(0, 0, [0, 0])
    empty_rows = Columns([0], [0], 3)
    index = np.array([2], np.int64)
    empty_rows.gather(index.ctypes.data, 1, [0])
    empty_rows.put(index.ctypes.data, 1, [0])


def test_lists_and_tuples_are_taken():
    table = Table.random([4, 8], 10)
    index = np.array([3], np.int64)
    out = Guarded(4), Guarded(8)
    table.core.gather(index.ctypes.data, 1, (out[0].address, out[1].address), (0, 1))
    assert (out[1].content() == table.columns[1][3]).all()


def run_beside(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_long_gather_lets_other_python_threads_run():
    table = Table.random([4096], 256)
    index, out = np.arange(256), Guarded(256 * 4096)
    arguments = (index.ctypes.data, 256, [out.address])
    started, stop = threading.Event(), threading.Event()
    rounds = 0

    def work():
        nonlocal rounds
        started.set()
        while not stop.is_set() and rounds < 20_000:
            table.core.gather(*arguments)
            rounds += 1

    before = sys.getswitchinterval()
    # No thread must release the interpreter lock in this test, except in a gather.
    sys.setswitchinterval(1000)
    try:
        thread = run_beside(work)
        started.wait()
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert rounds < 20_000


def test_a_short_write_keeps_the_interpreter_lock():
    table = Table.random([4, 8], 10)
    addresses = [r.ctypes.data for r in table.random_rows(1)]
    started = threading.Event()
    main_ran = False
    seen = []

    def work():
        started.set()
        for _ in range(200_000):
            table.core.write(0, 1, addresses)
        seen.append(main_ran)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = run_beside(work)
        started.wait()
        main_ran = True
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert seen == [False]
