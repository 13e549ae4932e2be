"""What a storage offers beside slots: indexing, iteration, a flat form, and being told about writes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from gleanrl.data.replay_buffers.gate import Gate
from gleanrl.data.replay_buffers.ownership import Part, taken
from gleanrl.data.replay_buffers.storages.indexing import slots_at
from gleanrl.errors import EmptyBufferError, InvalidTypeError, UnsupportedError
from gleanrl.system import proc

_Self = TypeVar("_Self", bound="Access")


class Access(Part, ABC):
    """Reading a storage by itself, and being told of its writes; see `Storage`."""

    ndim: int
    attached: tuple[weakref.ref[Any], ...] = ()
    """What is told of writes; see `attach`."""
    _users: tuple[weakref.ref[Any], ...] = ()  # buffers
    _written_by: weakref.ref[Any] | None = None  # the one of them that writes

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The visible part, ``[time steps stored, *batch]``."""

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Return the records at a user's index over the visible part; see the subclass for what is a view."""

    def slots_of(self, index: Any) -> tuple[torch.Tensor, torch.Size]:
        """Return the slots that a user's index names, ``(n,)`` int64, and the shape of the selection."""
        return slots_at(index, self.shape)

    def contains(self, index: Any) -> Any:
        """Return whether time steps are stored: a bool for an int, else a bool tensor of the shape of `index`.

        Args:
            index: an int, or integers in a tensor, list or range; negative ones count from the end. With ``ndim > 1``
                also coordinates, in a tensor ``(..., ndim)`` or in a tuple of `ndim` tensors.
        """
        shape = self.shape
        parts = torch.as_tensor(torch.stack(index, -1) if isinstance(index, tuple) else index, device="cpu")
        if len(shape) == 1 or parts.ndim < 2:
            found = (parts >= -shape[0]) & (parts < shape[0])
        else:
            sizes = torch.tensor(shape, device="cpu")
            found = ((parts >= -sizes) & (parts < sizes)).all(-1)
        return found if found.ndim else bool(found)

    def __contains__(self, index: Any) -> bool:
        """Return whether all of the time steps at `index` are stored; see `contains`."""
        return bool(torch.as_tensor(self.contains(index)).all())

    def __getitem__(self, index: Any) -> Any:
        """Return the records at an index; see `get`."""
        return self.get(index)

    def __iter__(self) -> Iterator[Any]:
        """Yield the time steps stored, the lowest slot first (with ``ndim=1`` the records); see `get`."""
        for step in range(self.shape[0]):
            yield self.get(step)

    def flatten(self: _Self) -> _Self | Access:
        """Return the stored part with one batch dimension, time steps first: the storage itself if it has one.

        Otherwise a storage that counts as full and shares the memory: what is written into either shows in
        both, but each counts its own writes, so that a buffer over the one doesn't notice those of the other.

        Raises:
            EmptyBufferError: nothing is stored, and there are several batch dimensions.
        """
        if self.ndim == 1:
            return self
        if not self.shape[0]:
            raise EmptyBufferError("flatten: the storage is empty; write records first")
        return self._flattened()

    def _flattened(self) -> Access:
        raise UnsupportedError(f"flatten: a {type(self).__name__} can't be flattened")

    # Buffers: one may write, others that came with it at their construction read, all under one lock

    @property
    def owner(self) -> Any:
        """The first of the buffers that use the storage; None while none does."""
        return next(iter(living(self._users)), None)

    def check_free(self, name: str, taker: Any) -> None:
        """Raise `InvalidArgumentError` if another buffer than `taker` uses the storage."""
        others = [buffer for buffer in living(self._users) if buffer is not taker]
        if others:
            raise taken(name, self, others[0])

    def join_buffer(self, owner: Any, gate: Gate) -> None:
        """Be used by `owner`, a buffer with that gate, which is the one of the others."""
        users = [buffer for buffer in living(self._users) if buffer is not owner]
        self._users = tuple(weakref.ref(buffer) for buffer in (*users, owner))
        super().join_buffer(owner, gate)

    def leave_buffer(self, owner: Any) -> None:
        """Be used by `owner` no longer."""
        self._users = tuple(weakref.ref(buffer) for buffer in living(self._users) if buffer is not owner)
        if self._written_by is not None and self._written_by() is owner:
            self._written_by = None
        if not self._users:
            super().leave_buffer(owner)

    def claim(self, buffer: Any) -> None:
        """Be written through `buffer` from now on.

        Raises:
            UnsupportedError: another buffer, which is still in use, has written to the storage.
        """
        writer = None if self._written_by is None else self._written_by()
        if writer is not None and writer is not buffer:
            raise UnsupportedError(
                f"this {type(self).__name__} is written through another {type(writer).__name__}; buffers may share a "
                "storage as long as one of them writes: write through that one, or drop it"
            )
        self._written_by = weakref.ref(buffer)

    # Who is told of writes

    def attach(self, buffer: Any) -> None:
        """Call ``buffer.mark_update(index)`` after every write from now on.

        The buffer that the storage belongs to knows of its writes without this. What is attached is called in
        the thread that writes, under the lock of the storage's buffer. It is held weakly, and not part of copies.

        Args:
            buffer: an object with `mark_update`; the index is what `extend` returns, ``(n,)`` int64 slots or
                ``(n, ndim)`` coordinates.

        Raises:
            InvalidTypeError: without `mark_update`.
        """
        if not callable(getattr(buffer, "mark_update", None)):
            raise InvalidTypeError(f"attach: expected an object with mark_update(index), got {buffer!r}")
        attached = living(self.attached)
        if all(one is not buffer for one in attached):
            self.attached = tuple(weakref.ref(one) for one in (*attached, buffer))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without what is attached.

        Raises:
            UnsupportedError: for a process that is about to be spawned.
        """
        if proc.is_spawning():
            raise UnsupportedError(
                f"this {type(self).__name__} can't be sent to a process that is spawned: its records aren't shared "
                "between processes, each side would write to a copy of its own, as after a queue or a pipe. Use a "
                "buffer with shared=True, send state_dict(), or make the buffer there (one with delayed_init=True that "
                "wasn't used yet can be sent)"
            )
        transient = ("attached", "moments")
        return {name: value for name, value in super().__getstate__().items() if name not in transient}


def living(references: tuple[weakref.ref[Any], ...]) -> list[Any]:
    """Return those of weakly held objects that are still there."""
    return [found for reference in references if (found := reference()) is not None]


def announce(storage: Access, slots: torch.Tensor) -> None:
    """Tell what is attached to a storage that `slots`, ``(n,)`` int64, were written."""
    index = slots
    if storage.ndim > 1:
        index = torch.stack(torch.unravel_index(slots, storage.shape), -1)
    for buffer in living(storage.attached):
        buffer.mark_update(index.clone())
