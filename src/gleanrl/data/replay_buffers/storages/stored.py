"""The stored schema: which column holds each leaf of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from gleanrl.errors import SchemaError
from gleanrl.objects import Leaf
from gleanrl.schema import Schema
from gleanrl.tree import Path


class Source(NamedTuple):
    """Where a leaf is read: a column, at the rows of one of the index arrays that a fetch is made with."""

    column: int
    """Position of the column."""
    array: int = 0
    """Which index array; 0 for the slots themselves."""


Sources: TypeAlias = tuple[Source, ...]


class StoredSchema:
    """The leaves of records, and the columns that hold them: mostly a column for each leaf, in the same order.

    Leaves that would hold the same values in other rows (an observation and the one after it) can share a column: each
    is read at an index array of its own, all by one call of the native core. What is stored is the leaf that is
    read at the slots themselves.

    Args:
        schema: the leaves.
        sources: where each leaf is read; None for a column for each.

    Raises:
        SchemaError: columns aren't numbered from 0 without a gap, or one isn't read at the slots by any leaf.
    """

    def __init__(self, schema: Schema, sources: Sequence[Source] | None = None) -> None:
        self.schema = schema
        own = tuple(Source(position) for position in range(len(schema)))
        self.sources: Sources = own if sources is None else tuple(sources)
        self.is_plain = self.sources == own
        """Whether there is a column for each leaf, in the same order."""
        holders = {
            source.column: leaf for leaf, source in reversed([*enumerate(self.sources)]) if not source.array
        }
        columns = {source.column for source in self.sources}
        if columns != set(range(len(columns))) or columns != holders.keys():
            raise SchemaError(
                f"sources: every column from 0 on is read at the slots by one leaf, got {self.sources}"
            )
        self._holders = tuple(holders[column] for column in range(len(columns)))
        self.paths = tuple(schema.paths[leaf] for leaf in self._holders)
        """The columns' names."""
        self.fields = tuple(schema.fields[leaf] for leaf in self._holders)
        """The columns' rows."""

    def to_store(self, leaves: list[Leaf]) -> list[Leaf]:
        """Return what goes into the columns, of leaves in the schema's order; the very list if it `is_plain`."""
        return leaves if self.is_plain else [leaves[leaf] for leaf in self._holders]

    def column_of(self, path: Path) -> int:
        """Return the column that the leaf at `path` is read from (KeyError if there is none)."""
        return self.sources[self.schema.index(path)].column

    def wanted(self, paths: Sequence[Path] | None = None) -> Sources | None:
        """Return where some leaves are read, or all; None for all columns in order."""
        if paths is None:
            return None if self.is_plain else self.sources
        return tuple(self.sources[self.schema.index(path)] for path in paths)
