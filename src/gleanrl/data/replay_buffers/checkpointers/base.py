"""What every checkpointer does: states of storages in another form, and back, bit for bit."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gleanrl.checkpoint.folder import Folder
from gleanrl.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError

_STORAGE = "Storage"
_PACKED = "packed"


class StorageCheckpointerBase(ABC):
    """Abstract: writes a storage's records into checkpoints in a form of its own.

    Whatever the form, loading gives every record back bit for bit. A checkpoint says in which form it was written, so
    that it can be loaded whatever checkpointer the storage has.

    `pack` and `unpack` are all that a form consists of.
    """

    form: ClassVar[str]
    """What the form is called in checkpoints."""
    _forms: ClassVar[dict[str, type[StorageCheckpointerBase]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note the form, to find it when a checkpoint is loaded."""
        super().__init_subclass__(**kwargs)
        if "form" in cls.__dict__:
            StorageCheckpointerBase._forms[cls.form] = cls

    @abstractmethod
    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a storage's state in this form.

        Args:
            state: from `Storage.state_dict`.

        Raises:
            CheckpointError: it can't be written so.
        """

    @classmethod
    @abstractmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that `pack` was given.

        Raises:
            CorruptCheckpointError: `packed` is nothing that it returned.
        """

    def packed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a storage's state in this form, with the form's name."""
        return {"form": self.form, _PACKED: self.pack(state)}

    @classmethod
    def unpacked(cls, state: Any) -> dict[str, Any]:
        """Return the state that any checkpointer's `packed` was given.

        Raises:
            IncompatibleCheckpointError: nobody here knows the form.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get(_PACKED), Mapping):
            raise CorruptCheckpointError("a storage's state without a form")
        kind = cls._forms.get(state.get("form", ""))
        if kind is None:
            raise IncompatibleCheckpointError(f"the storage's form, {state.get('form')!r}, isn't known here")
        try:
            return kind.unpack(state[_PACKED])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            if isinstance(cause, CheckpointError):
                raise
            raise CorruptCheckpointError(f"the storage isn't in the form {kind.form!r}: {cause}") from cause

    def dumps(self, storage: Any, path: os.PathLike[str] | str, keep: int = 1) -> None:
        """Write a checkpoint of a storage alone; see `ReplayBuffer.dumps`."""
        Folder(path).commit(_STORAGE, self.packed(storage.state_dict()), keep)

    def loads(self, storage: Any, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Load the newest checkpoint of a storage alone; see `ReplayBuffer.loads`."""
        found = Folder(path).load(verify)
        if found.kind != _STORAGE:
            raise IncompatibleCheckpointError(f"{found.path}: expected a storage, it's a {found.kind}")
        storage.load_state_dict(self.unpacked(found.state))

    def __repr__(self) -> str:
        """Show the class."""
        return f"{type(self).__name__}()"
