"""Memory for columns: zeroed heap memory, or mapped files; what can't be held is refused beforehand."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import torch

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path as KeyPath
from gleanrl._os import files as fs
from gleanrl._os import hugepages, proc
from gleanrl._os.hugepages import ALIGNMENT
from gleanrl.errors import CapacityError, UnsupportedError

_GENERATION_BYTES = 8
_LONGEST_NAME = 240  # of a file's 255 bytes, the ending left out


class Allocator(Protocol):
    """Makes the columns of a storage, once, at its first write."""

    exclusive: bool
    """Whether nobody else will hold a tensor of the columns' torch storages (see `columns`)."""
    shared: bool
    """Whether a forked child would write into the same memory, not into a copy of its own."""
    lists: Sequence[ObjectColumn]
    """Lists that exist already, all of them; or none, and they are made anew."""

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return one zeroed contiguous tensor ``[num_rows, *field]`` for each field.

        Raises:
            CapacityError: if they don't fit; nothing is left behind.
        """

    def discard(self) -> None:
        """Leave nothing behind of columns that were made and aren't used after all."""

    def settle(self) -> None:
        """Have the columns take the place of those of another allocator (see `FileAllocator.another`)."""


class GivenColumns:
    """Columns that exist already, all in the memory of their device.

    Args:
        columns: contiguous, ``[num_rows, *field]`` each; lists among them.
        exclusive: see `Allocator`.
        shared: see `Allocator`; memory that the user shares is the user's to share.
    """

    def __init__(self, columns: Sequence[Leaf], exclusive: bool = False, shared: bool = False) -> None:
        self.columns = [column for column in columns if isinstance(column, torch.Tensor)]
        self.lists: Sequence[ObjectColumn] = [
            column for column in columns if isinstance(column, ObjectColumn)
        ]
        self.exclusive = exclusive
        self.shared = shared

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return the columns that aren't lists."""
        return list(self.columns)

    def discard(self) -> None:
        """Do nothing: they are somebody's."""

    def settle(self) -> None:
        """Do nothing: they have their place."""


class HeapAllocator:
    """Zeroed memory of the process (or of a device); pages cost nothing until they are written.

    Each column is a storage of its own for torch, so that saving a view of one doesn't save the others.

    Args:
        device: where the columns live.
    """

    exclusive = True
    shared = False
    lists: Sequence[ObjectColumn] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return zeroed columns; `CapacityError` if the process may not take that much memory."""
        if self.device.type != "cpu":
            return [torch.zeros(num_rows, *f.shape, dtype=f.dtype, device=self.device) for f in fields]
        check_room(
            "memory", _total(fields, num_rows), proc.available_memory(), num_rows, "use LazyMemmapStorage"
        )
        # One region for all: the short columns share huge pages with the long ones, and a random row then
        # misses the address cache less often.
        starts = list(
            accumulate((-(-num_rows * f.row_bytes // ALIGNMENT) * ALIGNMENT for f in fields), initial=0)
        )
        memory = zeroed(starts[-1], num_rows)
        return [
            as_column(memory[start : start + num_rows * f.row_bytes], f, num_rows)
            for start, f in zip(starts, fields, strict=False)
        ]

    def discard(self) -> None:
        """Do nothing: memory goes with the columns."""

    def settle(self) -> None:
        """Do nothing: memory has no place."""


class FileAllocator:
    """Mapped files, their space reserved on the disk.

    Args:
        directory: where the files stay, one folder per level of the key. None for files without a name: the
            operating system frees them with the last view, whatever happens to the process.
        replace: whether files that exist are replaced; whoever has them mapped keeps the old ones.
    """

    exclusive = True
    shared = True
    lists: Sequence[ObjectColumn] = ()

    def __init__(self, directory: Path | None, replace: bool = False) -> None:
        self.directory = directory
        self.replace = replace
        self._made: list[Path] = []
        self._goal: Path | None = None  # where the files are to be once they are used

    def another(self) -> FileAllocator:
        """Return an allocator whose files are beside these until they take their places."""
        if self.directory is None:
            return FileAllocator(None)
        other = FileAllocator(self.directory / f"loading-{uuid.uuid4().hex}")
        other._goal = self.directory
        return other

    def settle(self) -> None:
        """Move files that are beside others into the places of these; whoever has those mapped keeps them."""
        goal, beside = self._goal, self.directory
        if goal is None or beside is None:
            return
        with suppress(OSError):  # the records are mapped, whatever their files are called
            for file in self._made:
                place = goal / file.relative_to(beside)
                fs.make_dir(place.parent)
                fs.rename(file, place)
            fs.remove_tree(beside)
        self._goal = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle; files that somebody named can't be made twice."""
        if self.directory is not None:
            raise UnsupportedError(
                f"a storage in scratch_dir={str(self.directory)!r} can't be pickled or copied: its files are its own; "
                "use state_dict, or a storage without scratch_dir"
            )
        return self.__dict__

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return zeroed columns; nothing stays behind after an error.

        Raises:
            CapacityError: the disk is too full.
            UnsupportedError: a file of a column's name exists and isn't to be replaced.
        """
        if self.directory is not None:
            return self._map_all(self.directory, paths, fields, num_rows)
        with fs.temporary_dir("gleanrl-columns-") as nameless:
            return self._map_all(Path(nameless), paths, fields, num_rows)

    def _map_all(
        self, directory: Path, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        files = [file_of(directory, path) for path in paths]
        taken = [file for file in files if file.exists()]
        if taken and not self.replace:
            raise UnsupportedError(
                f"scratch_dir: {', '.join(map(str, taken))} exists already and isn't overwritten. The files alone "
                "can't be opened again, they don't say which records are in use: to go on with an earlier buffer, have "
                "it write a checkpoint, dumps(folder), and load that, loads(folder), into one in another directory. "
                "To drop what the files hold, remove them, choose an empty directory, or ask for it by existsok=True"
            )
        regained = sum(file.stat().st_size for file in taken)
        fs.make_dir(directory)
        advice = "choose another scratch_dir, or TMPDIR without one"
        room = fs.free_bytes(directory) + regained
        check_room(f"disk at {directory}", _total(fields, num_rows), room, num_rows, advice)
        made = self._made = []
        try:
            for file in taken:
                fs.remove_file(file)
            return [
                _map_column(file, field, num_rows, made) for file, field in zip(files, fields, strict=True)
            ]
        except OSError as cause:
            raise CapacityError(
                f"can't reserve {_total(fields, num_rows):,} bytes for {num_rows} rows at {directory}: "
                f"{cause}; {advice}"
            ) from cause
        finally:
            # All files or none.
            if len(made) < len(files):
                self.discard()

    def discard(self) -> None:
        """Remove the files."""
        for file in self._made:
            with suppress(OSError):
                fs.remove_file(file, missing_ok=True)
        if self._goal is not None and self.directory is not None:
            with suppress(OSError):
                fs.remove_tree(self.directory)


def zeroed(num_bytes: int, num_rows: int) -> np.ndarray[Any, Any]:
    """Return zeroed bytes for `num_rows` rows (see `pages.zeroed`); `CapacityError` if there are none."""
    try:
        return hugepages.zeroed(num_bytes)
    except MemoryError as cause:
        raise CapacityError(f"{num_rows} rows: {cause}") from cause


def file_of(directory: Path, path: KeyPath) -> Path:
    """Return the file of the column at `path`; every key gives a file name of its own inside `directory`."""
    *groups, last = map(_file_name, path)
    return directory.joinpath(*groups, last + ".memmap")


def _file_name(key: str) -> str:
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:64]}%long{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"  # "%lo" quotes nothing


def _map_column(file: Path, field: Field, num_rows: int, made: list[Path]) -> torch.Tensor:
    num_bytes = num_rows * field.row_bytes
    fs.make_dir(file.parent)
    fs.create_file(file, num_bytes)
    made.append(file)
    memory: np.ndarray[Any, Any] = (
        np.frombuffer(fs.map_file(file), np.uint8) if num_bytes else np.zeros(0, np.uint8)
    )
    return as_column(memory, field, num_rows)


def as_column(memory: np.ndarray[Any, Any], field: Field, num_rows: int) -> torch.Tensor:
    """Return `memory`, uint8 in one dimension, as ``[num_rows, *field]``."""
    if not memory.size:
        return torch.empty(num_rows, *field.shape, dtype=field.dtype, device="cpu")
    return torch.from_numpy(memory).view(field.dtype).view(num_rows, *field.shape)


def _total(fields: Sequence[Field], num_rows: int) -> int:
    return num_rows * (sum(field.row_bytes for field in fields) + _GENERATION_BYTES)


def check_room(what: str, needed: int, room: int | None, num_rows: int, advice: str) -> None:
    """Raise `CapacityError` if `needed` bytes are more than there is room for."""
    if room is not None and needed > room:
        raise CapacityError(
            f"{num_rows} rows need {needed:,} bytes of {what}, {room:,} are free: lower max_size, or {advice}"
        )
