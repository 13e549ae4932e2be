"""What a writer is: it decides where new records go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gleanrl.data.replay_buffers.ownership import Part
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from gleanrl.records import Placement, Selection


class Writer(Part, ABC):
    """Turns prepared records into a placement in one storage.

    `place` decides and changes nothing that shows; the storage takes the records and moves on; `confirm` says
    that it did. The buffer calls them under its lock. A writer belongs to one buffer (see `Part`) and keeps no
    position of its own where the storage knows it: whatever was written, cleared or loaded without the writer
    counts.
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
        """Write to `storage` from now on, after what it holds.

        Raises:
            InvalidArgumentError: the writer belongs to a buffer with another storage.
        """
        owner = self.owner
        if owner is not None and owner.storage is not storage:
            raise InvalidArgumentError(
                f"register_storage: this {type(self).__name__} belongs to a {type(owner).__name__} with "
                "another storage; use the buffer's set_storage, or a writer of its own for this storage"
            )
        self._storage = storage

    def check_storage(self, storage: Storage) -> None:
        """Raise if the writer can't write to `storage`; a buffer asks before it takes either."""

    def check_write(self, data: Any, where: str) -> None:
        """Raise if `data` isn't for this writer; nothing, not even the schema, was changed yet.

        Args:
            data: records as they are to be stored, one or many, behind the inverse transforms.
            where: the call that error messages name.
        """

    @abstractmethod
    def place(self, prepared: Prepared) -> Placement | Selection:
        """Return where prepared records go; nothing changes.

        Returns:
            A `Placement` for a run of time steps, or a `Selection` for chosen records in slots of their own.
        """

    def confirm(self) -> None:
        """Learn that what was placed last is stored; for writers that keep books."""

    def check_clear(self) -> None:
        """Raise if the storage may not be emptied."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the writer's position."""

    @abstractmethod
    def check_state(self, state_dict: dict[str, Any], num_steps: int, capacity_steps: int) -> None:
        """Raise `SchemaError` unless the state fits a storage of that many time steps, stored and in all."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position; a state that doesn't fit raises and changes nothing."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the storage: a buffer registers its own with the copy."""
        return {**super().__getstate__(), "_storage": None}
