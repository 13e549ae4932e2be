"""Records as trajectories, one after the other, each observation once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.rows import Rows, laid_out
from gleanrl.data.replay_buffers.checkpointers.trajectories import (
    DONE,
    Streams,
    check_flags,
    check_rows,
    join,
    paths_of,
    split,
)
from gleanrl.tree import as_path


class NestedStorageCheckpointer(StorageCheckpointerBase):
    """Writes records as trajectories, one after the other, each observation once.

    Beside the columns stands where trajectories begin (``offsets``), so that a reader can make nested tensors of them
    without copying: ``torch.nested.nested_tensor_from_jagged(column, offsets)``. Columns that stand under ``"next"``,
    too, have one row more in each trajectory, what came last: ``offsets + torch.arange(len(offsets))``.

    The rows left out are found by comparing bytes, so that any data come back exactly; data that repeat nothing (of n
    steps, or of streams that were written in turns) are kept as they are.

    Args:
        done_keys: flags under ``"next"`` that end trajectories; None for ``"done"``, ``"terminated"``, ``"truncated"``,
            wherever they stand. What comes back doesn't depend on them.
        reward_keys: has no effect: rewards are kept as they are.

    Raises:
        CheckpointError: when it writes: flags with more elements than the storage has slots.
    """

    form = "nested"
    makes_columns = True
    takes_segments = True

    def __init__(self, done_keys: Any = None, reward_keys: Any = None) -> None:
        self.done_keys, self.reward_keys = done_keys, reward_keys

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with its columns as trajectories, and ``offsets``."""
        if "columns" not in state:
            return dict(state)
        paths = paths_of(state)
        done = flags_of(self.done_keys)
        check_flags(paths, state["format"]["shapes"], done)

        def lay(rows: Rows) -> dict[str, Any]:
            columns, offsets = split(paths, rows, Streams.of(state), done)
            return {"columns": columns, "offsets": offsets}

        return laid_out(state, lay)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with its rows in their places."""
        state = dict(packed)
        if "columns" in state:
            check_rows(state)
            offsets = state.pop("offsets")
            state["columns"] = join(paths_of(state), state["columns"], Streams.of(state), offsets)
        return state


def flags_of(keys: Any) -> tuple[Any, ...]:
    """Return which flags end trajectories: last keys, and whole paths."""
    if keys is None:
        return DONE
    several = keys if isinstance(keys, list) else (keys,) if isinstance(keys, str) else tuple(keys)
    return tuple(key if isinstance(key, str) else as_path(key) for key in several)
