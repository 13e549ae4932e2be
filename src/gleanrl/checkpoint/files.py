"""Data files: arrays one after the other, in files of a bounded size, with checksums; written once, read in place."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.checkpoint.manifest import BLOCK_BYTES, DataFile, file_name
from gleanrl.checkpoint.values import ATTACHED, Array, Attachment
from gleanrl.errors import CheckpointError, CorruptCheckpointError
from gleanrl.system import fs

FILE_BYTES = 1 << 26
"""About how large a data file gets: arrays that are larger are cut."""
_ALIGNMENT = 64


class FileWriter:
    """Collects arrays and writes them into data files of a folder.

    Args:
        folder: where; nothing else is in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[Array] = []
        self._size = 0
        self.files: list[DataFile] = []

    def store(self, data: Array) -> list[list[int]]:
        """Take the bytes of an array, which aren't changed until `close`; return where they will stand.

        Returns:
            ``[file, offset, bytes]`` for each piece, in order.
        """
        pieces, begin = [], 0
        while begin < data.size:
            if self._size >= FILE_BYTES:
                self._flush()
            taken = data[begin : begin + FILE_BYTES - self._size]
            pieces.append([len(self.files), self._size, taken.size])
            self._add(taken)
            begin += taken.size
        return pieces

    def attach(self, attachment: Attachment) -> list[list[int]]:
        """Write bytes into a file of their own; return where they stand, as `store` does.

        Raises:
            CheckpointError: its name isn't one of an attachment.
        """
        if not ATTACHED.fullmatch(attachment.name):
            raise CheckpointError(f"{attachment.name!r} isn't a name of a file: expected {ATTACHED.pattern}")
        self._flush()
        number, data = len(self.files), attachment.data
        taken = any(file.name == attachment.name for file in self.files)
        self._write(f"{number:06d}-{attachment.name}" if taken else attachment.name, [data], data.size)
        return [[number, 0, data.size]]

    def _add(self, data: Array) -> None:
        padding = -data.size % _ALIGNMENT
        self._pending += [data] + ([np.zeros(padding, np.uint8)] if padding else [])
        self._size += data.size + padding

    def _flush(self) -> None:
        if not self._size:
            return
        self._write(file_name(len(self.files)), self._pending, self._size)
        self._pending, self._size = [], 0

    def _write(self, name: str, pieces: list[Array], size: int) -> None:
        checksums = Checksums()
        fs.write_file(self._folder / name, checksums.watching(pieces))
        self.files.append(DataFile(name, size, checksums.end()))

    def close(self) -> tuple[DataFile, ...]:
        """Write what is left; return the files, all of which are on the disk."""
        self._flush()
        return tuple(self.files)


class Checksums:
    """Checksums of blocks of bytes that go by."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._crc, self._count = 0, 0

    def watching(self, pieces: list[Array]) -> Iterator[Array]:
        """Yield the pieces, counted in."""
        for piece in pieces:
            self.add(piece)
            yield piece

    def add(self, piece: Any) -> None:
        """Count bytes in."""
        rest = memoryview(piece)
        while rest:
            taken = rest[: BLOCK_BYTES - self._count]
            self._crc = zlib.crc32(taken, self._crc)
            self._count += len(taken)
            rest = rest[len(taken) :]
            if self._count == BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._found.append(self._crc)
        self._crc, self._count = 0, 0

    def end(self) -> tuple[int, ...]:
        """Return the checksums of all blocks, the last of which may be short."""
        if self._count:
            self._close_block()
        return tuple(self._found)


class FileReader:
    """Reads arrays out of the data files of a checkpoint.

    Args:
        folder: the checkpoint.
        files: those of its manifest.
        verify: whether checksums are compared; sizes are always.

    Raises:
        CorruptCheckpointError: a file is missing, of another size, or not a plain file.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...], verify: bool) -> None:
        self._folder, self._files = folder, files
        self._position = (
            0,
            0,
        )  # where the last array ended: arrays are read in the order in which they were written
        for entry in files:
            self._check(entry, verify)

    def _check(self, entry: DataFile, verify: bool) -> None:
        """Raise `CorruptCheckpointError` unless a file is what the manifest says of it."""
        path = self._folder / entry.name
        try:
            with fs.reading(path) as file:
                if (size := fs.size_of(file)) != entry.size:
                    raise CorruptCheckpointError(f"{path}: {size} bytes instead of {entry.size}")
                buffer = np.empty(min(BLOCK_BYTES, entry.size), np.uint8)
                for number, expected in enumerate(entry.checksums if verify else ()):
                    begin = number * BLOCK_BYTES
                    block = buffer[: min(BLOCK_BYTES, entry.size - begin)]
                    if fs.read_into(file, block, begin) != block.size or zlib.crc32(block.data) != expected:
                        raise CorruptCheckpointError(
                            f"{path}: bytes {begin} to {begin + block.size} aren't what was written"
                        )
        except OSError as cause:
            raise CorruptCheckpointError(f"{path}: {cause}") from cause

    def fetch(self, pieces: Any, size: int) -> Array:
        """Return bytes of an array, in memory of their own.

        Args:
            pieces: what `FileWriter.store` returned.
            size: how many there are.

        Raises:
            CorruptCheckpointError: there are others, or they stand elsewhere.
        """
        found = self._pieces(pieces, size)
        data, begin = np.empty(size, np.uint8), 0
        for number, offset, count in found:
            path = self._folder / self._files[number].name
            try:
                with fs.reading(path) as file:
                    if fs.read_into(file, data[begin : begin + count], offset) != count:
                        raise CorruptCheckpointError(f"{path}: it became shorter")
            except OSError as cause:
                raise CorruptCheckpointError(f"{path}: {cause}") from cause
            begin += count
        return data

    def _pieces(self, pieces: Any, size: int) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        if not isinstance(pieces, list):
            raise CorruptCheckpointError("an array without a place")
        for piece in pieces:
            if (
                not isinstance(piece, list)
                or len(piece) != 3
                or not all(type(n) is int and n >= 0 for n in piece)
            ):
                raise CorruptCheckpointError(f"an array at {piece!r:.50}")
            number, offset, count = piece
            if number >= len(self._files) or offset + count > self._files[number].size or not count:
                raise CorruptCheckpointError(f"an array at {piece}, where there's nothing")
            if (number, offset) < self._position:
                raise CorruptCheckpointError(f"an array at {piece}, where another one stands")
            self._position = number, offset + count
            found.append((number, offset, count))
        if sum(count for _, _, count in found) != size:
            raise CorruptCheckpointError(f"an array of {size} bytes that stands in others")
        return found
