"""Checkpointers that write each observation once, instead of under ``"next"`` and again in the following step."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.tensordicts import as_path
from gleanrl._checkpoint.reader import spread
from gleanrl._checkpoint.row_segments import Array, Unread, rows_of
from gleanrl._os.parallel_read import Target
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.trajectories import (
    DONE,
    IN_PLACE,
    Plan,
    RowReader,
    Streams,
    TrajectoryRuns,
    check_flags,
    check_rows,
    join,
    laid_out,
    paths_of,
    split,
    spread_out,
    twins,
)
from gleanrl.errors import CorruptCheckpointError


class FlatStorageCheckpointer(StorageCheckpointerBase):
    """Writes each observation once: of an entry under ``"next"``, only the rows that the following step doesn't repeat.

    The checkpointer finds these rows by comparing bytes. They are the ends of trajectories, the newest step, and any
    other row that differs (in n-step data, or in streams that were written alternately). So loading is exact for any
    data, and rows that aren't repeated cost no more than their own bytes.

    Args:
        done_keys: has no effect: the form doesn't depend on flags.
        reward_keys: has no effect: rewards are kept unchanged.

    Raises:
        CheckpointError: at a dump, a flag has more elements than the storage has slots.
    """

    form = "flat"
    makes_columns = True
    takes_segments = True

    def __init__(self, done_keys: Any = None, reward_keys: Any = None) -> None:
        self.done_keys, self.reward_keys = done_keys, reward_keys

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with only those rows of ``"next"`` that the following step doesn't repeat.

        ``"apart"`` has them by position of their column, as ``"rows"`` (numbers) and ``"values"``. The column is None.
        """
        if "columns" not in state:
            return dict(state)
        paths = paths_of(state)
        check_flags(paths, state["format"]["shapes"], DONE)
        after = _following(state)

        def lay(rows: RowReader) -> dict[str, Any]:
            index, apart = np.arange(len(after)), {}
            columns = [rows.column(position) for position in range(len(paths))]
            for position, counterpart in twins(paths, rows) if len(after) else ():
                differing = np.flatnonzero(rows.unlike(position, counterpart, index, after))
                apart[position] = {
                    "rows": torch.from_numpy(differing),
                    "values": rows.selected(position, differing),
                }
                columns[position] = None
            return {"apart": apart, "columns": columns}

        return laid_out(state, lay)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with all rows, in fresh memory (see `StorageCheckpointerBase.unpack`)."""
        state = dict(packed)
        if "columns" not in state:
            return state
        check_rows(state)
        apart, paths, columns = state.pop("apart"), paths_of(state), list(state["columns"])
        width = prod(state["batch_shape"])
        count = state["num_steps"] * width
        # An entry under "next" repeats the row that was written after it. Around the ring, the first rows come last.
        following = TrajectoryRuns(np.array([0, width]), np.array([count - width, 0]))
        plan: Plan = {}
        for position, column in enumerate(columns):
            if isinstance(column, (torch.Tensor, Unread)):
                if column.shape[0] != count:
                    raise CorruptCheckpointError(
                        f"column {paths[position]}: expected {count} rows, got {column.shape[0]}"
                    )
                plan[position] = [(position, IN_PLACE)]
        # Check all row numbers first: `spread` copies in C++ without checking bounds, and the file may be damaged.
        for position, separate in apart.items():
            path = paths[position]
            if path[:1] != ("next",) or columns[position] is not None:
                raise CorruptCheckpointError(
                    f"column {path}: expected separate rows only under 'next', and not of a whole column"
                )
            source = paths.index(path[1:])
            column, rows, values = columns[source], separate["rows"], separate["values"]
            alike = values.dtype is column.dtype and values.shape == (*rows.shape, *column.shape[1:])
            numbers = rows.dtype is torch.int64 and rows.ndim == 1
            inside = numbers and rows.numpy().min(initial=0) >= 0 and rows.numpy().max(initial=0) < count
            if not inside or not alike or not count:
                raise CorruptCheckpointError(
                    f"column {path}: expected separate rows of {column.dtype}, with numbers in [0, {count})"
                )
            plan[source].append((position, following))
        made = spread_out(columns, count, plan)
        left = [
            (p, np.ascontiguousarray(separate["rows"].numpy()), separate["values"])
            for p, separate in apart.items()
        ]
        spread(
            (values, [Target(rows_of(made[position]), np.arange(len(rows)), rows)])
            for position, rows, values in left
        )
        state["columns"] = made
        return state


def _following(state: Mapping[str, Any]) -> Array:
    """Return the row that was written after each row, in the same stream; after the newest row, the oldest."""
    width = prod(state["batch_shape"])
    count = state["num_steps"] * width
    after = np.arange(width, count + width)
    after[count - width :] -= count
    return after


class NestedStorageCheckpointer(StorageCheckpointerBase):
    """Writes records as trajectories, one after the other, with each observation once.

    ``offsets`` next to the columns holds where trajectories begin. So a reader can make nested tensors of them without
    copying: ``torch.nested.nested_tensor_from_jagged(column, offsets)``. A column that also exists under ``"next"`` has
    one row more in each trajectory, the last observation. Its offsets are ``offsets + torch.arange(len(offsets))``. If
    most rows under ``"next"`` differ from the following step, both columns are written whole.

    The checkpointer finds the rows to leave out by comparing bytes, so that loading is exact for any data. Data that
    repeat nothing are kept unchanged: n-step data, or streams that were written alternately.

    Args:
        done_keys: flags under ``"next"`` that end trajectories. None for ``"done"``, ``"terminated"`` and
            ``"truncated"`` at any depth. The loaded data don't depend on them.
        reward_keys: has no effect: rewards are kept unchanged.

    Raises:
        CheckpointError: at a dump, a flag has more elements than the storage has slots.
    """

    form = "nested"
    makes_columns = True
    takes_segments = True

    def __init__(self, done_keys: Any = None, reward_keys: Any = None) -> None:
        self.done_keys, self.reward_keys = done_keys, reward_keys

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with its columns as trajectories, and with ``offsets``."""
        if "columns" not in state:
            return dict(state)
        paths = paths_of(state)
        done = flags_of(self.done_keys)
        check_flags(paths, state["format"]["shapes"], done)

        def lay(rows: RowReader) -> dict[str, Any]:
            columns, offsets = split(paths, rows, Streams.of(state), done)
            return {"columns": columns, "offsets": offsets}

        return laid_out(state, lay)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with its rows at their original positions, in fresh memory."""
        state = dict(packed)
        if "columns" in state:
            check_rows(state)
            offsets = state.pop("offsets")
            state["columns"] = join(paths_of(state), state["columns"], Streams.of(state), offsets)
        return state


def flags_of(keys: Any) -> tuple[Any, ...]:
    """Return the flags that end trajectories, each as its last key or as its whole path."""
    if keys is None:
        return DONE
    several = keys if isinstance(keys, list) else (keys,) if isinstance(keys, str) else tuple(keys)
    return tuple(key if isinstance(key, str) else as_path(key) for key in several)
