"""An earlier checkpoint, as one that is being written sees it: what it has, and which of its files are worth a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gleanrl.checkpoint.manifest import Extent, Manifest, stored_in
from gleanrl.checkpoint.segments import Layout
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
    extents: tuple[Extent, ...]

    def common(self, layout: Layout) -> int:
        """Return how many segments, the first ones, are cut like those of a layout of the same step."""
        rows = min(layout.rows, self.layout.rows)
        return layout.count if layout.rows == self.layout.rows else rows // layout.step


@dataclass
class Earlier:
    """A checkpoint that may hold some of the same bytes.

    Attributes:
        path: its folder.
        manifest: what it consists of.
        arrays: the extents of each large array, in the order of the tree.
    """

    path: Path
    manifest: Manifest
    arrays: list[list[Extent]] = field(default_factory=list)
    _tables: list[Table] = field(default_factory=list)
    _known: set[Extent] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Look for arrays and rows; what isn't as it should be is none, what stands where others do included."""
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

    def place(self, file: int) -> str:
        """Return where a file is, by its number."""
        return f"{self.path}/{self.manifest.files[file].name}"

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
        sizes = {number: self.manifest.files[number].size for number in needed}
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

    def _note_rows(self, tree: dict[str, Any]) -> None:
        extents = self.manifest.extents
        try:
            layout, first, identity = layout_of(tree)
        except (CorruptCheckpointError, LookupError, TypeError, ValueError):
            return
        found = extents[first : first + min(layout.count, len(extents))]
        fits = len(found) == layout.count and [extent.size for extent in found] == layout.sizes()
        if fits and self._new(found):
            self._tables.append(Table(layout, identity, found))

    def _note_array(self, pieces: Any) -> None:
        try:
            if sum(size for _, _, size in pieces) >= LARGE_BYTES:
                found = [self.manifest.extents[number] for number, _, _ in pieces]
                self.arrays.append(found if self._new(found) else [])
        except (LookupError, TypeError, ValueError):
            return

    def _new(self, extents: Sequence[Extent]) -> bool:
        """Return whether nothing else stands in any of these extents."""
        known = len(self._known)
        self._known.update(extents)
        return len(self._known) == known + len(extents)
