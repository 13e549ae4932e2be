"""Trajectories that nobody goes on with: the last step of each that is stored says that it was cut there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from gleanrl.data.boundaries import TRAJ_IDS
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import MissingKeyError, UnsupportedError
from gleanrl.tree import Path, flatten

_ROWS = 1 << 20  # looked through at once
_CUT = ("done", "truncated")


def end_trajectories(storage: Storage, ids: Iterable[int]) -> int:
    """Set truncated, and with it done, in the last stored step of trajectories that don't end there; terminated stays.

    Steps are found by ``("collector", "traj_ids")``. Storages that hold none, lists, and records out of order are left
    as they are. The flags are corrections: priorities stay.

    Args:
        storage: of steps; the caller holds the buffer's lock.
        ids: of the trajectories.

    Returns:
        How many steps were marked.
    """
    if not len(storage) or not storage.ordered:
        return 0
    try:
        paths = storage.columns_of([TRAJ_IDS])
    except (MissingKeyError, UnsupportedError):
        return 0
    slots = _last_steps(storage, paths, set(ids))
    steps = storage.fetch(slots) if len(slots) else None
    if not isinstance(steps, TensorDictBase):
        return 0
    flags = [
        leaf
        for path, leaf in flatten(steps).items()
        if path[0] == "next"
        and path[-1] in _CUT
        and isinstance(leaf, torch.Tensor)
        and leaf.dtype is torch.bool
    ]
    if not flags:
        return 0
    ended = torch.stack([flag.reshape(len(slots), -1).any(1) for flag in flags]).any(0).cpu()
    for flag in flags:
        flag[~ended] = True
    if not ended.all():
        prepared = storage.prepare_selection(steps, slots.shape, "end_trajectories")
        storage.write_slots(prepared, slots, amended=True)
    return int((~ended).sum())


def _last_steps(storage: Storage, paths: tuple[Path, ...], ids: set[int]) -> torch.Tensor:
    """Return the slot of the newest step of each trajectory that has one, ``(n,)`` int64."""
    count = len(storage)
    first = storage.end * storage.rows_per_step if storage.num_steps == storage.capacity_steps else 0
    found: dict[int, int] = {}
    for stop in range(count, 0, -_ROWS):
        if not ids:
            break
        slots = (first + torch.arange(max(0, stop - _ROWS), stop, device="cpu")) % count
        column = storage.fetch(slots, paths).get(TRAJ_IDS).cpu()
        if column.numel() != len(slots):  # records of several steps
            return slots[:0]
        mine = torch.isin(column.reshape(-1), torch.tensor(sorted(ids), device="cpu"))
        newest = dict(zip(column.reshape(-1)[mine].tolist(), slots[mine].tolist(), strict=True))
        found |= newest
        ids = ids - newest.keys()
    return torch.tensor(list(found.values()), dtype=torch.int64, device="cpu")
