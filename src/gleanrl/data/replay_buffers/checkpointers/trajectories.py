"""Conversion of rows to trajectories with each observation once, and back, byte for byte.

A column under ``"next"`` is a *twin* if its key also exists outside of ``"next"``. A twin's row is left out if it
equals, byte for byte, the row of the next step. A trajectory ends where a row differs, and where a flag is set. So a
column with a twin gets one row for each step and one for each trajectory, and any data are restored exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.reader import spread
from gleanrl._checkpoint.row_segments import Array, Unread, empty_columns, rows_at, rows_of
from gleanrl._checkpoint.tree_codec import ArrayPieces
from gleanrl._os.parallel_read import Target
from gleanrl.errors import CheckpointError, CorruptCheckpointError

Field = tuple[torch.dtype, tuple[int, ...]]
_BLOCK_BYTES = 1 << 22
_FEW_WORDS = 16  # rows of at most so many words are compared by columns: `any` is slow on short rows


class RowReader(ABC):
    """Columns of equal length.

    Attributes:
        fields: dtype and shape of a row of each column; None for a column that isn't a tensor.
    """

    fields: Sequence[Field | None]

    @abstractmethod
    def pick(self, position: int, rows: Array | slice) -> Array:
        """Return rows of a column, ``(k, bytes of a row)`` uint8, in fresh memory.

        Args:
            position: position of the column.
            rows: row numbers, ``(k,)`` int64, or a slice of them.
        """

    @abstractmethod
    def column(self, position: int) -> Any:
        """Return a column unchanged."""

    def width(self, position: int) -> int:
        """Return the bytes of a row; 0 for a column that isn't a tensor."""
        field = self.fields[position]
        return 0 if field is None else field[0].itemsize * prod(field[1])

    def made(self, position: int, count: int, make: Callable[[int, int], Array]) -> ArrayPieces:
        """Return `count` rows like a column's, made when they are written.

        `make` returns the bytes of rows ``[start, stop)``.
        """
        field = self.fields[position]
        assert field is not None
        return ArrayPieces(field[0], (count, *field[1]), make)

    def selected(self, position: int, index: Array) -> ArrayPieces:
        """Return rows of a column, which are read when they are written."""
        return self.made(
            position, len(index), lambda start, stop: self.pick(position, run_of(index[start:stop]))
        )

    def unlike(self, position: int, other: int, rows: Array, following: Array) -> Array:
        """Return where rows of one column differ from the following rows of another one, ``(k,)`` bool, byte for byte.

        Args:
            position: position of the one column.
            other: position of the other column, which has as many bytes in a row.
            rows: rows of the one column, ``(k,)`` int64.
            following: row of the other column to compare with each of them, ``(k,)`` int64.
        """
        found = np.zeros(len(rows), bool)
        size = max(1, _BLOCK_BYTES // self.width(position))
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            found[part] = _differ(
                self.pick(position, run_of(rows[part])), self.pick(other, run_of(following[part]))
            )
        return found


def run_of(rows: Array) -> Array | slice:
    """Return row numbers as a slice if they are consecutive, because a slice is copied at once."""
    if not len(rows) or rows[-1] - rows[0] != len(rows) - 1 or not (rows[1:] > rows[:-1]).all():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _differ(one: Array, other: Array) -> Array:
    """Return which rows of bytes differ, ``(k,)`` bool."""
    word = next(size for size in (8, 4, 2, 1) if one.shape[1] % size == 0)
    words = one.view(f"u{word}") != other.view(f"u{word}")
    if words.shape[1] > _FEW_WORDS:
        return np.asarray(words.any(1))
    found: Array = words[:, 0].copy()
    for column in range(1, words.shape[1]):
        found |= words[:, column]
    return found


class InMemory(RowReader):
    """Columns in memory that no thread writes to.

    Args:
        columns: ``[rows, *shape]`` each, on any device; or objects that aren't tensors.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns
        self._bytes: dict[int, Array] = {}
        self.fields = [
            (column.dtype, tuple(column.shape[1:])) if isinstance(column, torch.Tensor) else None
            for column in columns
        ]

    def pick(self, position: int, rows: Array | slice) -> Array:
        """Return rows of a column."""
        # Cached, because `rows_of` copies a column that isn't contiguous or not on the CPU.
        if position not in self._bytes:
            self._bytes[position] = rows_of(self._columns[position])
        return rows_at(self._bytes[position], rows)

    def column(self, position: int) -> Any:
        """Return a column unchanged."""
        return self._columns[position]


class SnapshotReader(RowReader):
    """Columns with the rows of one moment, even if a writer changes them meanwhile (see `CowSnapshot`).

    Args:
        source: the generations, then the columns. The caller closes it.
    """

    def __init__(self, source: CowSnapshot) -> None:
        self._source = source
        self.fields = source.layout.fields[1:]
        source.begin()

    def pick(self, position: int, rows: Array | slice) -> Array:
        """Return rows of a column."""
        return self._source.pick(position + 1, rows)

    def column(self, position: int) -> ArrayPieces:
        """Return a column, whose rows are read when it is written."""
        return self.made(position, self._source.layout.rows, lambda *span: self.pick(position, slice(*span)))

    def generations(self) -> ArrayPieces:
        """Return the generations, which are read when they are written."""
        pick = self._source.pick
        return ArrayPieces(torch.int64, (self._source.layout.rows,), lambda *span: pick(0, slice(*span)))


def laid_out(state: Mapping[str, Any], lay: Callable[[RowReader], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a storage's state with its columns replaced by the entries that a form makes of them.

    Args:
        state: from `Storage.state_dict` or `Storage.checkpoint_dict`. Tensors of the latter are made when they are
            written.
        lay: returns entries of the state. `ArrayPieces` in them, also within dictionaries and lists, become tensors.
    """
    columns = state["columns"]
    if isinstance(columns, CowSnapshot):
        rows = SnapshotReader(columns)
        return {**state, "generations": rows.generations(), **lay(rows)}
    return {**state, **_with_tensors(lay(InMemory(columns)))}


def _with_tensors(value: Any) -> Any:
    if isinstance(value, ArrayPieces):
        return value.tensor()
    if isinstance(value, dict):
        return {key: _with_tensors(part) for key, part in value.items()}
    return [_with_tensors(part) for part in value] if isinstance(value, list) else value


def typed(rows: Array, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return rows of bytes as a column of the given dtype and shape, over the same memory."""
    if not rows.size:
        return torch.empty(len(rows), *shape, dtype=dtype, device="cpu")
    return torch.from_numpy(rows).view(dtype).reshape(len(rows), *shape)


Path = tuple[Any, ...]
Plan = dict[int, list[tuple[int, "TrajectoryRuns"]]]
DONE = ("done", "terminated", "truncated")


_FIRST = np.zeros(1, np.int64)


class TrajectoryRuns(NamedTuple):
    """Destinations of consecutive rows; see `Target` for the fields."""

    starts: Array
    to: Array
    stride: int = 1

    def with_gaps(self, rows: Array) -> TrajectoryRuns:
        """Return the destinations without some rows, ``(k,)`` int64; after each of these rows, a run begins."""
        starts = np.append(self.starts, rows)
        order = starts.argsort(kind="stable")
        return TrajectoryRuns(starts[order], np.append(self.to, np.full(len(rows), -1))[order], self.stride)


IN_PLACE = TrajectoryRuns(_FIRST, _FIRST)


@dataclass(frozen=True)
class Streams:
    """The order in which rows were written.

    Attributes:
        order: row numbers, ``(n,)`` int64: stream after stream, the oldest row of each first. A range if rows are in
            this order.
        length: number of rows in each stream.
    """

    order: Array | range
    length: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Streams:
        """Return the streams of a storage's state: each position of the batch is a stream."""
        steps, width = state["num_steps"], prod(state["batch_shape"])
        if width == 1 and state["end"] % max(steps, 1) == 0:
            return cls(range(steps), steps)
        times = np.roll(np.arange(steps), -state["end"])  # no effect if `end` is `steps`: the ring isn't full
        return cls(np.add.outer(np.arange(width), times * width).reshape(-1), steps)

    def rows(self) -> Array:
        """Return the row numbers, ``(n,)`` int64."""
        return np.arange(len(self.order)) if isinstance(self.order, range) else self.order

    def runs(self, cuts: Array) -> TrajectoryRuns:
        """Return where rows in this order belong in the columns; runs also begin at `cuts`, which rise from 0 on."""
        if isinstance(self.order, range) or len(self.order) < 2:
            return TrajectoryRuns(cuts, cuts)
        steps = np.diff(self.order)
        stride = max(int(steps[0]), 1)
        begins = np.append(True, steps != stride)
        begins[cuts] = True
        starts = np.flatnonzero(begins)
        return TrajectoryRuns(starts, self.order[starts], stride)


def check_rows(state: Mapping[str, Any]) -> None:
    """Raise `CorruptCheckpointError` unless a loaded state holds lists, and as many rows as it states.

    These checks come first, because a loop over a damaged array takes as long as its shape states, not its data.
    """
    steps, batch, generations = state["num_steps"], state["batch_shape"], state["generations"]
    columns, paths = state["columns"], state["format"]["paths"]
    if (
        not all(isinstance(part, (list, tuple)) for part in (batch, columns, paths))
        or not all(isinstance(path, (list, tuple)) for path in paths)
        or not all(type(size) is int for size in (steps, *batch))
    ):
        raise CorruptCheckpointError("a storage's state: expected sizes, columns and paths as lists")
    count = steps * prod(batch)
    if (
        not isinstance(generations, torch.Tensor)
        or generations.dtype is not torch.int64
        or len(generations) != count
    ):
        raise CorruptCheckpointError(
            f"a storage's state: expected generations of {count} rows, ({count},) int64"
        )


def paths_of(state: Mapping[str, Any]) -> list[Path]:
    """Return the paths of a storage's columns."""
    return [tuple(path) for path in state["format"]["paths"]]


def twins(paths: Sequence[Path], rows: RowReader) -> Iterable[tuple[int, int]]:
    """Yield the positions of each twin under ``"next"`` and of its counterpart, if their fields are equal."""
    for position, path in enumerate(paths):
        if (
            path[:1] != ("next",)
            or path[1:2] == ("next",)
            or path[1:] not in paths
            or not rows.width(position)
        ):
            continue
        counterpart = paths.index(path[1:])
        if rows.fields[position] == rows.fields[counterpart]:
            yield position, counterpart


def check_flags(paths: Sequence[Path], shapes: Sequence[Sequence[int]], done: Collection[Any]) -> None:
    """Raise `CheckpointError` if a flag has more elements than a storage has slots."""
    for path, shape in zip(paths, shapes, strict=True):
        if is_flag(path, done) and prod(shape) != 1:
            raise CheckpointError(
                f"checkpointer: {path} has shape {tuple(shape)} in each slot of the storage; flags may have "
                "as many elements as the storage has slots: give the storage more dimensions, or use "
                "TensorStorageCheckpointer"
            )


def is_flag(path: Path, done: Collection[Any]) -> bool:
    """Return whether a path under ``"next"`` is one of the flags, which are given by path or by their last key."""
    return path[:1] == ("next",) and (path[-1] in done or path[1:] in done or path in done)


def split(
    paths: Sequence[Path], rows: RowReader, streams: Streams, done: Collection[Any]
) -> tuple[list[Any], torch.Tensor]:
    """Return columns as trajectories, one after the other.

    Args:
        paths: paths of the columns.
        rows: the columns, n rows each; a column that isn't a tensor stays unchanged.
        streams: order of the rows.
        done: flags that end trajectories.

    Returns:
        The columns and the offsets. A column is `ArrayPieces` of n rows. Where a twin mostly repeats the next step, its
        counterpart has n + trajectories rows and the twin is None. The offsets, ``(trajectories + 1,)`` int64, hold
        where each trajectory begins, and where the last one ends.
    """
    order, count = streams.rows(), len(streams.order)
    everything = run_of(order)
    ends = np.zeros(count, bool)
    ends[streams.length - 1 :: max(streams.length, 1)] = True
    for position, path in enumerate(paths):
        field = rows.fields[position]
        if field is not None and is_flag(path, done) and rows.width(position) and count:
            flags = typed(rows.pick(position, everything), *field)
            single = flags.reshape(count, -1).bool().numpy()
            ends |= single[:, 0] if single.shape[1] == 1 else single.any(1)
    found = [
        (position, counterpart, np.append(rows.unlike(position, counterpart, order[:-1], order[1:]), False))
        for position, counterpart in (twins(paths, rows) if count else ())
    ]
    # A twin whose rows mostly differ would end a trajectory at nearly every step, which makes all other columns larger.
    # Such a twin is stored whole.
    shared = [twin for twin in found if 2 * np.count_nonzero(twin[2] & ~ends) <= count]
    for _, _, differs in shared:
        ends |= differs
    offsets = np.concatenate(([0], np.flatnonzero(ends) + 1))
    values: list[Any] = [
        rows.column(position) if field is None else rows.selected(position, order)
        for position, field in enumerate(rows.fields)
    ]
    last = offsets[1:] - 1
    final = np.zeros(count + len(last), bool)
    final[last + 1 + np.arange(len(last))] = True
    source = np.empty(len(final), np.int64)
    source[~final], source[final] = order, order[last]
    for position, counterpart, _ in shared:
        values[counterpart], values[position] = _shared(rows, position, counterpart, source, final), None
    return values, torch.from_numpy(offsets)


def _shared(rows: RowReader, position: int, counterpart: int, source: Array, final: Array) -> ArrayPieces:
    """Return a column that includes the last rows of its twin.

    Row i is row `source[i]` of the twin if `final[i]` is set, otherwise of the column itself.
    """

    def make(start: int, stop: int) -> Array:
        data = rows.pick(counterpart, source[start:stop])
        last = np.flatnonzero(final[start:stop])
        data[last] = rows.pick(position, source[start + last])
        return data

    return rows.made(counterpart, len(source), make)


def join(paths: Sequence[Path], columns: Sequence[Any], streams: Streams, offsets: torch.Tensor) -> list[Any]:
    """Return the columns that `split` was called with, in fresh memory; the given columns may be unread.

    Raises:
        CorruptCheckpointError: `split` can't have returned such columns.
    """
    count, begins = len(streams.order), offsets.numpy()
    steps = np.diff(begins)
    if (
        offsets.dtype is not torch.int64
        or not len(begins)
        or begins[0]
        or begins[-1] != count
        # Differences of numbers outside of [0, count] may overflow and look positive in `steps`.
        or (begins < 0).any()
        or (begins > count).any()
        or (steps <= 0).any()
    ):
        raise CorruptCheckpointError(
            f"offsets of trajectories: expected int64 numbers that rise from 0 to {count}"
        )
    shared = {
        paths.index(path[1:]): position
        for position, path in enumerate(paths)
        if columns[position] is None and path[1:] in paths
    }
    # A shared column holds n + 1 rows for a trajectory of n steps. Its rows but the last are the column, and its rows
    # but the first are the twin. Each row number is shifted by the number of trajectories before it.
    apart, runs = streams.runs(_FIRST), streams.runs(begins[:-1] if count else _FIRST)
    numbers = np.searchsorted(begins, runs.starts, "right") - 1
    first = begins[:-1] + np.arange(len(steps))
    last = first + steps
    before = TrajectoryRuns(runs.starts + numbers, *runs[1:]).with_gaps(last)
    after = TrajectoryRuns(runs.starts + numbers + 1, *runs[1:]).with_gaps(first)
    plan: Plan = {}
    for position, column in enumerate(columns):
        if isinstance(column, (torch.Tensor, Unread)):
            both = position in shared
            expected = count + (len(steps) if both else 0)
            if column.shape[0] != expected:
                raise CorruptCheckpointError(
                    f"column {paths[position]}: expected {expected} rows, got {column.shape[0]}"
                )
            plan[position] = [(position, before), (shared[position], after)] if both else [(position, apart)]
    return spread_out(columns, count, plan)


def spread_out(columns: Sequence[Any], count: int, plan: Plan) -> list[Any]:
    """Return columns in fresh memory.

    Args:
        columns: tensors and unread columns; a column that isn't in the plan stays unchanged.
        count: number of rows of each new column.
        plan: maps the position of each source column to the new columns made from it: their positions, and the
            destinations of its rows.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    fields = [
        (columns[source].dtype, columns[source].shape[1:]) for source, made in plan.items() for _ in made
    ]
    positions = [position for made in plan.values() for position, _ in made]
    found = dict(zip(positions, empty_columns(fields, count), strict=True))
    spread(
        (columns[source], [Target(rows_of(found[position]), *runs) for position, runs in made])
        for source, made in plan.items()
    )
    return [found.get(position, column) for position, column in enumerate(columns)]
