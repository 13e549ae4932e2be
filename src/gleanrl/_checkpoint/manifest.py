"""The manifest: what belongs to a checkpoint. Everything in it is checked before it's believed.

Extents of data files in tables: what is done to all of them at once takes no time, however many there are.

What earlier formats become: for each kind of file a table, from a format to what makes the next one of it.

A function gets the tree of JSON that was read, which is its own to change, and returns that of the next format. It's
run before anything in the tree is checked or believed, so that it needs no checks of its own: what it stumbles over
is damage. A format that checkpoints of a release have keeps its function for ever, and `tests/checkpoint/golden` has
a checkpoint of it.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gleanrl._checkpoint import tree_codec
from gleanrl._checkpoint.tree_codec import ATTACHED
from gleanrl.errors import CorruptCheckpointError, IncompatibleCheckpointError

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


Tree = dict[str, Any]
Migrations = Mapping[int, Callable[[Tree], Tree]]


def _with_extents(tree: Tree) -> Tree:
    """Let each file, which has checksums itself, be one extent of that number."""
    files = tree["files"]
    return {
        **tree,
        "files": [{"name": file["name"], "size": file["size"]} for file in files],
        "extents": _packed((n for number, file in enumerate(files) for n in (number, 0, file["size"])), 8),
        "crc32": _packed((checksum for file in files for checksum in file["crc32"]), 4),
    }


def _packed(numbers: Iterable[int], size: int) -> str:
    return b64encode(b"".join(number.to_bytes(size, "little") for number in numbers)).decode()


MANIFESTS: Migrations = {1: lambda tree: tree, 2: lambda tree: tree, 3: _with_extents}
"""Of manifests. The second format has one kind of value more, rows in segments; the third two, of non-tensor data; the
fourth many extents in a file."""
HDF5: Migrations = {1: lambda tree: tree}
"""Of the trees in HDF5 files. The second format has the two kinds of non-tensor data."""


def migrated(tree: Tree, newest: int, steps: Migrations, what: str) -> Tree:
    """Return a tree of the newest format.

    Args:
        tree: of any format, which stands under ``"format"``.
        newest: the format that this library writes.
        steps: one of the tables above.
        what: the tree is of, for messages.

    Raises:
        CorruptCheckpointError: the tree isn't of the format that it says.
        IncompatibleCheckpointError: a later library wrote it, or one so early that nothing here reads it.
    """
    version = tree.get("format")
    if type(version) is not int or version < 0:
        raise CorruptCheckpointError(f"{what}: 'format' isn't an integer of 0 or more")
    if version > newest:
        raise IncompatibleCheckpointError(
            f"{what}: format {version}; this library reads {newest}: a later one wrote it"
        )
    for step in range(version, newest):
        if step not in steps:
            raise IncompatibleCheckpointError(
                f"{what}: format {version}, which no release wrote; this library reads {newest}"
            )
        try:
            tree = steps[step](tree)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as cause:
            raise CorruptCheckpointError(f"{what}: it isn't of format {step}: {cause!r}") from cause
    return tree


FORMAT = 4
"""The version of the layout that this library writes; it reads this one, and earlier ones as `migrations` says."""
MOST_BYTES = 1 << 26
"""The longest manifest that is read."""
_NO_HASH = "0" * 64
_ARRAYS = ("$tensor", "$file")
_BEGIN = b'{"sha256":"'


class DataFile(NamedTuple):
    """A file of extents; some of it may belong to none."""

    name: str
    """``000000.bin`` and so on, or that of an attachment."""
    size: int
    """Its bytes."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        kind: what it is a state of, ``"ReplayBuffer"`` say.
        state: the tree of its state (see `values`).
        files: its data files.
        extents: the parts of them that hold something, by the numbers that stand for them in the tree.
        libraries: with which versions it was written, by name.
    """

    kind: str
    state: Any
    files: tuple[DataFile, ...]
    extents: Extents
    libraries: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the manifest's bytes: JSON, which begins with the hash of itself with zeros in the hash's place."""
        body = {
            "sha256": _NO_HASH,
            "format": FORMAT,
            "kind": self.kind,
            "libraries": dict(self.libraries),
            "files": [{"name": file.name, "size": file.size} for file in self.files],
            **_encoded_extents(self.extents),
            "state": self.state,
        }
        text = tree_codec.encoded(body)
        return text.replace(_NO_HASH.encode(), hashlib.sha256(text).hexdigest().encode(), 1)

    @classmethod
    def decoded(cls, data: bytes) -> Manifest:
        """Return the manifest of `encoded` bytes.

        Raises:
            CorruptCheckpointError: they are damaged.
            IncompatibleCheckpointError: a later library wrote them, or one before any release.
        """
        if len(data) > MOST_BYTES:
            raise CorruptCheckpointError(f"manifest: more than {MOST_BYTES} bytes")
        start = len(_BEGIN)
        blank = data[:start] + _NO_HASH.encode() + data[start + len(_NO_HASH) :]
        if (
            not data.startswith(_BEGIN)
            or data[start:].split(b'"', 1)[0] != hashlib.sha256(blank).hexdigest().encode()
        ):
            raise CorruptCheckpointError("manifest: its hash doesn't fit")
        body = migrated(tree_codec.decoded(data, "manifest"), FORMAT, MANIFESTS, "manifest")
        files, libraries = body.get("files"), body.get("libraries")
        if not isinstance(files, list) or not isinstance(libraries, dict) or "state" not in body:
            raise CorruptCheckpointError("manifest: files, libraries or state are missing")
        found = tuple(_data_file(entry, number) for number, entry in enumerate(files))
        if len({file.name for file in found}) != len(found):
            raise CorruptCheckpointError("manifest: a file stands there twice")
        return cls(_text(body, "kind"), body["state"], found, _extents(body, found), libraries)


def stored_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a tree of JSON that say where rows and arrays stand, in the order of the tree."""
    left = [tree]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += reversed(part)
        elif isinstance(part, dict):
            if part.keys().isdisjoint(("$rows", *_ARRAYS)):
                left += reversed(part.values())
            else:
                yield part


def arrays_in(tree: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a tree that say where arrays stand, and under which key."""
    for node in stored_in(tree):
        for key in _ARRAYS:
            if key in node:
                yield node, key


def columns_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a tree that say where columns of a storage's records in some form stand."""
    left = [tree]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict) and part.keys().isdisjoint(("$rows", *_ARRAYS)):
            left += part.values()
            packed = part.get("packed") if part.keys() == {"form", "packed"} else None
            columns = packed.get("columns") if isinstance(packed, dict) else None
            if isinstance(columns, list):
                yield from (column for column in columns if isinstance(column, dict) and "$tensor" in column)


def file_name(number: int) -> str:
    """Return the name of a data file."""
    return f"{number:06d}.bin"


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise CorruptCheckpointError(f"manifest: {name!r} isn't a string")
    return value


def _data_file(entry: Any, number: int) -> DataFile:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not (name == file_name(number) or ATTACHED.fullmatch(name)):
        raise CorruptCheckpointError(f"manifest: file {number} isn't called {file_name(number)}")
    size = entry.get("size")
    if type(size) is not int or size < 0:
        raise CorruptCheckpointError(f"manifest: the size of {name} isn't an integer of 0 or more")
    return DataFile(name, size)


def _encoded_extents(extents: Extents) -> dict[str, str]:
    """Return a table of all extents, which is read in no time however many there are."""
    places, checksums = extents.places.astype("<i8"), extents.checksums.astype("<u4")
    return {"extents": b64encode(places.tobytes()).decode(), "crc32": b64encode(checksums.tobytes()).decode()}


def _extents(body: Mapping[str, Any], files: Sequence[DataFile]) -> Extents:
    """Return extents that are within their files, and apart: else a small file could be said to hold a lot."""
    table, checksums = _table(body, "extents", "<i8", (-1, 3)), _table(body, "crc32", "<u4", (-1,))
    numbers, offset, size = table.T
    if table.size:
        if numbers.min() < 0 or offset.min() < 0 or size.min() < 1 or numbers.max() >= len(files):
            raise CorruptCheckpointError("manifest: an extent of nothing, or of no file")
        room = np.array([file.size for file in files], np.int64)[numbers] - offset
        if (size > room).any():
            raise CorruptCheckpointError("manifest: an extent where there's nothing")
        before, after = (ordered := table[np.lexsort((offset, numbers))])[:-1], ordered[1:]
        if ((after[:, 0] == before[:, 0]) & (after[:, 1] - before[:, 1] < before[:, 2])).any():
            raise CorruptCheckpointError("manifest: extents overlap")
    found = Extents(table, checksums)
    if found.blocks.sum() != checksums.size:
        raise CorruptCheckpointError("manifest: extents have other checksums than they need")
    return found


def _table(body: Mapping[str, Any], name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(b64decode(_text(body, name), validate=True), dtype).reshape(shape)
    except ValueError as cause:
        raise CorruptCheckpointError(f"manifest: {name!r} isn't a table: {cause}") from cause
