"""Rows, arrays and readers for tests of checkpoint files."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.manifest import DataFile, Extent
from gleanrl._checkpoint.reader import FileReader
from gleanrl._checkpoint.row_segments import Array, SegmentLayout, bytes_of
from gleanrl._checkpoint.writer import FileWriter
from tests.leaks import descriptors


def arrays(*sizes: int) -> list[Any]:
    return [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]


def on_disk(writer: FileWriter) -> tuple[tuple[DataFile, ...], tuple[Extent, ...]]:
    """Write and sync the data of a writer; return files and extents."""
    with writer:
        written = writer.write()
        writer.sync()
    return written


def open_in(folder: Path) -> int:
    """Return how many files of a folder this process has open."""
    return sum(Path(target).parent == folder for target in descriptors())


def arrays_from(reader: FileReader, places: list[Any], sizes: list[int]) -> list[Any]:
    """Return the arrays at `places`, as the decoder reads them."""
    tree = [{"$tensor": place} for place in places]
    reader.fill(tree)
    return [reader.fetch(node["$tensor"], size) for node, size in zip(tree, sizes, strict=True)]


class Plain(CowSnapshot):
    """Rows for a checkpoint. `earlier` says for each earlier identity which segments are unchanged."""

    def __init__(
        self,
        columns: list[torch.Tensor],
        step: int,
        earlier: dict[str, list[bool]] | None = None,
        first: int = 0,
        together: int = 1,
    ) -> None:
        fields = tuple((column.dtype, tuple(column.shape[1:])) for column in columns)
        self.layout = SegmentLayout(fields, len(columns[0]), step, together)
        self.identity = uuid.uuid4().hex
        self.columns, self.earlier, self.first = columns, earlier or {}, first
        self.taken: list[int] = []
        self.skipped: list[int] = []
        self.is_open = False
        self.written_on: set[int] = set()
        """Segments that another thread writes while the writer looks at them."""

    def unchanged(self, earlier: str) -> Array | None:
        found = self.earlier.get(earlier)
        return None if found is None else np.array(found, bool)

    def begin(self) -> None:
        self.is_open = True

    def look(self, number: int) -> list[Array] | None:
        pieces = self.layout.pieces(number, self.columns)
        return pieces if number not in self.written_on else [np.full_like(piece, 9) for piece in pieces]

    def settled(self, number: int) -> bool:
        if number not in self.written_on:
            self.taken.append(number)
        return number not in self.written_on

    def take(self, number: int) -> Array:
        self.taken.append(number)
        return np.concatenate(self.layout.pieces(number, self.columns))

    def give(self, data: Array) -> None:
        pass

    def pick(self, column: int, rows: Array | slice) -> Array:
        return bytes_of(self.columns[column]).reshape(len(self.columns[column]), -1)[rows]

    def skip(self, numbers: Sequence[int]) -> None:
        self.skipped += numbers

    def close(self) -> None:
        self.is_open = False


def columns(rows: int) -> list[torch.Tensor]:
    return [
        torch.arange(rows),
        torch.arange(rows * 3).view(rows, 3).to(torch.bfloat16),
        torch.empty(rows, 0),
        (torch.arange(rows) % 3 == 0),
    ]
