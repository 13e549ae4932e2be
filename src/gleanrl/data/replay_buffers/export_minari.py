"""Export of stored trajectories as a Minari data set with HDF5 storage; see `gleanrl.data.replay_buffers.export`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np
from gymnasium import spaces

from gleanrl import _util
from gleanrl._arrays.schema import numpy_dtype
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._os import files
from gleanrl.data.replay_buffers.describe import observed_twice
from gleanrl.data.replay_buffers.export import DESCRIPTION, Array, StoredRows, described, new_file, new_folder
from gleanrl.data.trajectories import TRAJ_IDS
from gleanrl.errors import InvalidArgumentError, SchemaError, UnsupportedError

_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+", re.ASCII)
_VERSION = "0.5.3"  # which all releases from 0.5.3 on read
_STEPS: Mapping[Path, str] = {
    ("next", "reward"): "rewards",
    ("next", "terminated"): "terminations",
    ("next", "truncated"): "truncations",
}


def minari_root(root: str | os.PathLike[str] | None) -> FilePath:
    """Return the folder of the local Minari data sets."""
    return FilePath(
        root or os.environ.get("MINARI_DATASETS_PATH") or FilePath.home() / ".minari" / "datasets"
    )


def minari_id(name: Any) -> str:
    """Return the id of a Minari data set, ``(namespace/)*name-v0``.

    Raises:
        InvalidArgumentError: it is no such id.
    """
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise InvalidArgumentError(
            f"dataset: expected an id such as 'namespace/name-v0' of letters, digits, '-' and '_', got {name!r}"
        )
    return name


def to_minari(
    buffer: Any,
    dataset_id: str,
    *,
    root: str | os.PathLike[str] | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    **metadata: Any,
) -> None:
    """Write all stored trajectories as a new local Minari data set with HDF5 storage; other threads wait meanwhile.

    Each trajectory, or stored fragment of one, becomes an episode. Its observations are the roots of its steps and the
    last next observation. Columns without a place in Minari's layout, for example log-probabilities, are stored below
    ``infos``. Values and dtypes stay. `gleanrl.data.from_minari` restores the records bit for bit, with trajectory ids
    that no collector assigns. The package minari isn't needed.

    Args:
        buffer: the buffer (`self`).
        dataset_id: the id, ``(namespace/)*name-v0``.
        root: the folder of all data sets. None for the environment variable ``MINARI_DATASETS_PATH``, or
            ``~/.minari/datasets``.
        observation_space: the gymnasium space that the metadata name. None for boxes without bounds.
        action_space: as `observation_space`.
        **metadata: further entries of the metadata, for example ``author`` or ``algorithm_name``.

    Raises:
        EmptyBufferError: nothing is stored.
        InvalidArgumentError: `dataset_id` isn't an id, the data set exists, or `metadata` has a reserved name.
        SchemaError: a record lacks an observation, an action, a reward or a flag, or a next observation isn't the
            following observation of the same trajectory.
        UnsupportedError: the storage has no columns, a column holds objects other than strings, or a space has no form
            in Minari.
        OSError: the disk is full or fails; nothing is left.
        MissingLibraryError: h5py isn't installed.
    """
    h5py, folder = _util.h5py(), minari_root(root) / minari_id(dataset_id)
    with buffer.storage.guard():
        rows = StoredRows(buffer.storage, "to_minari")
        lengths = buffer.episodes().length.tolist()
        layout, twins = _minari_layout(rows, np.cumsum(lengths))
        observed = _space(rows, layout, "observations", observation_space)
        acted = _space(rows, layout, "actions", action_space)
        found = {
            "total_episodes": len(lengths),
            "total_steps": rows.count,
            "data_format": "hdf5",
            "observation_space": json.dumps(observed),
            "action_space": json.dumps(acted),
            "dataset_id": dataset_id,
            "minari_version": _VERSION,
            "jpeg_encoding": False,
        }
        if found.keys() & metadata.keys():
            raise InvalidArgumentError(
                f"metadata: expected other names than {sorted(found.keys() & metadata.keys())}"
            )

        def write(stream: BinaryIO) -> None:
            with h5py.File(stream, "w") as file:
                file.attrs[DESCRIPTION] = described(
                    {name: (path, rows.fields[path]) for path, name in layout.items()}
                )
                start = 0
                for number, length in enumerate(lengths):
                    group = file.create_group(f"episode_{number}")
                    group.attrs.update(id=number, total_steps=length)
                    _write_episode(h5py, group, rows, layout, twins, start, start + length)
                    start += length

        with new_folder("to_minari", folder) as draft:
            files.make_dir(draft / "data")
            new_file(draft / "data" / "main_data.hdf5", write)
            size = files.size_at(draft / "data" / "main_data.hdf5")
            text = json.dumps({**found, "dataset_size": round(size / 1e6, 1), **metadata}, indent=2)
            new_file(draft / "data" / "metadata.json", lambda stream: stream.write(text.encode()))


def _write_episode(
    h5py: Any,
    group: Any,
    rows: StoredRows,
    layout: Mapping[Path, str],
    twins: Mapping[Path, Path],
    start: int,
    stop: int,
) -> None:
    if TRAJ_IDS in rows.fields:
        group.attrs["traj_id"] = int(rows.rows(TRAJ_IDS, start, start + 1).reshape(-1)[0])
    for path, name in layout.items():
        kind = rows.fields[path]
        shape: tuple[int, ...] = () if path in _STEPS else tuple(kind.shape)
        extra = path in twins
        dtype = h5py.string_dtype() if kind.dtype is None else numpy_dtype(kind.dtype)
        made = group.create_dataset(name, (stop - start + extra, *shape), dtype)
        step = rows.step(path)
        for begin in range(start, stop, step):
            block = rows.rows(path, begin, min(begin + step, stop))
            if block.size:
                made[begin - start : begin - start + len(block)] = block.reshape(len(block), *shape)
        if extra and 0 not in shape:
            made[stop - start] = rows.rows(twins[path], stop - 1, stop)[0]


def _minari_layout(rows: StoredRows, stops: Array) -> tuple[dict[Path, str], dict[Path, Path]]:
    """Return the names of columns in an episode's group, and the next column of each column with T + 1 rows."""
    fields = rows.fields
    pairs = {path[1:]: path for path in observed_twice(rows.storage.format.schema)}
    pairs |= {
        path[1:]: path
        for path, kind in fields.items()
        if path[0] == "next" and kind.dtype is None and fields.get(path[1:]) == kind
    }
    named = [path for path in pairs if path[0] == "observation"]
    observed = named or [path for path in pairs if path[0] not in ("info", "collector")]
    actions = [path for path in fields if path[0] == "action"]
    lacking = [path for path in _STEPS if path not in fields or math.prod(fields[path].shape) != 1]
    if not observed or not actions or lacking:
        raise SchemaError(
            "to_minari: expected observations with next ones, actions, and one value for each step of ('next', "
            f"'reward'), ('next', 'terminated') and ('next', 'truncated'), got the keys {[*map(as_key, fields)]}"
        )
    layout: dict[Path, str] = dict(_STEPS)
    for group, paths in (("observations", observed), ("actions", actions)):
        prefix = int(all(path[0] == paths[0][0] for path in paths))
        layout |= {path: "/".join((group, *path[prefix:])) for path in paths}
    twins: dict[Path, Path] = {}
    for path, following in pairs.items():
        row = _broken_link(rows, path, following, stops)
        if row is None:
            twins[path] = following
        elif path in observed:
            raise SchemaError(
                f"to_minari: key {as_key(following)!r} expected the following step's {as_key(path)!r} inside a "
                f"trajectory, got another value in row {row}; Minari stores each observation once"
            )
    for path in fields:
        if path in layout or path in twins.values() or path == TRAJ_IDS:
            continue
        if path == ("next", "done"):
            _check_done(rows)
            continue
        layout[path] = "/".join(("infos", *(path[1:] if path[0] == "info" else path)))
    return layout, twins


def _broken_link(rows: StoredRows, path: Path, following: Path, stops: Array) -> int | None:
    """Return the first row whose next value isn't the value of the following row of its trajectory; None if none."""
    step = rows.step(path)
    inner = np.ones(rows.count, bool)
    inner[stops - 1] = False
    for start in range(0, rows.count - 1, step):
        stop = min(start + step, rows.count - 1)
        left, right = rows.rows(following, start, stop), rows.rows(path, start + 1, stop + 1)
        if left.dtype.kind != "O":
            left, right = (
                np.ascontiguousarray(side).reshape(stop - start, -1).view(np.uint8) for side in (left, right)
            )
        differ = (left != right).reshape(stop - start, -1).any(1) & inner[start:stop]
        if differ.any():
            return start + int(np.flatnonzero(differ)[0])
    return None


def _check_done(rows: StoredRows) -> None:
    done, terminated, truncated = (
        rows.rows(("next", name), 0, rows.count).reshape(-1) for name in ("done", "terminated", "truncated")
    )
    wrong = np.flatnonzero(done != (terminated | truncated))
    if len(wrong):
        raise SchemaError(
            "to_minari: key ('next', 'done') expected terminated or truncated, which are stored instead, got "
            f"{bool(done[wrong[0]])} in row {int(wrong[0])}"
        )


def _space(rows: StoredRows, layout: Mapping[Path, str], group: str, space: Any) -> dict[str, Any]:
    """Return the description of a space: the given one, or boxes without bounds."""
    if space is not None:
        return _described_space(space)
    tree: dict[str, Any] = {"type": "Dict", "subspaces": {}}
    for path, name in layout.items():
        first, *inner = name.split("/")
        if first != group:
            continue
        if not inner:
            return _box(rows, path)
        level = tree
        for part in inner[:-1]:
            level = level["subspaces"].setdefault(part, {"type": "Dict", "subspaces": {}})
        level["subspaces"][inner[-1]] = _box(rows, path)
    return tree


def _box(rows: StoredRows, path: Path) -> dict[str, Any]:
    kind = rows.fields[path]
    if kind.dtype is None:
        texts = rows.rows(path, 0, rows.count).reshape(-1).tolist()
        charset = "".join(sorted({*"".join(texts)})) or "0"
        return {"type": "Text", "max_length": max(1, *map(len, texts)), "min_length": 0, "charset": charset}
    dtype, shape = numpy_dtype(kind.dtype), tuple(kind.shape)
    if dtype.kind == "b":
        return {"type": "MultiBinary", "n": list(shape) or [1]}
    low, high = (-math.inf, math.inf)
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    bounds = [np.full(shape, bound, object).tolist() for bound in (low, high)]
    return {"type": "Box", "dtype": dtype.name, "shape": list(shape), "low": bounds[0], "high": bounds[1]}


def _described_space(space: Any) -> dict[str, Any]:
    """Return Minari's description of a gymnasium space."""
    kind = type(space).__name__
    if isinstance(space, spaces.Dict):
        return {
            "type": "Dict",
            "subspaces": {name: _described_space(part) for name, part in space.spaces.items()},
        }
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [_described_space(part) for part in space.spaces]}
    names = {
        spaces.Box: ("dtype", "shape", "low", "high"),
        spaces.Discrete: ("dtype", "start", "n"),
        spaces.MultiDiscrete: ("dtype", "nvec", "start"),
        spaces.MultiBinary: ("n",),
        spaces.Text: ("max_length", "min_length"),
    }
    for known, attributes in names.items():
        if isinstance(space, known):
            found = {name: _plain(getattr(space, name)) for name in attributes}
            extra = {"charset": "".join(space.character_list)} if isinstance(space, spaces.Text) else {}
            return {"type": kind, **found, **extra}
    raise UnsupportedError(
        f"to_minari: expected a Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple space, got {space!r:.80}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return value.name
    return (
        value.tolist()
        if isinstance(value, (np.ndarray, np.generic))
        else list(value)
        if isinstance(value, tuple)
        else value
    )
