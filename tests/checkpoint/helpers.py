"""Rows and arrays for tests of files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.segments import Array, Layout, Source


def arrays(*sizes: int) -> list[Any]:
    return [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]


class Plain(Source):
    """Rows that nobody writes on; which segments changed is said by the test."""

    def __init__(
        self, columns: list[torch.Tensor], step: int, earlier: dict[str, list[bool]] | None = None
    ) -> None:
        fields = tuple((column.dtype, tuple(column.shape[1:])) for column in columns)
        super().__init__(Layout(fields, len(columns[0]), step))
        self.columns, self.earlier = columns, earlier or {}
        self.taken: list[int] = []
        self.skipped: list[int] = []
        self.is_open = False

    def unchanged(self, earlier: str) -> list[bool] | None:
        return self.earlier.get(earlier)

    def order(self) -> list[int]:
        return list(range(self.layout.count))

    def begin(self) -> None:
        self.is_open = True

    def take(self, number: int) -> Array:
        data = np.full(self.layout.size(number), 7, np.uint8)
        self.layout.fill(number, self.columns, data)
        self.taken.append(number)
        return data

    def give(self, data: Array) -> None:
        pass

    def skip(self, number: int) -> None:
        self.skipped.append(number)

    def close(self) -> None:
        self.is_open = False


def columns(rows: int) -> list[torch.Tensor]:
    return [
        torch.arange(rows),
        torch.arange(rows * 3).view(rows, 3).to(torch.bfloat16),
        torch.empty(rows, 0),
        (torch.arange(rows) % 3 == 0),
    ]
