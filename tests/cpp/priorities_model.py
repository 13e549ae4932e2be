"""The core's priorities and a slow model in plain dictionaries and lists; every call goes to both."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from gleanrl._arrays.native import Priorities

GENERATION = (1 << 29) - 1


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def int64(values) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def float64(values) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float64)


@dataclass
class Table:
    """The core's object, the plain one, and the write counters that the caller keeps."""

    core: Priorities
    written: np.ndarray  # (capacity,) int64
    alpha: float = 1.0
    eps: float = 0.0
    raw: dict[int, float] = field(default_factory=dict)  # of the rows in use
    drawn: dict[int, int] = field(default_factory=dict)  # row: generation at its last draw
    blocked: set[int] = field(default_factory=set)
    seen: float | None = None

    @classmethod
    def empty(cls, capacity: int, single: bool = False, alpha: float = 1.0, eps: float = 0.0) -> Table:
        table = cls(Priorities(capacity, single), np.zeros(capacity, np.int64))
        table.set_rule(alpha, eps)
        return table

    @property
    def capacity(self) -> int:
        return self.core.capacity

    def kept(self, raw: float) -> float:
        if not self.core.single:
            return float(raw)
        # A positive priority is never rounded to 0.
        return float(np.float32(raw)) or (float(np.finfo(np.float32).smallest_subnormal) if raw > 0 else 0.0)

    def leaf(self, row: int) -> float:
        if row not in self.raw or row in self.blocked:
            return 0.0
        base = self.raw[row] + self.eps
        return max(base**self.alpha, 2.0**-1000) if base > 0 or self.alpha == 0 else 0.0

    def all_leaves(self) -> np.ndarray:
        return np.array([self.leaf(row) for row in range(self.capacity)])

    def set_rule(self, alpha: float, eps: float) -> None:
        self.core.set_rule(alpha, eps)
        self.alpha, self.eps = alpha, eps

    def fill(self, start: int, n: int, raw: float) -> None:
        """Write n rows around the ring."""
        self.core.fill(start, n, raw)
        for i in range(n):
            self.raw[(start + i) % self.capacity] = self.kept(raw)
            self.written[(start + i) % self.capacity] += 1

    def update(self, index, raw, limit: int | None = None, expected=None) -> int:
        index, raw = int64(index), float64(raw)
        expected = None if expected is None else int64(expected)
        limit = self.capacity if limit is None else limit
        dropped = self.core.update(
            address(index), address(raw), len(index), limit, address(self.written), address(expected)
        )
        late = 0
        for i, row in enumerate(index.tolist()):
            now = int(self.written[row])
            known = self.drawn.get(row, now) if expected is None else int(expected[i])
            if row == -1:
                continue
            if known != now:
                late += 1
                continue
            self.raw[row] = self.kept(raw[i])
            self.seen = max(self.raw[row], self.raw[row] if self.seen is None else self.seen)
        assert dropped == late
        return dropped

    def draw(
        self, uniforms, beta: float = 0.5, by_batch: bool = False, served: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, weights and generations of a draw, after a check of each."""
        uniforms = float64(uniforms)
        n = len(uniforms)
        index, generation = np.full(n + 1, -7, np.int64), np.full(n + 1, -7, np.int64)
        weight = np.full(n + 1, -7, np.float32)
        self.core.draw(
            address(uniforms), n, beta, by_batch, address(self.written),
            address(index), address(weight), address(generation), served,
        )  # fmt: skip
        assert index[-1] == generation[-1] == weight[-1] == -7
        index, weight, generation = index[:-1], weight[:-1], generation[:-1]
        assert (generation == self.written[index]).all()
        if served:
            self.drawn.update(zip(index.tolist(), generation.tolist(), strict=True))
        else:
            self.remember(index)
        leaves = np.array([self.leaf(row) for row in index.tolist()])
        assert (leaves > 0).all()
        if n:
            one = leaves.min() if by_batch else self.lowest()
            np.testing.assert_allclose(
                weight, [(one / leaf) ** beta for leaf in leaves], rtol=1e-6, atol=1e-38
            )
            assert weight.max() <= 1.0 and (not by_batch or weight.max() == 1.0)
        return index, weight, generation

    def remember(self, index) -> None:
        """Record rows as drawn now."""
        index = int64(index)
        # The core refuses a row that isn't there.
        generation = int64([self.written[row] if 0 <= row < self.capacity else 0 for row in index.tolist()])
        self.core.remember(address(index), len(index), address(generation))
        self.drawn.update(zip(index.tolist(), generation.tolist(), strict=True))

    def block(self, index, flags) -> None:
        index, flags = int64(index), np.ascontiguousarray(flags, dtype=np.uint8)
        self.core.block(address(index), len(index), address(flags))
        for row, flag in zip(index.tolist(), flags, strict=True):
            (self.blocked.add if flag else self.blocked.discard)(row)

    def clear(self) -> None:
        self.core.clear()
        self.raw, self.drawn, self.blocked, self.seen = {}, {}, set(), None

    def lowest(self) -> float:
        leaves = self.all_leaves()
        return float(leaves[leaves > 0].min(initial=math.inf))

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        raw, mark = np.full(self.core.end + 1, -7.0), np.full(self.core.end + 1, 7, np.int32)
        self.core.save(address(raw), address(mark))
        assert raw[-1] == -7 and mark[-1] == 7
        return raw[:-1].copy(), mark[:-1].copy()

    def reloaded(self) -> Table:
        """Return the table with a fresh core that continues from its state."""
        raw, mark = self.state()
        core = Priorities(self.capacity, self.core.single)
        core.set_rule(self.alpha, self.eps)
        core.max_seen = self.core.max_seen
        core.load(address(raw), address(mark), len(raw))
        self.core = core
        return self

    def got(self, leaves: bool = False) -> np.ndarray:
        index, values = np.arange(self.capacity), np.full(self.capacity, -7.0)
        (self.core.leaves if leaves else self.core.get)(address(index), self.capacity, address(values))
        return values

    def check(self) -> None:
        core, leaves = self.core, self.all_leaves()
        core.check_valid()
        assert self.got().tolist() == [self.raw.get(row, 0.0) for row in range(self.capacity)]
        np.testing.assert_allclose(self.got(leaves=True), leaves, rtol=1e-8)
        assert core.total == pytest.approx(math.fsum(leaves), rel=1e-8, abs=0)
        assert core.min_positive == pytest.approx(self.lowest() if leaves.any() else 0.0, rel=1e-8, abs=0)
        assert core.max_seen == self.seen
        assert core.default_priority(False) == (1.0 if self.seen is None else self.seen)
        assert core.default_priority(True) == max(self.raw.values(), default=1.0)
        touched = [*self.raw, *self.drawn, *self.blocked]
        assert core.end >= max(touched, default=-1) + 1
        assert (core.alpha, core.eps) == (self.alpha, self.eps)
