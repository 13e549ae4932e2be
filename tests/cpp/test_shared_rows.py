"""Rows that share outcomes with roots read as the rows that were written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._arrays.native import Columns

BYTES = [3, 1, 3, 2, 2]  # an outcome, an entry, its root, and another pair of a root and its outcome
OUTCOMES, ROOTS = [0, 4], [2, 3]
BEHIND, BEFORE, ZERO = np.array([6]), np.array([-1]), np.array([0])


class Ring:
    """Shared rows, and plain arrays of the written rows."""

    def __init__(self, steps: int, streams: int) -> None:
        self.size, self.streams = steps * streams, streams
        rows = 2 * self.size + 1 + streams
        self.columns = [np.zeros((rows, width), np.uint8) for width in BYTES]
        self.written = [np.zeros((self.size, width), np.uint8) for width in BYTES]
        self.places = np.empty(self.size, np.uint32)
        bases = [0 if leaf in OUTCOMES else column.ctypes.data for leaf, column in enumerate(self.columns)]
        self.rows = Columns.sharing(
            bases, BYTES, OUTCOMES, ROOTS, self.size, streams, self.places.ctypes.data
        )

    def write(self, start: int, rows: list[np.ndarray], times: int = 1) -> None:
        n = len(rows[0])
        limit = self.rows.reach(n)
        for _ in range(times):
            assert self.rows.write(start, n, [row.ctypes.data for row in rows])
        assert self.rows.used <= limit
        for column, row in zip(self.written, rows, strict=True):
            column[(start + np.arange(n)) % self.size] = row

    def put(self, index: list[int], rows: list[np.ndarray], times: int = 1) -> None:
        slots, limit = np.array(index, np.int64), self.rows.reach(2 * len(index))
        for _ in range(times):
            assert self.rows.put(slots.ctypes.data, len(slots), [row.ctypes.data for row in rows])
        assert self.rows.used <= limit
        for column, row in zip(self.written, rows, strict=True):
            for slot, one in zip(index, row, strict=True):
                column[slot] = one

    def check(self) -> None:
        slots, found = np.arange(self.size), np.empty(self.size, np.int64)
        self.rows.find(slots.ctypes.data, self.size, found.ctypes.data)
        assert (found == self.places).all()
        for leaf, expected in enumerate(self.written):
            if leaf in OUTCOMES:
                assert (self.columns[ROOTS[OUTCOMES.index(leaf)]][found] == expected).all()
            else:
                assert (self.columns[leaf][: self.size] == expected).all()
        apart = found[found > self.size].tolist() + self.rows.free()
        assert sorted(apart) == [*range(self.size + 1, self.rows.used)]
        assert self.rows.num_apart == (found > self.size).sum()
        assert not any(column[self.size].any() for column in self.columns)


def drawn(random: np.random.Generator, n: int, streams: int, oddity: float, values: int) -> list[np.ndarray]:
    """Return rows whose outcomes mostly repeat the root of the following step."""
    rows = [random.integers(0, values, (n + streams, width), dtype=np.uint8) for width in BYTES]
    for outcome, root in zip(OUTCOMES, ROOTS, strict=True):
        same = random.random(n) >= oddity
        rows[outcome][:n][same] = rows[root][streams:][same]
    return [np.ascontiguousarray(row[:n]) for row in rows]


@settings(max_examples=300)
@given(st.integers(0, 1 << 30), st.integers(1, 8), st.integers(1, 3))
def test_any_writes_read_as_written(seed, steps, streams):
    random = np.random.default_rng(seed)
    ring, oddity, values = Ring(steps, streams), random.choice([0.0, 0.2, 1.0]), random.choice([1, 2, 256])
    at = 0
    for _ in range(25):
        kind, times = random.random(), random.integers(1, 3)
        if kind < 0.6:
            n = int(random.integers(1, steps + 1)) * streams
            start = at if random.random() < 0.8 else int(random.integers(steps)) * streams
            ring.write(start, drawn(random, n, streams, oddity, values), times)
            at = (start + n) % ring.size
        elif kind < 0.95:
            index = random.integers(0, ring.size, random.integers(1, 6)).tolist()
            ring.put(index, drawn(random, len(index), streams, oddity, values), times)
        else:
            ring.rows.forget()
            for leaf in OUTCOMES:
                ring.written[leaf][:] = 0
        ring.check()


def test_a_stream_takes_one_spare_row():
    ring, random = Ring(50, 1), np.random.default_rng(0)
    rows = drawn(random, 400, 1, 0.0, 256)
    for start in range(0, 400, 7):
        ring.write(start % 50, [np.ascontiguousarray(row[start : start + 7]) for row in rows])
        assert ring.rows.num_apart == 1
    assert ring.rows.used == 50 + 1 + 2


def test_rows_in_place_are_only_compared():
    ring, random = Ring(6, 1), np.random.default_rng(0)
    rows = drawn(random, 6, 1, 0.3, 256)
    for leaf in range(len(BYTES)):
        ring.columns[leaf][:6] = rows[leaf]
    sources = [row.ctypes.data if leaf in OUTCOMES else 0xDEAD for leaf, row in enumerate(rows)]
    for root in ROOTS:
        sources[root] = ring.columns[root].ctypes.data
    ring.rows.write(0, 6, sources, True)
    ring.written = rows
    ring.check()


def test_seams_equal_those_of_plain_columns():
    for seed in range(200):
        random = np.random.default_rng(seed)
        ring = Ring(6, 2)
        ring.rows.watch(OUTCOMES, ROOTS, [1])
        first, second = (drawn(random, 6, 2, 0.0, 3) for _ in range(2))
        for rows in (first, second):
            rows[1][:] = random.random((6, 1)) < 0.2
        ring.write(0, first)
        if seed % 2:
            for outcome, root in zip(OUTCOMES, ROOTS, strict=True):
                first[outcome][4] = second[root][0]
            ring.write(0, first)
        found = ring.rows.seams(4, 3, 2, [row.ctypes.data for row in second])
        over = first[1][4:, 0] != 0
        differs = np.zeros(2, bool)
        for outcome, root in zip(OUTCOMES, ROOTS, strict=True):
            differs |= (first[outcome][4:] != second[root][:2]).any(1)
        assert not found or (np.frombuffer(found, np.uint8) <= (differs & ~over)).all()
        if not (differs & ~over).any():
            assert found is None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rows, src: rows.write(6, 1, src), IndexError),
        (lambda rows, src: rows.write(-1, 1, src), IndexError),
        (lambda rows, src: rows.write(0, 7, src), ValueError),
        (lambda rows, src: rows.write(0, -1, src), ValueError),
        (lambda rows, src: rows.write(0, 1, src[1:]), ValueError),
        (lambda rows, src: rows.write(0, 1, [0, *src[1:]]), ValueError),
        (lambda rows, src: rows.put(BEHIND.ctypes.data, 1, src), IndexError),
        (lambda rows, src: rows.find(BEFORE.ctypes.data, 1, BEFORE.ctypes.data), IndexError),
        (lambda rows, src: rows.seams(6, 1, 1, src), IndexError),
    ],
)
def test_bad_arguments_change_nothing(call, error):
    ring = Ring(6, 1)
    ring.write(0, drawn(np.random.default_rng(0), 6, 1, 0.3, 256))
    with pytest.raises(error):
        call(ring.rows, [row.ctypes.data for row in drawn(np.random.default_rng(1), 6, 1, 0.0, 256)])
    ring.check()


@pytest.mark.parametrize("leaf", [1, 2, 3])
def test_arrays_inside_a_column_are_not_read(leaf):
    ring = Ring(6, 1)
    ring.write(0, drawn(np.random.default_rng(0), 6, 1, 0.3, 256))
    rows = drawn(np.random.default_rng(1), 2, 1, 0.0, 256)
    last = (len(ring.columns[leaf]) if leaf in ROOTS else ring.size) - 1
    for row in (0, last):
        sources = [one.ctypes.data for one in rows]
        sources[0] = ring.columns[leaf].ctypes.data + row * BYTES[leaf]
        assert not ring.rows.write(0, 2, sources)
        assert not ring.rows.put(ZERO.ctypes.data, 1, sources)
        ring.check()


@pytest.mark.parametrize("slots", [0, 1, 1 << 30])
def test_rings_of_other_sizes_are_refused(slots):
    with pytest.raises(ValueError, match="SharedRows"):
        Columns.sharing([0, 64], [4, 4], [0], [1], slots, 2, BEHIND.ctypes.data)
