"""Trajectories that nobody goes on with: the last step of each that is stored says that it was cut there."""

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

_ROWS = 1 << 20  # looked through at once
_RECORDS = 1 << 10  # likewise of a list, whose records may have to be unpacked


def end_trajectories(storage: Storage, given: Iterable[int]) -> int:
    """Set truncated, and with it done, in the last stored step of trajectories that don't end there; terminated stays.

    Steps are found by ``("collector", "traj_ids")``. A record may hold several steps, which follow each other in their
    last dimension; those that ``("collector", "mask")`` says are padding are none. Storages without ids, other objects
    than TensorDicts in lists, and records out of order are left as they are. The flags are corrections: priorities
    stay.

    Args:
        storage: of steps; the caller holds the buffer's lock.
        given: ids of the trajectories.

    Returns:
        How many steps were marked.
    """
    if not len(storage) or not storage.ordered:
        return 0
    marked = 0
    for slot, places in _last_steps(storage, set(given)).items():
        index = torch.tensor([slot], device="cpu")
        record = storage.fetch(index)
        single = record[0].clone() if isinstance(record, list) else record
        count = cut_at(single, places)
        if count:
            data = [single] if isinstance(record, list) else single
            prepared = storage.prepare_selection(data, index.shape, "end_trajectories")
            storage.write_slots(prepared, index, amended=True)
            marked += count
    return marked


def _last_steps(storage: Storage, ids: set[int]) -> dict[int, list[int]]:
    """Return where the newest step of each trajectory stands that has one: slots, and places among a record's steps."""
    found: dict[int, list[int]] = {}
    for slots, column, ends in _ids_by_age(storage):
        newest = newest_steps(column, ids)
        for place in newest.values():
            record = bisect(ends, place)
            begin = ends[record - 1] if record else 0
            found.setdefault(int(slots[record]), []).append(place - begin)
        ids = ids - newest.keys()
        if not ids:
            break
    return found


def _ids_by_age(storage: Storage) -> Iterator[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]:
    """Yield slots, ``(n,)`` int64, the ids of their steps, ``(steps,)``, the newest last, and where each slot's end.

    Padding, and records without ids, have the id -1, or no steps.
    """
    count = len(storage)
    first = storage.end * storage.rows_per_step if storage.num_steps == storage.capacity_steps else 0
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
    """Return the columns of ids and mask, as far as there are any."""
    found: tuple[Path, ...] = ()
    for key in (TRAJ_IDS, MASK):
        try:
            found += storage.columns_of([key])
        except (MissingKeyError, UnsupportedError):
            break
    return found
