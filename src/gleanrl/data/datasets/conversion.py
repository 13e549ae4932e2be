"""Conversion of arrays of other formats to a buffer of transitions, and `from_arrays`.

Readers of formats describe each array of a file as a `RowSource`. The functions here allocate the buffer's columns once
and copy each block of rows into them, so that a conversion needs little memory besides the buffer.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Field, numpy_dtype, numpy_view
from gleanrl._arrays.tensordicts import FLAGS, Path, as_key, key_argument, record_of
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.storages.allocators import FileAllocator, HeapAllocator
from gleanrl.data.replay_buffers.storages.record_formats import ADDED_KEYS
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.verify import audit
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter
from gleanrl.data.trajectories import TRAJ_IDS
from gleanrl.errors import DatasetError, InvalidArgumentError, InvalidTypeError, UnsupportedError

Array = np.ndarray[Any, Any]
MEMMAP_ABOVE = 1 << 30
"""Bytes of records above which a data set is stored in mapped files."""
BLOCK_BYTES = 1 << 20
"""Bytes of a block of rows. A block fits into a CPU's cache, so that its copies into two columns read no memory."""
_FIRST_ID = -2  # of trajectories; -1 marks rows without a trajectory, and collectors count from 0
OUTCOMES = ("reward", *FLAGS)  # entries that belong to the step of a row, so they are stored below "next"
REWARD: Path = ("next", "reward")
TERMINATED: Path = ("next", "terminated")
TRUNCATED: Path = ("next", "truncated")
DONE: Path = ("next", "done")


@dataclass(frozen=True)
class ReadOptions:
    """The arguments that all conversions share; see `from_arrays`."""

    reward_dtype: torch.dtype | str | None = "auto"
    memmap_above: int | None = MEMMAP_ABOVE
    verify: bool = True
    next_observation: bool = True
    buffer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: dict[str, Any]) -> ReadOptions:
        """Take the shared arguments out of the keywords of a call; the others are for the buffer."""
        own = {name: options.pop(name) for name in cls.__dataclass_fields__ if name in options}
        for name in ("storage", "writer"):
            if name in options:
                raise InvalidArgumentError(
                    f"{name}: a data set has its own storage and an ImmutableDatasetWriter; leave the argument out"
                )
        return cls(**own, buffer=options)

    def rewards(self, found: torch.dtype | None, own: bool = False) -> torch.dtype | None:
        """Return the dtype of stored rewards.

        Args:
            found: the dtype in the file.
            own: whether this library wrote the file.
        """
        if self.reward_dtype == "auto":
            return found if own else torch.float32
        return found if self.reward_dtype is None else self.reward_dtype  # type: ignore[return-value]


@dataclass(frozen=True)
class RowSource:
    """One array of a file, ``[rows, *shape]``, which is read in blocks of consecutive rows."""

    where: str
    """The file and the array's name in it, for error messages."""
    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for strings."""
    blocks: Callable[[], Iterable[Array]]
    """Returns the blocks, which together have all rows in order."""

    @classmethod
    def of(cls, where: str, array: Any) -> RowSource:
        """Return a source for an array in memory.

        Raises:
            DatasetError: the array has no rows, or its dtype can't be stored.
        """
        if isinstance(array, torch.Tensor):
            array = array.detach().cpu()
            return cls(where, len(array), tuple(array.shape[1:]), array.dtype, lambda: [numpy_view(array)])
        found = np.asarray(array)
        if not found.ndim:
            raise DatasetError(f"{where}: expected an array with one row for each step, got {array!r:.60}")
        dtype = stored_dtype(where, found.dtype)
        native = found if dtype is None else found.astype(found.dtype.newbyteorder("="), copy=False)
        if dtype is None and not all(isinstance(item, str) for item in native.flat):
            raise DatasetError(
                f"{where}: expected numbers, bools or strings, got an object array; convert it to one dtype first"
            )
        return cls(where, len(native), native.shape[1:], dtype, lambda: [native])

    def read(self) -> Array:
        """Return all rows in one array."""
        found: Array | None = None
        at = 0
        for block in self.blocks():
            if len(block) == self.rows:
                return block
            found = np.empty((self.rows, *block.shape[1:]), block.dtype) if found is None else found
            found[at : at + len(block)] = block[: self.rows - at]
            at += len(block)
        if found is None or at != self.rows:
            raise DatasetError(f"{self.where}: expected {self.rows} rows, got {at}; the file is damaged")
        return found

    def flag(self) -> Array:
        """Return the rows of a flag as bools, ``(rows,)``.

        Raises:
            DatasetError: there is more than one value for each row, or a value other than 0 and 1.
        """
        if self.shape not in ((), (1,)):
            raise DatasetError(
                f"{self.where}: expected one flag for each step, ({self.rows},) or ({self.rows}, 1), got "
                f"{(self.rows, *self.shape)}"
            )
        values = self.read().reshape(-1)
        flags = values.astype(bool)
        if values.dtype != bool and not np.array_equal(flags, values):
            row = int(np.flatnonzero(flags != values)[0])
            raise DatasetError(f"{self.where}: expected flags of 0 and 1, got {values[row]} in row {row}")
        return flags

    def as_columns(self) -> RowSource:
        """Return the source with shape ``(1,)`` instead of ``()``, as collectors store rewards."""
        if self.shape:
            return self
        return replace(self, shape=(1,), blocks=lambda: (block.reshape(-1, 1) for block in self.blocks()))


class ColumnTarget(NamedTuple):
    """A column of the buffer, and the rows of its source that it takes."""

    path: Path
    source: RowSource
    chosen: Array | None
    """``(source.rows,)`` bool; None for all rows."""
    dtype: torch.dtype | None


def stored_dtype(where: str, dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the torch dtype for a NumPy dtype; None for strings.

    Raises:
        DatasetError: columns can't hold such values.
    """
    if dtype.kind in "OU":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise DatasetError(
            f"{where}: expected numbers or bools, got dtype {dtype}; convert it first"
        ) from None


def new_columns(where: str, fields: Mapping[Path, Field], rows: int, options: ReadOptions) -> dict[Path, Any]:
    """Return the columns of a data set: tensors ``[rows, *shape]``, or columns of objects for fields without a dtype.

    Above `ReadOptions.memmap_above` bytes they are in mapped files without a name. The system frees such files with
    their last mapping, so an interrupted conversion leaves nothing.

    Raises:
        DatasetError: there are no rows.
        CapacityError: the columns don't fit into memory or on the disk.
    """
    if not rows:
        raise DatasetError(f"{where}: expected at least one step with a known next observation, got none")
    tensors = {path: kind for path, kind in fields.items() if kind.dtype is not None}
    size = rows * sum(kind.row_bytes for kind in tensors.values())
    mapped = options.memmap_above is not None and size > options.memmap_above
    allocator = FileAllocator(None) if mapped else HeapAllocator(torch.device("cpu"))
    made = dict(zip(tensors, allocator([*tensors], [*tensors.values()], rows), strict=True))
    return {
        path: made[path] if path in made else ObjectColumn.blanks((rows, *kind.shape))
        for path, kind in fields.items()
    }


def array_of(column: Any) -> Array:
    """Return a column's memory as an array, for writing."""
    return column.array if isinstance(column, ObjectColumn) else numpy_view(column)


def storage_of(
    where: str, columns: Mapping[Path, Any], options: ReadOptions, chained: bool = False
) -> TensorStorage:
    """Return a storage over filled columns, after an audit of its records (`gleanrl.data.ReplayBuffer.verify`).

    Args:
        where: the file, for error messages.
        columns: the columns by path.
        options: the shared arguments.
        chained: whether flags, ids and next observations obey the rules because the conversion made them. Only the
            values of actions and rewards are checked then, which takes a tenth of the time.

    Raises:
        DatasetError: the audit found problems.
    """
    rows = next(iter(columns.values())).shape[0]
    storage = TensorStorage(record_of(columns, torch.Size([rows])))
    problem: tuple[str, str, int] | None = None
    if options.verify and chained:
        problem = next((found for path in columns if (found := _not_finite(path, columns[path]))), None)
    elif options.verify:
        problems = audit(storage).problems
        problem = (problems[0].message, problems[0].rule, problems[0].slot) if problems else None
    if problem is not None:
        raise DatasetError(
            f"{where}: the records contradict each other: {problem[0]} (rule {problem[1]!r}, first in row "
            f"{problem[2]}); correct the file, or pass verify=False and look at buffer.verify()"
        )
    return storage


def _not_finite(path: Path, column: Any) -> tuple[str, str, int] | None:
    """Return message, rule and row of the first action or reward that isn't finite; None if there is none."""
    if path[-1] not in ("action", "reward") or isinstance(column, ObjectColumn):
        return None
    if not (column.dtype.is_floating_point or column.dtype.is_complex):
        return None
    step = max(1, BLOCK_BYTES // max(1, column[:1].nbytes))
    for start in range(0, len(column), step):
        part = column[start : start + step]
        # A sum that is finite needs one pass without a temporary array, and tells that all values are.
        if not part.sum().isfinite() and not (finite := part.isfinite()).all():
            row = start + int((~finite).reshape(len(finite), -1).any(1).nonzero()[0])
            return f"{as_key(path)!r} has a NaN or an infinite value", "not finite", row
    return None


def buffer_of(storage: TensorStorage, options: ReadOptions) -> TensorDictReplayBuffer:
    """Return a buffer over the records of a data set, which refuses writes."""
    return TensorDictReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), **options.buffer)


def written_since(path: str | os.PathLike[str]) -> Callable[[], None]:
    """Return a function that raises `DatasetError` if the file at a path has been written to since this call.

    Rows that are read after that may be wrong. A new file in its place doesn't matter, because the old one stays open.
    """
    before = os.stat(path)

    def check() -> None:
        with suppress(FileNotFoundError):
            now = os.stat(path)
            same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            if now.st_ino == before.st_ino and not same:
                raise DatasetError(f"{path}: the file was changed while it was read; read it again")

    return check


def refuse(where: str, **arguments: Any) -> None:
    """Raise `UnsupportedError` for an argument of TorchRL's data sets that isn't False or None."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{where}: {name}={value!r} isn't served; leave it out. gleanrl.collectors.utils.split_trajectories "
                "splits a batch into trajectories"
            )


def filled(where: str, targets: Sequence[ColumnTarget], rows: int, options: ReadOptions) -> dict[Path, Any]:
    """Allocate columns and fill them from their sources; each source is read once.

    Raises:
        DatasetError: a source has another number of rows than it said.
        CapacityError: the columns don't fit into memory or on the disk.
    """
    fields = {to.path: Field(torch.Size(to.source.shape), to.dtype) for to in targets}
    columns = new_columns(where, fields, rows, options)
    runs: dict[int, RowRuns] = {}
    of_source: dict[int, list[ColumnTarget]] = {}
    for to in targets:
        if id(to.chosen) not in runs:
            runs[id(to.chosen)] = RowRuns.of(to)
        of_source.setdefault(id(to.source), []).append(to)
    for group in of_source.values():
        source, at = group[0].source, 0
        arrays = [(runs[id(to.chosen)], array_of(columns[to.path])) for to in group]
        for block in source.blocks():
            for row_runs, array in arrays:
                row_runs.copy(block, at, array)
            at += len(block)
        if at != source.rows:
            raise DatasetError(f"{source.where}: expected {source.rows} rows, got {at}; the file is damaged")
    return columns


class RowRuns(NamedTuple):
    """The runs of consecutive rows that columns take from a source: arrays ``(runs,)`` int64."""

    begin: Array
    end: Array
    shift: Array
    """The row of the column minus the row of the source."""
    chosen: Array | None
    """See `ColumnTarget`."""

    @classmethod
    def of(cls, to: ColumnTarget) -> RowRuns:
        """Return the runs of the rows that a column takes."""
        if to.chosen is None:
            return cls(np.array([0]), np.array([to.source.rows]), np.array([0]), None)
        edges = np.flatnonzero(np.diff(to.chosen, prepend=False, append=False))
        begin, end = edges[::2], edges[1::2]
        left_out = begin.copy()
        left_out[1:] -= end[:-1]
        return cls(begin, end, -np.cumsum(left_out), to.chosen)

    def copy(self, block: Array, at: int, column: Array) -> None:
        """Copy the kept rows of a block, which begins with row `at` of the source, into a column."""
        end = at + len(block)
        touched = slice(np.searchsorted(self.end, at, "right"), np.searchsorted(self.begin, end))
        begins, ends = np.maximum(self.begin[touched], at), np.minimum(self.end[touched], end)
        shifts = self.shift[touched]
        if self.chosen is not None and len(begins) * 32 > len(block):
            start = begins[0] + shifts[0]
            column[start : start + (ends - begins).sum()] = block[self.chosen[at:end]]
            return
        for begin, stop, shift in zip(begins.tolist(), ends.tolist(), shifts.tolist(), strict=True):
            column[begin + shift : stop + shift] = block[begin - at : stop - at]


def free_ids(ids: Array) -> Array:
    """Return trajectory ids that no collector assigns, int64 from -2 downward; such ids stay unchanged.

    If any id is -1 or more, all are numbered anew, in the order of their first rows.
    """
    if not len(ids) or ids.max() <= _FIRST_ID:
        return ids
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return _FIRST_ID - order[inverse.reshape(-1)]


def convert(
    where: str,
    sources: Mapping[Path, RowSource],
    options: ReadOptions,
    ends: Array | None = None,
    observations: Iterable[Path] = (("observation",),),
    stated: bool = False,
) -> TensorStorage:
    """Return the records of episodes that follow each other in arrays with one row for each step.

    See `from_arrays` for the rules. Entries below ``next`` stay there.

    Args:
        where: the file, for error messages.
        sources: the arrays by path. Ids at ``("collector", "traj_ids")`` also end an episode where they change.
        options: the shared arguments.
        ends: the last row of each episode, ``(rows,)`` bool; None for the rows with flags.
        observations: the groups or entries whose next values the following row holds.
        stated: whether the caller chose `ends`, so that flags may be set within an episode.

    Raises:
        DatasetError: the arrays contradict each other.
        CapacityError: the columns don't fit into memory or on the disk.
    """
    sources = dict(sources)
    for path in sources:
        if as_key(path) in ADDED_KEYS:
            raise DatasetError(
                f"{sources[path].where}: expected another key than {as_key(path)!r}, which batches carry and no record "
                "stores; choose the keys, or leave the array out"
            )
    rows = _common_rows(where, sources, observations, ends)
    terminated, truncated, done = (_flag_of(sources, path) for path in (TERMINATED, TRUNCATED, DONE))
    ids = sources.pop(TRAJ_IDS, None)
    numbers = None if ids is None else _ids_of(ids)
    flags = [flag for flag in (terminated, truncated, done) if flag is not None]
    flagged = np.logical_or.reduce(flags) if flags else np.zeros(rows, bool)
    if ends is None and numbers is None and not flags:
        raise DatasetError(
            f"{where}: expected flags or ids that tell where episodes end, got the keys "
            f"{[as_key(path) for path in sources]}; pass episode_ends"
        )
    inside = np.zeros(rows, bool)  # rows with a flag after which the episode continues
    if ends is not None or numbers is not None:
        last = np.zeros(rows, bool) if ends is None else ends
        inside[:-1] = flagged[:-1] & ~last[:-1] & (numbers is None or numbers[1:] == numbers[:-1])
    ends = flagged if ends is None else ends.copy()
    if numbers is not None:
        ends[:-1] |= numbers[1:] != numbers[:-1]
    unfinished = not ends[-1]
    ends[-1] = True
    if terminated is None:
        terminated = (
            np.zeros(rows, bool) if done is None else done & ~(False if truncated is None else truncated)
        )
    if truncated is None:
        truncated = np.zeros(rows, bool) if done is None else done & ~terminated
    if done is not None and not np.array_equal(done, terminated | truncated):
        row = int(np.flatnonzero(done != (terminated | truncated))[0])
        raise DatasetError(
            f"{where}: expected done where a step is terminated or truncated, got other flags in row {row}"
        )
    if numbers is None:
        lengths = np.diff(np.flatnonzero(ends), prepend=-1)
        numbers = np.repeat(_FIRST_ID - np.arange(len(lengths)), lengths)
    else:
        numbers = free_ids(numbers)

    roots = [path for path in sources if any(path[: len(group)] == group for group in observations)]
    known = all(("next", *path) in sources for path in roots)
    if roots and not known and any(("next", *path) in sources for path in roots):
        raise DatasetError(
            f"{where}: expected next values of all observations or of none, got "
            f"{[as_key(path) for path in sources if path[0] == 'next']}"
        )
    if inside.any() and options.verify and not stated and not (roots and known):
        raise flag_inside(where, int(np.flatnonzero(inside)[0]))
    chosen: Array | None = None
    if roots and options.next_observation and not known and any(sources[path].rows == rows for path in roots):
        # The row after the last one of an episode isn't in the file.
        chosen = ~ends
        cut = ends[1:] & chosen[:-1]
        if unfinished:
            cut[-1:] = False
        truncated = truncated.copy()
        truncated[:-1] |= cut & ~terminated[:-1]
        if (lost := int(np.count_nonzero(terminated & ends))) and REWARD in sources:
            warnings.warn(
                f"{where}: {lost} terminated steps have no next observation in the file, so they are left out with "
                "their rewards; next_observation=False keeps them, and stores no next observation",
                stacklevel=3,
            )
    targets = [*_targets(sources, roots, known, chosen, ends, options)]
    outcomes = {TERMINATED: terminated, TRUNCATED: truncated, DONE: terminated | truncated}
    for path, flag in outcomes.items():
        targets.append(ColumnTarget(path, RowSource.of(where, flag[:, None]), chosen, torch.bool))
    targets.append(ColumnTarget(TRAJ_IDS, RowSource.of(where, numbers), chosen, torch.int64))
    count = rows if chosen is None else int(np.count_nonzero(chosen))
    chained = not any(path[0] == "next" and path[1:] in sources for path in sources)
    return storage_of(where, filled(where, targets, count, options), options, chained)


def flag_inside(where: str, row: int) -> DatasetError:
    """Return the error for a flag after which the episode continues, by its ids or its length."""
    return DatasetError(
        f"{where}: expected flags only in the last row of an episode, got one in row {row}, after which the episode "
        "continues by its ids or its length; correct the file, or pass verify=False to keep both"
    )


class DescribedColumn(NamedTuple):
    """A column that this library wrote: its key, the name of its dtype, and the shape of a row."""

    path: Path
    dtype: Any
    shape: tuple[int, ...]


def columns_of(where: str, description: Any) -> dict[str, DescribedColumn]:
    """Return the columns in a description of `gleanrl.data.replay_buffers.export` by their names in the file.

    Raises:
        DatasetError: it is no such description.
    """
    try:
        return {
            name: DescribedColumn(
                tuple(map(str, column["key"])), column["dtype"], tuple(map(int, column["shape"]))
            )
            for name, column in json.loads(description)["columns"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise DatasetError(
            f"{where}: expected gleanrl's description of the columns, got {description!r:.60}"
        ) from cause


def described(
    where: str, description: Any, found: Mapping[str, RowSource], options: ReadOptions
) -> TensorStorage:
    """Return the records of a file that this library wrote: the same columns, bit for bit.

    Args:
        where: the file, for error messages.
        description: the text that `gleanrl.data.replay_buffers.export` stored in the file.
        found: the arrays of the file by name.
        options: the shared arguments.
    """
    columns = columns_of(where, description)
    targets = []
    for name, (path, dtype, shape) in columns.items():
        source = found.get(name)
        if source is None:
            raise DatasetError(f"{where}: expected an array {name!r}, got {[*found]}")
        source = recast(source, dtype, shape)
        if path == TRAJ_IDS:
            source = RowSource.of(source.where, free_ids(source.read()))
        new_dtype = options.rewards(source.dtype, own=True) if path == REWARD else source.dtype
        targets.append(ColumnTarget(path, source, None, new_dtype))
    if not targets:
        raise DatasetError(f"{where}: expected at least one column, got none")
    rows = targets[0].source.rows
    for to in targets:
        if to.source.rows != rows:
            raise DatasetError(
                f"{to.source.where}: expected {rows} rows, as the other arrays have, got {to.source.rows}"
            )
    return storage_of(where, filled(where, targets, rows, options), options)


def recast(source: RowSource, name: Any, shape: tuple[int, ...]) -> RowSource:
    """Return the source of a described column, in the dtype and shape that were written."""
    if name == "str":
        if source.dtype is None and source.shape == shape:
            return source
    else:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if isinstance(dtype, torch.dtype) and source.dtype is not None:
            kind = numpy_dtype(dtype)
            bytes_of_row = math.prod(source.shape) * numpy_dtype(source.dtype).itemsize
            if bytes_of_row == math.prod(shape) * kind.itemsize:
                return replace(
                    source,
                    shape=shape,
                    dtype=dtype,
                    blocks=lambda: (
                        np.ascontiguousarray(block).reshape(-1).view(kind).reshape(len(block), *shape)
                        for block in source.blocks()
                    ),
                )
    raise DatasetError(
        f"{source.where}: expected rows {shape} {name}, got {source.shape} {source.dtype or 'strings'}"
    )


def _targets(
    sources: Mapping[Path, RowSource],
    roots: Sequence[Path],
    known: bool,
    chosen: Array | None,
    ends: Array,
    options: ReadOptions,
) -> Iterator[ColumnTarget]:
    rows = len(ends)
    following = None if chosen is None else np.concatenate([[False], chosen[:-1]])
    for path, source in sources.items():
        if path == REWARD:
            source = source.as_columns()
            yield ColumnTarget(path, source, chosen, options.rewards(source.dtype))
        elif path not in roots:
            if options.next_observation or path[1:] not in roots:
                yield ColumnTarget(path, source, chosen, source.dtype)
        elif source.rows != rows:  # one more row for each episode, so all rows have a next observation
            last = np.zeros(source.rows, bool)
            last[np.flatnonzero(ends) + np.arange(1, source.rows - rows + 1)] = True
            mine = ~last if chosen is None else _spread(chosen, last)
            yield ColumnTarget(path, source, mine, source.dtype)
            if options.next_observation and not known:
                yield ColumnTarget(
                    ("next", *path), source, np.concatenate([[False], mine[:-1]]), source.dtype
                )
        else:
            yield ColumnTarget(path, source, chosen, source.dtype)
            if options.next_observation and not known:
                yield ColumnTarget(("next", *path), source, following, source.dtype)


def _spread(chosen: Array, last: Array) -> Array:
    """Return `chosen` for a source that has one more row at the end of each episode, where `last` is True."""
    spread = np.zeros(len(last), bool)
    spread[~last] = chosen
    return spread


def _common_rows(
    where: str, sources: Mapping[Path, RowSource], observations: Iterable[Path], ends: Array | None
) -> int:
    """Return the number of steps; observations may have one more row for each episode, if `ends` tells their number."""
    counts = {path: source.rows for path, source in sources.items()}
    groups = [*observations]
    steps = {path: count for path, count in counts.items() if not any(path[: len(g)] == g for g in groups)}
    rows = next(iter((steps or counts).values())) if ends is None else len(ends)
    allowed = {rows} if ends is None else {rows, rows + int(np.count_nonzero(ends))}
    wrong = {
        path: count
        for path, count in counts.items()
        if count != rows and (path in steps or count not in allowed)
    }
    if wrong or not rows:
        path, count = next(iter((wrong or counts).items()))
        expected = f"{rows} rows" if rows else "at least one row"
        raise DatasetError(
            f"{sources[path].where}: expected {expected}, as the other arrays have, got {count} at "
            f"{as_key(path)!r}"
        )
    return rows


def _flag_of(sources: dict[Path, RowSource], path: Path) -> Array | None:
    source = sources.pop(path, None)
    return None if source is None else source.flag()


def _ids_of(source: RowSource) -> Array:
    if source.shape not in ((), (1,)) or source.dtype is None or source.dtype.is_floating_point:
        raise DatasetError(
            f"{source.where}: expected one whole number for each step, got {source.dtype} {source.shape}"
        )
    ids = source.read().reshape(-1)
    changes = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    if len(np.unique(ids[changes])) != len(changes):
        _, number, count = np.unique(ids[changes], return_index=True, return_counts=True)
        again = ids[changes][number[count > 1][0]]
        raise DatasetError(
            f"{source.where}: expected the rows of each episode together, got episode {again} in several places; sort "
            "the rows by episode and step"
        )
    return ids.astype(np.int64)


def flat_arrays(arrays: Mapping[Any, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and array of each entry of a nested dictionary; rewards and flags of the root come below ``next``."""
    for key, value in arrays.items():
        path = (*prefix, *key_argument("arrays", key))
        if isinstance(value, Mapping):
            yield from flat_arrays(value, path)
        else:
            yield (("next", *path) if path[0] in OUTCOMES and len(path) == 1 else path), value


def from_arrays(
    arrays: Mapping[Any, Any],
    episode_ends: Any = None,
    *,
    observation_keys: Sequence[Any] = ("observation",),
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of the episodes in a dictionary of arrays, one episode after the other.

    The buffer refuses writes. Its records have the form of a collector's: ``("collector", "traj_ids")`` counts the
    episodes from -2 downward, so that no id is one of a collector. ``reward`` ``(n, 1)``, ``terminated``, ``truncated``
    and ``done`` ``(n, 1)`` bool are below ``next``. Arrays at the root with these names are put there.

    A next observation is never invented. It is an array at ``("next", "observation")``, or the following row of the
    same episode. Observations may also have one row more than the other arrays for each episode. Otherwise the last row
    of each episode has no next observation: it is dropped, and the row before it becomes truncated. At the end of an
    episode that neither a flag nor `episode_ends` ends, no row becomes truncated.

    Args:
        arrays: NumPy arrays, tensors or lists ``[n, ...]`` by key, a string, a tuple of strings, or nested
            dictionaries. All have `n` rows.
        episode_ends: the last row of each episode: ``(n,)`` bool, or row numbers in ascending order. None for all rows
            that are terminated, truncated or done, and rows before a change of ``("collector", "traj_ids")``.
        observation_keys: the entries and groups whose values of the following row are next observations.
        **options: `reward_dtype` is the dtype of rewards. Without it they become float32; None keeps the dtype of the
            arrays. Above ``memmap_above=2**30`` bytes the records are stored in mapped files without a name, in the
            system's folder for temporary files; None for memory only. ``verify=True`` audits the records.
            ``next_observation=False`` keeps all rows and stores no next observation. All others are arguments of
            `TensorDictReplayBuffer`, for example `batch_size` and `sampler`.

    Raises:
        DatasetError: no row, unequal numbers of rows, values that can't be stored, or records that contradict each
            other.
        InvalidArgumentError: `episode_ends` doesn't fit the rows.
        InvalidTypeError: `arrays` isn't a dictionary, or a key isn't a string or a tuple of strings.
        CapacityError: too little memory or disk space.

    Examples:
        >>> import numpy as np
        >>> observation, ended = np.arange(5.0), np.array([False, False, True, False, True])
        >>> buffer = from_arrays({"observation": observation, "reward": np.ones(5), "truncated": ended})
        >>> buffer["next", "observation"], buffer["collector", "traj_ids"]
        (tensor([1., 2., 4.], dtype=torch.float64), tensor([-2, -2, -3]))
    """
    shared = ReadOptions.of(options)
    if not isinstance(arrays, Mapping):
        raise InvalidTypeError(f"arrays: expected a dictionary of arrays, got {type(arrays).__name__}")
    groups = [key_argument("observation_keys", key) for key in observation_keys]
    sources = {path: RowSource.of(f"arrays: {as_key(path)!r}", array) for path, array in flat_arrays(arrays)}
    if not sources:
        raise DatasetError("arrays: expected at least one array, got none")
    ends = None
    if episode_ends is not None:
        steps = [s.rows for p, s in sources.items() if not any(p[: len(g)] == g for g in groups)]
        ends = end_mask(episode_ends, steps[0] if steps else next(iter(sources.values())).rows)
    return buffer_of(convert("arrays", sources, shared, ends, groups, ends is not None), shared)


def end_mask(episode_ends: Any, rows: int) -> Array:
    """Return the argument `episode_ends`, bools or row numbers, as ``(rows,)`` bool.

    Raises:
        InvalidArgumentError: it doesn't fit the rows.
    """
    found = np.asarray(episode_ends.cpu() if isinstance(episode_ends, torch.Tensor) else episode_ends)
    if found.dtype == bool and found.shape == (rows,):
        return found
    numbers = found.dtype.kind in "iu" and found.ndim == 1 and len(found) > 0
    if numbers and found[0] >= 0 and found[-1] < rows and bool((np.diff(found) > 0).all()):
        mask = np.zeros(rows, bool)
        mask[found] = True
        return mask
    raise InvalidArgumentError(
        f"episode_ends: expected ({rows},) bools, or ascending row numbers below {rows}, got {found.dtype} "
        f"{found.shape}: {found!r:.80}"
    )
