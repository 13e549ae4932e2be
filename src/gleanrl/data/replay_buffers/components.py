"""The parts of a buffer as one object: construction, exchange of a part, and their common state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gleanrl._os.interrupts import to_the_end
from gleanrl._state.rng import OwnedGenerator
from gleanrl._state.state import Stateful, StateReader
from gleanrl.data.replay_buffers.adapters import plain_state
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.samplers.adapter import as_sampler
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.transitions import RandomSampler
from gleanrl.data.replay_buffers.storages.adapter import as_storage
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.storages.shared import SharedTensorStorage, share
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline
from gleanrl.data.replay_buffers.writers.adapter import as_writer
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter, Writer
from gleanrl.data.replay_buffers.writers.round_robin import RoundRobinWriter
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

_KINDS: Mapping[str, type[Any]] = {"storage": Storage, "sampler": Sampler, "writer": Writer}
_ADAPTERS: Mapping[str, Callable[[Any], Any]] = {
    "storage": as_storage,
    "sampler": as_sampler,
    "writer": as_writer,
}


class PartsState(NamedTuple):
    """The state of all parts of a buffer at one moment."""

    storage: StorageState
    sampler: Any
    writer: Any
    transforms: tuple[Any, ...]


class Parts(Stateful[PartsState]):
    """The storage, sampler, writer and transforms of one buffer.

    A part belongs to one buffer. The constructor refuses a part of another buffer that is still in use, and accepts a
    part whose buffer was deleted. Several buffers may share one storage if at most one of them writes to it. Writer and
    sampler adapt to the storage's content, even after it was written, cleared or loaded directly.

    The constructor checks the parts, bounds an unbounded storage to `Sampler.room`, and passes `generator` to the
    sampler. The parts have an owner only after `join`.

    Not thread-safe: the caller holds the buffer's lock.

    Args:
        storage: keeps the records, or a callable that creates the storage. None for a `ListStorage`, whose capacity is
            the most rows that the sampler allows, or 1000.
        sampler: chooses the records of a batch, or a callable that creates the sampler. None for `RandomSampler`.
        writer: chooses the slots of new records, or a callable that creates the writer. None for `RoundRobinWriter`.
        transform: the first transform; None for no transform.
        collate_fn: turns the storage's result into a batch; None for the storage's default.
        generator: the sampler's source of random numbers; None for the sampler's own generator.
        dim_extend: the batch dimension of extended data that is time. None for the last dimension that the storage
            takes as slots.

    Raises:
        InvalidTypeError: a transform or `collate_fn` isn't callable.
        InvalidArgumentError: an argument isn't such a part, or it belongs to another buffer. No part was taken.
    """

    def __init__(
        self,
        storage: Any,
        sampler: Any,
        writer: Any,
        transform: Any,
        collate_fn: Any,
        generator: torch.Generator | None = None,
        dim_extend: int | None = None,
    ) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise InvalidTypeError(f"collate_fn: expected a callable, got {collate_fn!r}")
        # An empty storage is falsy: compare with None.
        self.sampler: Sampler = RandomSampler() if sampler is None else made("sampler", sampler)
        room = self.sampler.room if isinstance(self.sampler, Sampler) else None
        self.storage: Storage = ListStorage(room or 1000) if storage is None else made("storage", storage)
        self.writer: Writer = RoundRobinWriter() if writer is None else made("writer", writer)
        self.transforms = Pipeline()
        if transform is not None:
            self.transforms.insert(0, transform, False)
        self.collate_fn: Callable[[Any], Any] | None = collate_fn
        self._dim_extend = dim_extend
        self.writes = False
        """Whether this buffer is the one that writes to the storage."""
        self.follows = True
        """Whether the sampler must be notified of writes."""
        self.weighs = True
        """Whether the sampler may return importance weights."""
        self.cuts = True
        """Whether draws depend on the ends of trajectories."""
        self._owner: weakref.ref[Any] | None = None
        for name in _KINDS:
            self._check(name, getattr(self, name), shared=name == "storage")
        if room is not None:
            self.storage.bound(room)
        self._settle_time()
        self.writer.check_storage(self.storage)
        self.sampler.check_storage(self.storage)
        self.generator: torch.Generator | None = None
        self.set_rng(generator)

    def share(self) -> SharedTensorStorage:
        """Make the storage usable by several processes and return it; see `ReplayBuffer.share`."""
        self._check_sharing(self.sampler, self.writer)
        return share(self.storage)

    def _check_sharing(self, sampler: Sampler, writer: Writer) -> None:
        if sampler.takes_priorities:
            raise UnsupportedError(
                f"shared: a {type(sampler).__name__} keeps its priorities in one process, so priorities would differ "
                "between processes; use RandomSampler, SamplerWithoutReplacement or a slice sampler without "
                "priorities. Passing a buffer to a spawned process shares it, too: pass its state_dict() instead, or "
                "create the buffer there"
            )
        if (
            not isinstance(writer, (RoundRobinWriter, ImmutableDatasetWriter))
            or writer.unwrapped is not writer
        ):
            raise UnsupportedError(
                f"shared: a {type(writer).__name__} tracks the records of one process only; use RoundRobinWriter"
            )

    def go_apart(self, number: int) -> None:
        """Reseed the sampler's own generator, so that this copy draws other numbers than the original.

        A user's generator stays unchanged.
        """
        if isinstance(self.sampler.random, OwnedGenerator):
            self.sampler.random.after_fork((number,))

    def _check(self, name: str, part: Any, shared: bool = False) -> None:
        """Raise `InvalidArgumentError` if `part` has the wrong type or, unless `shared`, another owner."""
        if not isinstance(part, _KINDS[name]):
            hint = f"; write LazyTensorStorage({part})" if name == "storage" and isinstance(part, int) else ""
            raise InvalidArgumentError(f"{name}: expected a {_KINDS[name].__name__}, got {part!r}{hint}")
        if not shared:
            part.check_free(name, None if self._owner is None else self._owner())

    def claim(self) -> None:
        """Make this buffer the only writer of the storage. The caller calls this before the first write.

        Before `join`, the call does nothing.

        Raises:
            UnsupportedError: another buffer, which is still in use, has written to the storage.
        """
        if self._owner is not None:
            self.storage.claim(self._owner())
            self.writes = True

    @property
    def written_time(self) -> int:
        """The time dimension of data in the user's layout. 0 if `dim_extend` isn't a dimension of the storage."""
        return self.dim_extend if self.dim_extend < self.storage.ndim else 0

    def _settle_time(self) -> None:
        self.dim_extend: int = self.storage.ndim - 1 if self._dim_extend is None else self._dim_extend
        """The batch dimension of extended data that is time."""

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Make this sampler and its successors draw from `generator`.

        None gives the sampler a new generator if it drew from a user's generator of this buffer; otherwise it keeps its
        present one.
        """
        if generator is not None or self.generator is not None:
            self.sampler.set_rng(generator)
        self.generator = generator

    def join(self, owner: Any, gate: BufferLock) -> None:
        """Set the owning buffer and its lock, and register the storage with writer and sampler.

        Called at construction, or for a copy.
        """
        self._owner = weakref.ref(owner)
        for part in (self.storage, self.sampler, self.writer):
            part.join_buffer(owner, gate)
        self._register()

    def _register(self) -> None:
        self._settle_time()
        self.writer.register_storage(self.storage)
        self.sampler.use_storage(self.storage)
        sampler = self.sampler
        self.follows, self.weighs, self.cuts = sampler.follows, sampler.weighs, sampler.cuts

    def exchange(
        self, name: str, part: Any, gate: BufferLock, collate_fn: Callable[[Any], Any] | None = None
    ) -> Any:
        """Replace one part and return the old one, as the user passed it.

        If the new part doesn't fit, the call raises and all parts stay. An unbounded storage may then be bounded to
        `Sampler.room` nevertheless.

        Args:
            name: ``"storage"``, ``"sampler"`` or ``"writer"``.
            part: the new part, or a callable that creates it.
            gate: the buffer's lock.
            collate_fn: turns the result of a new storage into a batch; None for its default.

        Raises:
            InvalidArgumentError: wrong type, the part belongs to another buffer, or the parts don't fit each other.
            UnsupportedError: a shared buffer, or one with a rate limiter, can't take that part.
        """
        # All checks come before the first change of a part; only `bound` has to come before the sampler's check.
        part = made(name, part)
        self._check(name, part)
        storage: Storage = part if name == "storage" else self.storage
        sampler: Sampler = part if name == "sampler" else self.sampler
        writer: Writer = part if name == "writer" else self.writer
        if gate.shared is not None:
            self._check_sharing(sampler, writer)
            if name == "storage":
                raise UnsupportedError(
                    "set_storage: other processes use the storage of a shared buffer; make a new buffer"
                )
        if gate.limiter is not None and name == "storage":
            raise UnsupportedError(
                "set_storage: the buffer's rate limiter counts the rows of its storage; make a new buffer"
            )
        writer.check_storage(storage)
        if sampler.room is not None:
            storage.bound(sampler.room)
        sampler.check_storage(storage)
        old, owner = getattr(self, name), self._owner and self._owner()

        def hand_over() -> None:
            setattr(self, name, part)
            if name == "storage":
                self.collate_fn, self.writes = collate_fn, False
            elif name == "sampler" and self.generator is not None:
                part.set_rng(self.generator)
            old.leave_buffer(owner)
            part.join_buffer(owner, gate)
            self._register()

        to_the_end(hand_over)  # an interrupt must not leave a part with two owners, or with none
        sampler.follow(storage)
        return old.unwrapped

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the owner; the copy continues with the same sequence of samples.

        The call brings the sampler up to date and seeds its unused generator.
        """
        self.sampler.follow(self.storage)
        self.sampler.random.begin()  # seeds an unused generator now, so that the copy gets the same seed
        return {**self.__dict__, "_owner": None, "writes": False}

    def snapshot(self) -> PartsState:
        """Return the state of all parts at one moment. The caller holds the buffer's lock."""
        storage = self.storage
        self.sampler.follow(storage)
        return PartsState(
            storage.snapshot(),
            self.sampler.snapshot(),
            self.writer.snapshot(),
            self.transforms.snapshot(),
        )

    def plain(self, value: PartsState, live: bool) -> dict[str, Any]:
        """Return a snapshot as plain values and private tensors; see `Storage.plain_state` for `live`."""
        return {
            "_storage": self.storage.plain_state(value.storage, live),
            "_sampler": plain_state(value.sampler),
            "_writer": plain_state(value.writer),
            "_transforms": list(value.transforms),
        }

    def parse(self, state: Any) -> PartsState:
        """Return the value of a saved state and change nothing.

        Transforms keep their present state if the saved one has no ``"_transforms"``.

        Raises:
            SchemaError: the state doesn't fit these parts.
            CapacityError: a storage without schema found too little memory or disk space.
        """
        reader = StateReader(state, "a ReplayBuffer")
        storage = self.storage.parse(reader.get("_storage"))
        sampler = self.sampler.parse(reader.get("_sampler"))
        return PartsState(
            storage,
            self.sampler.turned(sampler, storage.moved, storage.rows) if storage.moved else sampler,
            self.writer.parse(reader.get("_writer"), storage),
            self.transforms.parse(reader.get("_transforms"))
            if "_transforms" in reader
            else self.transforms.snapshot(),
        )

    def adopt(self, value: PartsState) -> None:
        """Take over a value that `parse` returned."""
        self.storage.adopt(value.storage)
        self.sampler.adopt(value.sampler)
        self.writer.adopt(value.writer)
        self.transforms.adopt(value.transforms)


def made(name: str, part: Any) -> Any:
    """Return a storage, sampler or writer for use in a buffer: the object, its adapter, or the callable's result.

    Args:
        name: ``"storage"``, ``"sampler"`` or ``"writer"``.
        part: the part, or a callable without arguments that creates it, for example a class.
    """
    found = _ADAPTERS[name](part)
    return _ADAPTERS[name](part()) if callable(part) and not isinstance(found, _KINDS[name]) else found


def share_parts(gate: BufferLock, parts: Parts, limited: bool = False) -> None:
    """Let several processes use the parts (see `ReplayBuffer.share`), or raise and change nothing.

    Args:
        gate: the lock of the buffer, or of all buffers over its storage.
        parts: the parts of the buffer, which may not have joined it yet.
        limited: whether the buffer is about to get a rate limiter.
    """
    with gate.lock:
        if limited or gate.limiter is not None:
            raise UnsupportedError(
                "share: the buffer's rate limiter counts in one process only; make the buffer without it"
            )
        if gate.shared is None:
            gate.share(parts.share())
