"""The ring writer: oldest out first."""

from __future__ import annotations

from typing import Any

from gleanrl.data.replay_buffers.storages.base import Prepared
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import SchemaError
from gleanrl.records import Placement


class RoundRobinWriter(Writer):
    """Writes one time step after the other and starts again at the first when the storage is full.

    Of a write longer than the storage the newest steps stay, where they would stand had the steps been
    written one by one. The position is the storage's own (`Storage.end`): after a storage was written,
    cleared or loaded by itself, the writer goes on behind the newest record that it holds.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=RoundRobinWriter())
        >>> buffer.extend(torch.arange(4))
        tensor([0, 1, 2, 3])
        >>> buffer.extend(torch.arange(4, 7))
        tensor([4, 0, 1])
    """

    @property
    def cursor(self) -> int:
        """The time step that the next write starts at."""
        return self.storage.end

    def place(self, prepared: Prepared) -> Placement:
        """Return the next steps of the ring."""
        storage, num_steps = self._storage or self.storage, prepared.num_steps
        capacity, stored, end = storage.capacity_steps, storage.num_steps, storage.end
        start, skipped, count = end, 0, num_steps
        if num_steps > capacity:
            skipped, count = num_steps - capacity, capacity
            start = (start + skipped) % capacity
        length = min(end + num_steps, capacity) if stored < capacity else capacity
        return Placement(
            start, count, skipped, min(max(stored + num_steps - capacity, 0), stored), length, capacity
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor."""
        return {"cursor": self.cursor}

    def check_state(self, state_dict: dict[str, Any], num_steps: int, capacity_steps: int) -> None:
        """Raise `SchemaError` unless the cursor stands where a ring with `num_steps` steps allows it."""
        cursor = state_dict.get("cursor")
        if not isinstance(cursor, int) or not 0 <= cursor < capacity_steps:
            raise SchemaError(f"load_state_dict: expected a cursor in [0, {capacity_steps}), got {cursor!r}")
        if num_steps < capacity_steps and cursor != num_steps:
            raise SchemaError(
                f"load_state_dict: expected the cursor {num_steps}, behind the {num_steps} of "
                f"{capacity_steps} time steps stored, got {cursor}; load the storage's state too"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved cursor.

        Raises:
            SchemaError: a cursor that leaves a gap behind what the storage holds; nothing changed.
        """
        storage = self.storage
        self.check_state(state_dict, storage.num_steps, storage.capacity_steps)
        storage.end = state_dict["cursor"]

    def check_valid(self) -> None:
        """Raise AssertionError unless the cursor stands where the stored part allows; for tests."""
        stored, capacity = self.storage.num_steps, self.storage.capacity_steps
        assert 0 <= self.cursor < capacity
        assert stored == capacity or self.cursor == stored
