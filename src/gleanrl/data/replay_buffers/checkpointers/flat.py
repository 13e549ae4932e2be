"""Records without what they say twice: an observation stands under ``"next"``, and again in the step that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.errors import CheckpointError, CorruptCheckpointError

_DONE = ("done", "terminated", "truncated")


class FlatStorageCheckpointer(StorageCheckpointerBase):
    """Writes each observation once: of an entry under ``"next"`` only the rows that the next step doesn't repeat.

    Which rows these are is found by comparing bytes: ends of trajectories, the newest step, and whatever else differs
    (data of n steps, streams that were written in turns). So loading is exact for any data, and what isn't repeated
    costs nothing but its own bytes.

    Args:
        done_keys: has no effect: nothing is assumed of flags.
        reward_keys: has no effect: rewards are kept as they are.

    Raises:
        CheckpointError: when it writes: flags with more elements than the storage has slots.
    """

    form = "flat"

    def __init__(self, done_keys: Any = None, reward_keys: Any = None) -> None:
        self.done_keys, self.reward_keys = done_keys, reward_keys

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with the rows of ``"next"`` that the following step doesn't repeat."""
        packed = dict(state)
        if "columns" not in state:
            return packed
        paths = _paths(state)
        _check_flags(paths, state["format"]["shapes"])
        after = _following(state)
        columns = list(state["columns"])
        packed["apart"] = {}
        for position, path in enumerate(paths):
            twin = path[1:]
            if path[:1] != ("next",) or twin not in paths:
                continue
            mine, theirs = columns[position], columns[paths.index(twin)]
            if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor) or not mine.numel():
                continue
            if mine.shape == theirs.shape and mine.dtype is theirs.dtype:
                kept = _unlike(mine, theirs, after)
                packed["apart"][position] = {"rows": kept, "values": mine[kept].clone()}
                columns[position] = None
        packed["columns"] = columns
        return packed

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with all rows."""
        state = dict(packed)
        if "columns" not in state:
            return state
        apart = state.pop("apart")
        paths, columns, after = _paths(state), list(state["columns"]), _following(state)
        for position, kept in apart.items():
            path = paths[position]
            source = columns[paths.index(path[1:])]
            if path[:1] != ("next",) or columns[position] is not None:
                raise CorruptCheckpointError(f"a column at {path} that stands elsewhere")
            column = source[after]
            column[kept["rows"]] = kept["values"]
            columns[position] = column
        state["columns"] = columns
        return state


def _paths(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the paths of the columns."""
    return [tuple(path) for path in state["format"]["paths"]]


def _check_flags(paths: Sequence[tuple[Any, ...]], shapes: Sequence[Sequence[int]]) -> None:
    for path, shape in zip(paths, shapes, strict=True):
        if path[:1] == ("next",) and path[-1] in _DONE and prod(shape) != 1:
            raise CheckpointError(
                f"checkpointer: {path} has shape {tuple(shape)} in each slot of the storage; flags may have "
                "as many elements as the storage has slots: give the storage more dimensions, or use "
                "TensorStorageCheckpointer"
            )


def _following(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the row that was written after each row, in the same column of the batch; the newest has the oldest."""
    steps, width = state["num_steps"], prod(state["batch_shape"])
    rows = torch.arange(steps * width, device="cpu").reshape(steps, width)
    return rows.roll(-1, 0).reshape(-1)


def _unlike(mine: torch.Tensor, theirs: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the rows of one column that aren't those of another one in the following step, byte for byte."""
    found = []
    rows = max(1, (1 << 22) // max(1, mine[0].numel() * mine.element_size()))
    for begin in range(0, len(mine), rows):
        part = _bytes(mine[begin : begin + rows])
        found.append((part != _bytes(theirs[after[begin : begin + rows]])).any(1))
    return torch.from_numpy(np.flatnonzero(np.concatenate(found)))


def _bytes(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = rows.cpu().contiguous().reshape(len(rows), -1)
    found: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return found
