"""The manifest: what belongs to a checkpoint. Everything in it is checked before it's believed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gleanrl.checkpoint import strict_json
from gleanrl.checkpoint.migrations import MANIFESTS, migrated
from gleanrl.checkpoint.values import ATTACHED
from gleanrl.errors import CorruptCheckpointError

FORMAT = 3
"""The version of the layout that this library writes; it reads this one, and earlier ones as `migrations` says."""
BLOCK_BYTES = 1 << 22
"""Bytes of a data file that have one checksum."""
MOST_BYTES = 1 << 26
"""The longest manifest that is read."""
_NO_HASH = "0" * 64
_ARRAYS = ("$tensor", "$file")
_BEGIN = b'{"sha256":"'


@dataclass(frozen=True)
class DataFile:
    """A file of arrays.

    Attributes:
        name: ``000000.bin`` and so on, or that of an attachment.
        size: its bytes.
        checksums: crc32 of each `BLOCK_BYTES`.
    """

    name: str
    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        kind: what it is a state of, ``"ReplayBuffer"`` say.
        state: the tree of its state (see `values`).
        files: its data files.
        libraries: with which versions it was written, by name.
    """

    kind: str
    state: Any
    files: tuple[DataFile, ...]
    libraries: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the manifest's bytes: JSON, which begins with the hash of itself with zeros in the hash's place."""
        body = {
            "sha256": _NO_HASH,
            "format": FORMAT,
            "kind": self.kind,
            "libraries": dict(self.libraries),
            "files": [{"name": f.name, "size": f.size, "crc32": list(f.checksums)} for f in self.files],
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
        files = body.get("files")
        libraries = body.get("libraries")
        if not isinstance(files, list) or not isinstance(libraries, dict) or "state" not in body:
            raise CorruptCheckpointError("manifest: files, libraries or state are missing")
        read = tuple(_data_file(entry, number) for number, entry in enumerate(files))
        if len({file.name for file in read}) != len(read):
            raise CorruptCheckpointError("manifest: a file stands there twice")
        return cls(_text(body, "kind"), body["state"], read, libraries)


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


def _integer(body: Mapping[str, Any], name: str, least: int) -> int:
    value = body.get(name)
    if type(value) is not int or value < least:
        raise CorruptCheckpointError(f"manifest: {name!r} isn't an integer of {least} or more")
    return value


def _data_file(entry: Any, number: int) -> DataFile:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not (name == file_name(number) or ATTACHED.fullmatch(name)):
        raise CorruptCheckpointError(f"manifest: file {number} isn't called {file_name(number)}")
    size, checksums = _integer(entry, "size", 0), entry.get("crc32")
    count = -(-size // BLOCK_BYTES)
    if (
        not isinstance(checksums, list)
        or len(checksums) != count
        or not all(type(c) is int and 0 <= c < 2**32 for c in checksums)
    ):
        raise CorruptCheckpointError(f"manifest: {entry['name']} needs {count} checksums")
    return DataFile(entry["name"], size, tuple(checksums))
