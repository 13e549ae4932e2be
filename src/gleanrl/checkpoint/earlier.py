"""An earlier checkpoint, as one that is being written sees it: which of its files may be linked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gleanrl.checkpoint.manifest import DataFile, Manifest, stored_in
from gleanrl.checkpoint.segments import Layout
from gleanrl.checkpoint.values import LARGE_BYTES, layout_of
from gleanrl.errors import CorruptCheckpointError


@dataclass(frozen=True)
class Table:
    """Rows of an earlier checkpoint.

    Attributes:
        layout: how they lie.
        identity: their name.
        files: one for each segment.
    """

    layout: Layout
    identity: str
    files: tuple[DataFile, ...]


@dataclass
class Earlier:
    """A checkpoint that may hold some of the same files.

    Attributes:
        path: its folder.
        arrays: the files of each large array, in the order of the tree.
    """

    path: Path
    manifest: Manifest
    arrays: list[list[DataFile]] = field(default_factory=list)
    _tables: list[Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Look for arrays and rows; what isn't as it should be is none."""
        for node in stored_in(self.manifest.state):
            if "$rows" in node:
                self._note_rows(node)
            elif "$tensor" in node:
                self._note_array(node["$tensor"])

    def table(self, number: int, layout: Layout) -> Table | None:
        """Return the rows that stand where the `number`-th ones of the new checkpoint do, if they lie alike."""
        if number >= len(self._tables):
            return None
        table = self._tables[number]
        alike = (table.layout.fields, table.layout.step) == (layout.fields, layout.step)
        return table if alike else None

    def _note_rows(self, tree: dict[str, Any]) -> None:
        files = self.manifest.files
        try:
            layout, first, identity = layout_of(tree)
        except (CorruptCheckpointError, LookupError, TypeError, ValueError):
            return
        found = files[first : first + min(layout.count, len(files))]
        fits = all(file.size == layout.size(number) for number, file in enumerate(found))
        if len(found) == layout.count and fits:
            self._tables.append(Table(layout, identity, found))

    def _note_array(self, pieces: Any) -> None:
        try:
            if sum(size for _, _, size in pieces) >= LARGE_BYTES:
                self.arrays.append([self.manifest.files[number] for number, _, _ in pieces])
        except (LookupError, TypeError, ValueError):
            return
