"""The ring writer: oldest out first."""

from __future__ import annotations

from typing import Any

from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import SchemaError
from gleanrl.records import Placement


class RoundRobinWriter(Writer):
    """Writes one time step after the other and starts again at the first when the storage is full.

    Of a write longer than the storage the newest steps stay, where they would stand had the steps been
    written one by one.

    Examples:
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage
        >>> writer = RoundRobinWriter()
        >>> writer.register_storage(LazyTensorStorage(10))
        >>> writer.publish(writer.place(8))
        >>> writer.place(5).spans()
        ((8, 10), (0, 3))
    """

    def __init__(self) -> None:
        super().__init__()
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """The time step that the next write starts at."""
        return self._cursor

    def _registered(self) -> None:
        # A storage that isn't full was filled from its first step on; a full one is taken as oldest first.
        self._cursor = self.storage.num_steps % self.storage.capacity_steps

    def place(self, num_steps: int) -> Placement:
        """Return the next `num_steps` steps of the ring."""
        storage, start = self.storage, self._cursor
        capacity, stored = storage.capacity_steps, storage.num_steps
        skipped = 0
        count = num_steps
        if num_steps > capacity:
            skipped, count = num_steps - capacity, capacity
            start = (start + skipped) % capacity
        length = min(self._cursor + num_steps, capacity) if stored < capacity else capacity
        return Placement(
            start, count, skipped, min(max(stored + num_steps - capacity, 0), stored), length, capacity
        )

    def publish(self, placement: Placement) -> None:
        """Move the cursor past `placement`."""
        self._cursor = (placement.start + placement.num_steps) % placement.capacity

    def clear(self) -> None:
        """Move the cursor to the first step."""
        self._cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor."""
        return {"cursor": self._cursor}

    def check_state(self, state_dict: dict[str, Any], capacity_steps: int) -> None:
        """Raise `SchemaError` unless the cursor lies in ``[0, capacity_steps)``."""
        cursor = state_dict.get("cursor")
        if not isinstance(cursor, int) or not 0 <= cursor < capacity_steps:
            raise SchemaError(f"load_state_dict: expected a cursor in [0, {capacity_steps}), got {cursor!r}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved cursor (`SchemaError` unless it lies within the storage)."""
        self.check_state(state_dict, self.storage.capacity_steps)
        self._cursor = state_dict["cursor"]

    def check_valid(self) -> None:
        """Raise AssertionError unless the cursor stands where the stored part allows; for tests."""
        stored, capacity = self.storage.num_steps, self.storage.capacity_steps
        assert 0 <= self._cursor < capacity
        assert stored == capacity or self._cursor == stored
