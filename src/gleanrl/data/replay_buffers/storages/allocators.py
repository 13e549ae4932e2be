"""Allocation of columns: zeroed heap memory or mapped files. Requests that don't fit are refused in advance."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeAlias
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
_SPARE = "observations that the next step doesn't repeat need them: lower max_size, or leave out compact"
_LONGEST_NAME = 240  # of a file's 255 bytes, the ending left out


Reach: TypeAlias = Callable[[int], None]


class Allocator(Protocol):
    """Makes the columns of a storage, once, at the first write."""

    exclusive: bool
    """Whether only the storage holds tensors over the columns' torch storages (see `columns`)."""
    shared: bool
    """Whether a forked child would write into the same memory instead of a private copy."""
    lists: Sequence[ObjectColumn]
    """All existing lists of the records; empty if the table must create them."""

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return one contiguous tensor ``[num_rows, *field]`` for each field. Newly made ones are zero.

        Raises:
            CapacityError: the columns don't fit. No memory or file is left behind.
            UnsupportedError: a file of a column exists already.
        """

    def discard(self) -> None:
        """Remove everything that was made for columns that won't be used."""

    def settle(self) -> None:
        """Move the columns to the place of another allocator's columns (see `FileAllocator.another`)."""


class ExistingColumns:
    """Existing columns, all in the memory of their device.

    Args:
        columns: contiguous columns ``[num_rows, *field]``, including lists.
        exclusive: see `Allocator`.
        shared: see `Allocator`. False for the user's own tensors, which the user may share between processes.
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
        """Do nothing, because the columns belong to the caller."""

    def settle(self) -> None:
        """Do nothing, because the columns are in their final place."""


class HeapAllocator:
    """Zeroed memory of the process or of a device. The system provides a page only when it is first written.

    Each column has a separate torch storage: `torch.save` of a view of one column then doesn't save the other
    columns.

    Args:
        device: the device of the columns.
    """

    exclusive = True
    shared = False
    lists: Sequence[ObjectColumn] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return zeroed columns. On the CPU they are parts of one region of memory.

        Raises:
            CapacityError: the process may not use that much memory. For other devices torch raises its own error.
        """
        if self.device.type != "cpu":
            return [torch.zeros(num_rows, *f.shape, dtype=f.dtype, device=self.device) for f in fields]
        check_room(
            "memory", _total(fields, num_rows), proc.available_memory(), num_rows, "use LazyMemmapStorage"
        )
        # One region for all columns: short columns then share huge pages with long ones, and reading random rows
        # causes fewer misses of the address cache (TLB).
        starts = list(
            accumulate((-(-num_rows * f.row_bytes // ALIGNMENT) * ALIGNMENT for f in fields), initial=0)
        )
        memory = zeroed(starts[-1], num_rows)
        return [
            as_column(memory[start : start + num_rows * f.row_bytes], f, num_rows)
            for start, f in zip(starts, fields, strict=False)
        ]

    def sparse(
        self,
        paths: Sequence[KeyPath],
        fields: Sequence[Field],
        num_rows: int,
        spare_bytes: Sequence[int],
        more_rows: int,
    ) -> tuple[list[torch.Tensor], Reach]:
        """Return zeroed columns ``[num_rows + more, *field]`` on the CPU, with spare rows behind the first `num_rows`.

        Spare rows take neither memory nor disk space yet. Before the first write to them, call the returned function
        with the row after the last one that will be used. It raises `CapacityError` if there is too little room.

        Args:
            paths: see `__call__`.
            fields: see `__call__`.
            num_rows: the number of rows that are reserved now.
            spare_bytes: the bytes of a spare row of each column, a multiple of its row's; 0 for columns without any.
            more_rows: the number of spare rows.
        """
        check_room(
            "memory", _total(fields, num_rows), proc.available_memory(), num_rows, "use LazyMemmapStorage"
        )
        plain = [field for field, spare in zip(fields, spare_bytes, strict=True) if not spare]
        others = iter(self((), plain, num_rows) if plain else ())
        columns = []
        for field, spare in zip(fields, spare_bytes, strict=True):
            size = num_rows * field.row_bytes + more_rows * spare
            columns.append(
                as_column(zeroed(size, num_rows + more_rows, hugepages.reserved), field)
                if spare
                else next(others)
            )
        usable = num_rows

        def reach(stop: int) -> None:
            nonlocal usable
            needed = (stop - usable) * sum(spare_bytes)
            check_room("memory", needed, proc.available_memory(), stop - usable, _SPARE)
            usable = stop

        return columns, reach

    def discard(self) -> None:
        """Do nothing, because the memory is freed with the columns."""

    def settle(self) -> None:
        """Do nothing, because heap memory isn't moved."""


class FileAllocator:
    """Mapped files whose space is reserved on the disk.

    Args:
        directory: the directory of the files, with one subdirectory for each level of a key. None for files without a
            name: the system frees them with their last mapping, even if the process is killed.
        replace: whether existing files are replaced. A process that has an old file mapped keeps it.
    """

    exclusive = True
    shared = True
    lists: Sequence[ObjectColumn] = ()

    def __init__(self, directory: Path | None, replace: bool = False) -> None:
        self.directory = directory
        self.replace = replace
        self._made: list[Path] = []
        self._goal: Path | None = None  # the directory that `settle` moves the files to

    def another(self) -> FileAllocator:
        """Return an allocator that makes files in a subdirectory, until `settle` moves them over the present files.

        Without a directory, the result makes files without a name, and `settle` does nothing.
        """
        if self.directory is None:
            return FileAllocator(None)
        other = FileAllocator(self.directory / f"loading-{uuid.uuid4().hex}")
        other._goal = self.directory
        return other

    def settle(self) -> None:
        """Move the files of `another` over the files that they replace; without `another`, do nothing.

        Processes that have the replaced files mapped keep them. If a move fails, this file and the later ones stay in
        the subdirectory, and no error is raised.
        """
        goal, staging = self._goal, self.directory
        if goal is None or staging is None:
            return
        with suppress(OSError):  # a failed rename loses nothing: the records stay mapped under any name
            for file in self._made:
                target = goal / file.relative_to(staging)
                fs.make_dir(target.parent)
                fs.rename(file, target)
            fs.remove_tree(staging)
        self._goal = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle.

        Raises:
            UnsupportedError: the files have names, so a copy can't make them again.
        """
        if self.directory is not None:
            raise UnsupportedError(
                f"a storage in scratch_dir={str(self.directory)!r} can't be pickled or copied, because a copy can't "
                "use the same files; use state_dict(), or a storage without scratch_dir"
            )
        return self.__dict__

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return zeroed columns. After an error no new files are left, but the files to replace may be lost.

        Raises:
            CapacityError: the disk is too full, or a file can't be made.
            UnsupportedError: a file of a column exists, and `replace` is False.
            OSError: the directory can't be made.
        """
        return self._mapped(paths, fields, num_rows, _map_column)

    def _mapped(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int, *options: Any
    ) -> list[torch.Tensor]:
        if self.directory is not None:
            return self._map_all(self.directory, paths, fields, num_rows, *options)
        with fs.temporary_dir("gleanrl-columns-") as nameless:
            return self._map_all(Path(nameless), paths, fields, num_rows, *options)

    def _map_all(
        self,
        directory: Path,
        paths: Sequence[KeyPath],
        fields: Sequence[Field],
        num_rows: int,
        map_column: Callable[..., torch.Tensor],
        *more: Sequence[Any],
    ) -> list[torch.Tensor]:
        """Return columns by `map_column`, which also gets the elements of `more` for each column."""
        files = [file_of(directory, path) for path in paths]
        existing = [file for file in files if file.exists()]
        if existing and not self.replace:
            raise UnsupportedError(
                f"scratch_dir: {', '.join(map(str, existing))} exists already and isn't overwritten. The files alone "
                "can't be loaded, because they don't tell which records are in use. To continue with an earlier "
                "buffer, write a checkpoint by its dumps(folder), and load it by loads(folder) into a buffer in "
                "another directory. To discard the files, remove them, choose an empty directory, or pass existsok=True"
            )
        # The files to be replaced are removed first, so their space counts as free.
        regained = sum(file.stat().st_size for file in existing)
        fs.make_dir(directory)
        advice = "choose another scratch_dir, or TMPDIR without one"
        room = fs.free_bytes(directory) + regained
        check_room(f"disk at {directory}", _total(fields, num_rows), room, num_rows, advice)
        made = self._made = []
        try:
            for file in existing:
                fs.remove_file(file)
            return [
                map_column(file, field, num_rows, made, *others)
                for file, field, *others in zip(files, fields, *more, strict=True)
            ]
        except OSError as cause:
            raise CapacityError(
                f"can't reserve {_total(fields, num_rows):,} bytes for {num_rows} rows at {directory}: "
                f"{cause}; {advice}"
            ) from cause
        finally:
            # Keep all files or none: an interrupt ends up here too.
            if len(made) < len(files):
                self.discard()

    def sparse(
        self,
        paths: Sequence[KeyPath],
        fields: Sequence[Field],
        num_rows: int,
        spare_bytes: Sequence[int],
        more_rows: int,
    ) -> tuple[list[torch.Tensor], Reach]:
        """Return zeroed columns in sparse files; see `HeapAllocator.sparse`."""
        opened: list[tuple[fs.Descriptors, int, int]] = []

        def map_column(file: Path, field: Field, num_rows: int, made: list[Path], spare: int) -> torch.Tensor:
            column = _map_column(file, field, num_rows, made)
            if not spare:
                return column
            region, descriptors = fs.map_sparse(file, num_rows * field.row_bytes + more_rows * spare)
            opened.append((descriptors, num_rows * field.row_bytes, spare))
            return as_column(np.frombuffer(region, np.uint8), field)

        columns = self._mapped(paths, fields, num_rows, map_column, spare_bytes)

        usable = num_rows

        def reach(stop: int) -> None:
            nonlocal usable
            try:
                for descriptors, before, spare in opened:
                    ends = (before + (row - num_rows) * spare for row in (stop, usable))
                    fs.reserve(descriptors.all[0], *ends)
            except OSError as cause:
                raise CapacityError(
                    f"can't reserve {stop - usable} more spare rows: {cause}; {_SPARE}"
                ) from cause
            usable = stop

        return columns, reach

    def discard(self) -> None:
        """Remove the files of the last call, and the subdirectory of `another`. Failures are ignored."""
        for file in self._made:
            with suppress(OSError):
                fs.remove_file(file, missing_ok=True)
        if self._goal is not None and self.directory is not None:
            with suppress(OSError):
                fs.remove_tree(self.directory)


def zeroed(
    num_bytes: int, num_rows: int, make: Callable[[int], np.ndarray[Any, Any]] = hugepages.zeroed
) -> np.ndarray[Any, Any]:
    """Return `num_bytes` zeroed bytes (see `hugepages.zeroed`).

    Args:
        num_bytes: the bytes of all rows together.
        num_rows: the number of rows, for the error message only.
        make: allocates the bytes.

    Raises:
        CapacityError: the system refuses the memory.
    """
    try:
        return make(num_bytes)
    except MemoryError as cause:
        raise CapacityError(f"{num_rows} rows: {cause}") from cause


def file_of(directory: Path, path: KeyPath) -> Path:
    """Return the path of the file for the column at `path`. Different keys give different files inside `directory`."""
    *groups, last = map(_file_name, path)
    return directory.joinpath(*groups, last + ".memmap")


def _file_name(key: str) -> str:
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) <= _LONGEST_NAME:
        return name
    # "%lo" is no escape of `quote`, so no short key has this name.
    return f"{name[:64]}%long{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"


def _map_column(file: Path, field: Field, num_rows: int, made: list[Path]) -> torch.Tensor:
    num_bytes = num_rows * field.row_bytes
    fs.make_dir(file.parent)
    fs.create_file(file, num_bytes)
    made.append(file)
    memory: np.ndarray[Any, Any] = (
        np.frombuffer(fs.map_file(file), np.uint8) if num_bytes else np.zeros(0, np.uint8)
    )
    return as_column(memory, field, num_rows)


def as_column(memory: np.ndarray[Any, Any], field: Field, num_rows: int = -1) -> torch.Tensor:
    """Return `memory`, a one-dimensional uint8 array, as a tensor ``[num_rows, *field]``, without a copy.

    If the rows have bytes, their number may be left out.
    """
    if not memory.size:
        return torch.empty(num_rows, *field.shape, dtype=field.dtype, device="cpu")
    return torch.from_numpy(memory).view(field.dtype).view(num_rows, *field.shape)


def _total(fields: Sequence[Field], num_rows: int) -> int:
    return num_rows * (sum(field.row_bytes for field in fields) + _GENERATION_BYTES)


def check_room(resource: str, needed: int, room: int | None, num_rows: int, advice: str) -> None:
    """Raise `CapacityError` if `needed` bytes exceed `room`, the free bytes; a room of None is unknown and passes."""
    if room is not None and needed > room:
        raise CapacityError(
            f"{num_rows} rows need {needed:,} bytes of {resource}, {room:,} are free: lower max_size, or {advice}"
        )
