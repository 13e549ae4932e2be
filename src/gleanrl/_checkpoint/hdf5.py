"""States as HDF5 files, which other programs can read. Columns are datasets under their names.

A file begins with 512 bytes that HDF5 leaves to its users. They hold a line with the hash of the rest, so that damage
is found before a parser reads the file. The group ``records`` has one dataset for each column. The group ``state`` has
``tree``, the rest of the state as JSON, and its arrays as bytes.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch

from gleanrl import _util
from gleanrl._arrays.schema import numpy_dtype, numpy_view
from gleanrl._checkpoint import tree_codec
from gleanrl._checkpoint.manifest import HDF5, migrated
from gleanrl._checkpoint.row_segments import Array
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, ArrayPieces, Decoder, Encoder
from gleanrl.errors import CheckpointError, CorruptCheckpointError

FORMAT = 2
"""The version of the layout that this library writes. It also reads the earlier versions in `manifest.HDF5`."""
_HEAD_BYTES = 512
_MAGIC = b"gleanrl h5 sha256 "
_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # HDF5's signature; in files of this library it follows the head.
_CHUNK_BYTES = 1 << 20
_FILTERS = frozenset((1, 2, 3, 32000))  # deflate, shuffle, fletcher32, lzf; none of them loads a plugin
_MOST_RATIO = 1100  # Deflate expands one byte to at most 1032. A higher ratio is a forged size.


def write(
    file: BinaryIO, state: Any, columns: Mapping[str, torch.Tensor | ArrayPieces], options: Mapping[str, Any]
) -> None:
    """Write a file, piece by piece.

    Args:
        file: an empty file that can be read and written at any position. It is flushed between pieces, outside of
            h5py's locks, so that its `flush` may block.
        state: a value of the kinds that `tree_codec` lists.
        columns: the columns by name; ``/`` in a name makes groups.
        options: options of `h5py.Group.create_dataset` for the columns.

    Raises:
        CheckpointError: the state can't be saved, or h5py refuses an option.
        MissingLibraryError: h5py isn't installed.
    """
    arrays: list[Array | ArrayPieces] = []

    def store(data: Array | ArrayPieces) -> int:
        arrays.append(data)
        return len(arrays) - 1

    tree = Encoder(store, pieces=store).tree(
        {"state": state, "columns": {name: _kind(column) for name, column in columns.items()}}
    )
    text = tree_codec.encoded({"format": FORMAT, "tree": tree})
    with _util.h5py().File(file, "w", userblock_size=_HEAD_BYTES) as root:
        group = root.create_group("state")
        group.create_dataset("tree", data=np.frombuffer(text, np.uint8))
        for number, data in enumerate(arrays):
            if isinstance(data, ArrayPieces):
                made = group.create_dataset(str(number), (data.width * data.shape[0],), np.uint8)
                for start, stop in data.cut(LARGE_BYTES):
                    made[start * data.width : stop * data.width] = data.make(start, stop).reshape(-1)
                    file.flush()
            else:
                group.create_dataset(str(number), data=data)
        records = root.create_group("records")
        for name, column in columns.items():
            try:
                _write_column(file, records, name, column, options)
            except (TypeError, ValueError) as cause:
                raise CheckpointError(f"h5_kwargs: {dict(options)} for a column {name!r}: {cause}") from cause
    # The hash comes last, so that an incomplete file is never valid.
    file.seek(_HEAD_BYTES)
    found = hashlib.sha256()
    while part := file.read(LARGE_BYTES):
        found.update(part)
        file.flush()
    file.seek(0)
    file.write(_head(found))


def _head(found: Any) -> bytes:
    """Return the head of a file with the hash of its rest."""
    return (_MAGIC + found.hexdigest().encode() + b"\n").ljust(_HEAD_BYTES, b"\0")


def _kind(column: torch.Tensor | ArrayPieces) -> dict[str, Any]:
    return {"dtype": column.dtype, "shape": torch.Size(column.shape)}


def _write_column(
    file: BinaryIO, records: Any, name: str, column: torch.Tensor | ArrayPieces, options: Mapping[str, Any]
) -> None:
    dtype, shape = numpy_dtype(column.dtype), tuple(column.shape)
    width = dtype.itemsize * math.prod(shape[1:])
    if options and width * shape[0]:
        options = {"chunks": (min(max(1, _CHUNK_BYTES // width), shape[0]), *shape[1:]), **options}
    else:
        options = {}
    made = records.create_dataset(name, shape, dtype, **options)
    if not width:
        return
    step = made.chunks[0] if made.chunks else 1  # Whole chunks, so that each is compressed only once.
    step *= max(1, LARGE_BYTES // (step * width))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        made[start:stop] = _rows(column, start, stop, dtype)
        file.flush()


def _rows(column: torch.Tensor | ArrayPieces, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
    if isinstance(column, ArrayPieces):
        return column.make(start, stop).view(dtype).reshape(stop - start, *column.shape[1:])
    return numpy_view(column[start:stop].detach().cpu().contiguous())


def is_foreign(data: Array) -> bool:
    """Return whether the bytes belong to another program, rather than to a damaged file of this library.

    Bytes count as damage if they begin like this library's head, have HDF5's signature behind it, or are all zero.
    """
    head = data[: len(_MAGIC)].tobytes()
    behind = data[_HEAD_BYTES : _HEAD_BYTES + len(_SIGNATURE)].tobytes()
    return not _MAGIC.startswith(head) and behind != _SIGNATURE and bool(data.any())


def decoded(data: Array) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the state and the columns in a file's bytes.

    Raises:
        CorruptCheckpointError: the file is damaged, or `write` didn't write it.
        MissingLibraryError: h5py isn't installed.
    """
    if data[:_HEAD_BYTES].tobytes() != _head(hashlib.sha256(data[_HEAD_BYTES:].data)):
        raise CorruptCheckpointError("an HDF5 file with a wrong hash: it is damaged or incomplete")
    h5py = _util.h5py()
    try:
        with h5py.File(io.BytesIO(data.data), "r") as root:
            files = _Datasets(h5py, root)
            body = tree_codec.decoded(files.read("state/tree", np.dtype(np.uint8)).tobytes(), "HDF5 file")
            tree = migrated(body, FORMAT, HDF5, "HDF5 file")["tree"]
            read = Decoder(partial(_array, files)).value(tree)
            return read["state"], {name: _column(files, name, kind) for name, kind in read["columns"].items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as cause:
        if isinstance(cause, CheckpointError):
            raise
        raise CorruptCheckpointError(f"an HDF5 file that isn't a checkpoint: {cause}") from cause


def _array(files: _Datasets, number: Any, size: int) -> Array:
    return files.read(f"state/{int(number)}", np.dtype(np.uint8), (size,))


def _column(files: _Datasets, name: str, kind: Mapping[str, Any]) -> torch.Tensor:
    dtype = kind["dtype"]
    return torch.from_numpy(files.read(f"records/{name}", numpy_dtype(dtype), tuple(kind["shape"]))).view(
        dtype
    )


class _Datasets:
    """Reads datasets whose data are in the file itself: none refers to another file, or needs a plugin."""

    def __init__(self, h5py: Any, root: Any) -> None:
        self._h5py, self._root = h5py, root

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None) -> Array:
        """Return a dataset, which must have this dtype and shape.

        With None as the shape, it has one dimension of any size.

        Links are refused because a foreign file could use them to read other files. The size is checked before memory
        is allocated.

        Raises:
            CorruptCheckpointError: there is no such dataset, it is a link or refers to another file, or it has another
                form or a filter of a plugin.
        """
        found = self._root
        for part in name.split("/"):
            if not isinstance(found.get(part, getlink=True), self._h5py.HardLink):
                raise CorruptCheckpointError(
                    f"{name!r} of an HDF5 file: expected an object of this file, got none or a link"
                )
            found = found[part]
        if not isinstance(found, self._h5py.Dataset) or found.is_virtual or found.external is not None:
            raise CorruptCheckpointError(
                f"{name!r} of an HDF5 file: expected a dataset with its data in this file"
            )
        plan = found.id.get_create_plist()
        filters = {plan.get_filter(number)[0] for number in range(plan.get_nfilters())}
        if (
            found.dtype != dtype
            or found.ndim != (1 if shape is None else len(shape))
            or not filters <= _FILTERS
        ):
            raise CorruptCheckpointError(
                f"{name!r} of an HDF5 file: expected {dtype} without filters of plugins, got {found.dtype} in "
                f"{found.ndim} dimensions with the filters {sorted(filters)}"
            )
        if (
            shape is not None and found.shape != shape
        ) or found.nbytes > _MOST_RATIO * found.id.get_storage_size():
            raise CorruptCheckpointError(
                f"{name!r} of an HDF5 file: expected the shape {shape or 'of any length'}, got {found.shape} in "
                f"{found.id.get_storage_size()} bytes"
            )
        read: Array = np.empty(found.shape, dtype)
        if read.size:
            found.read_direct(read)
        return read
