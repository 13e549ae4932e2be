"""The slots of a storage: how many there are, and how many are in use.

What a storage offers beside slots: indexing, iteration, a flat form, and being told about writes.

How often each slot of a storage was written or cleared.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from gleanrl._os import proc
from gleanrl._os.interrupts import to_the_end
from gleanrl._util import positive
from gleanrl.data.replay_buffers.change_log import Change, ChangeLog, Version, Versioned
from gleanrl.data.replay_buffers.component_base import Part, taken
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.storages.allocators import zeroed
from gleanrl.data.replay_buffers.storages.indexing import slots_at
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)

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

    def join_buffer(self, owner: Any, gate: BufferLock) -> None:
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


_FIRST_COUNTERS = 1024
_NO_SLOTS = torch.zeros(1, dtype=torch.int64, device="cpu")  # an address for counters that nobody looks at


class Generations:
    """A counter for each slot, in memory that is taken when it is first needed.

    It is zeroed memory, which costs nothing until it is touched: 8 bytes for each row in use. Whoever writes counts by
    the native core, before the bytes move. Not thread-safe: see `Storage`.

    Args:
        counters: ``(slots,)`` int64, to count in from now on; None for memory to be taken.

    Attributes:
        counters: ``(slots or more,)`` int64; None as long as there are none.
        at: their address, for the native core; 0 as long as there are none.
    """

    counters: torch.Tensor | None = None
    at = 0
    _size: int | None = 0  # slots; 0 while nobody knows how many, None for any number

    def __init__(self, counters: torch.Tensor | None = None) -> None:
        if counters is not None:
            self._size = counters.shape[0]
            self.hold(counters)

    def resize(self, size: int | None) -> None:
        """Have a counter for each of `size` slots; None for as many as are asked for."""
        self._size = size

    def of_all(self, rows: int = 0) -> torch.Tensor:
        """Return the counters of all slots; of a storage without a size those of `rows` slots at least.

        Before the size is known there is one, which nobody looks at.
        """
        if self._size == 0:
            return _NO_SLOTS
        counters = self.counters
        if counters is None or rows > counters.shape[0]:
            size = max(2 * rows, _FIRST_COUNTERS) if self._size is None else self._size
            grown = torch.from_numpy(zeroed(8 * size, size).view(np.int64))
            if counters is not None:
                grown[: counters.shape[0]] = counters
            counters = grown
            to_the_end(lambda: self.hold(grown))
        return counters

    def vacated(self, rows: int) -> torch.Tensor:
        """Return a copy of the counters of slots behind the first `rows` that were written before, and emptied.

        Slots are first written one after the other, so that those that never were are the last ones: few are looked at.
        """
        if self.counters is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        counters = self.counters.numpy()
        end = bisect_left(range(len(counters)), True, rows, key=lambda slot: not counters[slot])
        return self.counters[rows:end].clone()

    def hold(self, counters: torch.Tensor) -> None:
        """Count in this memory from now on; may be done twice."""
        self.counters, self.at = counters, counters.data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: the counters have another address."""
        self.__dict__.update(state)
        if self.counters is not None:
            self.hold(self.counters)


UNBOUNDED = 2**63 - 1  # the size of a storage that takes whatever comes


class Slots(Access, Versioned):
    """A ring of time steps, ``[steps, *batch]`` slots, with a generation for each slot and a log of changes.

    Args:
        max_size: transitions that fit, at least 1; `UNBOUNDED` for any number.
        ndim: batch dimensions of a storage, at least 1; the first is time.
    """

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.ndim = positive("ndim", ndim)
        self.requested_size = positive("max_size", max_size)
        """Transitions that were asked for."""
        # The sizes are plain attributes, read-only for others: every write and every draw asks for them.
        self.rows_per_step = 0
        """Transitions in one time step; with ``ndim > 1`` 0 before the first write."""
        self.batch_shape = torch.Size((0,) * (ndim - 1))
        """Sizes of the batch dimensions after time; fixed by the first write if ``ndim > 1``, 0 before."""
        self.capacity_steps = self.requested_size
        """Time steps that fit: ``ceil(requested_size / transitions per step)``."""
        self.max_size = self.requested_size
        """Transitions that fit: the size asked for, rounded up to whole time steps once those are known."""
        self.num_steps = 0
        """Time steps stored."""
        self._end = 0
        self.change_log = ChangeLog()
        """What changed since which version; whoever writes notes it there before the bytes move."""
        self.generations = Generations()
        """How often each slot was written or cleared."""
        self.ordered = True
        """Whether neighbouring slots hold neighbouring steps; not after records were chosen by what they hold."""
        self._rows_written = 0
        if self.ndim == 1:
            self.fix_batch(torch.Size(()))

    # Shape

    def fix_batch(self, shape: torch.Size) -> None:
        """Fix the batch dimensions after time, and the sizes that follow from them; may be done twice.

        For `prepare` of a storage with ``ndim > 1``, at the first write, once nothing can fail any more.

        Args:
            shape: ``ndim - 1`` sizes, none of them 0.
        """
        self.capacity_steps = self.steps_that_fit(shape)
        self.max_size = self.capacity_steps * shape.numel()
        self.batch_shape = shape
        self.generations.resize(None if self.max_size == UNBOUNDED else self.max_size)
        self.rows_per_step = shape.numel()  # last: it says that all of this is known

    def steps_that_fit(self, batch: torch.Size) -> int:
        """Return how many time steps fit if the batch dimensions after time are these."""
        return -(-self.requested_size // batch.numel())

    def bound(self, max_size: int) -> None:
        """Give a storage that takes any number of transitions a size; nothing to do for others.

        Raises:
            InvalidArgumentError: it holds more already.
        """
        if self.requested_size != UNBOUNDED:
            return
        if len(self) > max_size:
            raise InvalidArgumentError(
                f"max_size: {max_size} is less than the {len(self)} transitions stored"
            )
        self.requested_size = max_size
        self.fix_batch(self.batch_shape)
        self._end = self.num_steps % self.capacity_steps
        self.change_log.renew()  # it counts around another ring
        if self.generations.at:
            self.generations.of_all(max_size)

    def _go_on_at(self, step: int) -> None:
        capacity = self.capacity_steps
        if not 0 <= step < capacity or (self.num_steps < capacity and step != self.num_steps):
            raise IndexRangeError(
                f"end: expected a step in [0, {capacity}) that leaves no gap behind the {self.num_steps} "
                f"steps stored, got {step}"
            )
        if step != self._end:
            # Trajectories are cut elsewhere.
            self.change_log.note_ranges([(0, len(self))], self.max_size, amended=True)
            self._end = step

    # Every write asks: read without a call.
    end = property(
        attrgetter("_end"),
        lambda self, step: self._go_on_at(step),
        doc="""The time step after the newest one, around the ring: where a ring writer goes on.

        Before the storage is full that is `num_steps`; a full one may be told another step.
        """,
    )

    @property
    def shape(self) -> torch.Size:
        """The visible part, ``[time steps stored, *batch]``."""
        return torch.Size((self.num_steps, *self.batch_shape))

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return self.num_steps * self.rows_per_step

    _len = property(__len__)  # a private name that programs do use

    # Generations and versions

    # Every write, draw and follower asks: read without a call.
    version = property(
        attrgetter("change_log.version"),
        doc="Which content the storage holds, and how much of it has changed; counted before the bytes move.",
    )

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version` (see `ChangeLog.since`); None for another content."""
        return self.change_log.since(version)

    @property
    def origin(self) -> Version | None:
        """What this content began as a copy of, by loading or unpickling; None for nothing."""
        return self.change_log.origin

    @property
    def rows_written(self) -> int:
        """Transitions ever written."""
        return self._rows_written

    def generation(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generations of `slots` (``(n,)`` int64, in range), a fresh ``(n,)`` int64 tensor."""
        counters = self.generations.counters
        return (self.generations.of_all() if counters is None else counters).index_select(0, slots)

    @property
    def counters_at(self) -> int:
        """The address of all slots' generations, int64, for the native core; fixed for the life of a size."""
        return self.generations.at or self.generations.of_all().data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: another content."""
        self.__dict__.update(state)
        self.change_log = ChangeLog(self.change_log.version)
