"""Rows that share outcomes with roots read as the rows that were written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._arrays.native import Columns

BYTES = [6, 1, 6, 4, 4]  # an outcome, an entry, its root, and another pair of a root and its outcome
OUTCOMES, ROOTS = [0, 4], [2, 3]
BEHIND, BEFORE, ZERO = np.array([6]), np.array([-1]), np.array([0])
WHOLE = [1] * len(BYTES)
STACKS = {  # the frames of the two roots, and the pieces of these
    "no stacks": ((1, 1), (1, 1)),
    "frames first": ((3, 1), (1, 1)),
    "frames last": ((3, 2), (2, 2)),
    "of different lengths": ((6, 1), (2, 1)),
    "of four bytes": ((2, 1), (4, 1)),
    "of four bytes in pieces": ((2, 3), (4, 1)),
}


class Ring:
    """Shared rows, and plain arrays of the written rows."""

    def __init__(self, steps: int, streams: int, stacks: str = "no stacks") -> None:
        self.size, self.streams = steps * streams, streams
        self.frames, pieces = [*WHOLE], [*WHOLE]
        for root, (frames, parts) in zip(ROOTS, STACKS[stacks], strict=True):
            self.frames[root], pieces[root] = frames, parts
        self.pieces, stacked = pieces, max(self.frames) > 1
        spares = 1 + (1 + stacked) * self.size + streams
        self.columns = [
            np.zeros(self.size * width // frames + spares * width, np.uint8)
            for width, frames in zip(BYTES, self.frames, strict=True)
        ]
        self.written = [np.zeros((self.size, width), np.uint8) for width in BYTES]
        self.places, self.heads = np.empty(self.size, np.uint32), np.empty(self.size, np.uint32)
        bases = [0 if leaf in OUTCOMES else column.ctypes.data for leaf, column in enumerate(self.columns)]
        heads = self.heads.ctypes.data if stacked else 0
        if not stacked:
            self.heads[:] = 0xFFFFFFFF
        self.rows = Columns.sharing(
            bases,
            BYTES,
            OUTCOMES,
            ROOTS,
            self.frames,
            pieces,
            self.size,
            streams,
            self.places.ctypes.data,
            heads,
        )

    def write(self, start: int, rows: list[np.ndarray], times: int = 1) -> None:
        n = len(rows[0])
        limit = self.rows.reach_of(start, n, [row.ctypes.data for row in rows])
        assert limit <= self.rows.reach(n)
        for _ in range(times):
            assert self.rows.write(start, n, [row.ctypes.data for row in rows])
        assert self.rows.used <= limit
        for column, row in zip(self.written, rows, strict=True):
            column[(start + np.arange(n)) % self.size] = row

    def put(self, index: list[int], rows: list[np.ndarray], times: int = 1) -> None:
        slots, limit = np.array(index, np.int64), self.rows.reach(len(index), True)
        for _ in range(times):
            assert self.rows.put(slots.ctypes.data, len(slots), [row.ctypes.data for row in rows])
        assert self.rows.used <= limit
        for column, row in zip(self.written, rows, strict=True):
            for slot, one in zip(index, row, strict=True):
                column[slot] = one

    def check(self) -> None:
        slots = np.random.default_rng(0).permutation(self.size).astype(np.int64)
        found = [np.empty((self.size, width), np.uint8) for width in BYTES]
        self.rows.gather(slots.ctypes.data, self.size, [rows.ctypes.data for rows in found])
        for rows, expected in zip(found, self.written, strict=True):
            assert (rows == expected[slots]).all()
        apart = [
            *self.places[self.places > self.size],
            *self.heads[self.heads < 0xFFFF0000],
            *self.rows.free(),
        ]
        assert sorted(apart) == [*range(self.size + 1, self.rows.used)]
        assert self.rows.num_apart == len(apart) - len(self.rows.free())
        for root in ROOTS:
            zeros = self.size * BYTES[root] // self.frames[root]
            assert not self.columns[root][zeros : zeros + BYTES[root]].any()


class Source:
    """Makes rows of parallel streams, whose outcomes mostly repeat the following roots, and stacks their frames.

    Args:
        ring: the ring of the rows.
        random: the source of random numbers.
        oddity: the probability that an outcome or a stack is another one.
        values: the number of values of a byte.
    """

    def __init__(self, ring: Ring, random: np.random.Generator, oddity: float, values: int) -> None:
        self.ring, self.random, self.oddity, self.values = ring, random, oddity, values
        self.now = [self.first() for _ in range(ring.streams)]

    def bytes(self, *shape: int) -> np.ndarray:
        return self.random.integers(0, self.values, shape, dtype=np.uint8)

    def first(self) -> list[np.ndarray]:
        """Return the frames of each root at the start of an episode, ``[frames, bytes]``."""
        kind, found = self.random.integers(3), []
        for root in ROOTS:
            frames = self.ring.frames[root]
            stack = self.bytes(frames, BYTES[root] // frames)
            if kind < 2:
                stack[:-1] = stack[-1] if kind else 0
            found.append(stack)
        return found

    def step(self) -> list[np.ndarray]:
        """Return the rows of one step, ``[streams, bytes]`` for each leaf."""
        rows = [self.bytes(self.ring.streams, width) for width in BYTES]
        for stream, stacks in enumerate(self.now):
            coming = [np.concatenate([stack[1:], self.bytes(1, stack.shape[1])]) for stack in stacks]
            for outcome, root, stack, after in zip(OUTCOMES, ROOTS, stacks, coming, strict=True):
                rows[root][stream] = self.row(root, stack)
                if self.random.random() >= self.oddity:
                    rows[outcome][stream] = self.row(root, after)
            self.now[stream] = self.first() if self.random.random() < self.oddity else coming
        return rows

    def row(self, root: int, stack: np.ndarray) -> np.ndarray:
        return stack.reshape(len(stack), self.ring.pieces[root], -1).swapaxes(0, 1).reshape(-1)

    def rows(self, n: int) -> list[np.ndarray]:
        """Return n rows of each leaf."""
        steps = [self.step() for _ in range(-(-n // self.ring.streams))]
        return [np.ascontiguousarray(np.concatenate(rows)[:n]) for rows in zip(*steps, strict=True)]


def drawn(random: np.random.Generator, n: int, streams: int, oddity: float, values: int) -> list[np.ndarray]:
    """Return rows whose outcomes mostly repeat the root of the following step."""
    return Source(Ring(n, streams), random, oddity, values).rows(n)


@settings(max_examples=600)
@given(st.integers(0, 1 << 30), st.integers(1, 12), st.integers(1, 3), st.sampled_from([*STACKS]))
def test_any_writes_read_as_written(seed, steps, streams, stacks):
    random = np.random.default_rng(seed)
    ring, oddity, values = (
        Ring(steps, streams, stacks),
        random.choice([0.0, 0.1, 0.3, 1.0]),
        random.choice([1, 2, 256]),
    )
    sources = [Source(ring, random, oddity, values) for _ in range(2)]
    at = 0
    for _ in range(25):
        kind, times = random.random(), random.integers(1, 3)
        source = sources[int(random.random() < 0.1)]
        if kind < 0.6:
            n = int(random.integers(1, steps + 1)) * streams
            start = at if random.random() < 0.8 else int(random.integers(steps)) * streams
            ring.write(start, source.rows(n), times)
            at = (start + n) % ring.size
        elif kind < 0.8:
            index = random.integers(0, ring.size, random.integers(1, 6)).tolist()
            ring.put(index, source.rows(len(index)), times)
        elif kind < 0.95:  # write stored rows again, some of them changed
            index = random.integers(0, ring.size, random.integers(1, 6))
            rows = [np.ascontiguousarray(column[index]) for column in ring.written]
            rows[random.integers(len(BYTES))][0] ^= random.integers(2, dtype=np.uint8)
            ring.put(index.tolist(), rows, times)
        else:
            ring.rows.forget()
            slots, found = np.arange(ring.size), [np.empty((ring.size, width), np.uint8) for width in BYTES]
            ring.rows.gather(slots.ctypes.data, ring.size, [rows.ctypes.data for rows in found])
            assert not any(found[leaf].any() for leaf in OUTCOMES)
            ring.written = found  # roots keep some of their bytes
        ring.check()


@pytest.mark.parametrize("stacks", [*STACKS])
def test_streams_of_stacks_take_spare_rows_at_their_ends_only(stacks):
    ring, random = Ring(60, 2, stacks), np.random.default_rng(0)
    source, most = Source(ring, random, 0.0, 256), max(ring.frames)
    for _ in range(50):
        n = int(random.integers(1, 20)) * 2
        ring.write(getattr(ring, "at", 0), source.rows(n))
        ring.at = (getattr(ring, "at", 0) + n) % ring.size
        # The outcomes of the newest step, and the stacks that lost frames to the newest steps.
        assert ring.rows.num_apart <= 2 * most + 2 * (most - 1)
    ring.check()


def test_a_stream_takes_one_spare_row():
    ring, random = Ring(50, 1), np.random.default_rng(0)
    rows = drawn(random, 400, 1, 0.0, 256)
    for start in range(0, 400, 7):
        ring.write(start % 50, [np.ascontiguousarray(row[start : start + 7]) for row in rows])
        assert ring.rows.num_apart == 1
    assert ring.rows.used == 50 + 1 + 2


@pytest.mark.parametrize("stacks", [*STACKS])
def test_a_recount_finds_spare_rows_without_a_user(stacks):
    ring, random = Ring(20, 1, stacks), np.random.default_rng(0)
    source = Source(ring, random, 0.5, 256)
    for _ in range(9):
        ring.write(int(random.integers(20)), source.rows(7))
    free = ring.rows.free()
    ring.rows.recount()
    assert sorted(ring.rows.free()) == sorted(free)
    ring.check()
    for numbers in (ring.places, ring.heads):
        for slot in np.flatnonzero((numbers > ring.size) & (numbers < 0xFFFF0000))[:2]:
            free.append(int(numbers[slot]))
            numbers[slot] = 0xFFFFFFFF if numbers is ring.heads else ring.size
    ring.rows.recount()
    assert sorted(ring.rows.free()) == sorted(free)


def test_rows_in_place_are_only_compared():
    ring, random = Ring(6, 1), np.random.default_rng(0)
    rows = drawn(random, 6, 1, 0.3, 256)
    for leaf in range(len(BYTES)):
        ring.columns[leaf][: 6 * BYTES[leaf]] = rows[leaf].reshape(-1)
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
        (lambda rows, src: rows.gather(BEFORE.ctypes.data, 1, src), IndexError),
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
    last = len(ring.columns[leaf]) // BYTES[leaf] - 1 if leaf in ROOTS else ring.size - 1
    for row in (0, last):
        sources = [one.ctypes.data for one in rows]
        sources[0] = ring.columns[leaf].ctypes.data + row * BYTES[leaf]
        assert not ring.rows.write(0, 2, sources)
        assert not ring.rows.put(ZERO.ctypes.data, 1, sources)
        ring.check()


@pytest.mark.parametrize("slots", [0, 1, 1 << 30])
def test_rings_of_other_sizes_are_refused(slots):
    with pytest.raises(ValueError, match="SharedRows"):
        Columns.sharing([0, 64], [4, 4], [0], [1], [1, 1], [1, 1], slots, 2, BEHIND.ctypes.data, 0)
