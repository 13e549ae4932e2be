"""An earlier checkpoint, as one that is being written sees it: what it has, and which of its files are worth a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.checkpoint.extents import Extents
from gleanrl.checkpoint.manifest import DataFile, Manifest, stored_in
from gleanrl.checkpoint.segments import Array, Layout
from gleanrl.checkpoint.values import LARGE_BYTES, layout_of
from gleanrl.errors import CorruptCheckpointError

_GARBAGE = 0.5  # of the bytes that are needed: so many that aren't may lie beside them in linked files
_MOST_FILES, _BYTES_A_FILE = 32, 1 << 25  # that are linked; more where each has so many bytes
_MERGED = 3  # files that are written anew, at least, once there are too many


@dataclass(frozen=True)
class Table:
    """Rows of an earlier checkpoint.

    Attributes:
        layout: how they lie.
        identity: their name.
        extents: one for each segment.
    """

    layout: Layout
    identity: str
    extents: Extents

    def common(self, layout: Layout) -> int:
        """Return how many segments, the first ones, are cut like those of a layout of the same step."""
        rows = min(layout.rows, self.layout.rows)
        return layout.count if layout.rows == self.layout.rows else rows // layout.step


@dataclass(frozen=True)
class Earlier:
    """A checkpoint that may hold some of the same bytes.

    Attributes:
        path: its folder.
        kind: what it is a state of.
        files: its data files.
        arrays: the extents of each large array, in the order of the tree.
        tables: all rows, likewise.
    """

    path: Path
    kind: str
    files: tuple[DataFile, ...]
    arrays: Sequence[Extents]
    tables: Sequence[Table]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Earlier:
        """Return a checkpoint by what is noted of it.

        What isn't as it should be is none, what stands where others do included.
        """
        contents = _Contents(manifest.extents)
        for node in stored_in(manifest.state):
            if "$rows" in node:
                contents.note_rows(node)
            elif "$tensor" in node:
                contents.note_array(node["$tensor"])
        return cls(path, manifest.kind, manifest.files, contents.arrays, contents.tables)

    def table(self, number: int, layout: Layout) -> Table | None:
        """Return the rows that stand where the `number`-th ones of the new checkpoint do, if they lie alike."""
        if number >= len(self.tables):
            return None
        table = self.tables[number]
        alike = (table.layout.fields, table.layout.step) == (layout.fields, layout.step)
        return table if alike else None

    def place(self, file: int) -> str:
        """Return where a file is, by its number."""
        return f"{self.path}/{self.files[file].name}"

    def worth_keeping(self, needed: Mapping[int, int], total: int) -> set[int]:
        """Return the files that are worth a link.

        What else is needed is written anew, so that what nobody needs any more goes with its file, and there is no more
        of that than half of what the checkpoint has. Files with the largest share of it go first; so do small ones
        where there are many, of which a few become one.

        Args:
            needed: by the number of a file, how many of its bytes the new checkpoint needs, or may: what turns out
                to be otherwise, once it's compared, is left to the next checkpoint.
            total: how many it has.
        """
        sizes = {number: self.files[number].size for number in needed}
        kept = sorted(needed, key=lambda number: needed[number] / sizes[number], reverse=True)
        garbage = sum(sizes[number] - needed[number] for number in kept)
        while garbage > _GARBAGE * total:
            number = kept.pop()
            garbage -= sizes[number] - needed[number]
        most = max(_MOST_FILES, total // _BYTES_A_FILE)
        if len(kept) >= most:
            kept.sort(key=lambda number: needed[number], reverse=True)
            del kept[min(most, len(kept) - _MERGED) :]
        return set(kept)


class _Contents:
    """What is found in extents."""

    def __init__(self, extents: Extents) -> None:
        self.arrays: list[Extents] = []
        self.tables: list[Table] = []
        self._extents, self._taken = extents, np.zeros(len(extents), bool)

    def note_rows(self, tree: dict[str, Any]) -> None:
        try:
            layout, first, identity = layout_of(tree)
        except (CorruptCheckpointError, LookupError, TypeError, ValueError):
            return
        if layout.count > len(self._extents) - first:
            return
        numbers = np.arange(first, first + layout.count)
        found = self._extents.take(numbers)
        if np.array_equal(found.sizes, layout.sizes()) and self._new(numbers):
            self.tables.append(Table(layout, identity, found))

    def note_array(self, pieces: Any) -> None:
        try:
            size, numbers = sum(size for _, _, size in pieces), [number for number, _, _ in pieces]
        except (TypeError, ValueError):
            return
        if size < LARGE_BYTES:
            return
        there = all(type(number) is int and 0 <= number < len(self._extents) for number in numbers)
        places = np.array(numbers if there else (), np.int64)
        self.arrays.append(self._extents.take(places if self._new(places) else places[:0]))

    def _new(self, numbers: Array) -> bool:
        """Return whether nothing else stands in any of these extents."""
        free = not self._taken[numbers].any() and len(set(numbers.tolist())) == len(numbers)
        self._taken[numbers] = True
        return free
