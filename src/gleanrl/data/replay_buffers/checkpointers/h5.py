"""A checkpointer that writes records as trajectories into an HDF5 file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from gleanrl import _util
from gleanrl._checkpoint import hdf5
from gleanrl._checkpoint.tree_codec import ATTACHED, ArrayPieces, Attachment, sources_in
from gleanrl._os import atomic_files, files
from gleanrl._util import positive
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.flat import NestedStorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.trajectories import paths_of
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
)

_OPTIONS = ("chunks", "compression", "compression_opts", "fletcher32", "shuffle")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ -]*")


class H5StorageCheckpointer(StorageCheckpointerBase):
    """Writes records as trajectories (see `NestedStorageCheckpointer`) into an HDF5 file, which can be compressed.

    The file holds one dataset for each column, ``records/next/reward`` for example, for any number of trajectories. In
    a checkpoint it is an additional file, and it is complete by itself: a copy of it can be loaded alone.

    A path that ends in ``.h5`` names such a file. `dumps` replaces an older file only when the new one is complete. If
    a process is killed meanwhile, the next `dumps` into that folder removes its unfinished file.

    Args:
        checkpoint_file: name of the file within a checkpoint: letters, digits, ``.``, ``_`` and ``-``, and ``.h5`` at
            the end.
        done_keys: see `NestedStorageCheckpointer`.
        reward_keys: has no effect: rewards are kept unchanged.
        h5_kwargs: options of `h5py.Group.create_dataset`, as a dictionary or pairs: ``compression`` (``"gzip"``,
            ``"lzf"``, or a level of gzip, 0 to 9), ``compression_opts``, ``shuffle``, ``fletcher32``, ``chunks``. None
            for no compression. Chunks have about 1 MiB unless `h5_kwargs` says otherwise.

    Raises:
        InvalidArgumentError: another name of a file, or other options.
        MissingLibraryError: h5py isn't installed; the extra ``h5`` installs it.
        CheckpointError: at a dump, a flag has more elements than the storage has slots, or h5py refuses a value.
    """

    form = "h5"
    makes_columns = True
    takes_segments = True

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Any = None,
        reward_keys: Any = None,
        h5_kwargs: Any = None,
    ) -> None:
        _util.h5py()
        options = dict(h5_kwargs or {})
        known = options.get("compression") in (None, "gzip", "lzf", *range(10))
        if not known or not options.keys() <= set(_OPTIONS):
            raise InvalidArgumentError(
                f"h5_kwargs: expected {', '.join(_OPTIONS)}, with gzip, lzf or a level as compression, got {h5_kwargs}"
            )
        if not isinstance(checkpoint_file, str) or not ATTACHED.fullmatch(checkpoint_file):
            raise InvalidArgumentError(
                f"checkpoint_file: expected a plain name that ends in .h5, got {checkpoint_file!r}"
            )
        self.checkpoint_file, self.h5_kwargs = checkpoint_file, options
        self._nested = NestedStorageCheckpointer(done_keys, reward_keys)

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file, which is written later."""
        return {"file": Attachment(self.checkpoint_file, partial(self._write, state))}

    def _write(self, state: Mapping[str, Any], file: BinaryIO) -> None:
        rest = self._nested.pack(state)
        names: list[str | None] = []
        columns = {}
        if "columns" in rest:
            for position, (path, column) in enumerate(zip(paths_of(rest), rest["columns"], strict=True)):
                plain = path and all(isinstance(key, str) and _PLAIN.fullmatch(key) for key in path)
                dense = isinstance(column, (torch.Tensor, ArrayPieces))
                names.append(("/".join(path) if plain else f"#{position}") if dense else None)
                if names[-1] is not None:
                    columns[names[-1]] = column
            remaining = [
                None if name else column for name, column in zip(names, rest["columns"], strict=True)
            ]
            rest = {**rest, "columns": remaining}
        hdf5.write(file, {"storage": rest, "names": names}, columns, self.h5_kwargs)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state in the file."""
        file = packed["file"]
        if not isinstance(file, Attachment):
            raise CorruptCheckpointError("a storage's state: expected an HDF5 file, got none")
        found, columns = hdf5.decoded(file.data)
        state = found["storage"]
        if "columns" in state:
            pairs = zip(found["names"], state["columns"], strict=True)
            state["columns"] = [column if name is None else columns[name] for name, column in pairs]
        return NestedStorageCheckpointer.unpack(state)

    def dumps(self, storage: Any, path: os.PathLike[str] | str, keep: int = 1) -> None:
        """Write a checkpoint of one storage; see `ReplayBuffer.dumps`.

        Args:
            storage: the storage.
            path: a folder, or a file if it ends in ``.h5``.
            keep: number of checkpoints that a folder keeps; 1 for a file.

        Raises:
            CheckpointError: `path` ends in ``.h5`` and is a directory. See `ReplayBuffer.dumps` for folders.
            InvalidArgumentError: `keep` isn't 1 for a file.
        """
        location = Path(os.fspath(path))
        if location.suffix != ".h5":
            super().dumps(storage, path, keep)
        elif positive("keep", keep) != 1:
            raise InvalidArgumentError(
                f"keep: expected 1, because the file {location} holds one checkpoint, got {keep}; for several, give a "
                "folder"
            )
        else:
            files.make_lasting_dir(location.parent)
            atomic_files.remove_abandoned(location.parent, files.names(location.parent), ".h5")
            state = storage.checkpoint_dict()
            try:
                atomic_files.replace_file(location, partial(self._write, state))
            except IsADirectoryError as cause:
                raise CheckpointError(
                    f"{location}: expected a file, because the name ends in '.h5', got a directory: give the file "
                    "another name, or a folder without that suffix"
                ) from cause
            finally:
                for source in sources_in(state):
                    source.close()

    def loads(self, storage: Any, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Load one storage; see `ReplayBuffer.loads`.

        Args:
            storage: the storage.
            path: a folder, or a file if it ends in ``.h5`` and isn't a directory.
            verify: whether checksums of a folder's files are compared. Checksums of HDF5 files always are.

        Raises:
            IncompatibleCheckpointError: another program wrote the file.
            IncompleteCheckpointError: there is no such file.
            CorruptCheckpointError: the file is damaged or can't be read.
            CheckpointError: see `ReplayBuffer.loads`.
            SchemaError: the records don't fit the storage. After any error the storage is unchanged.
        """
        location = Path(os.fspath(path))
        if location.suffix != ".h5" or location.is_dir():
            super().loads(storage, path, verify)
        else:
            storage.load_state_dict(_read(location))


def _read(path: Path) -> dict[str, Any]:
    """Return the state in a file outside of a checkpoint; see `H5StorageCheckpointer.loads` for errors."""
    try:
        with files.reading(path) as file:
            data = np.empty(files.size_of(file), np.uint8)
            files.read_into(file, data, 0)
        if hdf5.is_foreign(data):
            raise IncompatibleCheckpointError(
                f"{path}: another program wrote it; expected a file that H5StorageCheckpointer().dumps(storage, path) "
                "of this library wrote; gleanrl.data.from_hdf5 reads data sets of other programs"
            )
        packed = {"file": Attachment(path.name, data)}
        return H5StorageCheckpointer.unpacked({"form": H5StorageCheckpointer.form, "packed": packed})
    except FileNotFoundError as cause:
        raise IncompleteCheckpointError(f"{path}: there is no such file") from cause
    except (OSError, CorruptCheckpointError) as cause:
        raise CorruptCheckpointError(f"{path}: {cause}") from cause
