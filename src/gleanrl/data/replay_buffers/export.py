"""Export of stored records to the formats of other programs: HDF5, Minari, Parquet, pandas and safetensors.

`ReplayBuffer` has these functions as methods. A file describes its columns, so that the readers in
`gleanrl.data.datasets` restore them bit for bit. It appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np
import torch

from gleanrl import _util
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Field, numpy_dtype, numpy_view
from gleanrl._arrays.tensordicts import Path, as_key, iter_leaves
from gleanrl._os import atomic_files, files
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import MASK
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    UnsupportedError,
)

DESCRIPTION = "gleanrl"
"""The name of the attribute or metadata in which a file describes its columns."""
D4RL: Mapping[Path, str] = {
    ("observation",): "observations",
    ("action",): "actions",
    ("next", "reward"): "rewards",
    ("next", "terminated"): "terminals",
    ("next", "truncated"): "timeouts",
    ("next", "observation"): "next_observations",
}
"""Names of D4RL's arrays by key."""
_SINGLE = (
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
)  # one value for each row in D4RL
_BLOCK_BYTES = 8 << 20
_MOST_FRAME_COLUMNS = 10_000
_SAFE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
Array = np.ndarray[Any, Any]


class StoredRows:
    """The stored records of a storage in the order of time, one stream after the other, without padding.

    Args:
        storage: the storage; the caller holds its buffer's lock.
        where: the call that errors name.

    Raises:
        EmptyBufferError: nothing is stored.
        UnsupportedError: the storage has no columns, or a column holds objects other than strings.
    """

    def __init__(self, storage: Storage, where: str) -> None:
        if not isinstance(storage, TensorStorage):
            raise UnsupportedError(
                f"{where}: expected a storage with columns, such as LazyTensorStorage, got {type(storage).__name__}"
            )
        if not len(storage):
            raise EmptyBufferError(f"{where}: expected at least one record, got an empty buffer")
        self.storage = storage
        self.fields: dict[Path, Field] = {}
        for path, kind in storage.format.schema.items().items():
            if kind.dtype is not None and kind.is_list:
                raise UnsupportedError(
                    f"{where}: key {as_key(path)!r} expected one shape in all records, got tensors of different "
                    "shapes; pad them"
                )
            self.fields[path] = kind
        self._where = where
        self._slots = _ordered_slots(storage)
        self.count = len(storage) if self._slots is None else self._slots.shape[0]

    def slots(self, start: int, stop: int) -> torch.Tensor | slice:
        """Return the slots of the rows ``[start, stop)``."""
        return slice(start, stop) if self._slots is None else self._slots[start:stop]

    def rows(self, path: Path, start: int, stop: int) -> Array:
        """Return the rows ``[start, stop)`` of a column; strings as objects."""
        kind, slots = self.fields[path], self.slots(start, stop)
        if kind.dtype is not None:
            rows = self.storage.column(path)[slots].detach()
            return numpy_view(rows.cpu().contiguous())
        index = torch.arange(start, stop, device="cpu") if isinstance(slots, slice) else slots
        leaf = next(leaf for _, leaf in iter_leaves(self.storage.fetch(index, (path,))))
        found = leaf.array if isinstance(leaf, ObjectColumn) else np.empty(0, object)
        wrong = next((item for item in found.flat if not isinstance(item, str)), None)
        if wrong is not None:
            raise UnsupportedError(
                f"{self._where}: key {as_key(path)!r} expected tensors or strings, got objects of type "
                f"{type(wrong).__name__}"
            )
        return found

    def step(self, *paths: Path) -> int:
        """Return the number of rows of a block of these columns."""
        width = sum(math.prod(self.fields[path].shape) * 8 for path in paths)
        return max(1, _BLOCK_BYTES // max(1, width))

    def blocks(self, path: Path) -> Iterator[tuple[int, Array]]:
        """Yield the first row and the rows of each block of a column."""
        step = self.step(path)
        for start in range(0, self.count, step):
            yield start, self.rows(path, start, min(start + step, self.count))


def _ordered_slots(storage: TensorStorage) -> torch.Tensor | None:
    """Return the slots in the order of time, ``(n,)`` int64; None if these are all rows in the order of the slots."""
    steps, streams = storage.num_steps, storage.rows_per_step
    begin = storage.oldest_step
    masked = MASK in storage.format.schema
    if streams == 1 and not begin and not masked:
        return None
    order = (torch.arange(steps, device="cpu") + begin) % steps
    slots = (order[None, :] * streams + torch.arange(streams, device="cpu")[:, None]).reshape(-1)
    if masked:
        slots = slots[storage.column(MASK)[slots].reshape(len(slots), -1).all(1).cpu()]
    return slots


def described(fields: Mapping[str, tuple[Path, Field]]) -> str:
    """Return the description of a file's columns, as JSON."""
    columns = {
        name: {
            "key": list(path),
            "dtype": "str" if kind.dtype is None else str(kind.dtype).removeprefix("torch."),
            "shape": list(kind.shape),
        }
        for name, (path, kind) in fields.items()
    }
    return json.dumps({"version": 1, "columns": columns})


def _named(rows: StoredRows, name: Callable[[Path], str], where: str) -> dict[str, tuple[Path, Field]]:
    named: dict[str, tuple[Path, Field]] = {}
    for path, kind in rows.fields.items():
        if name(path) in named:
            raise UnsupportedError(
                f"{where}: expected keys with different names in the file, got {as_key(path)!r} and "
                f"{as_key(named[name(path)][0])!r}; rename one in a transform"
            )
        named[name(path)] = path, kind
    return named


@contextmanager
def new_folder(where: str, path: FilePath) -> Iterator[FilePath]:
    """Give a draft of a new folder, which gets its name once the block has ended; an error removes it.

    Raises:
        InvalidArgumentError: there is a file or folder with that name.
    """
    if path.exists():
        raise InvalidArgumentError(f"{where}: expected the name of a new folder, got {path}, which exists")
    files.make_lasting_dir(path.parent)
    draft = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        files.make_dir(draft, exist_ok=False)
        yield draft
        files.rename(draft, path)
    except BaseException:
        with suppress(OSError):
            files.remove_tree(draft)
        raise
    files.sync_dir(path.parent)


def replace_file(path: FilePath, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically, and remove drafts of it that killed processes left."""
    atomic_files.remove_abandoned(path.parent, files.names(path.parent), path.name)
    atomic_files.replace_file(path, write)


def new_file(path: FilePath, write: Callable[[BinaryIO], object]) -> None:
    """Write a file of a draft, and return once it is on the disk."""
    file = atomic_files.NewFile(path, ())
    try:
        file.fill(write)
        file.sync()
    finally:
        file.close()


def to_hdf5(buffer: Any, path: str | os.PathLike[str]) -> None:
    """Write all stored records into an HDF5 file in D4RL's layout; other threads wait meanwhile.

    ``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts`` and ``next_observations`` have D4RL's names,
    and ``info`` becomes ``infos``. All other columns have their keys as names, for example ``collector/traj_ids``. Rows
    are in the order of time. `gleanrl.data.from_hdf5` restores the records bit for bit, with trajectory ids that no
    collector assigns. An existing file is replaced once the new one is complete.

    Args:
        buffer: the buffer (`self`).
        path: the file.

    Raises:
        EmptyBufferError: nothing is stored.
        UnsupportedError: the storage has no columns, or a column holds objects other than strings.
        OSError: the disk is full or fails; the earlier file is still there.
        MissingLibraryError: h5py isn't installed.
    """
    h5py = _util.h5py()
    with buffer.storage.guard():
        rows = StoredRows(buffer.storage, "to_hdf5")
        named = _named(rows, _hdf5_name, "to_hdf5")

        def write(stream: BinaryIO) -> None:
            with h5py.File(stream, "w") as file:
                file.attrs[DESCRIPTION] = described(named)
                for name, (path, kind) in named.items():
                    shape = () if path in _SINGLE and kind.shape == (1,) else tuple(kind.shape)
                    write_column(h5py, file, name, rows, path, shape)

        replace_file(FilePath(path), write)


def _hdf5_name(path: Path) -> str:
    if path in D4RL:
        return D4RL[path]
    return "/".join(("infos", *path[1:]) if path[0] == "info" else path)


def write_column(
    h5py: Any, group: Any, name: str, rows: StoredRows, path: Path, shape: tuple[int, ...]
) -> None:
    """Write one column into a new dataset with rows of a given shape."""
    kind = rows.fields[path]
    dtype = h5py.string_dtype() if kind.dtype is None else numpy_dtype(kind.dtype)
    made = group.create_dataset(name, (rows.count, *shape), dtype)
    for start, block in rows.blocks(path):
        if block.size:
            made[start : start + len(block)] = block.reshape(len(block), *shape)


def to_parquet(buffer: Any, folder: str | os.PathLike[str]) -> None:
    """Write all stored records into a new folder with a Parquet file; other threads wait meanwhile.

    A column is called like its key, with dots: ``next.reward``. A leaf of one value is a plain column, and any other a
    list of fixed length, flattened. The metadata of the schema hold key, dtype and shape. dtypes that Parquet lacks are
    stored as integers of the same bits, complex numbers as pairs. `gleanrl.data.from_parquet` restores the records bit
    for bit, with trajectory ids that no collector assigns.

    Args:
        buffer: the buffer (`self`).
        folder: the new folder.

    Raises:
        EmptyBufferError: nothing is stored.
        InvalidArgumentError: the folder exists.
        UnsupportedError: the storage has no columns, or a column holds objects other than strings.
        OSError: the disk is full or fails; nothing is left.
        MissingLibraryError: pyarrow isn't installed.
    """
    arrow, parquet = _util.pyarrow(), _util.pyarrow_parquet()
    with buffer.storage.guard():
        rows = StoredRows(buffer.storage, "to_parquet")
        named = _named(rows, ".".join, "to_parquet")
        step = min(1 << 16, rows.step(*rows.fields))

        def table(start: int) -> Any:
            stop = min(start + step, rows.count)
            columns = {
                name: _arrow_array(arrow, rows.rows(path, start, stop)) for name, (path, _) in named.items()
            }
            made = arrow.table(columns)
            return made.replace_schema_metadata({DESCRIPTION: described(named)})

        def write(stream: BinaryIO) -> None:
            first = table(0)
            with parquet.ParquetWriter(arrow.PythonFile(stream, "w"), first.schema) as writer:
                writer.write_table(first)
                for start in range(step, rows.count, step):
                    writer.write_table(table(start))

        with new_folder("to_parquet", FilePath(folder)) as draft:
            new_file(draft / "part-00000.parquet", write)


def _arrow_array(arrow: Any, rows: Array) -> Any:
    if rows.dtype.kind == "O":
        return arrow.array(rows.reshape(-1).tolist(), arrow.string())
    if rows.dtype.kind == "c":
        rows = rows.reshape(*rows.shape, 1).view(rows.real.dtype)
    width = math.prod(rows.shape[1:])
    if not width:
        return arrow.array([[]] * len(rows), arrow.list_(arrow.from_numpy_dtype(rows.dtype)))
    flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
    return flat if width == 1 else arrow.FixedSizeListArray.from_arrays(flat, width)


def to_safetensors(buffer: Any, path: str | os.PathLike[str]) -> None:
    """Write all stored records into a file in the format safetensors; other threads wait meanwhile.

    Each column is one tensor ``[n, *shape]``, called like its key with dots: ``next.reward``. Rows are in the order of
    time. The package safetensors isn't needed. An existing file is replaced once the new one is complete.

    Args:
        buffer: the buffer (`self`).
        path: the file.

    Raises:
        EmptyBufferError: nothing is stored.
        UnsupportedError: the storage has no columns, or the format lacks the dtype of a column.
        OSError: the disk is full or fails; the earlier file is still there.
    """
    with buffer.storage.guard():
        rows = StoredRows(buffer.storage, "to_safetensors")
        named = _named(rows, ".".join, "to_safetensors")
        for path_of, kind in named.values():
            if kind.dtype not in _SAFE_NAMES:
                raise UnsupportedError(
                    f"to_safetensors: key {as_key(path_of)!r} expected a dtype of the format, got "
                    f"{kind.dtype or 'strings'}; leave it out by a SelectTransform on writes"
                )
        # Large elements first, so that all tensors are aligned.
        order = sorted(named, key=lambda name: (-numpy_dtype(named[name][1].dtype).itemsize, name))
        header: dict[str, Any] = {"__metadata__": {DESCRIPTION: described(named)}}
        end = 0
        for name in order:
            kind = named[name][1]
            begin, end = end, end + rows.count * math.prod(kind.shape) * numpy_dtype(kind.dtype).itemsize
            header[name] = {
                "dtype": _SAFE_NAMES[kind.dtype],
                "shape": [rows.count, *kind.shape],
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        def write(stream: BinaryIO) -> None:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                for _, block in rows.blocks(named[name][0]):
                    if block.size:
                        stream.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

        replace_file(FilePath(path), write)


def to_pandas(buffer: Any) -> Any:
    """Return all stored records as a pandas DataFrame, in the order of time; other threads wait meanwhile.

    A column is called like its key, with dots: ``next.reward``. A leaf with several values gives one column for each:
    ``observation.0``, ``observation.1``. dtypes stay.

    Args:
        buffer: the buffer (`self`).

    Raises:
        EmptyBufferError: nothing is stored.
        UnsupportedError: the storage has no columns, NumPy lacks a dtype (bfloat16), or there are too many values.
        MissingLibraryError: pandas isn't installed.
    """
    pandas = _util.pandas()
    with buffer.storage.guard():
        rows = StoredRows(buffer.storage, "to_pandas")
        count = sum(math.prod(kind.shape) for kind in rows.fields.values())
        if count > _MOST_FRAME_COLUMNS:
            raise UnsupportedError(
                f"to_pandas: expected at most {_MOST_FRAME_COLUMNS} values in a record, got {count}; use to_parquet"
            )
        found: dict[str, Any] = {}
        for path, kind in rows.fields.items():
            if (
                kind.dtype is not None
                and torch.from_numpy(np.empty(0, numpy_dtype(kind.dtype))).dtype is not kind.dtype
            ):
                raise UnsupportedError(
                    f"to_pandas: key {as_key(path)!r}: pandas lacks {kind.dtype}; convert it first"
                )
            values, name = rows.rows(path, 0, rows.count), ".".join(path)
            if math.prod(kind.shape) == 1:
                found[name] = values.reshape(-1)
                continue
            for position in np.ndindex(*kind.shape):
                found[".".join((name, *map(str, position)))] = values[(slice(None), *position)]
        return pandas.DataFrame(found)
