"""Columns of random bytes in NumPy arrays: the core's `Columns` and a plain model of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gleanrl._arrays.native import Columns

# Untouched bytes around every destination reveal writes outside of it.
GUARD = 64


@dataclass
class Table:
    """k columns of `num_rows` rows as byte arrays, registered with the core."""

    columns: list[np.ndarray]  # each (num_rows, row_bytes) uint8
    core: Columns

    @classmethod
    def random(cls, row_bytes: list[int], num_rows: int, seed: int = 0) -> Table:
        generator = np.random.default_rng(seed)
        columns = [generator.integers(0, 256, (num_rows, width), dtype=np.uint8) for width in row_bytes]
        return cls(columns, Columns([c.ctypes.data for c in columns], row_bytes, num_rows))

    @property
    def row_bytes(self) -> list[int]:
        return [c.shape[1] for c in self.columns]

    def copy(self) -> list[np.ndarray]:
        return [c.copy() for c in self.columns]

    def gather(self, index, wanted=None) -> list[np.ndarray]:
        index = np.ascontiguousarray(index, dtype=np.int64)
        chosen = range(len(self.columns)) if wanted is None else wanted
        guarded = [Guarded(len(index) * self.row_bytes[j]) for j in chosen]
        self.core.gather(index.ctypes.data, len(index), [g.address for g in guarded], wanted)
        return [
            g.content().reshape(len(index), self.row_bytes[j]) for j, g in zip(chosen, guarded, strict=True)
        ]

    def write(self, start: int, rows: list[np.ndarray]) -> None:
        self.core.write(start, len(rows[0]), [r.ctypes.data for r in rows])

    def put(self, index, rows: list[np.ndarray]) -> None:
        index = np.ascontiguousarray(index, dtype=np.int64)
        self.core.put(index.ctypes.data, len(index), [r.ctypes.data for r in rows])

    def random_rows(self, n: int, seed: int = 1) -> list[np.ndarray]:
        generator = np.random.default_rng(seed)
        return [generator.integers(0, 256, (n, width), dtype=np.uint8) for width in self.row_bytes]


class Guarded:
    """A destination of n bytes between two guards."""

    def __init__(self, num_bytes: int) -> None:
        self._whole = np.full(num_bytes + 2 * GUARD, 0xA5, np.uint8)
        self._num_bytes = num_bytes

    @property
    def address(self) -> int:
        return self._whole.ctypes.data + GUARD

    def content(self) -> np.ndarray:
        """Return the n bytes, after a check of the guards."""
        assert (self._whole[:GUARD] == 0xA5).all() and (self._whole[GUARD + self._num_bytes :] == 0xA5).all()
        return self._whole[GUARD : GUARD + self._num_bytes]

    def is_untouched(self) -> bool:
        return bool((self._whole == 0xA5).all())
