"""Extents of data files in tables: what is done to all of them at once takes no time, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 22
"""Bytes of an extent that have one checksum."""


class Extent(NamedTuple):
    """Bytes that follow each other in a file, and belong to no other extent."""

    file: int
    """Its number among the files."""
    offset: int
    """Where they begin."""
    size: int
    """How many they are."""
    checksums: tuple[int, ...]
    """crc32 of each `BLOCK_BYTES` of them."""

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.offset + self.size

    def within(self, file: int) -> Extent:
        """Return the same place in another file."""
        return Extent(file, self.offset, self.size, self.checksums)


class Extents(Sequence[Extent]):
    """Extents in an order of theirs.

    Args:
        places: file, offset and size of each, ``(n, 3)`` int64.
        checksums: of all their blocks, one extent after the other, ``(m,)`` uint32.
    """

    def __init__(self, places: Array, checksums: Array) -> None:
        self.places, self.checksums = places, checksums

    @classmethod
    def of(cls, extents: Iterable[Extent]) -> Extents:
        """Return the table of extents."""
        each = [*extents]
        places = np.array([extent[:3] for extent in each], np.int64).reshape(-1, 3)
        checksums = chain.from_iterable(extent.checksums for extent in each)
        return cls(places, np.fromiter(checksums, np.uint32))

    @classmethod
    def together(cls, parts: Sequence[tuple[Array, Extents]]) -> Extents:
        """Return the extents of parts, of which each says where its ones belong, ``(n,)`` int64."""
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for numbers, _ in parts)])
        places = np.concatenate([np.empty((0, 3), np.int64), *(part.places for _, part in parts)])
        checksums = np.concatenate([np.empty(0, np.uint32), *(part.checksums for _, part in parts)])
        return cls(places, checksums).take(numbers.argsort())

    @property
    def files(self) -> Array:
        """The number of each one's file, ``(n,)`` int64."""
        return self.places[:, 0]

    @property
    def sizes(self) -> Array:
        """The bytes of each one, ``(n,)`` int64."""
        return self.places[:, 2]

    @property
    def ends(self) -> Array:
        """Where the checksums of each one end, ``(n,)`` int64."""
        return (-(-self.sizes // BLOCK_BYTES)).cumsum()

    def take(self, numbers: Array) -> Extents:
        """Return those of these numbers, ``(k,)`` int64."""
        if len(self.checksums) == len(self):
            return Extents(self.places[numbers], self.checksums[numbers])
        ends = self.ends
        starts = np.append(0, ends[:-1])
        blocks = [self.checksums[:0], *(self.checksums[starts[n] : ends[n]] for n in numbers)]
        return Extents(self.places[numbers], np.concatenate(blocks))

    def within(self, files: Array) -> Extents:
        """Return the same places in other files, ``files[i]`` in the place of file ``i``."""
        places = self.places.copy()
        places[:, 0] = files[places[:, 0]]
        return Extents(places, self.checksums)

    @cached_property
    def _each(self) -> tuple[Extent, ...]:
        ends, sums = self.ends.tolist(), self.checksums.tolist()
        checksums = (tuple(sums[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
        return tuple(map(Extent._make, zip(*self.places.T.tolist(), checksums, strict=True)))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Extent: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Extent, ...]: ...

    def __getitem__(self, index: int | slice) -> Extent | tuple[Extent, ...]:
        """Return one, or some."""
        return self._each[index]

    def __eq__(self, other: object) -> bool:
        """Return whether others are the same, in the same order."""
        return (
            isinstance(other, Extents)
            and np.array_equal(self.places, other.places)
            and np.array_equal(self.checksums, other.checksums)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show all of them."""
        return f"{type(self).__name__}({self._each})"
