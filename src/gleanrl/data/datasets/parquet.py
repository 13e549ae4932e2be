"""Parquet files: `from_parquet` for rows of any program, and `from_lerobot` for folders in LeRobot's layout."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gleanrl import _util
from gleanrl._arrays.tensordicts import Path, key_argument
from gleanrl.data.datasets.conversion import (
    OUTCOMES,
    Array,
    ReadOptions,
    RowSource,
    buffer_of,
    convert,
    described,
    stored_dtype,
    written_since,
)
from gleanrl.data.datasets.videos import Clip, video_source
from gleanrl.data.replay_buffers.export import DESCRIPTION
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.trajectories import TRAJ_IDS
from gleanrl.errors import DatasetError, GleanError, InvalidArgumentError

_BATCH_ROWS = 1 << 14
_BATCH_BYTES = 4 << 20
_MOST_RATIO = (
    10_000  # of rows' bytes to a file's; encodings of repeated values exceed that of plain compression
)
_SMALL_BYTES = 1 << 30
_NUMBER = re.compile(r"(\d+)")
_SLOT = re.compile(r"\{(\w+)(?::0(\d)d)?\}")


@contextmanager
def parsed(where: object) -> Iterator[None]:
    """Raise the errors of code that takes metadata apart as `DatasetError`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as cause:
        if isinstance(cause, GleanError):
            raise
        raise DatasetError(
            f"{where}: expected metadata of this format, got other values: {cause!r}"
        ) from cause


@contextmanager
def typed(where: str) -> Iterator[None]:
    """Raise errors of pyarrow as `DatasetError`."""
    arrow = _util.pyarrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as cause:
        if isinstance(cause, FileNotFoundError):
            raise
        raise DatasetError(f"{where}: expected a readable Parquet or Arrow file, got: {cause}") from cause


def rows_of(where: str, array: Any) -> Array:
    """Return the rows of an Arrow array as ``[rows, *sizes]``; strings and bytes as objects.

    Raises:
        DatasetError: null values, lists of different lengths, or a type that columns can't hold.
    """
    types = _util.pyarrow().types
    kind, sizes, rows = array.type, [], len(array)
    while True:
        if types.is_dictionary(kind):
            array = array.dictionary_decode()
        elif isinstance(kind, _util.pyarrow().BaseExtensionType):
            array = array.storage
        elif array.null_count or types.is_null(kind):
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise DatasetError(f"{where}: expected a value in each row, got null in row {row}")
        elif types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            array = array.flatten()
        elif types.is_list(kind) or types.is_large_list(kind):
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            size = int(lengths[0]) if len(lengths) else 0
            if bool((lengths != size).any()):
                other = int(lengths[np.flatnonzero(lengths != size)[0]])
                raise DatasetError(f"{where}: expected lists of one length, got {size} and {other}")
            sizes.append(size)
            array = array.flatten()
        else:
            break
        kind = array.type
    texts = types.is_string(kind) or types.is_large_string(kind)
    if not (texts or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        if not types.is_binary(kind) and not types.is_large_binary(kind):
            raise DatasetError(
                f"{where}: expected numbers, bools, strings or lists of them, got {kind}; cast it first"
            )
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, *sizes)


class _ParquetFiles:
    """Parquet files with the same columns, whose rows follow each other.

    Args:
        where: the file or folder, for error messages.
        paths: the files, in order.
    """

    def __init__(self, where: str, paths: Sequence[FilePath]) -> None:
        self._where = where
        self._opened = []
        for path in paths:
            if path.is_symlink() or not path.is_file():
                raise DatasetError(f"{where}: expected {path} to be a file in the folder, got none or a link")
            with typed(str(path)):
                check_file = written_since(path)
                file = _util.pyarrow_parquet().ParquetFile(path, pre_buffer=False)
                self._opened.append((path, file, check_file))
        if not self._opened:
            raise DatasetError(f"{where}: expected Parquet files, got none")
        self.schema = self._opened[0][1].schema_arrow
        for path, file, _ in self._opened:
            if not file.schema_arrow.equals(self.schema):
                expected, found = (
                    {f"{column.name}: {column.type}" for column in schema}
                    for schema in (self.schema, file.schema_arrow)
                )
                raise DatasetError(
                    f"{path}: expected the columns of the first file with their types, got {sorted(found - expected)} "
                    f"instead of {sorted(expected - found)}"
                )
            size = sum(
                file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)
            )
            if max(size, file.metadata.num_rows) > max(_SMALL_BYTES, _MOST_RATIO * path.stat().st_size):
                raise DatasetError(
                    f"{path}: expected as many values as the file holds, got {file.metadata.num_rows} rows in "
                    f"{path.stat().st_size} bytes"
                )
        self.rows = sum(file.metadata.num_rows for _, file, _ in self._opened)
        if not self.rows:
            raise DatasetError(f"{where}: expected at least one row, got none")

    def description(self) -> Any:
        """Return the text by which this library describes its own files; None in other files."""
        return (self.schema.metadata or {}).get(DESCRIPTION.encode())

    def arrays(self, column: str) -> Iterator[Any]:
        """Yield the Arrow arrays of one column, in order."""
        for path, file, check_file in self._opened:
            with typed(f"{path}: {column!r}"):
                for batch in file.iter_batches(self._step(file), columns=[column], use_threads=False):
                    yield batch.column(0)
                check_file()

    def _step(self, file: Any) -> int:
        widths = [file.metadata.row_group(0).total_byte_size // max(1, file.metadata.row_group(0).num_rows)]
        return int(min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, *widths))))

    def source(self, column: str, decode: Callable[[Any], Array] | None = None) -> RowSource:
        """Return the source of one column; `decode` turns an Arrow array into rows."""
        where = f"{self._where}: {column!r}"
        read = decode or (lambda array: rows_of(where, array))

        def blocks() -> Iterable[Array]:
            for array in self.arrays(column):
                block = read(array)
                if block.shape[1:] != shape or block.dtype != kind:
                    raise DatasetError(
                        f"{where}: expected rows {shape} {kind}, got {block.shape[1:]} {block.dtype}"
                    )
                yield block

        filled = next((array for array in self.arrays(column) if len(array)), None)
        if filled is None:
            raise DatasetError(f"{where}: expected {self.rows} rows, got none; the file is damaged")
        first = read(filled[:1])
        shape, kind = first.shape[1:], first.dtype
        if kind.kind == "O" and not isinstance(first.flat[0], str):
            raise DatasetError(f"{where}: expected numbers, bools, strings or lists of them, got bytes")
        return RowSource(where, self.rows, shape, stored_dtype(where, kind), blocks)


def from_parquet(
    path: str | os.PathLike[str],
    columns: Mapping[Any, str] | None = None,
    *,
    episode: str | None = None,
    step: str | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of the steps in a Parquet file, or in all Parquet files of a folder.

    Each row is a step, and the rows of an episode follow each other. Files are read in the order of their paths, where
    numbers count as numbers. A file of `ReplayBuffer.to_parquet` gives the records that were written. In other files, a
    dot in the name of a column makes a group: ``observation.state`` becomes ``("observation", "state")``. Episodes and
    their last rows are treated as in `from_arrays`.

    Args:
        path: a file or a folder.
        columns: names of columns by key; None for all columns, under their own names.
        episode: the column with the numbers of the episodes. None if flags tell where episodes end.
        step: the column that counts the steps of each episode; it is checked and not stored. None if there is none.
        **options: see `from_arrays`. Rewards of a file of `ReplayBuffer.to_parquet` keep their dtype.

    Raises:
        DatasetError: a file is damaged or has other columns; null values; lists of different lengths; or rows in
            another order. The message names file and column.
        InvalidArgumentError: a bad value.
        FileNotFoundError: there is no such file.
        CapacityError: too little memory or disk space.
        MissingLibraryError: pyarrow isn't installed.
    """
    shared, where = ReadOptions.of(options), os.fspath(path)
    files = _ParquetFiles(where, _parquet_files(where, FilePath(path)))
    description = files.description()
    if description is not None and columns is None:
        if episode is not None or step is not None:
            raise InvalidArgumentError(
                f"episode, step: {where} was written by to_parquet and tells where episodes end; leave the arguments "
                "out"
            )
        found = {name: files.source(name) for name in files.schema.names}
        return buffer_of(described(where, description, found, shared), shared)
    chosen = (
        {_key_of(name): name for name in files.schema.names}
        if columns is None
        else {key_argument("columns", key): name for key, name in columns.items()}
    )
    chosen = {key: name for key, name in chosen.items() if name not in (episode, step)}
    for name in (*chosen.values(), *(name for name in (episode, step) if name is not None)):
        _require_column(where, files, name)
    sources = {path: files.source(name) for path, name in chosen.items()}
    if episode is not None:
        sources[TRAJ_IDS] = files.source(episode)
    ends = None
    if step is not None:
        ends = _check_steps(where, files.source(step), files.source(episode) if episode else None)
    return buffer_of(convert(where, sources, shared, ends), shared)


def _require_column(where: str, files: _ParquetFiles, name: str) -> None:
    if name not in files.schema.names:
        raise DatasetError(f"{where}: expected a column {name!r}, got {files.schema.names}")


def _key_of(name: str) -> Path:
    path = tuple(name.split("."))
    return ("next", *path) if len(path) == 1 and path[0] in OUTCOMES else path


def _check_steps(where: str, steps: RowSource, episodes: RowSource | None) -> Array:
    """Return the last rows of the episodes, by a column that counts their steps.

    Raises:
        DatasetError: the steps of an episode don't increase by one.
    """
    counts = steps.read().reshape(-1).astype(np.int64)
    numbers = None if episodes is None else episodes.read().reshape(-1)
    starts = counts[1:] <= counts[:-1] if numbers is None else numbers[1:] != numbers[:-1]
    wrong = np.flatnonzero(np.where(starts, counts[1:] != counts[0], counts[1:] != counts[:-1] + 1))
    if len(wrong):
        row = int(wrong[0]) + 1
        raise DatasetError(
            f"{steps.where}: expected steps that count up from {counts[0]} in each episode, got {counts[row]} after "
            f"{counts[row - 1]} in row {row}; sort the rows, or leave `step` out if steps are missing on purpose"
        )
    return np.append(starts, True)


def _parquet_files(where: str, path: FilePath) -> list[FilePath]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{where}: expected a Parquet file or a folder of them, got no such path")
    found = [file for file in path.rglob("*.parquet") if not file.name.startswith(("_", "."))]
    return sorted(found, key=lambda file: _natural(file.relative_to(path).as_posix()))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``part-2`` comes before ``part-10``."""
    parts = _NUMBER.split(text)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def from_lerobot(
    folder: str | os.PathLike[str], *, video: bool = True, **options: Any
) -> TensorDictReplayBuffer:
    """Return a buffer of a folder in LeRobot's layout, versions 2 and 3. The package lerobot isn't needed.

    A dot in the name of a column makes a group: ``observation.state`` becomes ``("observation", "state")``. The number
    of an episode becomes the trajectory id ``-2 - episode_index``; ``frame_index``, ``timestamp`` and ``task_index``
    are stored under their names. A data set without rewards gives records without rewards.

    LeRobot stores no observation after the last action. So the last frame of each episode is dropped, and the frame
    before it becomes truncated, as `from_arrays` says. For imitation, ``next_observation=False`` keeps all frames.
    ``next.done`` is read as done, and as terminated if ``next.truncated`` doesn't say otherwise.

    Frames of videos become uint8 in the shape that ``meta/info.json`` says. A row takes the frame with its number, and
    the frame's time must be the ``timestamp`` of the row, with a tolerance of half a frame.

    Args:
        folder: the folder that contains ``meta`` and ``data``.
        video: whether to decode videos, which needs torchcodec (extra ``video``); False leaves them out.
        **options: see `from_arrays`.

    Raises:
        DatasetError: a file is missing or damaged, a path leaves the folder, or episodes or videos have other lengths,
            sizes or times than the metadata say.
        UnsupportedError: the data set has videos, `video` is True, and torchcodec can't be imported.
        CapacityError: too little memory or disk space.
        MissingLibraryError: pyarrow isn't installed, or Pillow for images.
    """
    shared, root = ReadOptions.of(options), FilePath(folder)
    info = read_json(root / "meta" / "info.json")
    version, features = str(info.get("codebase_version")), info.get("features")
    if not re.fullmatch(r"v?[23]\.\d+", version) or not isinstance(features, Mapping):
        raise DatasetError(
            f"{root / 'meta' / 'info.json'}: expected codebase_version v2.x or v3.x and features, got {version!r}"
        )
    where = os.fspath(root)
    with parsed(root / "meta"):
        kinds = {name: feature.get("dtype") for name, feature in features.items()}
        shapes = {name: _shape_of(feature) for name, feature in features.items()}
        lengths, file_values = _episodes(root, version, info)
        template = info.get("data_path")
        paths = [
            within(root, _filled_in(root, "data_path", template, values))
            for values in dict.fromkeys(file_values)
        ]
        videos = [name for name, kind in kinds.items() if kind == "video"]
        decoder = _util.video_decoder(f"{where}: {videos}") if videos and video else None
        clips = {name: _clips(root, version, info, name, lengths, file_values) for name in videos if decoder}
    files = _ParquetFiles(where, paths)
    if (
        sum(length for _, length in lengths) != files.rows
        or info.get("total_frames", files.rows) != files.rows
    ):
        raise DatasetError(
            f"{where}: expected as many rows as the metadata say, {info.get('total_frames')} in all and "
            f"{sum(length for _, length in lengths)} in the episodes, got {files.rows}"
        )
    for name in (*features, "episode_index", "frame_index", *(["timestamp"] if clips else [])):
        if name not in videos:
            _require_column(where, files, name)
    numbers = np.repeat([number for number, _ in lengths], [length for _, length in lengths]).astype(np.int64)
    _compare(files.source("episode_index"), numbers, "as meta/episodes says")
    frames = np.concatenate([np.arange(length) for _, length in lengths])
    _compare(files.source("frame_index"), frames, "as the lengths of the episodes say")
    sources = {
        _key_of(name): files.source(name, _decoder(f"{where}: {name!r}", shapes[name]))
        if kinds[name] == "image"
        else _shaped(files.source(name), shapes[name])
        for name in features
        if name not in (*videos, "episode_index", "index")
    }
    if clips:
        with parsed(where):
            times = files.source("timestamp").read().reshape(-1).astype(np.float64)
            sources |= {
                _key_of(name): video_source(
                    f"{where}: {name!r}", decoder, features[name], float(info["fps"]), found, times
                )
                for name, found in clips.items()
            }
    sources[TRAJ_IDS] = RowSource.of(where, -2 - numbers)
    ends = np.append(numbers[1:] != numbers[:-1], True)
    return buffer_of(convert(where, sources, shared, ends), shared)


def _shape_of(feature: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a feature's rows; images are (H, W, C)."""
    shape, names = tuple(map(int, feature.get("shape") or ())), feature.get("names")
    if feature.get("dtype") == "image" and isinstance(names, list) and str(names[0]).startswith("channel"):
        return (*shape[1:], shape[0])  # (C, H, W) in older data sets
    return shape


def _shaped(source: RowSource, shape: tuple[int, ...]) -> RowSource:
    """Check the shape of a column; a scalar column may be described as ``[1]``."""
    if source.shape != shape and (source.shape, shape) != ((), (1,)):
        raise DatasetError(
            f"{source.where}: expected rows {shape}, as meta/info.json says, got {source.shape}"
        )
    return source


def _compare(source: RowSource, expected: Array, why: str) -> None:
    at = 0
    if source.rows != len(expected):
        raise DatasetError(f"{source.where}: expected {len(expected)} rows, {why}, got {source.rows}")
    for block in source.blocks():
        wrong = np.flatnonzero(block.reshape(-1) != expected[at : at + len(block)])
        if len(wrong):
            row = at + int(wrong[0])
            raise DatasetError(
                f"{source.where}: expected {expected[row]} in row {row}, {why}, got {block.reshape(-1)[wrong[0]]}; "
                "episodes are missing or reordered"
            )
        at += len(block)


def _episodes(
    root: FilePath, version: str, info: Mapping[str, Any]
) -> tuple[list[tuple[int, int]], list[tuple[tuple[str, int], ...]]]:
    """Return number and length of each episode, and the values for the path template of each episode's file."""
    if version.lstrip("v").startswith("2"):
        listing = root / "meta" / "episodes.jsonl"
        rows = [json.loads(line) for line in text_of(listing).splitlines() if line.strip()]
        per_chunk = int(info.get("chunks_size") or 1000)
        found = [
            (
                int(row["episode_index"]),
                int(row["length"]),
                (
                    ("episode_chunk", int(row["episode_index"]) // per_chunk),
                    ("episode_index", int(row["episode_index"])),
                ),
            )
            for row in rows
        ]
    else:
        listing = root / "meta" / "episodes"
        names = ("episode_index", "length", "data/chunk_index", "data/file_index")
        found = [
            (number, length, (("chunk_index", chunk), ("file_index", file)))
            for number, length, chunk, file in _table(listing, names)
        ]
    found.sort()
    numbers, lengths = [number for number, _, _ in found], [length for _, length, _ in found]
    total = info.get("total_episodes", len(found))
    if numbers != [*range(len(found))] or len(found) != total or min(lengths, default=0) < 1:
        raise DatasetError(
            f"{listing}: expected the episodes 0 to {total} (not included), each with a frame or more, got "
            f"{numbers[:5]} of the lengths {lengths[:5]} and so on"
        )
    return [(number, length) for number, length, _ in found], [values for _, _, values in found]


def _clips(
    root: FilePath,
    version: str,
    info: Mapping[str, Any],
    name: str,
    lengths: Sequence[tuple[int, int]],
    file_values: Sequence[tuple[tuple[str, int], ...]],
) -> list[Clip]:
    """Return the clip of each episode in the videos of the feature `name`."""
    places: Iterable[tuple[tuple[tuple[str, int], ...], float, float | None]]
    if version.lstrip("v").startswith("2"):
        places = [(values, 0.0, None) for values in file_values]
    else:
        columns = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
        table = _table(
            root / "meta" / "episodes", ("episode_index", *(f"videos/{name}/{one}" for one in columns))
        )
        places = [
            ((("chunk_index", chunk), ("file_index", file)), start, stop)
            for _, chunk, file, start, stop in sorted(table)
        ]
    template = info.get("video_path")
    return [
        Clip(
            number,
            within(root, _filled_in(root, "video_path", template, (*values, ("video_key", name)))),
            start,
            stop,
            length,
        )
        for (number, length), (values, start, stop) in zip(lengths, places, strict=True)
    ]


def _table(listing: FilePath, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows of some columns in a folder of Parquet files."""
    files = _ParquetFiles(os.fspath(listing), _parquet_files(os.fspath(listing), listing))
    for name in names:
        _require_column(os.fspath(listing), files, name)
    return [*zip(*(files.source(name).read().reshape(-1).tolist() for name in names), strict=True)]


def _filled_in(root: FilePath, name: str, template: Any, values: Iterable[tuple[str, Any]]) -> str:
    """Return the path that the template `name` of ``meta/info.json`` gives for some values."""
    known = dict(values)

    def number(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise DatasetError(f"{root}: expected {name} with {[*known]}, got {template!r}")
        return str(known[found[1]]).zfill(int(found[2] or 1))

    if not isinstance(template, str):
        raise DatasetError(f"{root}: expected a text {name} in meta/info.json, got {template!r}")
    return _SLOT.sub(number, template)


def within(root: FilePath, relative: str) -> FilePath:
    """Return the path of a file in a folder.

    Raises:
        DatasetError: the path leaves the folder, also by a link.
    """
    path = root / relative
    if FilePath(relative).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise DatasetError(f"{root}: expected a path in this folder, got {relative!r}")
    return path


def text_of(path: FilePath) -> str:
    """Return a text of metadata.

    Raises:
        DatasetError: the file doesn't exist, is larger than any such text, or isn't UTF-8.
    """
    try:
        if path.stat().st_size > _SMALL_BYTES // 4:
            raise DatasetError(f"{path}: expected metadata, got {path.stat().st_size} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise DatasetError(f"{path}: expected a text of metadata, got: {cause}") from cause


def read_json(path: FilePath) -> dict[str, Any]:
    """Return the object in a JSON file, which may contain Infinity and NaN.

    Raises:
        DatasetError: there is no such file, or it has another content.
    """
    try:
        found = json.loads(text_of(path))
    except (ValueError, RecursionError) as cause:
        if isinstance(cause, DatasetError):
            raise
        raise DatasetError(f"{path}: expected JSON, got: {cause}") from cause
    if not isinstance(found, dict):
        raise DatasetError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _decoder(where: str, shape: tuple[int, ...]) -> Callable[[Any], Array]:
    def decode(array: Any) -> Array:
        if not _util.pyarrow().types.is_struct(array.type) or array.type.get_field_index("bytes") < 0:
            raise DatasetError(f"{where}: expected images as bytes, got {array.type}")
        return np.stack([image(where, item, shape) for item in array.field("bytes").to_pylist()])

    return decode


def image(where: str, data: Any, shape: tuple[int, ...]) -> Array:
    """Return the pixels of an encoded image, uint8 in the expected shape.

    Raises:
        DatasetError: the bytes aren't such an image.
        MissingLibraryError: Pillow isn't installed.
    """
    if data is None:
        raise DatasetError(
            f"{where}: expected an image {shape}, got a path or nothing; embed the images in the file"
        )
    pillow = _util.pillow()
    read_image = pillow.open
    try:
        with read_image(io.BytesIO(data)) as picture:
            size = (picture.height, picture.width)  # known before the pixels are decoded
            pixels = np.asarray(picture) if size == tuple(shape[:2]) else None
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as cause:
        raise DatasetError(f"{where}: expected an encoded image, got: {cause}") from cause
    if pixels is None or pixels.dtype != np.uint8 or pixels.size != np.prod(shape):
        found = size if pixels is None else pixels.shape
        raise DatasetError(f"{where}: expected an image {shape}, got {found}")
    return pixels.reshape(shape)
