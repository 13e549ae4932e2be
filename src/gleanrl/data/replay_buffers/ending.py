"""Trajectories that nobody goes on with: the last step of each that is stored says that it was cut there."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.data.boundaries import MASK, TRAJ_IDS
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.errors import MissingKeyError, UnsupportedError
from gleanrl.tree import Path, flatten, leaf_at

_ROWS = 1 << 20  # looked through at once
_RECORDS = 1 << 10  # likewise of a list, whose records may have to be unpacked
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_CUT = ("done", "truncated")


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
        ids = leaf_at(single, TRAJ_IDS)
        count = 0 if ids is None else _marked(single, ids, places)
        if count:
            data = [single] if isinstance(record, list) else single
            prepared = storage.prepare_selection(data, index.shape, "end_trajectories")
            storage.write_slots(prepared, index, amended=True)
            marked += count
    return marked


def _marked(record: TensorDictBase, ids: torch.Tensor, places: list[int]) -> int:
    """Mark steps of a record with these ids, by their places among its steps; return how many didn't end there."""
    lead = ids.shape[:-1] if ids.ndim and ids.shape[-1] == 1 else ids.shape
    flags = [
        leaf
        for path, leaf in flatten(record).items()
        if path[0] == "next"
        and path[-1] in _CUT
        and isinstance(leaf, torch.Tensor)
        and leaf.dtype is torch.bool
        and leaf.shape[: len(lead)] == lead
    ]
    if not flags:
        return 0
    at = torch.tensor(places, device=flags[0].device)
    ended = torch.stack([flag.reshape(ids.numel(), -1)[at].any(1) for flag in flags]).any(0)
    for flag in flags:
        rows = flag.reshape(ids.numel(), -1)
        rows[at[~ended]] = True
        flag.copy_(rows.reshape(flag.shape))
    return int((~ended).sum())


def _last_steps(storage: Storage, ids: set[int]) -> dict[int, list[int]]:
    """Return where the newest step of each trajectory stands that has one: slots, and places among a record's steps."""
    found: dict[int, list[int]] = {}
    for slots, column, ends in _ids_by_age(storage):
        mine = torch.isin(column, torch.tensor(sorted(ids), device="cpu")).nonzero().flatten()
        newest = dict(zip(column[mine].tolist(), mine.tolist(), strict=True))
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
            each = [_ids_of(record) for record in records]
            yield slots, torch.cat(each), [*accumulate(map(torch.numel, each))]
        elif (column := _ids_of(records)).numel():
            width = column.numel() // len(slots)
            yield slots, column, range(width, column.numel() + 1, width)


def _ids_of(record: Any) -> torch.Tensor:
    """Return the ids of a record's steps, ``(steps,)`` on the CPU; none of what has none."""
    ids = leaf_at(record, TRAJ_IDS)
    if ids is None:
        return _NONE
    mask = leaf_at(record, MASK)
    if mask is not None and mask.dtype is torch.bool and mask.numel() == ids.numel():
        ids = torch.where(mask.reshape(ids.shape), ids, -1)
    return ids.cpu().reshape(-1)


def _columns(storage: Storage) -> tuple[Path, ...]:
    """Return the columns of ids and mask, as far as there are any."""
    found: tuple[Path, ...] = ()
    for key in (TRAJ_IDS, MASK):
        try:
            found += storage.columns_of([key])
        except (MissingKeyError, UnsupportedError):
            break
    return found
