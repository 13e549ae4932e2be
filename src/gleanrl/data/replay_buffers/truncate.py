"""Marking of abandoned trajectories: their last stored step becomes truncated."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from gleanrl._arrays.tensordicts import Path
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.trajectories import MASK, TRAJ_IDS, cut_at, newest_steps, step_ids
from gleanrl.errors import MissingKeyError, UnsupportedError

_ROWS = 1 << 20  # rows searched at once
_RECORDS = 1 << 10  # records of a list searched at once, which may have to be decompressed


def end_trajectories(storage: Storage, ids: Iterable[int]) -> int:
    """Set truncated and done in the last stored step of trajectories that didn't end there; terminated stays unchanged.

    Steps are found by ``("collector", "traj_ids")``. A record may hold several consecutive steps in its last dimension.
    Padding, where ``("collector", "mask")`` is False, isn't a step. Nothing changes in storages without ids, in records
    of a list that aren't TensorDicts, and in storages whose records aren't in order. Unknown ids are ignored. The flags
    count as amendments, so priorities stay. The sampler isn't notified.

    Args:
        storage: a storage of steps; the caller holds the buffer's lock.
        ids: the ids of the trajectories.

    Returns:
        The number of steps marked.
    """
    if not len(storage) or not storage.ordered:
        return 0
    marked = 0
    for slot, positions in _last_steps(storage, set(ids)).items():
        index = torch.tensor([slot], device="cpu")
        record = storage.fetch(index)
        single = record[0].clone() if isinstance(record, list) else record
        count = cut_at(single, positions)
        if count:
            data = [single] if isinstance(record, list) else single
            prepared = storage.prepare_selection(data, index.shape, "end_trajectories")
            storage.write_slots(prepared, index, amended=True)
            marked += count
    return marked


def _last_steps(storage: Storage, ids: set[int]) -> dict[int, list[int]]:
    """Return the newest step of each trajectory: for each slot, the positions of such steps in its record."""
    found: dict[int, list[int]] = {}
    # The newest chunk comes first, so the first step found of a trajectory is its last one.
    for slots, column, ends in _ids_by_age(storage):
        newest = newest_steps(column, ids)
        for position in newest.values():
            record = bisect(ends, position)
            begin = ends[record - 1] if record else 0
            found.setdefault(int(slots[record]), []).append(position - begin)
        ids = ids - newest.keys()
        if not ids:
            break
    return found


def _ids_by_age(storage: Storage) -> Iterator[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]:
    """Yield chunks of slots, their steps' ids, and the end position of each slot's steps.

    The first chunk is the newest; within a chunk the newest step is last. Padding and records without ids have the id
    -1, or no steps.

    Yields:
        Slots ``(n,)`` int64, ids ``(steps,)``, and for each slot the position after its last step.
    """
    count = len(storage)
    first = storage.oldest_step * storage.rows_per_step
    listed = isinstance(storage, ListStorage)
    paths = None if listed else _columns(storage)
    if paths == ():
        return
    step = _RECORDS if listed else _ROWS
    for stop in range(count, 0, -step):
        slots = (first + torch.arange(max(0, stop - step), stop, device="cpu")) % count
        records: Any = storage.fetch(slots, paths)
        if listed:
            each = [step_ids(record) for record in records]
            yield slots, torch.cat(each), [*accumulate(map(torch.numel, each))]
        elif (column := step_ids(records)).numel():
            width = column.numel() // len(slots)
            yield slots, column, range(width, column.numel() + 1, width)


def _columns(storage: Storage) -> tuple[Path, ...]:
    """Return the columns of ids and mask, as far as the storage has them."""
    found: tuple[Path, ...] = ()
    for key in (TRAJ_IDS, MASK):
        try:
            found += storage.columns_of([key])
        except (MissingKeyError, UnsupportedError):
            break
    return found
