"""`open_buffer`, which opens stored records of any known format by their path, and `export` for the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import torch

from gleanrl._checkpoint.folder import Folder
from gleanrl.data.datasets.hdf5 import from_hdf5
from gleanrl.data.datasets.minari import from_minari
from gleanrl.data.datasets.parquet import from_lerobot, from_parquet, read_json
from gleanrl.data.replay_buffers.checkpointers.buffers import with_records
from gleanrl.data.replay_buffers.checkpointers.h5 import H5StorageCheckpointer
from gleanrl.data.replay_buffers.export_minari import minari_id
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from gleanrl.data.replay_buffers.storages.tensor import LazyTensorStorage
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter
from gleanrl.errors import DatasetError, InvalidArgumentError

FORMATS = {"hdf5": ".hdf5", "minari": "", "parquet": ".parquet", "safetensors": ".safetensors"}
"""The formats of `export`, with the suffix of their files; an id names a Minari data set."""


def open_buffer(
    source: str | os.PathLike[str], part: str | None = None, *, video: bool = True
) -> TensorDictReplayBuffer:
    """Return a buffer of the records at a path, which refuses writes. Rewards keep their dtype.

    If the checkpoint has priorities, the buffer draws by them.

    Args:
        source: a checkpoint of a buffer, of a storage or of `gleanrl.Checkpoint`; an HDF5 checkpoint; a file in D4RL's
            layout; a Parquet file of this library; the folder of a Minari, Parquet or LeRobot data set; or the id of a
            local Minari data set.
        part: the name of the buffer in a `gleanrl.Checkpoint` with several; None for the only one.
        video: whether to decode the videos of a LeRobot data set; see `gleanrl.data.from_lerobot`.

    Raises:
        DatasetError: there are no such records, or they can't be read.
        CheckpointError: a checkpoint is damaged.
        InvalidArgumentError: `part` isn't a buffer of the checkpoint.
    """
    path = FilePath(source)
    if path.is_dir():
        if (path / "meta" / "info.json").exists():
            return from_lerobot(path, video=video, reward_dtype=None)
        if (path / "metadata.json").exists() or (path / "data" / "metadata.json").exists():
            return from_minari(path.resolve(), reward_dtype=None)
        if next(path.rglob("*.parquet"), None) is not None:
            return from_parquet(path, reward_dtype=None)
        return _checkpointed(path, part)
    if not path.exists():
        try:
            minari_id(os.fspath(source))
        except InvalidArgumentError:
            raise DatasetError(
                f"{source}: expected a file, a folder or the id of a Minari data set, got no such path"
            ) from None
        return from_minari(os.fspath(source), reward_dtype=None)
    if path.suffix == ".parquet":
        return from_parquet(path, reward_dtype=None)
    with path.open("rb") as file:
        is_checkpoint = file.read(10) == b"gleanrl h5"
    if is_checkpoint:
        state = _Capture()
        H5StorageCheckpointer().loads(state, path)
        return _buffer_of(_storage_of(path, state.found))
    return from_hdf5(path, reward_dtype=None)


def videos_of(source: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Return the shapes of the videos at a path by name: all that ``open_buffer(source, video=False)`` leaves out."""
    path = FilePath(source) / "meta" / "info.json"
    features = read_json(path)["features"] if path.exists() else {}
    return {
        name: feature.get("shape") for name, feature in features.items() if feature.get("dtype") == "video"
    }


class _Capture:
    """Receives the state that a checkpointer loads."""

    found: Mapping[str, Any] = {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = state


def _checkpointed(path: FilePath, part: str | None) -> TensorDictReplayBuffer:
    """Return the buffer in the newest checkpoint of a folder."""

    def take(kind: str, state: Any) -> TensorDictReplayBuffer:
        parts = state.get("parts") if isinstance(state, dict) else None
        if isinstance(parts, Mapping):
            buffers = [
                name for name, saved in parts.items() if isinstance(saved, Mapping) and "_storage" in saved
            ]
            if part not in buffers and (part is not None or len(buffers) != 1):
                raise InvalidArgumentError(
                    f"part: expected one of the buffers {buffers} in {path}, got {part!r}"
                )
            state = parts[part or buffers[0]]
        elif part is not None:
            raise InvalidArgumentError(f"part: expected None, because {path} is a checkpoint of one {kind}")
        if isinstance(state, dict) and "_storage" not in state:
            state = {"_storage": state}
        return _buffer_of(_storage_of(path, with_records(state)["_storage"]), state.get("_sampler"))

    buffer: TensorDictReplayBuffer = Folder(path).load(True, take).state
    return buffer


def _storage_of(path: FilePath, state: Mapping[str, Any]) -> LazyTensorStorage:
    try:
        storage = LazyTensorStorage(state["max_size"], ndim=state["ndim"])
    except (KeyError, TypeError, InvalidArgumentError) as cause:
        raise DatasetError(
            f"{path}: expected a checkpoint of a buffer with columns, got the entries {[*state]}"
        ) from cause
    storage.load_state_dict(state)
    return storage


def _buffer_of(storage: LazyTensorStorage, drawn: Any = None) -> TensorDictReplayBuffer:
    """Return a buffer of a storage, with the priorities in the state of a sampler, if it has any."""
    sampler = None
    if isinstance(drawn, Mapping) and (priorities := drawn.get("priorities")) is not None:
        sampler = PrioritizedSampler(None, alpha=1.0, beta=1.0, dtype=torch.float64)
        sampler.load_state_dict({**sampler.state_dict(), "priorities": priorities})
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, writer=ImmutableDatasetWriter())


def export(source: str, kind: str, out: str | None = None, part: str | None = None) -> str:
    """Write the records at a path in another format, and return a line that says how many.

    Args:
        source: see `open_buffer`.
        kind: one of `FORMATS`.
        out: the file or folder, or the id of the new Minari data set. None for the name of the source in the current
            folder, with the suffix of the format.
        part: see `open_buffer`.

    Raises:
        InvalidArgumentError: an unknown format, or `out` is missing for a Minari data set.
        Exception: an error of `open_buffer`, or of the buffer's method.
    """
    if kind not in FORMATS:
        raise InvalidArgumentError(f"to: expected one of {[*FORMATS]}, got {kind!r}")
    if out is None:
        if kind == "minari":
            raise InvalidArgumentError(
                "out: expected the id of the new data set, for example out='made/name-v0'"
            )
        out = FilePath(source).resolve().stem + FORMATS[kind]
    buffer = open_buffer(source, part)
    getattr(buffer, f"to_{kind}")(out)
    return f"wrote {len(buffer)} transitions to {out}"
