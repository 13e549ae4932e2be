"""The slots of a storage: ring geometry, generations, reading by index, and notification of writes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._os import proc
from gleanrl._os.interrupts import to_the_end
from gleanrl._util import positive
from gleanrl.data.replay_buffers.change_log import Change, ChangeLog, Version, ring_spans
from gleanrl.data.replay_buffers.component_base import Part, living
from gleanrl.data.replay_buffers.storages.allocators import zeroed
from gleanrl.data.replay_buffers.storages.indexing import slots_at
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)

_Self = TypeVar("_Self", bound="Slots")


def announce(storage: Slots, slots: torch.Tensor) -> None:
    """Call `mark_update` of the objects attached to a storage, after a write to `slots`, ``(n,)`` int64."""
    index = slots
    if storage.ndim > 1:
        index = torch.stack(torch.unravel_index(slots, storage.shape), -1)
    for buffer in living(storage.attached):
        buffer.mark_update(index.clone())


_FIRST_COUNTERS = 1024
_NO_SLOTS = torch.zeros(1, dtype=torch.int64, device="cpu")  # a valid address, for storages without slots


def preserve(
    snapshots: tuple[weakref.ref[CowSnapshot], ...], ranges: list[tuple[int, int]], size: int
) -> tuple[weakref.ref[CowSnapshot], ...]:
    """Let snapshots copy slots that are about to change, and return the snapshots that aren't saved completely.

    The call waits while the threads that save a snapshot leave it no room for further copies.

    Args:
        snapshots: the open snapshots of one storage.
        ranges: the first slot and the number of slots of each range.
        size: the number of slots of the storage; a range may wrap around its end.
    """
    living = [(reference, snapshot) for reference in snapshots if (snapshot := reference()) is not None]
    if living:
        spans = [span for start, count in ranges for span in ring_spans(start, count, size)]
        for _, snapshot in living:
            snapshot.before(spans)
    return tuple(reference for reference, snapshot in living if snapshot.open)


class Generations:
    """A counter for each slot. The memory is allocated when it is first needed.

    Zeroed memory costs nothing until it is touched, so the counters take 8 bytes for each row in use. Writers count
    them up by the native core, before the bytes of the rows change. The object isn't thread-safe: see `Storage`.

    Args:
        counters: existing counters to use, ``(slots,)`` int64; None to allocate them when they are needed.

    Attributes:
        counters: ``(slots or more,)`` int64; None before the memory is allocated.
        at: the address of the counters, for the native core; 0 before the memory is allocated.
    """

    counters: torch.Tensor | None = None
    at = 0
    _size: int | None = 0  # number of slots; 0 while it isn't known, None if it is unbounded

    def __init__(self, counters: torch.Tensor | None = None) -> None:
        if counters is not None:
            self._size = counters.shape[0]
            self.hold(counters)

    def resize(self, size: int | None) -> None:
        """Set the number of slots; None means unbounded."""
        self._size = size

    def of_all(self, rows: int = 0) -> torch.Tensor:
        """Return the counters of all slots, or of at least `rows` slots if the number is unbounded.

        Missing counters are allocated, and too few are moved to larger memory. While the number of slots isn't known,
        the result is a dummy counter, which is never read.

        Raises:
            CapacityError: the system refuses the memory.
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
        """Return a copy of the counters of the slots from `rows` on that were ever written, ``(n,)`` int64.

        Slots are first written in order, so all slots that were never written come last. A binary search finds them.
        """
        if self.counters is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        counters = self.counters.numpy()
        end = bisect_left(range(len(counters)), True, rows, key=lambda slot: not counters[slot])
        return self.counters[rows:end].clone()

    def hold(self, counters: torch.Tensor) -> None:
        """Use this memory from now on. An interrupted call may be repeated."""
        self.counters, self.at = counters, counters.data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy, whose counters have another address."""
        self.__dict__.update(state)
        if self.counters is not None:
            self.hold(self.counters)


UNBOUNDED = 2**63 - 1  # the size of a storage without a limit


class Slots(Part, ABC):
    """A ring of time steps, ``[steps, *batch]`` slots, with a generation for each slot and a change log.

    Args:
        max_size: the number of transitions that fit, at least 1; `UNBOUNDED` for any number.
        ndim: the number of batch dimensions, at least 1; the first is time.
    """

    attached: tuple[weakref.ref[Any], ...] = ()
    """Weak references to the objects that are called after each write; see `attach`."""
    _written_by: weakref.ref[Any] | None = None  # the one buffer that writes

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.ndim = positive("ndim", ndim)
        self.requested_size = positive("max_size", max_size)
        """The number of transitions that the user requested."""
        # The sizes are plain attributes for speed, because every write and every draw reads them. Other objects
        # must not set them.
        self.rows_per_step = 0
        """Transitions in one time step; with ``ndim > 1`` 0 before the first write."""
        self.batch_shape = torch.Size((0,) * (ndim - 1))
        """Sizes of the batch dimensions after time. With ``ndim > 1`` the first write sets them; they are 0 before."""
        self.capacity_steps = self.requested_size
        """Number of time steps that fit: ``ceil(requested_size / transitions per step)``."""
        self.max_size = self.requested_size
        """Number of transitions that fit: `requested_size`, rounded up to whole time steps once their size is known."""
        self.num_steps = 0
        """Number of time steps stored."""
        self._end = 0
        self.change_log = ChangeLog()
        """The changes since earlier versions. A writer logs a change before the bytes change."""
        self.generations = Generations()
        """A counter for each slot, which every write and every `clear` of the slot increments. A load may raise it."""
        self.overwritten = False
        """Whether steps of the present content are gone: overwritten, or left out by a write longer than the ring."""
        self.ordered = True
        """Whether adjacent slots hold adjacent steps; False after a writer chose records by their content."""
        self._rows_written = 0
        if self.ndim == 1:
            self.fix_batch(torch.Size(()))

    def fix_batch(self, shape: torch.Size) -> None:
        """Fix the batch dimensions after time, and the sizes that follow from them.

        An interrupted call may be repeated. With ``ndim > 1``, `prepare` calls it at the first write, after everything
        that can fail.

        Args:
            shape: ``ndim - 1`` sizes, each at least 1.
        """
        self.capacity_steps = self.steps_that_fit(shape)
        self.max_size = self.capacity_steps * shape.numel()
        self.batch_shape = shape
        self.generations.resize(None if self.max_size == UNBOUNDED else self.max_size)
        self.rows_per_step = shape.numel()  # last, because a value above 0 means that all sizes are set

    def steps_that_fit(self, batch: torch.Size) -> int:
        """Return how many time steps fit if `batch` are the batch dimensions after time."""
        return -(-self.requested_size // batch.numel())

    def bound(self, max_size: int) -> None:
        """Set the size of an unbounded storage, whose content gets a new version. Other storages are unchanged.

        Raises:
            InvalidArgumentError: the storage already holds more transitions.
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
        self.change_log.renew()  # logged ranges wrap around the old size
        if self.generations.at:
            self.generations.of_all(max_size)

    def _go_on_at(self, step: int) -> None:
        """Set `end`, which logs all stored slots as amended; raise `IndexRangeError` for a step that leaves a gap."""
        capacity = self.capacity_steps
        if not 0 <= step < capacity or (self.num_steps < capacity and step != self.num_steps):
            raise IndexRangeError(
                f"end: expected a step in [0, {capacity}) that leaves no gap behind the {self.num_steps} "
                f"steps stored, got {step}"
            )
        if step != self._end:
            # The newest step is another one now, so trajectories end at other steps: followers must look again.
            self.change_log.note_ranges([(0, len(self))], self.max_size, amended=True)
            self._end = step

    # Every write reads it, so `attrgetter` replaces a Python function.
    end = property(
        attrgetter("_end"),
        lambda self, step: self._go_on_at(step),
        doc="""The time step after the newest one, around the ring. A ring writer continues there.

        Before the storage is full it equals `num_steps`. In a full storage it can be set to another step.
        """,
    )

    @property
    def shape(self) -> torch.Size:
        """The visible part, ``[time steps stored, *batch]``."""
        return torch.Size((self.num_steps, *self.batch_shape))

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return self.num_steps * self.rows_per_step

    _len = property(__len__)  # TorchRL programs use this private name

    # Every write, draw and follower reads it, so `attrgetter` replaces a Python function.
    version: Version = property(  # type: ignore[assignment]
        attrgetter("change_log.version"),
        doc="The identity of the content and the count of its changes. It changes before the bytes do.",
    )

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return the changes after `version` (see `ChangeLog.since`); None if the content is another one."""
        return self.change_log.since(version)

    @property
    def origin(self) -> Version | None:
        """The version that this content was loaded or unpickled from; None if there is none."""
        return self.change_log.origin

    @property
    def oldest_step(self) -> int:
        """The position of the oldest stored time step in the ring, if steps are in the order of time."""
        return self._end if self.num_steps == self.capacity_steps else 0

    @property
    def rows_written(self) -> int:
        """Number of transitions ever written, also before a `clear`. A load sets it to the saved number."""
        return self._rows_written

    def generation(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generations of `slots` (``(n,)`` int64, in range) as a fresh ``(n,)`` int64 tensor."""
        counters = self.generations.counters
        return (self.generations.of_all() if counters is None else counters).index_select(0, slots)

    @property
    def counters_at(self) -> int:
        """The address of the generations of all slots, int64, for the native core.

        It changes if the number of slots changes, and when an unbounded storage outgrows its counters.
        """
        return self.generations.at or self.generations.of_all().data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy. The content gets a new version."""
        self.__dict__.update(state)
        self.change_log = ChangeLog(self.change_log.version)

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Return the records at a user's index over the visible part. The subclass defines which results are views."""

    def slots_of(self, index: Any) -> tuple[torch.Tensor, torch.Size]:
        """Return the slots that a user's index names, ``(n,)`` int64, and the selection's shape (see `slots_at`)."""
        return slots_at(index, self.shape)

    def contains(self, index: Any) -> Any:
        """Return whether time steps are stored: a bool for an int, else a bool tensor of the shape of `index`.

        Args:
            index: an int, or integers in a tensor, list or range; negative ones count from the end. With ``ndim > 1``
                also coordinates, in a tensor ``(..., ndim)`` with two or more dimensions, or in a tuple of `ndim`
                integers or tensors. A tensor ``(ndim,)`` holds time steps, as in ``storage[index]``.
        """
        shape = self.shape
        is_tuple = isinstance(index, tuple)
        parts = [torch.as_tensor(part, device="cpu") for part in (index if is_tuple else (index,))]
        positions = torch.stack(torch.broadcast_tensors(*parts), -1) if is_tuple else parts[0]
        if is_tuple or (len(shape) > 1 < positions.ndim and positions.shape[-1] == len(shape)):
            sizes = torch.tensor(shape[: positions.shape[-1]], device="cpu")
            found = ((positions >= -sizes) & (positions < sizes)).all(-1)
        else:
            found = (positions >= -shape[0]) & (positions < shape[0])
        return found if found.ndim else bool(found)

    def __contains__(self, index: Any) -> bool:
        """Return whether all time steps at `index` are stored; see `contains`."""
        return bool(torch.as_tensor(self.contains(index)).all())

    def __getitem__(self, index: Any) -> Any:
        """Return the records at an index; see `get`."""
        return self.get(index)

    def __iter__(self) -> Iterator[Any]:
        """Yield the stored time steps in the order of slots (with ``ndim=1`` the records); see `get`."""
        for step in range(self.shape[0]):
            yield self.get(step)

    def flatten(self: _Self) -> _Self | Slots:
        """Return the stored part as a storage with one batch dimension, time steps first.

        A storage with one batch dimension returns itself. Otherwise the result is a full storage that shares the
        memory. A write into either storage shows in both. Each storage counts only its own writes, so a buffer over one
        doesn't notice writes into the other.

        Raises:
            EmptyBufferError: nothing is stored, and there are several batch dimensions.
            UnsupportedError: there are several batch dimensions, and the storage isn't a tensor storage.
        """
        if self.ndim == 1:
            return self
        if not self.shape[0]:
            raise EmptyBufferError("flatten: the storage is empty; write records first")
        return self._flattened()

    def _flattened(self) -> Slots:
        raise UnsupportedError(f"flatten: a {type(self).__name__} can't be flattened; use a tensor storage")

    # Several buffers may use the storage. One of them may write. All others got the same lock at construction and
    # only read.

    def leave_buffer(self, owner: Any) -> None:
        """Unregister `owner`, which also gives up its claim to write. The last buffer releases the lock."""
        if self._written_by is not None and self._written_by() is owner:
            self._written_by = None
        super().leave_buffer(owner)

    def claim(self, buffer: Any) -> None:
        """Make `buffer` the only buffer that may write.

        Raises:
            UnsupportedError: another buffer, which is still in use, has written to the storage.
        """
        writer = None if self._written_by is None else self._written_by()
        if writer is not None and writer is not buffer:
            raise UnsupportedError(
                f"this {type(self).__name__} is written through another {type(writer).__name__}, and only one of the "
                "buffers that share a storage may write: write through that buffer, or delete it first"
            )
        self._written_by = weakref.ref(buffer)

    def attach(self, buffer: Any) -> None:
        """Call ``buffer.mark_update(index)`` after every write from now on, but not after `clear` or a load.

        The buffer of the storage needs no call, because it learns of writes from the version. The call is made by the
        writing thread, under the lock of the storage's buffer. The object is held weakly, and copies of the storage
        don't call it. An object that is attached already isn't attached twice.

        Args:
            buffer: an object with `mark_update`; the index has the form that `extend` returns, ``(n,)`` int64 slots or
                ``(n, ndim)`` coordinates.

        Raises:
            InvalidTypeError: the object has no `mark_update`.
        """
        if not callable(getattr(buffer, "mark_update", None)):
            raise InvalidTypeError(f"attach: expected an object with mark_update(index), got {buffer!r}")
        attached = living(self.attached)
        if all(one is not buffer for one in attached):
            self.attached = tuple(weakref.ref(one) for one in (*attached, buffer))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without attached objects.

        Raises:
            UnsupportedError: the pickle is for a process that is being spawned.
        """
        if proc.is_spawning():
            raise UnsupportedError(
                f"this {type(self).__name__} can't be sent to a process that is spawned: its records aren't shared "
                "between processes, so each process would write to a private copy. Use a buffer with shared=True, send "
                "state_dict(), or make the buffer in the new process (a buffer with delayed_init=True that wasn't used "
                "yet can be sent)"
            )
        transient = ("attached", "open_snapshots")
        return {name: value for name, value in super().__getstate__().items() if name not in transient}
