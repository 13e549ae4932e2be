"""Adapter for writers that follow the protocol of other releases."""

from __future__ import annotations

from typing import Any

from gleanrl._arrays.results import Placement, Selection
from gleanrl.data.replay_buffers.adapters import Adapter, SavedAttributes, view_of
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.record_formats import swap_batch_dims
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import SchemaError

_METHODS = dict.fromkeys(("add", "extend", "register_storage", "_empty", "state_dict", "load_state_dict"))
_NEEDED = ("register_storage", "add", "extend", "state_dict", "load_state_dict")


def as_writer(writer: Any) -> Any:
    """Return a writer in the form that buffers use (see `view_of`); return any other object unchanged."""
    return view_of(writer, Writer, WriterAdapter, _METHODS, _NEEDED)


class WriterAdapter(Adapter, Writer):
    """Adapter that writes by a user's `add` and `extend`, which call the storage's `set` and return the index.

    A method that the user's class doesn't define is native.
    """

    __slots__ = ()

    def register_storage(self, storage: Storage) -> None:
        """Write to `storage` from now on; a user's method of this name is called, too.

        A writer of another library gets the unwrapped storage, without an adapter. If the user's class defines `add` or
        `extend`, the storage's `takes_one` becomes True: `set` at an int then takes one record of any shape.
        """
        super().register_storage(storage)
        if not self.own.isdisjoint({"add", "extend"}):
            storage.takes_one = True
        if "register_storage" in self.own:
            self.part.register_storage(storage.unwrapped if self.foreign else storage)

    def store(self, data: Any, single: bool, dim_extend: int, where: str) -> Any:
        """Write by the user's method, and return its index. Without such a method, write natively.

        Only `check_write` comes before the user's method. An error of that method may therefore leave a part of the
        data stored.
        """
        name = "add" if single else "extend"
        if name not in self.own:
            return super().store(data, single, dim_extend, where)
        self.check_write(data, where)
        if dim_extend and not single:
            data = swap_batch_dims(data, dim_extend, where)
        storage = self.storage
        version = storage.version
        index = self.part.add(data) if single else self.part.extend(data)
        # A storage of another library changes behind its view, so its version may have missed the write.
        if storage.version == version:
            storage.note_written(index)
        return index

    def place(self, prepared: Prepared) -> Placement | Selection:
        """Return the result of the class's `place`, own or inherited; `UnsupportedError` if it has none."""
        return super().place(prepared)  # type: ignore[safe-super]

    def emptied(self) -> None:
        """Call the user's `_empty`, if its class defines it."""
        if "_empty" in self.own:
            self.call("_empty")

    def snapshot(self) -> Any:
        """Return the state: the user's own state if its class defines one."""
        return self.saved() if "state_dict" in self.own else super().snapshot()

    def parse(self, state: Any, stored: Storage | StorageState | None = None) -> Any:
        """Return the value of a saved state.

        A user's `load_state_dict` loads the state as a check, and then its previous state (see `Adapter.parsed`).

        Raises:
            SchemaError: the state doesn't fit, or the user's `load_state_dict` raised an error. Also if the load moves
                records to another ring size and the user's class defines `load_state_dict`.
        """
        if "load_state_dict" in self.own and isinstance(stored, StorageState) and stored.moved is not None:
            raise SchemaError(
                "load_state_dict: the state was saved with a storage of another max_size, to which the state of a "
                f"{type(self.part).__name__} may refer: build the storage with the same max_size"
            )
        if "load_state_dict" not in self.own:
            return super().parse(state, stored)
        ours = isinstance(stored, StorageState) and not self.foreign
        return self.parsed(state, self.part.trial(stored) if ours else None)

    def adopt(self, value: Any) -> None:
        """Continue from a value: by the user's `load_state_dict` if the user's class saved it, otherwise natively."""
        if isinstance(value, SavedAttributes):
            self.restore(value)
        else:
            super().adopt(value)
