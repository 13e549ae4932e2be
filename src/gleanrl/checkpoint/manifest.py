"""The manifest: what belongs to a checkpoint. Everything in it is checked before it's believed."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gleanrl.checkpoint import strict_json
from gleanrl.checkpoint.extents import Extents
from gleanrl.checkpoint.migrations import MANIFESTS, migrated
from gleanrl.checkpoint.values import ATTACHED
from gleanrl.errors import CorruptCheckpointError

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
        text = strict_json.encoded(body)
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
        body = migrated(strict_json.decoded(data, "manifest"), FORMAT, MANIFESTS, "manifest")
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
