"""The interface of checkpointers, which convert a storage's state into a form for checkpoints and back bit for bit."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gleanrl._checkpoint.folder import Folder
from gleanrl._checkpoint.reader import all_read
from gleanrl._checkpoint.row_segments import PrivateColumns, Segmented, Unread
from gleanrl._checkpoint.tree_codec import Items, Later
from gleanrl._util import is_ours
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedError,
)

_STORAGE = "Storage"
_PACKED = "packed"


class StorageCheckpointerBase(ABC):
    """Abstract: writes a storage's records into checkpoints in its own form.

    Loading restores every record bit for bit, in any form. A checkpoint names its form, so that a storage with any
    checkpointer can load it.

    A form consists of `pack` and `unpack` alone. A class that overrides one of them gets tensors, even if its base
    class takes segments. To get segments it sets `takes_segments` itself.
    """

    form: ClassVar[str]
    """The form's name in checkpoints."""
    takes_segments: ClassVar[bool] = False
    """Whether `pack` and `unpack` accept rows in segments as ``"columns"``; the generations are the first column."""
    makes_columns: ClassVar[bool] = False
    """Whether `unpack` accepts `Unread` columns and returns columns whose memory nothing else uses."""
    _forms: ClassVar[dict[str, type[StorageCheckpointerBase]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class for its `form`, so that loading a checkpoint finds it; it replaces an earlier class.

        A class that doesn't set `form` isn't registered. Loading then calls `unpack` of the base class that did.

        Raises:
            UnsupportedError: the class overrides `dumps` or `loads`, which checkpoints of buffers don't call.
        """
        super().__init_subclass__(**kwargs)
        for name in ("dumps", "loads"):
            if not is_ours(getattr(cls, name)):
                raise UnsupportedError(
                    f"class {cls.__name__}: checkpoints of buffers don't call {name}() of a checkpointer: override "
                    "pack() and unpack() instead"
                )
        if {"pack", "unpack"} & cls.__dict__.keys():
            # A base class's flags describe its own `pack` and `unpack`, which this class replaces.
            cls.takes_segments = cls.__dict__.get("takes_segments", False)
            cls.makes_columns = cls.__dict__.get("makes_columns", False)
        if "form" in cls.__dict__:
            StorageCheckpointerBase._forms[cls.form] = cls

    @abstractmethod
    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a storage's state in this form.

        Args:
            state: the state that `Storage.state_dict` returned.

        Raises:
            CheckpointError: this form can't hold the state.
        """

    @classmethod
    @abstractmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that `pack` was called with; it may reuse the memory of `packed`, which the caller gives up.

        Raises:
            CorruptCheckpointError: `pack` can't have returned `packed`.
        """

    def packed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a storage's state in this form, together with the form's name; see `pack` for errors."""
        content = state if self.takes_segments else with_tensors(state)
        return {"form": self.form, _PACKED: self.pack(content)}

    def packed_later(self, state: Mapping[str, Any]) -> Later:
        """Return a value that becomes the result of `packed` when it is written."""
        return _Packed(self, state)

    @classmethod
    def unpacked(cls, state: Any) -> dict[str, Any]:
        """Return the state that `packed` of any checkpointer was called with.

        Raises:
            IncompatibleCheckpointError: no class in this program has registered the form.
            CorruptCheckpointError: `state` isn't such a result, or the form's class can't unpack it.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get(_PACKED), Mapping):
            raise CorruptCheckpointError(
                "a storage's state: expected the name of a form and the packed state"
            )
        form = state.get("form")
        kind = cls._forms.get(form) if isinstance(form, str) else None
        if kind is None:
            raise IncompatibleCheckpointError(
                f"the storage's form, {form!r:.100}, isn't known here: import the class of its checkpointer"
            )
        try:
            packed = state[_PACKED] if kind.makes_columns else _read(state[_PACKED])
            found = kind.unpack(packed if kind.takes_segments else with_tensors(packed))
            return (
                {**found, "columns": PrivateColumns(found["columns"])}
                if kind.makes_columns and "columns" in found
                else found
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            if isinstance(cause, CheckpointError):
                raise
            raise CorruptCheckpointError(f"the storage isn't in the form {kind.form!r}: {cause}") from cause

    def dumps(self, storage: Any, path: os.PathLike[str] | str, keep: int = 1) -> None:
        """Write a checkpoint of one storage into a folder; `ReplayBuffer.dumps` describes `keep` and the errors."""
        Folder(path).commit(_STORAGE, self.packed_later(storage.checkpoint_dict()), keep)

    def loads(self, storage: Any, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Load the newest checkpoint of one storage, in any form; see `ReplayBuffer.loads`.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another kind of object.
        """

        def take(kind: str, state: Any) -> None:
            if kind != _STORAGE:
                raise IncompatibleCheckpointError(f"{path}: expected a storage, it's a {kind}")
            storage.load_state_dict(self.unpacked(state))

        Folder(path).load(verify, take)

    def __repr__(self) -> str:
        """Show the class."""
        return f"{type(self).__name__}()"


class _Packed(Later):
    """A storage's state that is packed when it is written; for another process it is pickled with tensors in memory."""

    def __init__(self, checkpointer: StorageCheckpointerBase, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self._checkpointer = checkpointer

    def make(self) -> dict[str, Any]:
        return self._checkpointer.packed(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._checkpointer.packed(with_tensors(self.source)),)


def with_tensors(state: Any) -> Any:
    """Return a storage's state with all columns as tensors in memory, and objects in plain lists.

    A value that isn't a storage's state is returned unchanged. Generations in segments become an entry of the state.

    Raises:
        CorruptCheckpointError: the segments of rows are damaged, or hold something else.
    """
    columns = state.get("columns") if isinstance(state, Mapping) else None
    if isinstance(state, Mapping) and isinstance(items := state.get("items"), Items):
        return {**state, "items": items.make()}
    if not isinstance(columns, Segmented):
        return _read(state)
    if not columns.layout.fields:
        raise CorruptCheckpointError(
            "a storage's rows: expected generations as the first column, got no column"
        )
    generations, *rest = columns.tensors()
    return {**state, "generations": generations, "columns": rest}


def _read(state: Any) -> Any:
    """Return a storage's state with all `Unread` columns read."""
    columns = state.get("columns") if isinstance(state, Mapping) else None
    if not isinstance(columns, list) or not any(isinstance(column, Unread) for column in columns):
        return state
    return {**state, "columns": all_read(columns)}


def in_memory(state: Any) -> Any:
    """Return the state of buffers with the columns of all storages in memory, for another process.

    Raises:
        CorruptCheckpointError: the segments of rows are damaged.
    """
    if isinstance(state, Mapping):
        return with_tensors({name: in_memory(part) for name, part in state.items()})
    return [in_memory(part) for part in state] if isinstance(state, list) else state


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Writes the stored records unchanged: the default of storages.

    Examples:
        >>> import tempfile, torch
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2) for _ in range(2))
        >>> _ = buffer.extend(torch.arange(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buffer.dumps(folder)
        ...     other.loads(folder)
        >>> other[:]
        tensor([0, 1, 2, 3])
    """

    form = "whole"
    takes_segments = True

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state unchanged."""
        return dict(state)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state unchanged; its columns may be rows that are still in their files."""
        return dict(packed)


class ListStorageCheckpointer(TensorStorageCheckpointer):
    """Writes the objects of list storages.

    They may be tensors, TensorDicts, numbers, strings, and containers of them. A dump of any other object raises
    `CheckpointError`.
    """

    form = "list"
