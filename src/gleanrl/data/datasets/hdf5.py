"""HDF5 files: `from_hdf5` for D4RL's layout and others with one row for each step, and `D4RLExperienceReplay`.

A file may come from anywhere, so its links, sizes and filters are checked before memory is allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gleanrl import _util
from gleanrl._arrays.tensordicts import Path, key_argument
from gleanrl.data.datasets.conversion import (
    BLOCK_BYTES,
    TERMINATED,
    TRUNCATED,
    Array,
    ReadOptions,
    RowSource,
    buffer_of,
    convert,
    described,
    end_mask,
    refuse,
    stored_dtype,
    written_since,
)
from gleanrl.data.replay_buffers.export import D4RL, DESCRIPTION
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter
from gleanrl.errors import DatasetError, GleanError, InvalidArgumentError

_REQUIRED = ("observations", "actions", "rewards", "terminals")
_FILTERS = frozenset((1, 2, 3, 4, 5, 6, 32000))  # HDF5's own filters and lzf; none of them loads a plugin
_MOST_RATIO = 1100  # Deflate expands a byte to at most 1032.
_SMALL_BYTES = 64 << 20  # a dataset up to this size may consist of values that were never written
_DEEPEST = 16
_CACHE_BYTES = 4 << 20  # for each open dataset
_MOST_BLOCK_BYTES = 32 << 20
_TEXTS = 1 << 14  # strings in a block


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open an HDF5 file for reading.

    Raises:
        DatasetError: the file is damaged, it changes meanwhile, or it isn't an HDF5 file.
        FileNotFoundError: there is no such file.
        MissingLibraryError: h5py isn't installed.
    """
    h5py = _util.h5py()
    if FilePath(path).is_dir():
        raise DatasetError(f"{path}: expected an HDF5 file, got a folder")
    with open(path, "rb") as start:
        head = start.read(64)
    if head.startswith(b"gleanrl h5"):
        raise DatasetError(
            f"{path}: expected a data set, got a checkpoint of a buffer; load it by the buffer's loads(), and write "
            "it by to_hdf5()"
        )
    check_file = written_since(path)
    try:
        file = h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES)
    except OSError as cause:
        kind = (
            "a damaged HDF5 file" if head.startswith(b"\x89HDF") else f"a file that begins with {head[:8]!r}"
        )
        raise DatasetError(f"{path}: expected an HDF5 file, got {kind}: {cause}") from cause
    with file:
        try:
            yield file
            check_file()  # HDF5 reads zeros behind the end of a file
        except (OSError, RuntimeError, LookupError, ValueError, TypeError) as cause:
            if isinstance(cause, (GleanError, FileNotFoundError)) or not _is_h5py(cause):
                raise
            raise DatasetError(f"{path}: the file is damaged: {cause}") from cause


def _is_h5py(error: BaseException) -> bool:
    """Return whether h5py raised the error; its errors are plain classes of Python."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "h5py" in trace.tb_frame.f_code.co_filename


def entries(where: str, group: Any, *names: str) -> dict[str, Any]:
    """Return the datasets and groups in a group, all or the named ones, without following links.

    Raises:
        DatasetError: an entry is a symbolic or external link.
    """
    hard = _util.h5py().h5l.TYPE_HARD
    links, found = group.id.links, {}
    for name in names or group:
        if not isinstance(name, str):
            raise DatasetError(f"{where}: expected names in UTF-8, got {name!r}")
        if links.get_info(name.encode(errors="surrogateescape")).type != hard:
            raise DatasetError(
                f"{where}: expected the data of {name!r} in this file, got a symbolic or external link"
            )
        found[name] = group[name]
    return found


def datasets(where: str, group: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the checked dataset of each array below a file's root, without its group ``metadata``.

    Raises:
        DatasetError: a link, a dataset that `check` refuses, or too many levels.
    """
    if len(prefix) > _DEEPEST:
        raise DatasetError(
            f"{where}: expected at most {_DEEPEST} levels of groups, got {'/'.join(prefix)}/..."
        )
    for name, entry in entries(where, group).items():
        # It holds names, numbers and weights of the policy, and not one row for each step.
        if not prefix and name == "metadata":
            continue
        path = (*prefix, name)
        if isinstance(entry, _util.h5py().Group):
            yield from datasets(where, entry, path)
        else:
            check(f"{where}: {'/'.join(path)!r}", entry)
            yield path, entry


def check(where: str, dataset: Any) -> None:
    """Check that a dataset has its data in the file, and no more values than the file can hold.

    Raises:
        DatasetError: otherwise.
    """
    if not isinstance(dataset, _util.h5py().Dataset):
        raise DatasetError(f"{where}: expected an array, got {type(dataset).__name__}")
    plan, layouts = dataset.id.get_create_plist(), _util.h5py().h5d
    layout = plan.get_layout()
    if layout == layouts.VIRTUAL or (layout == layouts.CONTIGUOUS and plan.get_external_count()):
        raise DatasetError(f"{where}: expected an array with its data in this file, got one in another file")
    chunked = layout == layouts.CHUNKED
    filters = {plan.get_filter(number)[0] for number in range(plan.get_nfilters() if chunked else 0)}
    if not filters <= _FILTERS:
        raise DatasetError(
            f"{where}: expected HDF5's own filters, got the numbers {sorted(filters - _FILTERS)}; rewrite the file "
            "by h5repack"
        )
    shape, size = dataset.shape, None
    if shape is not None:  # A length of 0 counts as 1, because torch multiplies the other ones, too.
        size = math.prod(length or 1 for length in shape) * dataset.dtype.itemsize
    if size is None or size > _SMALL_BYTES:
        stored = dataset.id.get_storage_size()
        if size is None or size > _MOST_RATIO * stored:
            raise DatasetError(
                f"{where}: expected as many values as the file holds, got the shape {shape} in {stored} bytes"
            )


def source_of(where: str, dataset: Any) -> RowSource:
    """Return a source for a checked dataset ``[rows, *shape]``."""
    shape, kind = dataset.shape, dataset.dtype
    if not shape:
        raise DatasetError(f"{where}: expected one row for each step, got a single value")
    if kind.kind in "SO" and _util.h5py().check_string_dtype(kind) is not None:
        return RowSource(where, shape[0], shape[1:], None, lambda: _texts(dataset.asstr(), shape[0]))
    if kind.kind == "O":
        raise DatasetError(
            f"{where}: expected rows of one length, got rows of different lengths or references"
        )
    if kind.subdtype is not None:
        raise DatasetError(
            f"{where}: expected numbers or strings, got arrays {kind} as single values; write them as further "
            "dimensions of the dataset"
        )
    dtype = stored_dtype(where, kind)
    native = kind.newbyteorder("=")
    return RowSource(where, shape[0], shape[1:], dtype, lambda: _blocks(dataset, shape, native))


def _texts(reader: Any, rows: int) -> Iterator[Array]:
    yield from (reader[start : start + _TEXTS] for start in range(0, rows, _TEXTS))


def _blocks(dataset: Any, shape: tuple[int, ...], kind: np.dtype[Any]) -> Iterator[Array]:
    """Yield blocks of whole chunks, so that each chunk is read once."""
    rows = shape[0]
    width = max(1, kind.itemsize * math.prod(shape[1:]))
    step = max(1, BLOCK_BYTES // width)
    if rows <= step:
        block = dataset[()]  # h5py reads this fastest
        yield block if block.dtype.isnative else block.astype(kind)
        return
    if dataset.chunks:
        chunk = dataset.chunks[0]
        step = max(chunk, step // chunk * chunk)
        if step * width > _MOST_BLOCK_BYTES:
            step = max(1, _MOST_BLOCK_BYTES // width)
    # One array for all blocks: new memory for each would cost as much as the copy into the columns.
    block = np.empty((min(step, rows), *shape[1:]), kind)
    # read_direct would make three objects for each block.
    chosen, spaces = dataset.id.get_space(), _util.h5py().h5s
    for start in range(0, rows, step):
        part = block[: min(step, rows - start)]
        chosen.select_hyperslab((start, *(0 for _ in shape[1:])), part.shape)
        dataset.id.read(spaces.create_simple(part.shape), chosen, part)
        yield part


def from_hdf5(
    path: str | os.PathLike[str],
    layout: str | Mapping[Any, str] = "d4rl",
    *,
    episode_ends: Any = None,
    max_episode_steps: int | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of the episodes in an HDF5 file that has one row for each step.

    The layout ``"d4rl"`` reads ``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts`` and
    ``next_observations``. Arrays in ``infos`` are stored below ``info``, and other arrays with as many rows under their
    names. The group ``metadata`` isn't read. A file of `ReplayBuffer.to_hdf5` gives the records that were written.

    An episode ends after a row with ``terminals`` or ``timeouts``. Without ``next_observations`` the last row of an
    episode is dropped, as `from_arrays` says, and the row before it becomes truncated.

    Args:
        path: the file.
        layout: ``"d4rl"``; or the names of the arrays in the file by key. The key ``("collector", "traj_ids")`` may
            name the numbers of episodes. Only these arrays are read.
        episode_ends: the array in the file that ends episodes where it is set, instead of all flags; or rows, as in
            `from_arrays`. In antmaze the terminals mark steps at the goal, so ``"timeouts"`` is right there.
        max_episode_steps: the step limit of the environment. It truncates episodes in a file without ``timeouts``,
            which needs this argument or `episode_ends`.
        **options: see `from_arrays`. Rewards of a file of `ReplayBuffer.to_hdf5` keep their dtype.

    Raises:
        DatasetError: the file is damaged, isn't an HDF5 file, lacks an array, refers to other files, or has arrays of
            unequal lengths; the message names file and array.
        InvalidArgumentError: a bad value.
        FileNotFoundError: there is no such file.
        CapacityError: too little memory or disk space.
        MissingLibraryError: h5py isn't installed.
    """
    shared = ReadOptions.of(options)
    return buffer_of(read_hdf5(path, layout, episode_ends, max_episode_steps, shared), shared)


def read_hdf5(
    path: str | os.PathLike[str],
    layout: str | Mapping[Any, str],
    episode_ends: Any,
    max_episode_steps: int | None,
    shared: ReadOptions,
) -> TensorStorage:
    """Return the records of a file; see `from_hdf5`."""
    where = os.fspath(path)
    _util.positive_or_none("max_episode_steps", max_episode_steps)
    with opened(path) as file:
        description = file.attrs.get(DESCRIPTION)
        if layout == "d4rl" and description is not None:
            if episode_ends is not None or max_episode_steps is not None:
                raise InvalidArgumentError(
                    f"episode_ends, max_episode_steps: {where} was written by to_hdf5 and tells where episodes end; "
                    "leave the arguments out"
                )
            return described(where, description, _found(where, file), shared)
        sources = _sources(where, file, layout)
        if isinstance(episode_ends, str):
            ends = _named(where, file, episode_ends).flag()
        elif episode_ends is not None:
            ends = end_mask(episode_ends, next(iter(sources.values())).rows)
        else:
            ends = None
            if layout == "d4rl" and TRUNCATED not in sources and max_episode_steps is None:
                raise DatasetError(
                    f"{where}: expected 'timeouts', got the arrays {[*file]}. Without them the file doesn't tell where "
                    "a step limit ended an episode: pass max_episode_steps, or episode_ends='terminals' if the "
                    "terminals end all episodes"
                )
        if max_episode_steps is not None:
            ends = _limit(where, sources, ends, max_episode_steps)
        return convert(where, sources, shared, ends, stated=ends is not None)


def _found(where: str, file: Any) -> dict[str, RowSource]:
    """Return the sources of all arrays of a file by name."""
    return {
        "/".join(path): source_of(f"{where}: {'/'.join(path)!r}", dataset)
        for path, dataset in datasets(where, file)
    }


def _sources(where: str, file: Any, layout: str | Mapping[Any, str]) -> dict[Path, RowSource]:
    if isinstance(layout, Mapping):
        sources = {key_argument("layout", key): _named(where, file, name) for key, name in layout.items()}
        if not sources:
            raise InvalidArgumentError("layout: expected at least one key, got an empty dictionary")
        return sources
    if layout != "d4rl":
        raise InvalidArgumentError(f"layout: expected 'd4rl' or a dictionary of names, got {layout!r}")
    for name in _REQUIRED:
        _named(where, file, name)
    found = _found(where, file)
    rows = found["observations"].rows
    sources = {path: found.pop(name) for path, name in D4RL.items() if name in found}
    for name, source in found.items():
        if source.rows != rows:
            raise DatasetError(
                f"{source.where}: expected {rows} rows, as 'observations' has, got {source.rows}"
            )
        first, *rest = name.split("/")
        sources[("info", *rest) if first == "infos" else (first, *rest)] = source
    return sources


def _named(where: str, file: Any, name: Any) -> RowSource:
    """Return the source of one array of a file.

    Raises:
        DatasetError: there is no such array, or `check` refuses it.
    """
    found = file
    for part in name.split("/") if isinstance(name, str) else ():
        if not isinstance(found, _util.h5py().Group) or part not in found:
            raise DatasetError(
                f"{where}: expected an array {name!r}, got {[*file]}; pass layout= with the names of this file"
            )
        found = entries(where, found, part)[part]
    check(f"{where}: {name!r}", found)
    return source_of(f"{where}: {name!r}", found)


def _limit(where: str, sources: dict[Path, RowSource], ends: Array | None, limit: int) -> Array:
    """Return the last rows of episodes that a step limit cuts, and add these cuts to the truncated rows."""
    flags = {path: sources[path].flag() for path in (TERMINATED, TRUNCATED) if path in sources}
    if ends is None:
        ends = np.logical_or.reduce([*flags.values()]) if flags else None
    rows = next(iter(sources.values())).rows if ends is None else len(ends)
    ends = np.zeros(rows, bool) if ends is None else ends.copy()
    stops = np.flatnonzero(ends) + 1
    cut = np.zeros(rows, bool)
    for start, stop in zip([0, *stops.tolist()], [*stops.tolist(), rows], strict=True):
        cut[start + limit - 1 : stop - (stop < rows or bool(ends[-1])) : limit] = True
    ends |= cut
    sources[TRUNCATED] = RowSource.of(where, flags.get(TRUNCATED, np.zeros(rows, bool)) | cut)
    return ends


_READING = ("layout", "episode_ends", "max_episode_steps")


def _local_file(
    dataset_id: str | os.PathLike[str], root: str | os.PathLike[str] | None, download: bool
) -> FilePath:
    """Return the path of a data set's file.

    D4RL's files replace all hyphens of a name by underscores, except the one before the version.
    """
    path = FilePath(dataset_id)
    if path.suffix == ".hdf5" or path.exists():
        return path
    folder = FilePath(root or os.environ.get("D4RL_DATASET_DIR") or FilePath.home() / ".d4rl" / "datasets")
    name, hyphen, version = os.fspath(dataset_id).rpartition("-")
    spellings = [f"{dataset_id}.hdf5", f"{name.replace('-', '_')}{hyphen}{version}.hdf5"]
    for spelling in spellings:
        if (folder / spelling).exists():
            return folder / spelling
    advice = "gleanrl downloads nothing: put the file there" if download else "put the file there"
    raise FileNotFoundError(f"{dataset_id}: expected {' or '.join(spellings)} in {folder}; {advice}")


class D4RLExperienceReplay(TensorDictReplayBuffer):
    """A buffer of a local D4RL file, under TorchRL's name; see `from_hdf5`, which has more options.

    Differences from TorchRL's class: nothing is downloaded. Records have the keys of `from_hdf5`, with trajectory ids
    and without a reward and flags at the root. A next observation is never set to zero: a row without one is dropped.
    Rewards keep the dtype of the file.

    Args:
        dataset_id: the path of a file; or a name such as ``"halfcheetah-medium-v2"``, whose file is in `root`.
        batch_size: the default number of transitions in a batch.
        root: the folder of the files. None for the environment variable ``D4RL_DATASET_DIR``, or
            ``~/.d4rl/datasets``.
        download: no effect if the file exists.
        split_trajs: only False.
        from_env: only False or None.
        **options: see `from_hdf5`, and `TensorDictReplayBuffer`.

    Raises:
        DatasetError: see `from_hdf5`.
        FileNotFoundError: there is no such file; the message says where it is expected.
        UnsupportedError: `split_trajs` or `from_env`.
    """

    def __init__(
        self,
        dataset_id: str | os.PathLike[str],
        batch_size: int | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool = True,
        split_trajs: bool = False,
        from_env: bool | None = None,
        **options: Any,
    ) -> None:
        refuse(type(self).__name__, split_trajs=split_trajs, from_env=from_env)
        reading = {name: options.pop(name) for name in _READING if name in options}
        shared = ReadOptions.of({"reward_dtype": None, **options})
        storage = read_hdf5(
            _local_file(dataset_id, root, download),
            reading.get("layout", "d4rl"),
            reading.get("episode_ends"),
            reading.get("max_episode_steps"),
            shared,
        )
        super().__init__(
            storage=storage, writer=ImmutableDatasetWriter(), batch_size=batch_size, **shared.buffer
        )
