"""Extents of data files in tables: what is done to all of them at once takes no time, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

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


class Extents:
    """Extents in an order of theirs.

    Args:
        places: file, offset and size of each, ``(n, 3)`` int64.
        checksums: of all their blocks, one extent after the other, ``(m,)`` uint32. Nobody writes on either.
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
    def together(cls, parts: Sequence[tuple[Array, Extents]], count: int) -> Extents:
        """Return `count` extents out of parts, of which each says where its ones belong, ``(n,)`` int64.

        Raises:
            ValueError: one is missing, or there twice.
        """
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for numbers, _ in parts)])
        places = np.concatenate([np.empty((0, 3), np.int64), *(part.places for _, part in parts)])
        checksums = np.concatenate([np.empty(0, np.uint32), *(part.checksums for _, part in parts)])
        order = numbers.argsort()
        if not np.array_equal(numbers[order], np.arange(count)):
            raise ValueError(f"extents: expected {count}, each of them once, got {len(numbers)}")
        return cls(places, checksums).take(order)

    @property
    def files(self) -> Array:
        """The number of each one's file, ``(n,)`` int64."""
        return self.places[:, 0]

    @property
    def sizes(self) -> Array:
        """The bytes of each one, ``(n,)`` int64."""
        return self.places[:, 2]

    @property
    def blocks(self) -> Array:
        """How many checksums each one has, ``(n,)`` int64."""
        return -(-self.sizes // BLOCK_BYTES)

    def take(self, numbers: Array) -> Extents:
        """Return those of these numbers, ``(k,)`` int64."""
        blocks = self.blocks
        starts, counts = (blocks.cumsum() - blocks)[numbers], blocks[numbers]
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        return Extents(self.places[numbers], self.checksums[np.repeat(starts, counts) + within])

    def within(self, files: Array) -> Extents:
        """Return the same places in other files, ``files[i]`` in the place of file ``i``."""
        places = self.places.copy()
        places[:, 0] = files[places[:, 0]]
        return Extents(places, self.checksums)

    @cached_property
    def _each(self) -> tuple[Extent, ...]:
        ends, sums = self.blocks.cumsum().tolist(), self.checksums.tolist()
        checksums = (tuple(sums[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
        return tuple(map(Extent._make, zip(*self.places.T.tolist(), checksums, strict=True)))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.places)

    def __getitem__(self, number: int) -> Extent:
        """Return one."""
        return self._each[number]

    def __iter__(self) -> Iterator[Extent]:
        """Yield all of them."""
        return iter(self._each)

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
