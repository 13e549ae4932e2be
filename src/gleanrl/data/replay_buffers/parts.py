"""What a replay buffer is made of: its parts, exchanging them, and the state of all of them together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gleanrl.data.replay_buffers.ownership import Part
from gleanrl.data.replay_buffers.pipeline import Pipeline
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.random import RandomSampler
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.data.replay_buffers.writers.round_robin import RoundRobinWriter
from gleanrl.errors import InvalidArgumentError, SchemaError

_Self = TypeVar("_Self", bound="Parts")


class Parts:
    """The storage, sampler, writer and transforms of one buffer, kept consistent under one lock.

    Each part belongs to one buffer: a part of another buffer that is still in use is refused, one of a buffer
    that is gone can be used again. What is stored is the storage's business alone; writer and sampler go on
    with what it holds, also after it was written, cleared or loaded by itself.

    Args:
        storage: where records are kept; None for ``ListStorage(1000)``.
        sampler: which records make a batch; None for `RandomSampler`.
        writer: where new records go; None for `RoundRobinWriter`.
        transform: the first transform; None for none.
        seed: where the sampler's random sequence starts; None leaves the sampler as it is.

    Raises:
        InvalidArgumentError: no part of that kind, or a part of another buffer; no part was taken.
    """

    def __init__(
        self,
        storage: Storage | None,
        sampler: Sampler | None,
        writer: Writer | None,
        transform: Any = None,
        seed: int | None = None,
    ) -> None:
        self._lock = threading.RLock()
        # An empty storage is falsy: compare with None.
        self._storage: Storage = self._part(
            "storage", ListStorage(1000) if storage is None else storage, Storage
        )
        self._sampler: Sampler = self._part(
            "sampler", RandomSampler() if sampler is None else sampler, Sampler
        )
        self._writer: Writer = self._part("writer", RoundRobinWriter() if writer is None else writer, Writer)
        self._writer.check_storage(self._storage)
        self._sampler.check_storage(self._storage)
        self._collate_fn: Callable[[Any], Any] | None = None
        self._transforms = Pipeline()
        if transform is not None:
            self._transforms.insert(0, transform, False)
        if seed is not None:
            self._sampler.set_seed(seed)
        # Nothing fails from here on: a buffer that couldn't be made keeps no part.
        for part in (self._storage, self._sampler, self._writer):
            part.join_buffer(self)
        self._writer.register_storage(self._storage)

    def _part(self, name: str, part: Any, kind: type[Any]) -> Any:
        """Return `part` if it is of that kind and free for this buffer."""
        if not isinstance(part, kind):
            raise InvalidArgumentError(f"{name}: expected a {kind.__name__}, got {part!r}")
        part.check_free(name, self)
        return part

    @property
    def storage(self) -> Storage:
        """Where the records are."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """What decides which records make a batch."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """What decides where new records go."""
        return self._writer

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Use another storage and return the old one; writer and sampler go on with what the new one holds.

        Args:
            storage: the new storage, empty or filled.
            collate_fn: what makes a batch out of what it returns; None for its default.
        """
        with self._lock:
            self._writer.check_storage(self._part("storage", storage, Storage))
            self._sampler.check_storage(storage)
            self._drop_ahead()
            old, self._storage = self._storage, storage
            _hand_over(old, storage, self)
            self._collate_fn = collate_fn
            self._writer.register_storage(self._storage)
            self._sampler.follow(storage)
            return old

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use another sampler and return the old one; an epoch of another storage ends."""
        with self._lock:
            self._part("sampler", sampler, Sampler).check_storage(self._storage)
            self._drop_ahead()
            old, self._sampler = self._sampler, sampler
            _hand_over(old, sampler, self)
            sampler.follow(self._storage)
            return old

    def set_writer(self, writer: Writer) -> Writer:
        """Use another writer, which goes on where the old one stands, and return the old one."""
        with self._lock:
            self._part("writer", writer, Writer).check_storage(self._storage)
            old, self._writer = self._writer, writer
            _hand_over(old, writer, self)
            self._writer.register_storage(self._storage)
            return old

    def set_seed(self, seed: int) -> None:
        """Start the sampler's random sequence of `seed`."""
        with self._lock:
            self._drop_ahead()
            self._sampler.set_seed(seed)

    def _drop_ahead(self) -> None:
        """Take back what was drawn ahead: what it was drawn from, or by, becomes another one."""

    def append_transform(self: _Self, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform after the others, and return the buffer; see `insert_transform`."""
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self: _Self, index: int, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform before the one at `index`, in evaluation mode, and return the buffer.

        Args:
            index: its place in the order in which batches pass; records pass in the opposite order.
            transform: see the class.
            invert: whether it acts on writes as it would on reads, and the other way round.
        """
        with self._lock:
            count = len(self._transforms)
            if isinstance(index, bool) or not isinstance(index, int) or not -count <= index <= count:
                raise InvalidArgumentError(
                    f"index: expected a place among {count} transforms, in [{-count}, {count}], got {index!r}"
                )
            self._transforms.insert(index, transform, invert)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything but the lock; the copy goes on with the same sequence of samples."""
        with self._lock:
            self._sampler_state()  # a generator that was never used takes its seed now, for both
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        self._lock = threading.RLock()
        for part in (self._storage, self._sampler, self._writer):
            part.join_buffer(self)
        self._writer.register_storage(self._storage)
        self._sampler.follow(self._storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of storage, sampler, writer and transforms: copies that later calls don't change."""
        with self._lock:
            return {
                "_storage": self._storage.state_dict(),
                "_sampler": self._sampler_state(),
                "_writer": self._writer.state_dict(),
                "_transforms": self._transforms.state_dict(),
            }

    def _sampler_state(self) -> dict[str, Any]:
        """Return the sampler's state, which goes with what is stored now."""
        self._sampler.follow(self._storage)
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly as the saved buffer would have; the same sequence of samples follows.

        Args:
            state_dict: what `state_dict` returned, of a buffer with parts like this one's. It is copied.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        check_state(state_dict)
        with self._lock:
            # The cheap parts first: they are checked, or taken back, before the storage changes.
            self._writer.check_state(state_dict["_writer"], *Storage.steps_in(state_dict["_storage"]))
            before, transforms = self._sampler_state(), self._transforms.state_dict()
            self._transforms.load_state_dict(state_dict.get("_transforms", transforms))
            try:
                self._sampler.load_state_dict(state_dict["_sampler"])
                self._storage.load_state_dict(state_dict["_storage"])
            except BaseException:
                self._transforms.load_state_dict(transforms)
                self._sampler.load_state_dict(before)
                raise
            self._writer.load_state_dict(state_dict["_writer"])
            self._sampler.follow(self._storage)


def check_state(state_dict: Any) -> None:
    """Raise `SchemaError` unless `state_dict` has the parts of a buffer's state."""
    if not isinstance(state_dict, Mapping):
        raise SchemaError(
            f"load_state_dict: expected the state of a ReplayBuffer, got {type(state_dict).__name__}"
        )
    missing = [
        key for key in ("_storage", "_sampler", "_writer") if not isinstance(state_dict.get(key), Mapping)
    ]
    if missing:
        raise SchemaError(f"load_state_dict: expected the state of a ReplayBuffer, {missing} is missing")


def _hand_over(old: Part, new: Part, owner: Parts) -> None:
    old.leave_buffer()
    new.join_buffer(owner)
