"""What a writer is: it decides where new records go."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from gleanrl.data.replay_buffers.ownership import Part
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from gleanrl.overrides import refuse_overrides
from gleanrl.records import Placement, Selection
from gleanrl.state import Stateful, StateReader

_PLACE = "override place(prepared), which decides where records go"
_UNHEARD = {
    **dict.fromkeys(("add", "extend"), _PLACE),
    "_empty": "override check_clear(), or follow the storage",
}


class NoState(NamedTuple):
    """The state of a writer that has none."""


class Writer(Part, Stateful[Any]):
    """Turns prepared records into a placement in one storage.

    `place` decides and changes nothing that shows; the storage takes the records and moves on. The buffer calls it
    under its lock. A writer belongs to one buffer (see `Part`) and keeps no
    position of its own where the storage knows it: whatever was written, cleared or loaded without the writer
    counts.

    Args:
        compilable: has no effect: compiled programs call buffers, they don't contain them.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods that nothing would call."""
        super().__init_subclass__(**options)
        refuse_overrides(cls, Writer, _UNHEARD)

    def __init__(self, compilable: bool = False) -> None:
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

    def check_clear(self) -> None:
        """Raise if the storage may not be emptied."""

    # State: a writer without one says nothing

    def snapshot(self) -> Any:
        """Return what the writer knows of the stored records beside what they say; nothing by default."""
        return NoState()

    def parse(self, state: Any, stored: Storage | StorageState | None = None) -> Any:
        """Return the value of a saved state.

        Args:
            state: what `state_dict` returned.
            stored: what it has to fit; None for what the writer's storage holds.

        Raises:
            SchemaError: a state that doesn't fit.
        """
        StateReader(state, f"a {type(self).__name__}")
        return NoState()

    def adopt(self, value: Any) -> None:
        """Go on from a value, with the storage that holds what it was parsed for."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the storage: a buffer registers its own with the copy."""
        return {**super().__getstate__(), "_storage": None}
