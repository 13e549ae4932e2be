"""The interface of writers, and a writer for datasets that are only read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from gleanrl._arrays.results import Placement, Selection
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import overridden
from gleanrl.data.replay_buffers.adapters import make_concrete
from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.errors import InvalidArgumentError, UnsupportedError


class NoState(NamedTuple):
    """The state of a writer without state."""


class Writer(Part, Stateful[Any]):
    """Turns prepared records into a placement in one storage.

    `place` chooses the slots and leaves the storage unchanged; then the storage takes the records and moves its end.
    The buffer calls a writer under its lock. A writer belongs to one buffer (see `Part`). It keeps no position if the
    storage has one, so that it also takes writes, clears and loads into account that were made without it.

    Args:
        compilable: has no effect: compiled programs call buffers, but don't contain them.
    """

    _storage: Storage | None = None
    _tried_for: StorageState | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a class that overrides `add` or `extend` leave out `place` (see `WriterAdapter`)."""
        super().__init_subclass__(**options)
        if overridden(cls, "add", "extend", of=Writer):
            make_concrete(cls, ("place",))

    def __init__(self, compilable: bool = False) -> None:
        self._storage = None

    @property
    def storage(self) -> Storage:
        """The storage that the writer writes to; `UnsupportedError` before `register_storage`."""
        if self._storage is None:
            raise UnsupportedError("the writer has no storage: give it to a ReplayBuffer first")
        return self._storage

    def register_storage(self, storage: Storage) -> None:
        """Write to `storage` from now on, after the records that it holds.

        If the class overrides `add` or `extend`, the storage's `takes_one` becomes True and stays so.

        Raises:
            InvalidArgumentError: the writer belongs to a buffer with another storage.
        """
        owner = self.owner
        if owner is not None and owner.storage is not storage.unwrapped:
            raise InvalidArgumentError(
                f"register_storage: this {type(self).__name__} belongs to a {type(owner).__name__} with "
                "another storage; use the buffer's set_storage, or give this storage another writer"
            )
        self._storage = storage
        if overridden(self, "add", "extend", of=Writer):
            storage.takes_one = True

    def check_storage(self, storage: Storage) -> None:
        """Raise if the writer can't write to `storage`; a buffer calls this before it takes either of them.

        By default, every storage is accepted.
        """

    def check_write(self, data: Any, where: str) -> None:
        """Raise if this writer doesn't accept `data`; nothing has changed so far, not even the schema.

        By default, all data are accepted.

        Args:
            data: one record or many, in the form to be stored, after the inverse transforms.
            where: the call that error messages name.
        """

    @abstractmethod
    def place(self, prepared: Prepared) -> Placement | Selection:
        """Return the slots for prepared records, at least one; the storage doesn't change.

        Returns:
            A `Placement` for consecutive time steps, or a `Selection` for chosen records with one slot each.
        """

    def store(self, data: Any, single: bool, dim_extend: int, where: str) -> Any:
        """Write one record or many and return their index (see `ReplayBuffer.add` and `extend`).

        The caller holds the buffer's lock. No transform acts. Padding rows that `prepare` left out have the index -1.

        Args:
            data: the records, not as a list: the caller has joined a list.
            single: whether `data` is one time step without its time dimension.
            dim_extend: the time dimension of `data`; no effect if `single` is True.
            where: the call that error messages name.

        Raises:
            UnsupportedError: the writer has no storage, or refuses every write.
            SchemaError: the data don't fit; nothing changed.
            CapacityError: the first write found too little memory or disk space.
        """
        self.check_write(data, where)
        storage = self.storage
        prepared = storage.prepare(data, single=single, dim_extend=dim_extend, where=where)
        index: Any
        if prepared.num_steps:
            placement = self.place(prepared)
            if isinstance(placement, Selection):
                storage.write_selected(prepared, placement)
            else:
                storage.write(prepared, placement)
            index = index_of(placement, storage, single)
        else:
            index = no_index(storage)
        return index if prepared.kept is None else _spread(index, prepared.kept, single)

    def add(self, data: Any) -> Any:
        """Write one record to the storage and return its index, for callers without a buffer; see `store`.

        The call takes the lock of the writer's buffer, if it has one, but passes over that buffer's transforms.
        """
        with self.guard():
            return self.store(data, True, 0, "add")

    def extend(self, data: Any) -> Any:
        """Write many records, time first, to the storage and return their index; see `add`.

        A list holds single records.
        """
        with self.guard():
            joined = self.storage.join(data, "extend") if isinstance(data, list) else data
            return self.store(joined, False, 0, "extend")

    def emptied(self) -> None:
        """Note that the buffer emptied the storage; by default, do nothing."""

    def _empty(self) -> None:
        """Do nothing: the storage knows where a ring continues."""

    def check_clear(self) -> None:
        """Raise if the buffer may not empty the storage; by default, it may."""

    # The defaults of the next three methods are for writers without state.

    def snapshot(self) -> Any:
        """Return data about the stored records that the records themselves don't hold; none by default."""
        return NoState()

    def parse(self, state: Any, stored: Storage | StorageState | None = None) -> Any:
        """Return the value of a saved state and change nothing; by default, any mapping is accepted.

        Args:
            state: the result of `state_dict`.
            stored: the storage or state that it has to fit; None for the writer's storage.

        Raises:
            SchemaError: the state doesn't fit.
        """
        StateReader(state, f"a {type(self).__name__}")
        return NoState()

    def adopt(self, value: Any) -> None:
        """Continue from a value, after the storage has adopted the state that the value was parsed for.

        By default, do nothing.
        """

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a saved state; during a `trial` the state is only checked.

        Raises:
            SchemaError: the state doesn't fit; nothing changed.
        """
        value = self.parse(state_dict, self._tried_for)
        if self._tried_for is None:
            self.adopt(value)

    @contextmanager
    def trial(self, stored: StorageState) -> Iterator[None]:
        """Make `load_state_dict` check states against `stored`, and load nothing, during a ``with`` block.

        The writer's storage doesn't hold the records of `stored` yet.
        """
        self._tried_for = stored
        try:
            yield
        finally:
            self._tried_for = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the storage, because a buffer registers its own with the copy."""
        return {**super().__getstate__(), "_storage": None}


def no_index(storage: Storage) -> torch.Tensor:
    """Return the index of a write that stored nothing: int64, ``(0,)`` or, with several dimensions, ``(0, ndim)``."""
    shape = (0,) if storage.ndim == 1 else (0, storage.ndim)
    return torch.empty(shape, dtype=torch.int64, device="cpu")


def index_of(placement: Placement | Selection, storage: Storage, single: bool) -> Any:
    """Return the index of a write: slots ``(n,)`` or coordinates ``(n, ndim)``, int64, in the order of the records.

    A `single` record of a storage with one dimension has an int. Records that the write doesn't store, or overwrites
    itself, have -1.
    """
    if isinstance(placement, Selection):
        return int(placement.returned[0]) if single else placement.returned
    start, count, skipped = placement.start, placement.num_steps, placement.skipped
    if storage.ndim == 1 and single:
        return start
    # By NumPy, which takes half the time of torch.arange.
    steps = torch.from_numpy(np.arange(start, start + count, dtype=np.int64))
    if start + count > placement.capacity:
        steps %= placement.capacity
    if storage.ndim > 1:
        steps = torch.cartesian_prod(
            steps, *(torch.arange(size, device="cpu") for size in storage.batch_shape)
        )
    if skipped:  # later steps of the same write overwrite them
        gone = torch.full((skipped * storage.rows_per_step, *steps.shape[1:]), -1, device="cpu")
        steps = torch.cat([gone, steps])
    return steps


def _spread(index: Any, kept: torch.Tensor, single: bool) -> Any:
    """Return the index of all given rows: -1 for rows that aren't in `kept`, ``(given,)`` bool."""
    if single:
        return index if kept.all() else -1
    spread = torch.full(kept.shape, -1, dtype=torch.int64, device="cpu")
    spread[kept] = index
    return spread


class ImmutableDatasetWriter(Writer):
    """Refuses the buffer's `add`, `extend`, ``buffer[index] = ...`` and `empty` with `UnsupportedError`.

    Loading a saved state is not a write. `load_state_dict` of the buffer works, even with the state of a buffer that
    had another writer. Priorities can be set. `end_trajectories` changes no stored record. Direct writes to the
    storage aren't refused.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import ReplayBuffer, TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4)), writer=ImmutableDatasetWriter())
        >>> len(buffer), buffer[1]
        (4, tensor(1))
    """

    def check_write(self, data: Any, where: str) -> None:
        """Raise `UnsupportedError`."""
        self._refuse(where)

    def place(self, prepared: Prepared) -> NoReturn:
        """Raise `UnsupportedError`."""
        self._refuse("place")

    def check_clear(self) -> None:
        """Raise `UnsupportedError`."""
        self._refuse("empty")

    def _refuse(self, where: str) -> NoReturn:
        raise UnsupportedError(
            f"{where}: the buffer has an ImmutableDatasetWriter and can't be changed; for a buffer that can, use "
            "another writer (set_writer)"
        )

    def parse(self, state: Any, stored: Any = None) -> NoState:
        """Accept every state: this writer needs no position."""
        return NoState()
