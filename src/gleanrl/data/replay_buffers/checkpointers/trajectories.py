"""Rows as trajectories, with each observation once, and back, byte for byte: what the forms are made of.

What stands under ``"next"`` is a *twin* if the same key stands beside it. Where a step's twins are what the next step
holds, byte for byte, they are left out; a trajectory ends where they aren't, and where a flag says so. So a column
with a twin gets a row for each step and one for each trajectory, and any data come back exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.segments import rows_of
from gleanrl.checkpoint.values import Pieces
from gleanrl.data.replay_buffers.checkpointers.rows import Rows, run_of, typed
from gleanrl.errors import CheckpointError, CorruptCheckpointError
from gleanrl.native import Columns
from gleanrl.system.threads import for_each

Path = tuple[Any, ...]
Array = np.ndarray[Any, Any]
DONE = ("done", "terminated", "truncated")
_BLOCK_BYTES = 1 << 22
_HOT_BYTES = 1 << 20  # that are still in the cache when they are read again
_MOST_MORE = 8  # of the memory of a column, one part in so many may stay without use


@dataclass(frozen=True)
class Streams:
    """In which order rows were written.

    Attributes:
        order: the rows, ``(n,)`` int64: stream after stream, in each one the oldest first. A range where they lie so.
        length: rows in each stream.
    """

    order: Array | range
    length: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Streams:
        """Return those of a storage's state: each place of the batch is one."""
        steps, width = state["num_steps"], prod(state["batch_shape"])
        if width == 1 and state["end"] % max(steps, 1) == 0:
            return cls(range(steps), steps)
        times = np.roll(np.arange(steps), -state["end"])  # a ring that isn't full ends where it began
        return cls(np.add.outer(np.arange(width), times * width).reshape(-1), steps)

    def rows(self) -> Array:
        """Return the rows, ``(n,)`` int64."""
        return np.arange(len(self.order)) if isinstance(self.order, range) else self.order

    def places(self) -> Array | None:
        """Return where each row stands in the order, ``(n,)`` int64; None if that is its own number."""
        count = len(self.order)
        if isinstance(self.order, range) or np.array_equal(self.order, np.arange(count)):
            return None
        places = np.empty(count, np.int64)
        places[self.order] = np.arange(count)
        return places


def check_rows(state: Mapping[str, Any]) -> None:
    """Raise `CorruptCheckpointError` unless a state that was read holds lists, and as many rows as it says.

    To iterate over an array takes what its shape says, not what it holds.
    """
    steps, batch, generations = state["num_steps"], state["batch_shape"], state["generations"]
    columns, paths = state["columns"], state["format"]["paths"]
    if (
        not all(isinstance(part, (list, tuple)) for part in (batch, columns, paths))
        or not all(isinstance(path, (list, tuple)) for path in paths)
        or not all(type(size) is int for size in (steps, *batch))
    ):
        raise CorruptCheckpointError("a storage without sizes, columns or paths")
    count = steps * prod(batch)
    if (
        not isinstance(generations, torch.Tensor)
        or generations.dtype is not torch.int64
        or len(generations) != count
    ):
        raise CorruptCheckpointError(f"a storage of {count} rows that holds others")


def paths_of(state: Mapping[str, Any]) -> list[Path]:
    """Return the paths of a storage's columns."""
    return [tuple(path) for path in state["format"]["paths"]]


def twins(paths: Sequence[Path], rows: Rows) -> Iterable[tuple[int, int]]:
    """Yield the places of a column under ``"next"``, and of the same key beside it, where both are alike."""
    for place, path in enumerate(paths):
        if path[:1] != ("next",) or path[1:2] == ("next",) or path[1:] not in paths or not rows.width(place):
            continue
        beside = paths.index(path[1:])
        if rows.fields[place] == rows.fields[beside]:
            yield place, beside


def check_flags(paths: Sequence[Path], shapes: Sequence[Sequence[int]], done: Collection[Any]) -> None:
    """Raise `CheckpointError` for flags with more elements than a storage has slots."""
    for path, shape in zip(paths, shapes, strict=True):
        if is_flag(path, done) and prod(shape) != 1:
            raise CheckpointError(
                f"checkpointer: {path} has shape {tuple(shape)} in each slot of the storage; flags may have "
                "as many elements as the storage has slots: give the storage more dimensions, or use "
                "TensorStorageCheckpointer"
            )


def is_flag(path: Path, done: Collection[Any]) -> bool:
    """Return whether a path under ``"next"`` is one of the flags, which are named by path or by their last key."""
    return path[:1] == ("next",) and (path[-1] in done or path[1:] in done or path in done)


def split(
    paths: Sequence[Path], rows: Rows, streams: Streams, done: Collection[Any]
) -> tuple[list[Any], torch.Tensor]:
    """Return columns as trajectories, one after the other.

    Args:
        paths: of the columns.
        rows: ``n`` of them; what isn't a tensor stays as it is.
        streams: their order.
        done: flags that end trajectories.

    Returns:
        The columns, `Pieces` of ``n`` rows, or of ``n + trajectories`` and None for two that are twins; and where the
        trajectories begin, and the last one ends: ``(trajectories + 1,)`` int64.
    """
    order, count = streams.rows(), len(streams.order)
    everything = run_of(order)
    ends = np.zeros(count, bool)
    ends[streams.length - 1 :: max(streams.length, 1)] = True
    for place, path in enumerate(paths):
        field = rows.fields[place]
        if field is not None and is_flag(path, done) and rows.width(place) and count:
            flags = typed(rows.pick(place, everything), *field)
            single = flags.reshape(count, -1).bool().numpy()
            ends |= single[:, 0] if single.shape[1] == 1 else single.any(1)
    found = [
        (place, beside, np.append(rows.unlike(place, beside, order[:-1], order[1:]), False))
        for place, beside in (twins(paths, rows) if count else ())
    ]
    # One whose rows mostly differ would end trajectories everywhere, and make the others large: it stays whole.
    shared = [twin for twin in found if 2 * np.count_nonzero(twin[2] & ~ends) <= count]
    for _, _, differs in shared:
        ends |= differs
    offsets = np.concatenate(([0], np.flatnonzero(ends) + 1))
    values: list[Any] = [
        rows.whole(place) if field is None else rows.taken(place, order)
        for place, field in enumerate(rows.fields)
    ]
    last = offsets[1:] - 1
    final = np.zeros(count + len(last), bool)
    final[last + 1 + np.arange(len(last))] = True
    source = np.empty(len(final), np.int64)
    source[~final], source[final] = order, order[last]
    for place, beside, _ in shared:
        values[beside], values[place] = _shared(rows, place, beside, source, final), None
    return values, torch.from_numpy(offsets)


def _shared(rows: Rows, place: int, beside: int, source: Array, final: Array) -> Pieces:
    """Return a column and the last rows of its twin: those at `source`, of the twin where `final` says so."""

    def make(start: int, stop: int) -> Array:
        data = rows.pick(beside, source[start:stop])
        last = np.flatnonzero(final[start:stop])
        data[last] = rows.pick(place, source[start + last])
        return data

    return rows.made(beside, len(source), make)


def join(paths: Sequence[Path], columns: Sequence[Any], streams: Streams, offsets: torch.Tensor) -> list[Any]:
    """Return the columns that `split` was given, some of them in the memory of those that it returned.

    Raises:
        CorruptCheckpointError: it returned no such columns.
    """
    count, begins = len(streams.order), offsets.numpy()
    steps = np.diff(begins)
    if (
        offsets.dtype is not torch.int64
        or not len(begins)
        or begins[0]
        or begins[-1] != count
        or (begins > count).any()  # so that no difference overflows
        or (steps <= 0).any()
    ):
        raise CorruptCheckpointError("trajectories that aren't the storage's rows")
    places = streams.places()
    after = None if places is None else places + np.repeat(np.arange(len(steps)), steps)[places]

    def among_more(begin: int, end: int) -> Array:
        """Return where rows stand in a column that has one more for each trajectory."""
        if after is not None:
            return after[begin:end]
        first, last = np.searchsorted(begins, (begin, end - 1), "right") - 1
        within = np.diff(np.clip(begins[first : last + 2], begin, end))
        return np.arange(begin, end) + np.repeat(np.arange(first, last + 1), within)

    shared = {
        paths.index(path[1:]): place
        for place, path in enumerate(paths)
        if columns[place] is None and path[1:] in paths
    }
    rows: list[Any] = list(columns)
    for place, column in enumerate(columns):
        if isinstance(column, torch.Tensor) and place not in shared and len(column) != count:
            raise CorruptCheckpointError(f"a column at {paths[place]} of other rows")
    for place, beside in shared.items():
        if places is None and _MOST_MORE * len(steps) <= count:
            rows[beside], rows[place] = _apart(columns[place], count, among_more)
        else:  # what is read at the same rows is read in one pass
            rows[place], rows[beside] = _take([columns[place], columns[place][1:]], count, among_more)
    if places is not None:
        moved = [
            place
            for place, column in enumerate(columns)
            if isinstance(column, torch.Tensor) and place not in shared
        ]
        taken = _take([columns[place] for place in moved], count, lambda begin, end: places[begin:end])
        for place, column in zip(moved, taken, strict=True):
            rows[place] = column
    return rows


def _apart(
    column: torch.Tensor, count: int, index: Callable[[int, int], Array]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows behind some of a column, in fresh memory, and those themselves, in the memory of the column.

    Args:
        column: ``[rows, *shape]``; it holds something else then.
        count: how many rows there are of each.
        index: returns the numbers of the ``[begin, end)`` ones, ``(end - begin,)`` int64, which rise.

    Raises:
        IndexError: there is no such row.
    """
    source = rows_of(column)
    after: Array = np.empty((count, source.shape[1]), np.uint8)
    before, behind = (
        Columns([rows.ctypes.data], [rows.shape[1]], len(rows)) for rows in (source, source[1:])
    )

    def take(begin: int, end: int, to: Array) -> None:
        numbers = np.ascontiguousarray(index(begin, end), np.int64)
        behind.gather(numbers.ctypes.data, end - begin, [after[begin:].ctypes.data])
        before.gather(numbers.ctypes.data, end - begin, [to.ctypes.data])

    def move(span: tuple[int, int]) -> None:
        """Fill a span from its beginning on: no row is read where another one was written before."""
        for begin in range(span[0], span[1], step):
            take(begin, min(begin + step, span[1]), source[begin:])

    # Two halves at once. Those rows of the first one that come from where the second one is written are taken before.
    step, half = max(1, _HOT_BYTES // max(source.shape[1], 1)), count // 2
    least = max(half - max(len(source) - count, 0) - 1, 0)
    first = least + int(np.searchsorted(index(least, half), half - 1)) if half else 0
    middle: Array = np.empty((half - first, source.shape[1]), np.uint8)
    if len(middle):
        take(first, half, middle)
    for_each(move, ((0, first), (half, count)), 2 if count > 2 * step else 1)
    source[first:half] = middle
    return typed(after, column.dtype, column.shape[1:]), typed(source[:count], column.dtype, column.shape[1:])


def _take(
    columns: Sequence[torch.Tensor], count: int, index: Callable[[int, int], Array]
) -> Iterator[torch.Tensor]:
    """Yield `count` rows of each column, on the CPU: the very bytes, of any dtype.

    Args:
        columns: ``[rows, *shape]`` each.
        count: how many rows are taken.
        index: returns the numbers of the ``[begin, end)`` ones, ``(end - begin,)`` int64.

    Raises:
        IndexError: there is no such row.
    """
    sources = [rows_of(column) for column in columns]
    made: list[Array] = [np.empty((count, source.shape[1]), np.uint8) for source in sources]
    pairs = [(source, out) for source, out in zip(sources, made, strict=True) if out.size]
    if pairs:
        native = Columns(
            [source.ctypes.data for source, _ in pairs],
            [source.shape[1] for source, _ in pairs],
            min(len(source) for source, _ in pairs),
        )

        def take(begin: int, end: int) -> None:
            numbers = np.ascontiguousarray(index(begin, end), np.int64)
            outs = [out[begin:end].ctypes.data for _, out in pairs]
            native.gather(numbers.ctypes.data, end - begin, outs)

        _in_parts(count, sum(out.shape[1] for _, out in pairs), take)
    return (typed(out, column.dtype, column.shape[1:]) for out, column in zip(made, columns, strict=True))


def following(column: torch.Tensor, by: int) -> torch.Tensor:
    """Return a column that isn't empty with each row in the place of the one `by` before it, around the end; a copy."""
    rows = rows_of(column)
    moved: Array = np.empty_like(rows)
    cut = len(rows) - by

    def copy(begin: int, end: int) -> None:
        middle = min(max(begin, cut), end)
        moved[begin:middle] = rows[begin + by : middle + by]
        moved[middle:end] = rows[middle - cut : end - cut]

    _in_parts(len(moved), moved.shape[1], copy)
    return typed(moved, column.dtype, column.shape[1:])


def _in_parts(rows: int, width: int, fill: Callable[[int, int], None]) -> None:
    """Have ``[begin, end)`` of rows filled, part after part, by two threads where there is much."""
    step = max(1, _BLOCK_BYTES // width)
    parts = range(0, rows, step)
    for_each(lambda begin: fill(begin, min(begin + step, rows)), parts, 2 if len(parts) > 2 else 1)
