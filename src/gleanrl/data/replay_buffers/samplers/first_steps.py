"""First steps: the rows that slices drawn by priority may begin with."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers.samplers.episodes import EpisodeTable, locate
from gleanrl.data.replay_buffers.samplers.priorities import PriorityTable
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import Change, Follower
from gleanrl.native import Episodes

_CHUNK = 1 << 14  # time steps looked at together


class FirstSteps(Follower[Storage]):
    """Sees to it that the rows which slices may begin with are the only ones that are drawn.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        table: the trajectories.
        priorities: what rows are drawn by.
    """

    def __init__(self, table: EpisodeTable, priorities: PriorityTable) -> None:
        self._table, self._priorities = table, priorities
        self._asked = (0, False, 0, 0)  # length, strict, overhang, and the priorities' renewals

    def of_slices(self, storage: Storage, length: int, strict: bool, overhang: int) -> None:
        """Come in step with a storage, with which the table and the priorities are.

        Args:
            storage: what slices are drawn from.
            length: steps of a slice, as they are meant.
            strict: whether trajectories shorter than a slice offer none.
            overhang: steps that a slice may reach behind its trajectory.
        """
        asked = (length, strict, overhang, self._priorities.renewals)
        if asked != self._asked:
            self.unfollow()
            self._asked = asked
        self.sync(storage)

    def _look_at_all(self, storage: Storage) -> None:
        self._find(storage, 0, storage.num_steps)

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        # What was written makes, or takes away, first steps up to a slice before it and behind it.
        around, streams = self._asked[0], max(storage.rows_per_step, 1)
        stored, capacity = storage.num_steps, storage.capacity_steps
        for start, stop, _ in changes:
            first, behind = start // streams - around, -(-stop // streams) + around
            if stored < capacity:
                first, behind = max(first, 0), min(behind, stored)
            self._find(storage, first % capacity, min(behind - first, stored))

    def _find(self, storage: Storage, step: int, count: int) -> None:
        """Learn which of `count` time steps from `step` on, around the ring, are first steps."""
        table, native = self._table.of(storage), self._priorities.of(storage)
        for begin in range(step, step + count, _CHUNK):
            steps = torch.arange(begin, min(begin + _CHUNK, step + count), device="cpu") % table.capacity
            slots = (steps[:, None] * table.num_streams + torch.arange(table.num_streams, device="cpu")).view(
                -1
            )
            blocked = self._are_no_starts(table, slots)
            masked = storage.masked(slots)
            blocked = blocked if masked is None else blocked | masked
            native.block(slots.data_ptr(), slots.shape[0], blocked.data_ptr())

    def _are_no_starts(self, table: Episodes, slots: torch.Tensor) -> torch.Tensor:
        length, strict, overhang, _ = self._asked
        before, after = locate(table, slots)
        total, reach = before + after, max(length - overhang, 1)
        if strict:
            return (after < reach) | (total < length)
        return (after < reach) & ((before > 0) | (total >= reach))
