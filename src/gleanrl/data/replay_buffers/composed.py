"""A buffer as the sum of its parts: making them, exchanging them, seeding, state, copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch

from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed, with_records
from gleanrl.data.replay_buffers.draws import Draws
from gleanrl.data.replay_buffers.ending import end_trajectories
from gleanrl.data.replay_buffers.gate import Gate
from gleanrl.data.replay_buffers.intake import Intake
from gleanrl.data.replay_buffers.parts import Parts
from gleanrl.data.replay_buffers.pipeline import Pipeline
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.server import BufferServer
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.shared import is_shareable
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import UnsupportedError
from gleanrl.overrides import overridden
from gleanrl.system import proc

_Self = TypeVar("_Self", bound="Composed")
_OPENING = threading.RLock()


class _Opened:
    """An attribute that is there once the parts are; asking for it earlier makes them. Costs nothing afterwards."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type[Any]) -> Any:
        if buffer is None:
            return self
        buffer.open()
        return buffer.__dict__[self._name]


class Composed(Checkpointed):
    """What a `ReplayBuffer` does as the sum of its parts; the parts are made at once, or at its first use."""

    kind = "ReplayBuffer"
    _gate: Gate = _Opened()  # type: ignore[assignment]
    _parts: Parts = _Opened()  # type: ignore[assignment]
    _draws: Draws = _Opened()  # type: ignore[assignment]
    _server: BufferServer = _Opened()  # type: ignore[assignment]
    _intake: Intake = _Opened()  # type: ignore[assignment]
    _to_open: dict[str, Any] | None = None  # what to make the parts of, until they are made

    def open(self) -> None:
        """Make the parts, if that waits for the buffer's first use; what fails is tried again at the next one."""
        with _OPENING:  # two threads may be the first
            if self._to_open is not None:
                self._assemble(**self._to_open)
                self._to_open = None

    def _assemble(self, *_: Any, **options: Any) -> None:
        """Make the parts and set the attributes above."""
        raise NotImplementedError

    @property
    def initialized(self) -> bool:
        """Whether the parts are made."""
        return self._to_open is None

    # Parts

    @property
    def storage(self) -> Storage:
        """Where the records are."""
        found: Storage = self._parts.storage.given
        return found

    @property
    def sampler(self) -> Sampler:
        """What decides which records make a batch."""
        found: Sampler = self._parts.sampler.given
        return found

    @property
    def writer(self) -> Writer:
        """What decides where new records go."""
        found: Writer = self._parts.writer.given
        return found

    _storage, _sampler, _writer = storage, sampler, writer  # private names that programs do use

    @property
    def server(self) -> BufferServer:
        """What serves the batches; for ensembles."""
        return self._server

    @property
    def transforms(self) -> Pipeline:
        """What records and batches pass."""
        return self._parts.transforms

    transform = _transform = transforms

    @property
    def batch_size(self) -> int | None:
        """Transitions in a batch if `sample` isn't told otherwise."""
        return self._server.batch_size

    _batch_size = batch_size

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time; it is told at construction."""
        return self._parts.dim_extend

    @dim_extend.setter
    def dim_extend(self, dim_extend: int) -> None:
        raise UnsupportedError(
            "dim_extend: what is stored was laid out by it; make a new buffer with dim_extend=..."
        )

    def set_storage(
        self, storage: Storage | Callable[[], Storage], collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use another storage, empty or filled, and return the old one; writer and sampler go on with its content.

        `collate_fn` makes a batch out of what it returns; None for its default.
        """
        return self._draws.exchange("storage", storage, collate_fn)

    def set_sampler(self, sampler: Sampler | Callable[[], Sampler]) -> Sampler:
        """Use another sampler and return the old one; an epoch of another storage ends."""
        return self._draws.exchange("sampler", sampler)

    def set_writer(self, writer: Writer | Callable[[], Writer]) -> Writer:
        """Use another writer, which goes on where the old one stands, and return the old one."""
        return self._draws.exchange("writer", writer)

    def append_transform(self: _Self, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform after the others, and return the buffer; see `insert_transform`."""
        return self.insert_transform(len(self._parts.transforms), transform, invert=invert)

    def insert_transform(self: _Self, index: int, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform before the one at `index`, in evaluation mode, and return the buffer.

        Batches pass in this order, records in the opposite one. `invert`: whether it acts on writes as it would on
        reads, and the other way round.
        """
        with self._gate.lock:
            self._parts.transforms.insert(index, transform, invert)
        return self

    def register_save_hook(self, hook: Any) -> None:
        """Write records into checkpoints as a hook of other releases does; see `save_form`."""
        self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Any) -> None:
        """Take the counterpart of such a hook: it has nothing to do, checkpoints in any form are read."""
        self.storage.register_load_hook(hook)

    # Several processes

    @property
    def shared(self) -> bool:
        """Whether several processes use the buffer."""
        return self._gate.shared is not None

    def share(self: _Self, shared: bool = True) -> _Self:
        """Let several processes of this machine extend and sample the buffer at once, and return it.

        Copies, made by fork, or by pickle while this process lives (as an argument of a process of `multiprocessing`
        or `torch.multiprocessing`, say), are of the same records. What a buffer promises to threads it promises to all
        processes: no batch holds half a record, generations count every write, and a write is all or nothing. The
        lock is the kernel's: it is free when its holder dies, and what that one was writing is taken back.

        Each process has a sampler, transforms, and a sequence of random numbers of its own: an epoch of
        `SamplerWithoutReplacement` is a process's. Records live in anonymous shared memory, once more for what a write
        replaces, as far as writes reach; those of a `LazyMemmapStorage` in a file without a name in its `scratch_dir`,
        twice their size. A buffer that is an argument of a process that is spawned becomes shared by that, and stays so
        if the process fails to start: nothing tells whether somebody has opened the memory already.

        Args:
            shared: True; a shared buffer stays one.

        Raises:
            UnsupportedError: a storage other than a `LazyTensorStorage` on the CPU or a `LazyMemmapStorage`, a sampler
                with priorities, which would differ from process to process, a writer other than the ring writers, or a
                rate limiter, which counts in one process.
            CapacityError: too little memory, or too little space on the disk.
        """
        with self._gate.lock:
            if shared and self._gate.limiter is not None:
                raise UnsupportedError(
                    "share: the buffer's rate limiter counts in one process only; make the buffer without it"
                )
            if shared and not self.shared:
                self._gate.share(self._parts.share())
            elif not shared and self.shared:
                raise UnsupportedError("share: other processes may use the buffer, it stays shared")
        return self

    # Random state

    def set_seed(self, seed: int) -> None:
        """Start the sampler's random sequence of `seed`."""
        self._draws.set_seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a generator of yours from now on, as `generator` says; None for the sampler's own."""
        self._draws.set_rng(generator)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts and of the batches drawn ahead: copies."""
        return self._draws.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly as the saved buffer would have; the same sequence of samples follows.

        The state, of a buffer with parts like this one's, is copied.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        self._draws.load_state_dict(state_dict)

    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state, its records in the form of the storage's checkpointer."""
        own = overridden(self, "state_dict", of=Composed)
        state = self.state_dict() if own else self._draws.moment_dict()
        return {**state, "_storage": self.storage.checkpointer.packed_later(state["_storage"])}

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Return what goes on from what `checkpointed_state` returned, with whatever checkpointer; it can't fail."""
        if overridden(self, "load_state_dict", of=Composed):
            return partial(self.load_state_dict, with_records(state))
        return partial(self._draws.adopt, self._draws.parse(with_records(state)))

    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last step of trajectories that nobody goes on with as truncated, and done.

        It is one that is stored, or one that a transform holds back (`MultiStepTransform`).
        """
        if self.initialized:
            with self._gate.lock:
                held = self._parts.transforms.end_held(ids)
                end_trajectories(self._parts.storage, set(ids) - held)
                self._parts.sampler.follow(self._parts.storage)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything; the copy has a lock of its own and goes on with the same sequence of samples.

        For a process that is about to be spawned the buffer is shared (see `share`), if its storage can be.
        """
        if not self.initialized:
            return dict(self.__dict__)
        with self._gate.lock:
            if proc.is_spawning() and is_shareable(self._parts.storage):
                self.share()
            return {name: value for name, value in self.__dict__.items() if name != "_iteration"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        if self.initialized:
            self._parts.join(self, self._gate)
            if self._gate.shared is not None:
                self._parts.go_apart(self._gate.shared.next_copy())
            self._draws.rejoin()

    def __repr__(self) -> str:
        """Show the parts."""
        if not self.initialized:
            return f"{type(self).__name__}(its parts are made at the first use)"
        return (
            f"{type(self).__name__}(storage={self._storage!r}, sampler={self._sampler!r}, "
            f"writer={self._writer!r}, batch_size={self.batch_size})"
        )
