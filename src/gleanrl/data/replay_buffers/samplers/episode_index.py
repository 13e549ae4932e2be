"""The table of a storage's trajectories, updated at every write, so that draws need no scan of the records.

To change where trajectories end in a storage, change `EpisodeTable` and `_BoundaryReader`.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gleanrl._arrays.native import EndColumns, Episodes
from gleanrl._arrays.schema import Schema, numpy_view
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl.data.replay_buffers.change_log import Change, Follower
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.seams import flag_paths
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import EPISODE, MASK, STEPS, TRAJ_IDS, not_a_flag
from gleanrl.errors import (
    EmptyBufferError,
    GleanError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

_DONE: Path = ("next", "done")
_Array: TypeAlias = np.ndarray[Any, Any]
_Column: TypeAlias = np.ndarray[Any, Any] | torch.Tensor


class BoundaryKeys(NamedTuple):
    """The columns that a user names for the ends of trajectories."""

    ends: tuple[Path, ...] = ()
    """Flags that end a trajectory. Empty for every ``done``, ``terminated`` and ``truncated`` below ``next``."""
    trajectory: Path | None = None
    """A whole number that changes with the trajectory; None for ``"episode"`` if that is stored.

    If the key isn't stored but other columns tell where trajectories end, it is ignored with a warning.
    """


class EpisodeTable(Follower[Storage]):
    """Keeps a native episode table in sync with a storage.

    A trajectory is a maximal run of adjacent time steps of one stream (batch entry) with one id and no end inside. The
    write cursor ends a trajectory, too. Without ids, a seam between two writes also ends it: there the content shows
    that the second write doesn't continue the first (see `Seams`).

    ``("collector", "traj_ids")`` and ``("next", "done")`` always count where they are stored. In n-step data
    (``"steps_to_next_obs"``) flags count only in rows where that is 1. Masked rows (``("collector", "mask")``) and
    unmasked rows are never in one trajectory.

    A ring write costs O(steps written). The table reads the whole storage when it begins to follow a storage in use,
    after records were replaced by index, and at the first seam.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        keys: columns of the ends.
        ends: ``[steps, *batch]`` bool, further ends in a storage that isn't written any more; None for none.
        trajectories: ``[steps, *batch]`` integers whose changes end trajectories in such a storage; None for none.
    """

    def __init__(
        self, keys: BoundaryKeys, ends: torch.Tensor | None = None, trajectories: torch.Tensor | None = None
    ) -> None:
        self.keys = keys
        self._ends = None if ends is None else _user_array("ends", ends, torch.bool)
        self._trajectories = (
            None if trajectories is None else _user_array("trajectories", trajectories, torch.int64)
        )
        self._native: Episodes | None = None
        self._reader: _BoundaryReader | None = None

    def of(self, storage: Storage) -> Episodes:
        """Return the native table in sync with `storage`.

        Raises:
            EmptyBufferError: the storage has no schema yet.
            MissingKeyError: no stored column tells where trajectories end.
            SchemaError: a flag isn't 0 or 1, an id isn't a whole number, or `ends` has another length than the storage.
            UnsupportedError: the storage has no columns, its records aren't in the order of time, or it was written
                after its `ends` had been given.
        """
        self.sync(storage)
        assert self._native is not None
        return self._native

    def holds(self, storage: Storage, slots: torch.Tensor, inner: torch.Tensor) -> bool:
        """Return whether no trajectory ends at the inner rows of slices, by the ends and ids stored now.

        A write through a live view doesn't change the version, so the stored ends may differ from the ends in the
        table. If a trajectory does end inside, the table reads the whole storage at the next `sync`.

        Args:
            storage: storage that the rows belong to.
            slots: slice after slice, ``(n,)`` int64.
            inner: which rows aren't the last step of their slice, ``(n,)`` bool.
        """
        self.sync(storage)
        assert self._reader is not None
        unbroken = not self._reader.ends_inside(slots, inner)
        if not unbroken:
            self.unfollow()
        return unbroken

    def joins(self, storage: Storage, slots: torch.Tensor, steps: torch.Tensor) -> bool:
        """Return whether no trajectory ends between each slot and the one `steps` later, earlier if negative.

        Both arguments are ``(n,)`` int64. See `holds` for the ends that count.
        """
        table = self.of(storage)
        path = expanded(table, later(table, slots, steps.clamp(max=0)), steps.abs() + 1)
        return self.holds(storage, path.slots, ~path.last)

    def ends_at(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return whether a flag, or one of the user's `ends`, ends a trajectory at `slots`, ``(n,)`` bool.

        None if there are no flags and no `ends`. The table has to be in sync (see `of`).
        """
        assert self._reader is not None
        at = slots.numpy()
        ends, _ = self._reader.read(at)
        if self._ends is not None:
            ends = self._ends[at] if ends is None else ends | self._ends[at]
        return None if ends is None else torch.from_numpy(ends)

    @property
    def _static(self) -> bool:
        return self._ends is not None or self._trajectories is not None

    def try_sync(self, storage: Storage) -> bool:
        """Return whether the table could be brought in sync; if not, the next draw raises the error."""
        try:
            self.sync(storage)
        except GleanError:
            return False
        return True

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        native = self._native
        assert native is not None
        if self._static and not all(change.amended for change in changes):
            raise UnsupportedError(
                "ends, trajectories: they describe the records stored when they were given, but the storage was "
                "written since; give end_key or traj_key instead"
            )
        if self._reader is None or storage.pieces is not self._reader.pieces:
            self._look_at_all(storage)
        elif storage.ordered and (written := _ring_write(changes, native, storage.end)):
            for start, stop in written:
                self._tell(native, start, stop)
        else:
            self._tell_everything(native, storage)

    def _look_at_all(self, storage: Storage) -> None:
        self._reader = _reader(storage, self.keys, self._static)
        self._native = Episodes(storage.capacity_steps, max(storage.rows_per_step, 1))
        self._tell_everything(self._native, storage)

    def _tell_everything(self, native: Episodes, storage: Storage) -> None:
        """Write everything stored to the native table, the oldest step first."""
        if not storage.ordered:
            raise UnsupportedError(
                "slices need records in the order of time, but a writer that chooses records by their values (for "
                "example TensorDictMaxValueWriter) stored these; use RoundRobinWriter"
            )
        self._check_lengths(len(storage))
        self.unfollow()  # if a step below raises, the next `sync` reads the whole storage again
        native.clear()
        capacity, stored, end = storage.capacity_steps, storage.num_steps, storage.end
        for start, stop in ((end, capacity), (0, end)) if stored == capacity else ((0, stored),):
            if stop > start:
                self._tell(native, start, stop)

    def _check_lengths(self, rows: int) -> None:
        for name, values in (("ends", self._ends), ("trajectories", self._trajectories)):
            if values is not None and values.shape[0] != rows:
                raise SchemaError(
                    f"{name}: expected one value for each of the {rows} stored rows, got {values.shape[0]}"
                )

    def _tell(self, native: Episodes, start: int, stop: int) -> None:
        """Write the time steps ``[start, stop)`` to the native table."""
        assert self._reader is not None
        streams = native.num_streams
        rows = slice(start * streams, stop * streams)
        ends, ids = self._reader.read(rows)
        if self._ends is not None:
            user_ends = self._ends[rows]
            ends = user_ends if ends is None else ends | user_ends
        if self._trajectories is not None:
            ids = [*ids, self._trajectories[rows]]
        native.on_write(
            start,
            stop - start,
            0 if ends is None else ends.ctypes.data,
            [values.ctypes.data for values in ids],
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: the copy reads its storage again."""
        return {"keys": self.keys, "_ends": self._ends, "_trajectories": self._trajectories}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        self._native = self._reader = self.followed = None


def _ring_write(changes: list[Change], table: Episodes, end: int) -> list[tuple[int, int]]:
    """Return changes as spans of time steps, the oldest first, if they are one write of a ring; else an empty list.

    They are one write of the ring if they lead from the table's cursor to `end`.
    """
    streams, begin = table.num_streams, table.cursor * table.num_streams
    at, written = begin, []
    for start, stop, amended in changes if len(changes) == 1 else reversed(changes):
        if amended or start != at:
            return []
        written.append((start // streams, stop // streams))
        at = stop % (table.capacity * streams)
    return written if at == end * streams != begin else []


def locate(table: Episodes, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each slot's number of earlier steps in its trajectory, and of steps from it on, ``(n,)`` int64 each."""
    before, after = torch.empty_like(slots), torch.empty_like(slots)
    table.locate(slots.data_ptr(), slots.shape[0], before.data_ptr(), after.data_ptr())
    return before, after


def later(table: Episodes, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the slots `steps` time steps later (earlier if negative) in the same streams, around the ring."""
    streams = table.num_streams
    target = (slots // streams + steps) % table.capacity
    return target * streams + slots % streams


class EpisodeRows(NamedTuple):
    """The rows of slices, one slice after the other."""

    slots: torch.Tensor
    """Slots, ``(n,)`` int64."""
    last: torch.Tensor
    """Which rows are the last step of their slice, ``(n,)`` bool; copies that fill slices up aren't."""


def expanded(table: Episodes, first: torch.Tensor, lengths: torch.Tensor, stride: int = 0) -> EpisodeRows:
    """Return the rows of slices.

    Args:
        table: the trajectories; a slice may cross their ends.
        first: first slots, ``(n,)`` int64.
        lengths: number of steps, ``(n,)`` int64.
        stride: number of rows for each slice, filled up with copies of its last step; 0 for its steps only.
    """
    count = first.shape[0]
    rows = count * stride or int(lengths.sum())
    slots = torch.empty(rows, dtype=torch.int64, device="cpu")
    last = torch.empty(rows, dtype=torch.bool, device="cpu")
    table.expand(first.data_ptr(), lengths.data_ptr(), count, slots.data_ptr(), stride, last.data_ptr())
    return EpisodeRows(slots, last)


def runs_of(table: Episodes, shortest: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first slot and length of the trajectories of at least `shortest` steps, ``(n,)`` int64 each.

    Streams come one after the other, each with its oldest trajectory first.
    """
    count = table.num_runs(shortest)
    first = torch.empty(count, dtype=torch.int64, device="cpu")
    length = torch.empty_like(first)
    table.list_runs(shortest, first.data_ptr(), length.data_ptr(), count)
    return first, length


class _BoundaryReader:
    """Reads the columns of a storage that tell where trajectories end.

    Args:
        storage: storage of the columns.
        flags: columns of bools, or of the numbers 0 and 1.
        ids: columns of whole numbers, one for each row; the mask, a column of bools, may be one of them.
        steps: the column of `steps_to_next_obs` if it is stored.
        groups: the flags that may have several values for each row, one for each agent; if any is set, the row is an
            end.
    """

    def __init__(
        self,
        storage: TensorStorage,
        flags: list[Path],
        ids: list[Path],
        steps: Path | None,
        groups: Container[Path],
    ) -> None:
        self._flags = [(path, _flat(storage, path, "flag", wide=path in groups)) for path in flags]
        self._ids = [(path, _flat(storage, path, "bool" if path == MASK else "whole number")) for path in ids]
        self.pieces = storage.pieces
        """Numbers that change at seams, ``(steps, streams)``; None for none."""
        if self.pieces is not None and not ids:  # with ids, seams add nothing
            self._ids.append((("pieces",), self.pieces.reshape(-1)))
        self._steps = None if steps is None else _flat(storage, steps, "integer")
        self._core = self._by_core()

    def read(self, rows: slice | _Array) -> tuple[_Array | None, list[_Array]]:
        """Return ends, ``(n,)`` bool or None, and the id columns, ``(n,)`` int64 each; all are contiguous.

        Args:
            rows: a range of slots, or slots ``(n,)`` int64.

        Raises:
            SchemaError: a flag is a number other than 0 and 1, or an id isn't a whole number.
        """
        ends: _Array | None = None
        for path, column in self._flags:
            flag = _as_flag(path, _host(column, rows))
            flag = np.asarray(flag.any(1)) if flag.ndim > 1 else flag
            ends = flag if ends is None else ends | flag
        if self._steps is not None and ends is not None:
            ends = ends & (_host(self._steps, rows) == 1)
        ids = [_as_integers(path, _host(column, rows)) for path, column in self._ids]
        return (None if ends is None else np.ascontiguousarray(ends)), ids

    def ends_inside(self, slots: torch.Tensor, inner: torch.Tensor) -> bool:
        """Return whether a trajectory ends at an inner row of a slice (see `EpisodeTable.holds`)."""
        if self._core is not None:
            return self._core.inside(slots.data_ptr(), slots.shape[0], inner.data_ptr())
        inside = inner.numpy()
        ends, ids = self.read(slots.numpy())
        differ = ((values[1:] != values[:-1]) & inside[:-1] for values in ids)
        return (ends is not None and bool((ends & inside).any())) or any(map(np.any, differ))

    def _by_core(self) -> EndColumns | None:
        """Return the core's reader of the columns; None if one of them is on a device or of another dtype."""
        flags = [
            column for _, column in self._flags if isinstance(column, np.ndarray) and column.dtype == np.bool_
        ]
        ids = [
            column for _, column in self._ids if isinstance(column, np.ndarray) and column.dtype.kind in "biu"
        ]
        steps = self._steps if isinstance(self._steps, np.ndarray) else None
        if len(flags) < len(self._flags) or len(ids) < len(self._ids) or steps is not self._steps:
            return None
        return EndColumns(
            [flag.ctypes.data for flag in flags],
            [flag.shape[1] if flag.ndim > 1 else 1 for flag in flags],
            [column.ctypes.data for column in ids],
            [column.itemsize for column in ids],
            *(() if steps is None else (steps.ctypes.data, steps.itemsize)),
        )


def _reader(storage: Storage, keys: BoundaryKeys, has_user_arrays: bool) -> _BoundaryReader:
    """Return a reader of the columns of a storage that tell where trajectories end.

    Raises:
        MissingKeyError: no end key is stored, or no column tells where trajectories end.
        UnsupportedError: the storage has no columns.
    """
    if not isinstance(storage, TensorStorage):
        raise UnsupportedError(
            f"slices need records in columns, a {type(storage).__name__} holds single objects; use LazyTensorStorage"
        )
    if not storage.initialized:
        raise EmptyBufferError("can't sample: the storage is empty; extend it first")
    schema = storage.format.schema
    flags = _flag_paths(schema, keys.ends)
    wanted = keys.trajectory or EPISODE
    # The ids of collectors always count, in addition to the key that the user names.
    ids = [path for path in dict.fromkeys((wanted, TRAJ_IDS)) if path in schema]
    if keys.trajectory is not None and wanted not in schema and (flags or ids):
        warnings.warn(
            f"trajectory key {as_key(wanted)!r} isn't stored; trajectories are bounded by "
            f"{[as_key(path) for path in (*flags, *ids)]}",
            stacklevel=2,
        )
    if not (flags or ids or has_user_arrays):
        raise MissingKeyError(
            f"nothing stored tells where trajectories end: neither {as_key(wanted)!r}, {TRAJ_IDS!r} nor a flag "
            f"below 'next'; there are {[as_key(path) for path in schema.paths]}"
        )
    if storage.format.mask is not None:
        ids.append(MASK)  # a masked row may have the same id as its neighbours, which are steps
    groups = () if keys.ends else flags
    return _BoundaryReader(storage, flags, ids, STEPS if STEPS in schema else None, groups)


def _flag_paths(schema: Schema, ends: tuple[Path, ...]) -> list[Path]:
    if not ends:
        return flag_paths(schema)
    if not any(path in schema for path in ends):
        raise MissingKeyError(
            f"end_key: {[as_key(path) for path in ends]} isn't stored; there are "
            f"{[as_key(path) for path in schema.paths]}"
        )
    return [path for path in dict.fromkeys((*ends, _DONE)) if path in schema]


def _flat(storage: TensorStorage, path: Path, kind: str, wide: bool = False) -> _Column:
    """Return a live column as ``[rows]`` or ``[rows, width]``, checked; on the CPU as a NumPy array."""
    column = storage.column(path)
    column = column.view(column.shape[0], -1)
    is_bool, is_half = column.dtype == torch.bool, column.dtype == torch.bfloat16
    fits = {
        "bool": is_bool,
        "flag": not column.dtype.is_complex,
        "whole number": not (is_bool or is_half or column.dtype.is_complex),
        "integer": not (is_bool or column.dtype.is_floating_point or column.dtype.is_complex),
    }
    if fits[kind] and (wide or column.shape[1] == 1):
        column = column.view(-1) if column.shape[1] == 1 else column
        # A NumPy view keeps one address. The memory of tensors that a user gave may move, so these remain tensors.
        return numpy_view(column) if column.is_cpu and not storage.has_user_memory and not is_half else column
    raise SchemaError(
        f"{as_key(path)!r} can't tell where trajectories end: expected one {kind} for each row, got "
        f"{tuple(column.shape[1:])} {column.dtype}"
    )


def _host(column: _Column, rows: slice | _Array) -> _Array:
    if isinstance(column, np.ndarray):
        return column[rows]
    values = column[rows].cpu()
    return numpy_view(values.float() if values.dtype == torch.bfloat16 else values)


def _as_flag(path: Path, values: _Array) -> _Array:
    """Return flags as bool; raise `SchemaError` for numbers other than 0 and 1."""
    if values.dtype == np.bool_:
        return values
    flag = values == 1
    other = ~flag & (values != 0)
    if other.any():
        raise not_a_flag(path, values[other][0], values.dtype)
    return np.asarray(flag)


def _as_integers(path: Path, values: _Array) -> _Array:
    """Return ids as contiguous int64; raise `SchemaError` for one that isn't a whole number."""
    if values.dtype.kind == "f":
        broken = values != np.floor(values)  # True for NaN, too
        broken |= ~np.isfinite(values)
        if broken.any():
            raise SchemaError(
                f"{as_key(path)!r} can't tell trajectories apart: expected whole numbers, got {values[broken][0]}"
            )
    return np.ascontiguousarray(values, np.int64)


def _user_array(name: str, values: Any, dtype: torch.dtype) -> _Array:
    try:
        tensor = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as cause:
        raise InvalidTypeError(
            f"{name}: expected a tensor [steps, *batch] of {dtype}, got {values!r}"
        ) from cause
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or not tensor.ndim:
        raise InvalidArgumentError(
            f"{name}: expected a tensor [steps, *batch] of {dtype}, got {tensor.dtype}"
        )
    return tensor.reshape(-1).to(dtype).contiguous().numpy()
