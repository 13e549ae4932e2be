"""The core's episode table and a plain list of the stored steps, from which the model recomputes every answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gleanrl._arrays.native import Episodes


class Step(NamedTuple):
    """A stored step of one stream."""

    time: int
    ids: tuple[int, ...]
    end: bool


class Run(NamedTuple):
    """The stored part of a trajectory: times [start, end) of a stream."""

    stream: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def scaled(uniform: float, count: int) -> int:
    return min(int(uniform * count), count - 1)


@dataclass
class Table:
    """The core's table and the plain one; every call goes to both."""

    core: Episodes
    steps: list[list[Step]] = field(default_factory=list)  # of each stream, the oldest first
    now: int = 0
    cursor: int = 0

    @classmethod
    def empty(cls, capacity: int, num_streams: int = 1, now: int = 0) -> Table:
        return cls(Episodes(capacity, num_streams, now), [[] for _ in range(num_streams)], now)

    @property
    def stored(self) -> int:
        return len(self.steps[0])

    def write(self, count: int, ends=None, ids=(), start: int | None = None) -> None:
        """Write steps; `ends` and each of `ids` have the shape (count, num_streams) or (count,)."""
        shape, start = (count, len(self.steps)), self.cursor if start is None else start
        flags = None if ends is None else np.ascontiguousarray(np.reshape(ends, shape), dtype=np.uint8)
        columns = [np.ascontiguousarray(np.reshape(c, shape), dtype=np.int64) for c in ids]
        self.core.on_write(start, count, address(flags), [address(c) for c in columns])
        for i in range(count):
            for s, steps in enumerate(self.steps):
                end = flags is not None and bool(flags[i, s])
                steps.append(Step(self.now + i, tuple(int(c[i, s]) for c in columns), end))
        for steps in self.steps:
            del steps[: -self.core.capacity]
        if count:
            self.now, self.cursor = self.now + count, (start + count) % self.core.capacity

    def runs(self, min_len: int = 1) -> list[Run]:
        runs = []
        for s, steps in enumerate(self.steps):
            first = 0
            for i, step in enumerate(steps):
                if i + 1 == len(steps) or step.end or steps[i + 1].ids != step.ids:
                    runs.append(Run(s, steps[first].time, step.time + 1))
                    first = i + 1
        return [run for run in runs if run.length >= min_len]

    def slot(self, stream: int, time: int) -> int:
        place = (self.cursor - (self.now - time)) % self.core.capacity
        return place * len(self.steps) + stream

    def check(self) -> None:
        self.core.check_valid()
        counters = (self.core.now, self.core.stored, self.core.cursor)
        assert counters == (self.now, self.stored, self.cursor)
        for min_len in (1, 2, 3, 7):
            runs = self.runs(min_len)
            assert self.core.num_runs(min_len) == len(runs)
            assert self.listed(min_len) == [(self.slot(r.stream, r.start), r.length) for r in runs]

    def listed(self, min_len: int = 1) -> list[tuple[int, int]]:
        n = self.core.num_runs(min_len)
        first, length = np.empty(n, np.int64), np.empty(n, np.int64)
        assert self.core.list_runs(min_len, address(first), address(length), n) == n
        return list(zip(first.tolist(), length.tolist(), strict=True))

    def draw(self, slice_len: int, uniforms, **options) -> list[tuple[int, int]]:
        """Return the core's slices as (first slot, length)."""
        uniforms = np.ascontiguousarray(uniforms, dtype=np.float64).ravel()
        n = len(uniforms) // 2
        first, length = np.full(n + 1, -7), np.full(n + 1, -7)
        total = self.core.draw(slice_len, n, address(uniforms), address(first), address(length), **options)
        assert first[n] == length[n] == -7 and total == length[:n].sum()
        return list(zip(first[:n].tolist(), length[:n].tolist(), strict=True))

    def expected_draw(self, slice_len: int, uniforms, strict=True, left=0, right=0) -> list[tuple[int, int]]:
        """Return the slices that the manual defines for these uniforms."""
        runs, slices = self.runs(slice_len if strict else 1), []
        for u, v in np.reshape(uniforms, (-1, 2)):
            run = runs[scaled(u, len(runs))]
            most = min(max(run.length - slice_len, 0) + right, run.length - 1)
            at = scaled(v, most + left + 1) - left
            first, last = max(at, 0), min(at + slice_len, run.length)
            slices.append((self.slot(run.stream, run.start + first), last - first))
        return slices

    def valid_starts(self, slice_len: int) -> list[int]:
        """Return the first slots of all slices of this length, run by run."""
        return [
            self.slot(run.stream, time)
            for run in self.runs(slice_len)
            for time in range(run.start, run.end - slice_len + 1)
        ]
