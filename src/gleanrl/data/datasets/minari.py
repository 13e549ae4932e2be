"""Minari data sets: `from_minari` for the storages hdf5, arrow and parquet, and `MinariExperienceReplay`.

Files are read without the package minari. An episode has T + 1 observations, and T actions, rewards and flags.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl import _util
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path
from gleanrl.data.datasets import hdf5
from gleanrl.data.datasets.conversion import (
    DONE,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Array,
    DescribedColumn,
    ReadOptions,
    RowSource,
    array_of,
    buffer_of,
    columns_of,
    flag_inside,
    free_ids,
    new_columns,
    recast,
    refuse,
    storage_of,
    stored_dtype,
    written_since,
)
from gleanrl.data.datasets.parquet import image, read_json, rows_of, typed
from gleanrl.data.replay_buffers.export import DESCRIPTION
from gleanrl.data.replay_buffers.export_minari import minari_id, minari_root
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter
from gleanrl.data.trajectories import EPISODE, TRAJ_IDS
from gleanrl.errors import DatasetError, UnsupportedError

_STEPS: dict[str, Path] = {
    "actions": ("action",),
    "rewards": REWARD,
    "terminations": TERMINATED,
    "truncations": TRUNCATED,
}
_OBSERVED: dict[str, Path] = {"observations": ("observation",), "infos": ("info",)}
_EPISODE = re.compile(r"episode_(\d+)", re.ASCII)
_ENTRY = re.compile(r"_index_(\d+)", re.ASCII)  # of a Tuple space
_BATCH_ROWS = 1 << 14
_FIRST_ID = -2
_MOST_EXPANSION = 1100  # see `hdf5.check`


class EpisodeArray(NamedTuple):
    """One array of each episode, with the paths of its columns in the buffer."""

    name: Path
    """Its path in the file."""
    extra: int
    """1 if it has T + 1 rows, else 0."""
    root: Path | None
    """The column of its first T rows."""
    following: Path | None
    """The column of its rows from the second on."""
    source: RowSource
    """The rows of the first episode. All other episodes must have their shape and dtype."""


def from_minari(
    dataset: Any,
    *,
    root: str | os.PathLike[str] | None = None,
    episodes: Sequence[int] | None = None,
    infos: bool = True,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of a local Minari data set of any storage (hdf5, arrow, parquet). Minari isn't needed.

    The buffer refuses writes. The last observation of an episode is in the file, so no row is dropped. Episodes are in
    the order of their numbers, and episode `k` has the trajectory id ``-2 - k``. Dict spaces become nested keys, and
    the entries of Tuple spaces are called ``"0"``, ``"1"`` and so on. Discrete values and texts are stored as in the
    file. Encoded images are decoded.

    Infos are decided array by array. With T + 1 rows for T steps an info is stored at ``("info", name)`` and
    ``("next", "info", name)``. With T rows it is stored below ``next`` only. Seeds and options aren't read.

    Args:
        dataset: the id of a local data set, the path of its folder, or a `minari.MinariDataset`, whose selection of
            episodes counts.
        root: the folder of all data sets. None for the environment variable ``MINARI_DATASETS_PATH``, or
            ``~/.minari/datasets``.
        episodes: the numbers of the episodes to read, in this order. None for all, of which none may be missing.
        infos: whether infos are read. Infos whose keys or shapes differ between episodes can't be stored.
        **options: see `from_arrays`.

    Raises:
        DatasetError: a file is missing or damaged, or an episode has other arrays, shapes or lengths than the first
            one; the message names file, episode and array.
        InvalidArgumentError: `dataset` isn't an id, or a bad value.
        CapacityError: too little memory or disk space.
        MissingLibraryError: h5py or pyarrow isn't installed, or Pillow for images.
    """
    shared = ReadOptions.of(options)
    data, chosen = _folder_of(dataset, root)
    storage = read_minari(data, chosen if episodes is None else episodes, infos, shared)
    return buffer_of(storage, shared)


def _folder_of(dataset: Any, root: str | os.PathLike[str] | None) -> tuple[FilePath, Sequence[int] | None]:
    """Return the folder with the files of a data set, and the numbers of its selected episodes."""
    loaded = getattr(dataset, "storage", None)
    if loaded is not None:
        return FilePath(loaded.data_path), [*map(int, dataset.episode_indices)]
    if isinstance(dataset, os.PathLike) or (isinstance(dataset, str) and os.path.isabs(dataset)):
        folder = FilePath(dataset)
        return (folder / "data" if (folder / "data").is_dir() else folder), None
    folder = minari_root(root) / minari_id(dataset) / "data"
    if not folder.is_dir():
        raise DatasetError(
            f"{dataset}: expected the data set in {folder}, got no such folder; `minari download {dataset}` fetches it"
        )
    return folder, None


def read_minari(
    data: FilePath,
    episodes: Sequence[int] | None,
    infos: bool,
    options: ReadOptions,
    ids: Path = TRAJ_IDS,
) -> TensorStorage:
    """Return the records of a data set; see `from_minari`.

    Args:
        data: the folder with ``metadata.json``.
        episodes: numbers of episodes.
        infos: whether infos are read.
        options: the shared arguments.
        ids: the path of the trajectory ids; at ``episode`` they are the numbers of the episodes.
    """
    metadata = read_json(data / "metadata.json")
    kind = metadata.get("data_format", "hdf5")
    readers = {"hdf5": _hdf5_episodes, "arrow": _arrow_episodes, "parquet": _arrow_episodes}
    if not isinstance(kind, str) or kind not in readers:
        raise DatasetError(
            f"{data / 'metadata.json'}: expected data_format {' or '.join(readers)}, got {kind!r}"
        )
    with readers[kind](data, metadata, kind) as reader:
        numbers = _numbers(data, reader.numbers, episodes, metadata)
        return _read(data, reader, numbers, infos, options, ids)


def _numbers(
    data: FilePath, found: set[int], episodes: Sequence[int] | None, metadata: Mapping[str, Any]
) -> list[int]:
    if episodes is None:
        total = metadata.get("total_episodes", len(found))
        if total != len(found) or found != {*range(len(found))}:
            missing = sorted({*range(len(found) + 1)} - found)[:5]
            raise DatasetError(
                f"{data}: expected the episodes 0 to {total} (not included), got {len(found)}, without {missing}; pass "
                "episodes= with the numbers to read"
            )
        return sorted(found)
    missing = sorted({*episodes} - found)
    if missing or len({*episodes}) != len(episodes):
        raise DatasetError(
            f"{data}: episodes: expected numbers of stored episodes, each once, got {missing or episodes}"
        )
    return [*episodes]


def _read(
    data: FilePath,
    reader: _EpisodeReader,
    numbers: Sequence[int],
    infos: bool,
    options: ReadOptions,
    ids: Path,
) -> TensorStorage:
    where = os.fspath(data)
    steps = [reader.steps(number) for number in numbers]
    total = sum(steps)
    if not numbers or min(steps) < 1 or total > _MOST_EXPANSION * reader.bytes:
        raise DatasetError(
            f"{where}: expected episodes of at least one step, together as many as {reader.bytes} bytes can hold, got "
            f"{len(numbers)} episodes with {total} steps"
        )
    first = _episode(reader, numbers[0], infos)
    layout = [*_layout(f"{where}: episode {numbers[0]}", first, steps[0], reader.described)]
    fields: dict[Path, Field] = {ids: Field(torch.Size(()), torch.int64)}
    for leaf in layout:
        kind = Field(torch.Size(leaf.source.shape), leaf.source.dtype)
        if leaf.root == REWARD:
            kind = Field(kind.shape, options.rewards(kind.dtype, own=bool(reader.described)))
        if leaf.following is not None and not options.next_observation and leaf.name[0] == "observations":
            leaf = leaf._replace(following=None)
        fields |= {path: kind for path in (leaf.root, leaf.following) if path is not None}
    fields[DONE] = Field(torch.Size((1,)), torch.bool)
    columns = new_columns(where, fields, total, options)
    arrays = {path: array_of(column) for path, column in columns.items()}
    start, saved = 0, []
    for number, count in zip(numbers, steps, strict=True):
        episode = first if number == numbers[0] else _episode(reader, number, infos)
        _compare(f"{where}: episode {number}", episode, count, layout)
        for leaf in layout:
            _copy_episode(episode[leaf.name], leaf, arrays, start, count)
        inner = slice(start, start + count - 1)
        inside = np.flatnonzero(arrays[TERMINATED][inner] | arrays[TRUNCATED][inner])
        if options.verify and not reader.described and len(inside):
            raise flag_inside(f"{where}: episode {number}", int(inside[0]))
        arrays[ids][start : start + count] = number if ids == EPISODE else _FIRST_ID - number
        saved.append(reader.saved_id(number) if reader.described else None)
        start += count
    if ids == TRAJ_IDS and None not in saved:  # the ids that a buffer had when it was written
        arrays[ids][:] = free_ids(np.repeat(np.array(saved, np.int64), steps))
    np.logical_or(arrays[TERMINATED], arrays[TRUNCATED], out=arrays[DONE])
    return storage_of(where, columns, options, chained=not reader.described)


def _episode(reader: _EpisodeReader, number: int, infos: bool) -> dict[Path, RowSource]:
    """Return the arrays of an episode, with rewards and flags as columns ``(T, 1)``."""
    found = {name: source for name, source in reader.episode(number).items() if infos or name[0] != "infos"}
    for name in _STEPS:
        source = found.get((name,))
        if source is not None and name != "actions":
            found[name,] = source.as_columns()
            if name != "rewards" and source.dtype is not torch.bool:
                found[name,] = RowSource.of(source.where, source.flag()[:, None])
    return found


def _layout(
    where: str, episode: Mapping[Path, RowSource], steps: int, described: Mapping[Path, DescribedColumn]
) -> Iterator[EpisodeArray]:
    """Yield the arrays of an episode with their columns.

    Raises:
        DatasetError: an array is missing, unknown, or has another number of rows than the others.
    """
    groups = {name[0] for name in episode}
    lacking = {"observations", *_STEPS} - groups
    if lacking:
        raise DatasetError(f"{where}: expected {sorted(lacking)}, got {sorted(groups)}")
    for name, source in episode.items():
        key = described[name].path if name in described else None
        if key is None and name[0] not in {*_STEPS, *_OBSERVED}:
            raise DatasetError(f"{where}: expected {[*_OBSERVED, *_STEPS]}, got an array {'/'.join(name)!r}")
        extra = source.rows - steps
        if extra not in ((1,) if name[0] == "observations" else (0, 1) if name[0] == "infos" else (0,)):
            expected = f"{steps + 1}" if name[0] == "observations" else f"{steps}"
            raise DatasetError(
                f"{source.where}: expected {expected} rows for {steps} steps, got {source.rows}"
            )
        entries = tuple(_ENTRY.sub(r"\1", part) for part in name[1:])
        if key is not None:
            yield EpisodeArray(name, extra, key, ("next", *key) if extra else None, source)
        elif name[0] in _STEPS:
            yield EpisodeArray(name, 0, (*_STEPS[name[0]], *entries), None, source)
        else:
            path = (*_OBSERVED[name[0]], *entries)
            yield EpisodeArray(
                name, extra, path if extra else ("next", *path), ("next", *path) if extra else None, source
            )


def _compare(
    where: str, episode: Mapping[Path, RowSource], steps: int, layout: Sequence[EpisodeArray]
) -> None:
    """Raise `DatasetError` unless an episode has the arrays of the first one, with as many rows as it has steps."""
    names = {leaf.name for leaf in layout}
    if episode.keys() != names:
        only = sorted("/".join(name) for name in episode.keys() ^ names)
        advice = (
            "; pass infos=False to leave out infos" if any(name.startswith("infos") for name in only) else ""
        )
        raise DatasetError(f"{where}: expected the arrays of the first episode, got others: {only}{advice}")
    for leaf in layout:
        source, model = episode[leaf.name], leaf.source
        if source.rows != steps + leaf.extra:
            raise DatasetError(
                f"{source.where}: expected {steps + leaf.extra} rows for {steps} steps, got {source.rows}"
            )
        if source.shape != model.shape or source.dtype is not model.dtype:
            raise DatasetError(
                f"{source.where}: expected rows {model.shape} {model.dtype}, as in the first episode, got "
                f"{source.shape} {source.dtype}"
            )


def _copy_episode(
    source: RowSource, leaf: EpisodeArray, arrays: Mapping[Path, Array], start: int, count: int
) -> None:
    """Copy the rows of one episode into its columns, from row `start` on."""
    root = None if leaf.root is None else arrays[leaf.root]
    following = None if leaf.following is None else arrays.get(leaf.following)
    at = 0
    for block in source.blocks():
        end = at + len(block)
        if root is not None:
            stop = min(end, count)
            root[start + at : start + stop] = block[: stop - at]
        if following is not None:
            begin = max(at, 1)
            following[start + begin - 1 : start + end - 1] = block[begin - at :]
        at = end
    if at != source.rows:
        raise DatasetError(f"{source.where}: expected {source.rows} rows, got {at}; the file is damaged")


class _EpisodeReader:
    """Reads the episodes of a data set.

    Attributes:
        numbers: The numbers of the stored episodes.
        bytes: The size of the files.
        described: The keys of arrays in the buffer, if this library wrote the file.
    """

    numbers: set[int]
    bytes: int
    described: Mapping[Path, DescribedColumn] = {}

    def steps(self, number: int) -> int:
        """Return the number of steps of an episode."""
        raise NotImplementedError

    def episode(self, number: int) -> dict[Path, RowSource]:
        """Return the arrays of an episode by path."""
        raise NotImplementedError

    def saved_id(self, number: int) -> int | None:
        """Return the id that an episode had in a buffer, if this library wrote the file."""
        return None


class _Hdf5Reader(_EpisodeReader):
    def __init__(self, path: FilePath, file: Any, space: Any) -> None:
        self._where, self._file, self._space = os.fspath(path), file, space
        self.bytes = path.stat().st_size
        self.numbers = {int(found[1]) for name in file if (found := _EPISODE.fullmatch(name))}
        description = file.attrs.get(DESCRIPTION)
        if description is not None:
            self.described = {
                tuple(name.split("/")): column
                for name, column in columns_of(self._where, description).items()
            }

    def _group(self, number: int) -> Any:
        name = f"episode_{number}"
        found = hdf5.entries(self._where, self._file, name)[name]
        if not isinstance(found, _util.h5py().Group):
            raise DatasetError(f"{self._where}: expected a group {name!r}, got an array")
        return found

    def steps(self, number: int) -> int:
        group = self._group(number)
        stated = group.attrs.get("total_steps")
        if stated is None and "rewards" in group:
            stated = group["rewards"].shape[0]
        return _util.non_negative(f"{self._where}: total_steps of episode {number}", stated)

    def saved_id(self, number: int) -> int | None:
        found = self._group(number).attrs.get("traj_id")
        return None if found is None else int(found)

    def episode(self, number: int) -> dict[Path, RowSource]:
        where = f"{self._where}: episode_{number}"
        return {
            path: self._source(f"{where}/{'/'.join(path)}", path, dataset)
            for path, dataset in hdf5.datasets(where, self._group(number))
        }

    def _source(self, where: str, path: Path, dataset: Any) -> RowSource:
        kind = dataset.dtype if path[0] == "observations" else None
        if kind is not None and (kind == np.uint8 or _util.h5py().check_vlen_dtype(kind) is not None):
            shape = _space_of(self._space, path[1:]).get("shape")
            if shape and len(shape) > 1 and dataset.ndim < 1 + len(shape):
                return _pictures(where, dataset.shape[0], tuple(shape), lambda: ([row] for row in dataset))
        source = hdf5.source_of(where, dataset)
        column = self.described.get(path)
        return source if column is None else recast(source, column.dtype, column.shape)


class _ArrowReader(_EpisodeReader):
    def __init__(self, data: FilePath, metadata: Mapping[str, Any], kind: str) -> None:
        self._data, self._kind = data, kind
        self._spaces = {
            "observations": _space(data, metadata, "observation_space"),
            "actions": _space(data, metadata, "action_space"),
        }
        self.numbers = {
            int(entry.name) for entry in data.iterdir() if entry.name.isdecimal() and entry.is_dir()
        }
        self.bytes = sum(self._file(number).stat().st_size for number in self.numbers)

    def _file(self, number: int) -> FilePath:
        parts = [entry for entry in (self._data / f"{number}").iterdir() if entry.suffix == f".{self._kind}"]
        if len(parts) != 1 or parts[0].is_symlink():
            raise DatasetError(
                f"{self._data / str(number)}: expected one file part-0.{self._kind}, got "
                f"{[part.name for part in parts]}"
            )
        return parts[0]

    def steps(self, number: int) -> int:
        with self._opened(number) as (schema, rows, _):
            stated = read_json(self._data / f"{number}" / "metadata.json").get("total_steps", rows - 1)
            if stated != rows - 1:
                raise DatasetError(
                    f"{self._file(number)}: expected {stated} steps and one row more, as metadata.json says, got "
                    f"{rows} rows"
                )
            return rows - 1

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[Any, int, Callable[[str], Iterator[Any]]]]:
        """Give the schema of an episode's file, its number of rows, and a function that yields a column's arrays."""
        path = self._file(number)
        # Files aren't mapped: the process would be killed if another one cut a file meanwhile.
        with typed(os.fspath(path)):
            check_file = written_since(path)
            if self._kind == "parquet":
                file = _util.pyarrow_parquet().ParquetFile(path)

                def arrays(name: str) -> Iterator[Any]:
                    with typed(os.fspath(path)):
                        for batch in file.iter_batches(_BATCH_ROWS, columns=[name], use_threads=False):
                            yield batch.column(0)
                        check_file()

                yield file.schema_arrow, file.metadata.num_rows, arrays
            else:
                arrow = _util.pyarrow()
                opened = arrow.ipc.open_file(arrow.OSFile(os.fspath(path)))
                batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
                check_file()
                yield (
                    opened.schema,
                    sum(batch.num_rows for batch in batches),
                    lambda name: (batch.column(batch.schema.get_field_index(name)) for batch in batches),
                )

    def episode(self, number: int) -> dict[Path, RowSource]:
        with self._opened(number) as (schema, rows, arrays):
            found: dict[Path, RowSource] = {}
            for field in schema:
                for path, kind in _flat_fields(field, (field.name,)):
                    extra = path[0] in _OBSERVED
                    found[path] = self._source(number, path, kind, rows - (not extra), arrays)
            return found

    def _source(
        self, number: int, path: Path, kind: Any, rows: int, arrays: Callable[[str], Iterator[Any]]
    ) -> RowSource:
        where = f"{self._data / str(number)}: {'/'.join(path)!r}"
        space = _space_of(self._spaces.get(path[0], {}), path[1:])
        stated = (kind.metadata or {}).get(b"shape", b"").decode()
        shape = tuple(space.get("shape") or ()) or tuple(int(part) for part in stated.split(",") if part)

        def parts() -> Iterator[Any]:
            at = 0
            for array in arrays(path[0]):
                for name in path[1:]:
                    array = array.field(name)
                array = array[: max(0, rows - at)]
                at += len(array)
                if len(array):
                    yield array

        types = _util.pyarrow().types
        if types.is_binary(kind.type) or types.is_large_binary(kind.type):
            return _pictures(where, rows, shape, lambda: (array.to_pylist() for array in parts()))

        def blocks() -> Iterator[Array]:
            for array in parts():
                block = rows_of(where, array)
                if block[:1].size != np.prod(shape or block.shape[1:]):
                    raise DatasetError(f"{where}: expected rows {shape}, got {block.shape[1:]}")
                yield block.reshape(len(block), *shape) if shape else block

        first = next(blocks(), None)
        if first is None:
            raise DatasetError(f"{where}: expected {rows} rows, got none")
        return RowSource(where, rows, first.shape[1:], stored_dtype(where, first.dtype), blocks)


def _flat_fields(field: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield path and field of each array in a column, which may be a struct of structs."""
    if _util.pyarrow().types.is_struct(field.type):
        for child in field.type:
            yield from _flat_fields(child, (*path, child.name))
    else:
        yield path, field


def _pictures(
    where: str, rows: int, shape: tuple[int, ...], encoded: Callable[[], Iterable[Sequence[Any]]]
) -> RowSource:
    """Return a source that decodes images, given as rows of bytes."""

    def blocks() -> Iterator[Array]:
        for items in encoded():
            yield np.stack([image(where, None if item is None else bytes(item), shape) for item in items])

    return RowSource(where, rows, shape, torch.uint8, blocks)


def _space(data: FilePath, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the description of a space, which may contain Infinity; empty if there is none."""
    text = metadata.get(name)
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError as cause:
        raise DatasetError(
            f"{data / 'metadata.json'}: {name}: expected a space as JSON, got: {cause}"
        ) from cause
    return found if isinstance(found, dict) else {}


def _space_of(space: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the description of a part of a space; empty if there is no such part."""
    for name in path:
        inner = space.get("subspaces")
        entry = _ENTRY.sub(r"\1", name)
        if isinstance(inner, dict) and name in inner:
            space = inner[name]
        elif isinstance(inner, list) and entry.isdecimal() and int(entry) < len(inner):
            space = inner[int(entry)]
        else:
            return {}
    return space


@contextmanager
def _hdf5_episodes(data: FilePath, metadata: Mapping[str, Any], kind: str) -> Iterator[_EpisodeReader]:
    path = data / "main_data.hdf5"
    if path.is_symlink() or not path.is_file():
        raise DatasetError(f"{data}: expected a file main_data.hdf5, got none or a link")
    with hdf5.opened(path) as file:
        yield _Hdf5Reader(path, file, _space(data, metadata, "observation_space"))


@contextmanager
def _arrow_episodes(data: FilePath, metadata: Mapping[str, Any], kind: str) -> Iterator[_EpisodeReader]:
    yield _ArrowReader(data, metadata, kind)


class MinariExperienceReplay(TensorDictReplayBuffer):
    """A buffer of a local Minari data set, under TorchRL's name and with its keys; see `from_minari`.

    Records have ``episode``, the number of the episode, instead of trajectory ids. Rewards keep the dtype of the file.
    Nothing is downloaded.

    Args:
        dataset_id: the id of a data set in Minari's folder.
        batch_size: the default number of transitions in a batch.
        root: the folder of all data sets; see `from_minari`.
        download: no effect if the data set exists.
        split_trajs: only False.
        load_from_local_minari: no effect, because a data set is always read from Minari's folder.
        **options: see `from_minari`, and `TensorDictReplayBuffer`.

    Raises:
        DatasetError: see `from_minari`.
        UnsupportedError: `split_trajs`.
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool = True,
        split_trajs: bool = False,
        load_from_local_minari: bool = True,
        episodes: Sequence[int] | None = None,
        infos: bool = True,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        refuse(name, split_trajs=split_trajs)
        if download not in (True, False):
            raise UnsupportedError(
                f"{name}: download={download!r} isn't served: download by `minari download {dataset_id}`"
            )
        shared = ReadOptions.of({"reward_dtype": None, **options})
        data, _ = _folder_of(dataset_id, root)
        storage = read_minari(data, episodes, infos, shared, EPISODE)
        super().__init__(
            storage=storage, writer=ImmutableDatasetWriter(), batch_size=batch_size, **shared.buffer
        )
