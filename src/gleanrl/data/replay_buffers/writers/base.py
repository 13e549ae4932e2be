"""What a writer is: it decides where new records go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import UnsupportedError
from gleanrl.records import Placement


class Writer(ABC):
    """Turns "so many time steps" into a placement, and moves on once the storage has taken them.

    A writer belongs to one storage. `place` decides and changes nothing; `publish` follows the copy. The
    buffer calls both under its lock.
    """

    def __init__(self) -> None:
        self._storage: Storage | None = None

    @property
    def storage(self) -> Storage:
        """The storage that the writer writes to."""
        if self._storage is None:
            raise UnsupportedError("the writer has no storage: give it to a ReplayBuffer first")
        return self._storage

    def register_storage(self, storage: Storage) -> None:
        """Write to `storage` from now on, after what it holds."""
        self._storage = storage
        self._registered()

    @abstractmethod
    def _registered(self) -> None:
        """Take a position in the storage that was just registered."""

    @abstractmethod
    def place(self, num_steps: int) -> Placement:
        """Return where `num_steps` new time steps go; nothing changes."""

    @abstractmethod
    def publish(self, placement: Placement) -> None:
        """Move on past a placement whose records the storage has taken."""

    @abstractmethod
    def clear(self) -> None:
        """Start over in an emptied storage."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the writer's position."""

    @abstractmethod
    def check_state(self, state_dict: dict[str, Any], capacity_steps: int) -> None:
        """Raise `SchemaError` unless the state fits a storage of `capacity_steps` time steps."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position; a state that doesn't fit raises and changes nothing."""
