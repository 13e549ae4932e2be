"""The replay buffer: a storage, a sampler, a writer and transforms, composed.

A buffer as the sum of its parts: making them, exchanging them, seeding, state, copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from gleanrl._arrays.devices import outside_graphs
from gleanrl._arrays.results import BufferStats
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._os import proc
from gleanrl._util import non_negative, overridden
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed, with_records
from gleanrl.data.replay_buffers.components import Parts
from gleanrl.data.replay_buffers.draws import Draws
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.prefetch import Prefetcher, make_prefetcher
from gleanrl.data.replay_buffers.rate_limiter import SamplesPerInsert, limit
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.sampling import BufferServer
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import column_of, is_key
from gleanrl.data.replay_buffers.storages.record_formats import swap_batch_dims
from gleanrl.data.replay_buffers.storages.shared import SharedTensorStorage, is_shareable
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline
from gleanrl.data.replay_buffers.truncate import end_trajectories
from gleanrl.data.replay_buffers.verify import AuditReport, audit
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.data.replay_buffers.writing import Inserter
from gleanrl.errors import InvalidTypeError, UnsupportedError

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
    _gate: BufferLock = _Opened()  # type: ignore[assignment]
    _parts: Parts = _Opened()  # type: ignore[assignment]
    _draws: Draws = _Opened()  # type: ignore[assignment]
    _server: BufferServer = _Opened()  # type: ignore[assignment]
    _intake: Inserter = _Opened()  # type: ignore[assignment]
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


class ReplayBuffer(Composed):
    """Stores records and serves batches of them.

    The parts are composed: the *storage* keeps records, the *writer* decides where new ones go, the *sampler*
    decides which ones make a batch, *transforms* act on records on their way in and on batches on their way
    out. A part belongs to one buffer at a time; one of another buffer that is still in use is refused, save a storage
    that this buffer is made over: one of the buffers over it writes, the others read.

    `add`, `extend`, `sample`, indexing, `empty` and the state methods may be called from any threads. Writers wait
    for no fetch: rows that were overwritten while they were fetched are drawn and fetched again, so that a batch
    never holds half a record. Exchanging parts and transforms while other threads work isn't supported. A write
    that has begun ends: an interrupt (Ctrl-C) is raised after it.

    A subclass may override any public method, and ``_sample(batch_size) -> (batch, info)``, which `sample` and
    iteration then call, and ``_add(data)`` and ``_extend(data)``, which get records behind the transforms.

    Args:
        storage: where records are kept, or a callable that makes it; None for ``ListStorage(1000)``.
        sampler: which records make a batch, or a callable that makes it; None for `RandomSampler`, uniform with
            replacement.
        writer: where new records go, or a callable that makes it; None for `RoundRobinWriter`, oldest out first.
        collate_fn: makes a batch out of what the storage returns; None for stacking (list storages) or
            nothing at all (tensor storages return batches).
        pin_memory: whether batches come in pinned memory; needs CUDA.
        prefetch: batches drawn and fetched ahead by threads; None or 0 for none. A batch drawn ahead of a write
            to one of its rows, of `empty` or of `load_state_dict` isn't served but drawn again; priorities are
            those at the draw. The sequence of batches depends on the depth only if records or priorities are
            written in between, and never on the number of threads.
        transform: a callable on batches, or an object with `forward` (on read) and `inv` (on write). A plain
            callable that changes the batch shape of data with more batch dimensions than the storage has acts
            on the way in: ``lambda data: data.reshape(-1)`` flattens ``[P, T]`` data. That is found out at
            the first write, by calling it on a clone of the data's corner ``[:1, :1]``.
        transform_factory: a callable that makes the transform, instead of `transform`.
        batch_size: transitions in a batch if `sample` isn't told otherwise; needed for iteration.
        dim_extend: the batch dimension of extended data that is time, 0 or more; it changes places with
            dimension 0. None for the last dimension that the storage takes as slots, ``storage.ndim - 1``.
        checkpointer: in which form the storage writes records into checkpoints, see `dumps`; None for the storage's
            own.
        generator: what the sampler, and one that takes its place, draws from: whoever draws from it, or sets its state,
            moves the one sequence, and its state is part of the buffer's. None for a generator of the sampler's own.
        seed: where the sampler's random sequence starts; None leaves it where it is.
        prefetch_threads: threads that fetch ahead; None for one for each batch, as far as there are CPUs.
        compilable: has no effect: compiled programs call buffers, they don't contain them.
        delayed_init: whether the parts are made, of callables, at the first use, so that the buffer can be sent to
            another process before. None for whether there is a `transform_factory`.
        shared: whether several processes use the buffer at once; see `share`.
        rate_limiter: a `SamplesPerInsert` or `MinSize`, by which `add` and `extend` wait for samples, and samples for
            inserts; None for never. Buffers over one storage go by the same one; give it to one of them.

    Raises:
        InvalidArgumentError: a bad value, or a part of another buffer.
        UnsupportedError: an option that isn't available.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, seed=0)
        >>> buffer.extend(TensorDict({"x": torch.arange(6)}, [6]))
        tensor([0, 1, 2, 3, 4, 5])
        >>> len(buffer), buffer.sample()["x"].shape
        (6, torch.Size([4]))
    """

    _iteration: Iterator[Any] | None = None  # of `next`
    _carries = False  # whether batches carry index, weights and generations as entries

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        prefetch_threads: int | None = None,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        shared: bool = False,
        rate_limiter: SamplesPerInsert | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise InvalidTypeError(
                "transform, transform_factory: give the transform or what makes it, not both"
            )
        dim_extend = None if dim_extend is None else non_negative("dim_extend", dim_extend)
        prefetcher = make_prefetcher(prefetch, prefetch_threads)
        self._own_sample = bool(overridden(self, "_sample", of=ReplayBuffer))

        self._to_open = {
            "parts": (storage, sampler, writer, transform, collate_fn, generator, dim_extend),
            "transform_factory": transform_factory,
            "served": (batch_size, pin_memory),
            "prefetcher": prefetcher,
            "seed": seed,
            "shared": bool(shared),
            "checkpointer": checkpointer,
            "rate_limiter": rate_limiter,
        }
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            self.open()

    def _assemble(
        self,
        *,
        parts: tuple[Any, ...],
        transform_factory: Callable[[], Any] | None,
        served: tuple[int | None, bool],
        prefetcher: Prefetcher | None,
        seed: int | None,
        shared: bool,
        checkpointer: StorageCheckpointerBase | None,
        rate_limiter: SamplesPerInsert | None,
    ) -> None:
        storage, sampler, writer, transform, *others = parts
        if transform_factory is not None:
            transform = transform_factory()
        made = Parts(storage, sampler, writer, transform, *others)
        if checkpointer is not None:
            made.storage.checkpointer = checkpointer
        gate = made.storage.gate or BufferLock()  # buffers over one storage share its lock
        draws = Draws(gate, made, prefetcher)
        own = self.sample if self._own_sample or overridden(self, "sample", of=ReplayBuffer) else None
        server = BufferServer(draws, gate, made, *served, self._carries, own)
        intake = self._make_intake(gate, made)
        if overridden(self, "_add", "_extend", of=ReplayBuffer):
            intake.put = self._put
        if seed is not None:
            made.sampler.set_seed(seed)
        if rate_limiter is not None:
            limit(gate, rate_limiter, made.storage)
        # Nothing fails from here on: a buffer that couldn't be made keeps no part.
        self._gate, self._parts, self._draws, self._server, self._intake = gate, made, draws, server, intake
        made.join(self, gate)
        if shared or isinstance(made.storage, SharedTensorStorage):
            self.share()

    def _make_intake(self, gate: BufferLock, parts: Parts) -> Inserter:
        """Return what takes records in."""
        return Inserter(gate, parts)

    # Writing

    def _add(self, data: Any) -> Any:
        """Store one record as it is, behind the transforms, for subclasses that have an `_add` of their own."""
        return self._parts.writer.store(data, True, 0, "add")

    def _extend(self, data: Any) -> Any:
        """Store many records, time first, as they are, for subclasses that have an `_extend` of their own."""
        return self._parts.writer.store(data, False, 0, "extend")

    def _put(self, data: Any, single: bool, dim_extend: int, where: str) -> Any:
        if dim_extend:
            data = swap_batch_dims(data, dim_extend, where)
        return self._add(data) if single else self._extend(data)

    @outside_graphs
    def add(self, data: Any) -> Any:
        """Store one record (with ``ndim > 1`` one time step of all batch entries); see `extend`.

        Args:
            data: a record without a time dimension. It isn't changed, and nothing of it is kept
                (`ListStorage` keeps the object itself).

        Returns:
            Its index: an int, or ``(n, ndim)`` coordinates; an empty one if a transform held the record back.
        """
        return self._intake.store(data, True, "add")

    @outside_graphs
    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Store many records, the oldest first; the newest stay if they are more than fit.

        Args:
            data: records ``[T, ...]``; for ``ndim > 1`` ``[*batch, T]`` with time at `dim_extend`. A
                TensorDict, a tensor, or a dictionary or tuple of tensors is one batch; a list holds single
                records, as `add` takes them. It isn't changed, and nothing of it is kept (`ListStorage` keeps
                the objects of a list themselves). ``index``, ``_weight``, ``priority_weight`` and
                ``_generation``, which samples may carry, are left out, and so are rows that are no steps:
                those where a stored ``("collector", "mask")`` is False (with ``ndim > 1`` they are kept, and
                never drawn).
            update_priority: see `TensorDictReplayBuffer`; has no effect here.

        Returns:
            The index of each record, ``(n,)`` int64 or ``(n, ndim)`` coordinates, time first; -1 for one that
            isn't stored once the call has ended (more came than fit, it is no step, the writer left it out). An
            empty index if a transform held the records back.

        Raises:
            SchemaError: no record, or other keys, shapes or dtypes than the first write had; nothing changed.
            RateLimiterTimeoutError: the rate limiter didn't let it in in time; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._intake.store(data, False, "extend")

    @outside_graphs
    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column by its key; inverse transforms act first, the cursor stays.

        Records replaced by position are new ones to a prioritized sampler; with another column they aren't. A key that
        isn't stored yet becomes a column of a tensor storage, zero in all other records.

        Args:
            index: as in `__getitem__`, within the stored part. Of equal positions the last one wins.
            value: records of the schema, of exactly the shape that the index selects. With ``ndim > 1`` a TensorDict
                may lack the first dimensions of that shape: each of them gets the same records.

        Raises:
            IndexRangeError: outside the stored part.
            SchemaError: another shape or dtype, or a key is missing; nothing changed.
        """
        self._intake.replace(index, value)

    @outside_graphs
    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every record; memory, schema and random state stay.

        Args:
            empty_write_count: whether `write_count`, and what a rate limiter counts, begins again at 0.
        """
        self._draws.empty(empty_write_count)

    @outside_graphs
    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Give stored records the priorities that a prioritized sampler draws them by.

        An update for a slot that was overwritten since its record was drawn is dropped and counted
        (`stats().priorities_dropped`): it belongs to a record that is gone.

        Args:
            index: slots as `extend` or `sample` returned them: an int or ``(n,)`` integers; with ``ndim > 1``
                ``(n, ndim)`` coordinates or a tuple of ``ndim`` tensors. -1 is skipped.
            priority: one number, or one for each index; 0 or more and finite.
            generation: how often each slot had been written when its record was drawn, ``(n,)`` int64, as
                samples carry it; None for the generation at the slot's last draw (a slot that was never drawn
                takes any update).

        Raises:
            IndexRangeError: an index outside the stored part, or with `generation` outside the storage: a
                record that was forgotten meanwhile (`empty`) is dropped and counted; nothing changed.
            InvalidArgumentError: a priority that is negative, infinite or no number; nothing changed.
            SchemaError: another number of priorities or generations than of indices; nothing changed.
        """
        self._intake.update_priority(index, priority, generation)

    @outside_graphs
    def mark_update(self, index: Any) -> None:
        """Give stored records (see `update_priority`) the priority of new ones; does nothing without priorities."""
        self._intake.mark_update(index)

    def generation(self, index: Any) -> torch.Tensor:
        """Return how often each slot has been written by now: what `update_priority` compares with.

        After `extend`, ``update_priority(index, priority, buffer.generation(index))`` is for the records just
        written, whatever was drawn from their slots before.

        Returns:
            ``(n,)`` int64, for an index as in `update_priority`, without -1 and in the stored part.
        """
        return self._intake.generation(index)

    # Reading

    @outside_graphs
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        keys: Iterable[NestedKey] | None = None,
    ) -> Any:
        """Return a batch of records in fresh memory.

        Args:
            batch_size: transitions; None for the one given at construction. Batches drawn ahead (`prefetch`)
                have that size; another one is drawn at once, beside them.
            return_info: whether to return ``(batch, info)``.
            include_info: has no effect: in a `TensorDictReplayBuffer` batches carry what `info` does.
            keys: the only columns to fetch; the key of a group stands for all below it. None for all. Such a
                batch isn't fetched ahead.

        Returns:
            The batch ``[n]``. ``info`` holds ``"index"`` (``(n,)`` int64, or a tuple of ``ndim`` such
            tensors), ``"generation"`` (``(n,)`` int64, how often each slot had been written) and what the
            sampler adds.

        Raises:
            EmptyBufferError: nothing is stored.
            RateLimiterTimeoutError: the rate limiter didn't let it in in time; nothing was drawn.
            UnsupportedError: no batch size, here or at construction.
            InvalidTypeError: a transform or `collate_fn` returned None.
            MissingKeyError: one of `keys` isn't stored.
        """
        if not self._own_sample:
            return self._server.sample(batch_size, return_info, keys)
        if keys is not None:
            raise UnsupportedError(f"keys: {type(self).__name__} has a _sample of its own, which takes none")
        batch, info = self._sample(self._server.size_of(batch_size, 3))
        return (batch, info) if return_info else batch

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return a batch of that size and its info, for subclasses that have a `_sample` of their own."""
        served = self._server.serve(batch_size, None, True)
        return served.batch, served.info

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one whole epoch, a new one (for ever, with samplers without epochs).

        It ends with that epoch, also where what was left of it has been overwritten.
        """
        return self._server.epoch()

    def next(self) -> Any:
        """Return the next batch of an iteration of the buffer's own; None once at the end of an epoch.

        After that None the next call begins another epoch.
        """
        if self._iteration is None:
            self._iteration = iter(self)
        batch = next(self._iteration, None)
        if batch is None:
            self._iteration = None
        return batch

    @outside_graphs
    def __getitem__(self, index: Any) -> Any:
        """Return stored records by position, or a column by its key; transforms act on what is returned.

        Args:
            index: an int, slice, list, tensor or mask over the first batch dimension, or a tuple of these, one for
                each, in the layout in which records are written: with ``ndim=2`` ``[batch, steps]``, unless
                `dim_extend` says otherwise. The coordinates that `extend` and `sample` return, ``(n, ndim)`` or a
                tuple of tensors, have time first all the same. A key, a string or tuple of strings, reads the
                whole buffer.

        Returns:
            For ints and slices live views of a tensor storage (what is written into them is written into the
            storage, and later writes show in them), unless there are transforms; copies otherwise.

        Raises:
            IndexRangeError: outside the stored part.
        """
        return column_of(self[:], index) if is_key(index) else self._server.at(index)

    def __len__(self) -> int:
        """Return the number of transitions stored, without those that the sampler has used up (`ConsumingSampler`)."""
        parts = self._parts
        with self._gate.lock:
            return parts.sampler.available(parts.storage)

    @property
    def write_count(self) -> int:
        """Transitions written so far, or since `empty`; those written by index count, too."""
        return self._draws.write_count

    def stats(self) -> BufferStats:
        """Return the counters of the buffer."""
        return self._draws.stats()

    def verify(self) -> AuditReport:
        """Look at every stored record for what can't be, by the rules of `audit`; other threads wait meanwhile."""
        with self._gate.lock:
            return audit(self._parts.storage)
