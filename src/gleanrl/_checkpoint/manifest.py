"""The manifest, which lists the parts of a checkpoint. All of it is checked before it is used.

For each kind of file, a table of migrations maps a format to the function that converts it to the next format. The
function receives the JSON tree, which it may change, and returns the converted tree. It runs before the tree is
checked. So it needs no checks, and any error that it raises means damage. The migration of a released format is never
removed, and `tests/_checkpoint/golden` has a checkpoint of each.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gleanrl._checkpoint import tree_codec
from gleanrl._checkpoint.tree_codec import ATTACHED
from gleanrl.errors import CorruptCheckpointError, IncompatibleCheckpointError

BLOCK_BYTES = 1 << 22
"""The bytes of an extent that share one checksum."""


class Extent(NamedTuple):
    """Consecutive bytes of a data file that belong to no other extent."""

    file: int
    """The number of its file."""
    offset: int
    """The first byte."""
    size: int
    """The number of bytes."""
    checksums: tuple[int, ...]
    """The crc32 of each block of `BLOCK_BYTES`."""


Tree = dict[str, Any]
Migrations = Mapping[int, Callable[[Tree], Tree]]


def _with_extents(tree: Tree) -> Tree:
    """Convert format 3 to 4: each file, which had checksums itself, becomes one extent with the file's number."""
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
"""Migrations of manifests.

Format 2 added rows in segments. Format 3 added two kinds of non-tensor data. Format 4 added several extents in a file.
"""
HDF5: Migrations = {1: lambda tree: tree}
"""Migrations of the trees in HDF5 files. Format 2 added the two kinds of non-tensor data."""


def migrated(tree: Tree, newest: int, steps: Migrations, name: str) -> Tree:
    """Return a tree converted to the newest format; the given tree may be changed.

    Args:
        tree: a tree of any format, with its number under ``"format"``.
        newest: the format that this library writes.
        steps: one of the tables above.
        name: a name of the file for messages.

    Raises:
        CorruptCheckpointError: the tree doesn't have the format that it states.
        IncompatibleCheckpointError: a later release wrote it, or it is older than any release.
    """
    version = tree.get("format")
    if type(version) is not int or version < 0:
        raise CorruptCheckpointError(
            f"{name}: expected an integer of 0 or more as 'format', got {version!r:.50}"
        )
    if version > newest:
        raise IncompatibleCheckpointError(
            f"{name}: expected format {newest} or an earlier one, got {version}: a later release of gleanrl wrote it"
        )
    for step in range(version, newest):
        if step not in steps:
            raise IncompatibleCheckpointError(
                f"{name}: format {version}, which no release wrote; expected format {newest} or an earlier release's"
            )
        try:
            tree = steps[step](tree)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as cause:
            raise CorruptCheckpointError(
                f"{name}: expected a tree of format {step}, got another one: {cause!r}"
            ) from cause
    return tree


FORMAT = 4
"""The version of the layout that this library writes. It also reads the earlier versions in `MANIFESTS`."""
MOST_BYTES = 1 << 26
"""Size of the longest manifest that is read, in bytes."""
_NO_HASH = "0" * 64
_ARRAYS = ("$tensor", "$file")
_BEGIN = b'{"sha256":"'


class DataFile(NamedTuple):
    """A data file. Some of its bytes may belong to no extent."""

    name: str
    """``000000.bin`` and so on, or the name of an attachment."""
    size: int
    """In bytes."""


@dataclass(frozen=True)
class Manifest:
    """The parts of a checkpoint.

    Attributes:
        kind: the kind of the state's owner, for example ``"ReplayBuffer"``.
        state: the tree of the state (see `tree_codec`).
        files: its data files.
        extents: the used parts of the files. The tree refers to them by number.
        libraries: the versions of the libraries that wrote it, by name.
    """

    kind: str
    state: Any
    files: tuple[DataFile, ...]
    extents: tuple[Extent, ...]
    libraries: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the manifest as JSON bytes that begin with their hash.

        The hash is computed with zeros in its place.
        """
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
        """Return the manifest in `encoded` bytes.

        Raises:
            CorruptCheckpointError: the bytes are damaged.
            IncompatibleCheckpointError: a later release wrote them, or their format is older than any release.
        """
        if len(data) > MOST_BYTES:
            raise CorruptCheckpointError(f"manifest: more than {MOST_BYTES} bytes")
        start = len(_BEGIN)
        blank = data[:start] + _NO_HASH.encode() + data[start + len(_NO_HASH) :]
        if (
            not data.startswith(_BEGIN)
            or data[start:].split(b'"', 1)[0] != hashlib.sha256(blank).hexdigest().encode()
        ):
            raise CorruptCheckpointError("manifest: its hash is wrong: it is damaged or incomplete")
        body = migrated(tree_codec.decoded(data, "manifest"), FORMAT, MANIFESTS, "manifest")
        files, libraries = body.get("files"), body.get("libraries")
        if not isinstance(files, list) or not isinstance(libraries, dict) or "state" not in body:
            raise CorruptCheckpointError("manifest: files, libraries or state are missing")
        found = tuple(_data_file(entry, number) for number, entry in enumerate(files))
        if len({file.name for file in found}) != len(found):
            raise CorruptCheckpointError("manifest: two files have the same name")
        return cls(_text(body, "kind"), body["state"], found, _extents(body, found), libraries)


def stored_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a JSON tree that refer to rows or arrays, in the order of the tree."""
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
    """Yield the nodes of a tree that refer to arrays, each with the key of the reference."""
    for node in stored_in(tree):
        for key in _ARRAYS:
            if key in node:
                yield node, key


def columns_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a tree that refer to columns of a storage's records."""
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
    """Return the name of a data file, by its number."""
    return f"{number:06d}.bin"


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise CorruptCheckpointError(f"manifest: expected a string as {name!r}, got a {type(value).__name__}")
    return value


def _data_file(entry: Any, number: int) -> DataFile:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not (name == file_name(number) or ATTACHED.fullmatch(name)):
        raise CorruptCheckpointError(
            f"manifest: expected file {number} to be called {file_name(number)}, got {name!r:.100}"
        )
    size = entry.get("size")
    if type(size) is not int or size < 0:
        raise CorruptCheckpointError(
            f"manifest: expected an integer of 0 or more as the size of {name}, got {size!r:.50}"
        )
    return DataFile(name, size)


def _encoded_extents(extents: Sequence[Extent]) -> dict[str, str]:
    """Return all extents as two base64 tables."""
    places = np.array([one[:3] for one in extents], "<i8")
    checksums = np.fromiter(chain.from_iterable(one.checksums for one in extents), "<u4")
    return {"extents": b64encode(places.tobytes()).decode(), "crc32": b64encode(checksums.tobytes()).decode()}


def _extents(body: Mapping[str, Any], files: Sequence[DataFile]) -> tuple[Extent, ...]:
    """Return the extents; raise `CorruptCheckpointError` unless they lie within their files and don't overlap.

    Otherwise a small file could claim to contain any amount of data.
    """
    table, checksums = _table(body, "extents", "<i8", (-1, 3)), _table(body, "crc32", "<u4", (-1,))
    numbers, offset, size = table.T
    if table.size:
        if numbers.min() < 0 or offset.min() < 0 or size.min() < 1 or numbers.max() >= len(files):
            raise CorruptCheckpointError("manifest: an extent is empty, or of a file that isn't listed")
        room = np.array([file.size for file in files], np.int64)[numbers] - offset
        if (size > room).any():
            raise CorruptCheckpointError("manifest: an extent ends behind the end of its file")
        before, after = (ordered := table[np.lexsort((offset, numbers))])[:-1], ordered[1:]
        if ((after[:, 0] == before[:, 0]) & (after[:, 1] - before[:, 1] < before[:, 2])).any():
            raise CorruptCheckpointError("manifest: extents overlap")
    ends = (-(-size // BLOCK_BYTES)).cumsum().tolist()
    if (expected := ends[-1] if ends else 0) != checksums.size:
        raise CorruptCheckpointError(f"manifest: expected {expected} checksums, got {checksums.size}")
    sums = checksums.tolist()
    each = (tuple(sums[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
    return tuple(map(Extent._make, zip(*table.T.tolist(), each, strict=True)))


def _table(body: Mapping[str, Any], name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(b64decode(_text(body, name), validate=True), dtype).reshape(shape)
    except ValueError as cause:
        raise CorruptCheckpointError(f"manifest: {name!r} isn't a table: {cause}") from cause
