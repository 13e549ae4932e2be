"""The replay buffer: a storage, a sampler, a writer and transforms, composed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.devices import outside_graphs
from gleanrl._arrays.results import BufferStats, html_parts, parts_text
from gleanrl._os import proc
from gleanrl._os.interrupts import ForkSafeLock
from gleanrl._util import key_list, non_negative, overridden
from gleanrl.data.replay_buffers import export, export_minari
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed, with_records
from gleanrl.data.replay_buffers.components import Parts, share_parts
from gleanrl.data.replay_buffers.describe import BufferDescription, StoredEpisodes, describe, stored_episodes
from gleanrl.data.replay_buffers.draws import Draws
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.prefetch import Prefetcher, make_prefetcher
from gleanrl.data.replay_buffers.rate_limiter import SamplesPerInsert
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.sampling import BufferServer, ChosenKeys
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import column_of, is_key
from gleanrl.data.replay_buffers.storages.record_formats import swap_batch_dims
from gleanrl.data.replay_buffers.storages.shared import SharedTensorStorage, is_shareable
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline
from gleanrl.data.replay_buffers.truncate import end_trajectories
from gleanrl.data.replay_buffers.verify import AuditReport, audit
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter, Writer
from gleanrl.data.replay_buffers.writing import Inserter
from gleanrl.errors import InvalidTypeError, UnsupportedError

_Self = TypeVar("_Self", bound="ReplayBuffer")
_opening = ForkSafeLock()


class _Opened:
    """Descriptor for an attribute that exists once the parts are created. An earlier access creates them.

    The instance attribute then takes precedence, so later accesses cost nothing.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type[Any]) -> Any:
        if buffer is None:
            return self
        buffer.open()
        return buffer.__dict__[self._name]


class ReplayBuffer(Checkpointed):
    """Stores records and serves batches of them.

    A buffer is composed of parts. The *storage* keeps records. The *writer* chooses the slots of new records. The
    *sampler* chooses the records of a batch. *Transforms* act on records that are written and on batches that are read.

    A part belongs to one buffer at a time: the constructor refuses a part of another buffer that is still in use. A
    storage is an exception, because several buffers may use one storage. One of them writes to it and the others read.

    Any thread may call `add`, `extend`, `sample`, indexing, `empty` and the state methods. Writers don't wait for
    fetches. Rows that are overwritten during a fetch are drawn and fetched again, so a batch never holds half a record.
    Don't exchange parts or transforms while other threads use the buffer. A write that has begun completes: an
    interrupt (Ctrl-C) is raised after it.

    A subclass may override any public method. It may also override ``_sample(batch_size) -> (batch, info)``, which
    `sample` and iteration then call, and ``_add(data)`` and ``_extend(data)``, which receive transformed records.

    Args:
        storage: keeps the records, or a callable that creates the storage. None for ``ListStorage(1000)``, or for a
            `ListStorage` of the size that the sampler allows.
        sampler: chooses the records of a batch, or a callable that creates the sampler. None for `RandomSampler`,
            uniform with replacement.
        writer: chooses the slots of new records, or a callable that creates the writer. None for `RoundRobinWriter`,
            which overwrites the oldest records first.
        collate_fn: turns the storage's result into a batch. None stacks the records of list storages; tensor storages
            return batches anyway.
        pin_memory: whether batches are in pinned memory; requires CUDA.
        prefetch: number of batches that `sample` draws ahead and threads fetch; None or 0 for none. If a write, `empty`
            or `load_state_dict` affects a batch drawn ahead, the buffer draws it again. The priorities at the time of
            the draw count. The sequence of batches depends on this number only if records or priorities are written in
            between. It never depends on the number of threads.
        transform: a callable on batches, or an object with `forward` (on read) and `inv` (on write). A plain callable
            acts on writes if it changes the batch shape of data with more batch dimensions than the storage has. For
            example, ``lambda data: data.reshape(-1)`` flattens ``[P, T]`` data. To find out, the first write calls it
            on a clone of the data's corner ``[:1, :1]``.
        transform_factory: a callable that creates the transform, instead of `transform`.
        batch_size: the default number of transitions in a batch; iteration requires it.
        dim_extend: the batch dimension of extended data that is time, 0 or more; it is swapped with dimension 0. None
            for the last dimension that the storage takes as slots, ``storage.ndim - 1``.
        checkpointer: becomes the storage's `checkpointer`, which determines the form of the records in checkpoints (see
            `dumps`). None keeps the storage's own.
        generator: source of random numbers for this sampler and its successors. Its state is part of the buffer's
            state. If other code draws from it or sets its state, the buffer's sequence changes too. None for the
            sampler's own generator.
        seed: seed of the sampler's random sequence. None keeps the present sequence.
        prefetch_threads: threads that fetch ahead. None for one thread per batch, up to the number of CPUs.
        compilable: has no effect. Compiled programs call buffers but don't contain them.
        delayed_init: whether the parts are created from callables at the first use, so that the buffer can be sent to
            another process before. None for True if there is a `transform_factory`. Most errors of arguments are then
            raised at the first use.
        shared: whether several processes use the buffer at the same time; see `share`.
        rate_limiter: a `SamplesPerInsert` or `MinSize`, which makes `add` and `extend` wait for samples, and samples
            for inserts. None for no waiting. Buffers over one storage share one limiter; give it to one of them.

    Raises:
        InvalidArgumentError: a bad value, or a part of another buffer.
        InvalidTypeError: `transform` together with `transform_factory`, or an argument that isn't callable.
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

    kind = "ReplayBuffer"
    _gate: BufferLock = _Opened()  # type: ignore[assignment]
    _parts: Parts = _Opened()  # type: ignore[assignment]
    _draws: Draws = _Opened()  # type: ignore[assignment]
    _server: BufferServer = _Opened()  # type: ignore[assignment]
    _intake: Inserter = _Opened()  # type: ignore[assignment]
    _to_open: dict[str, Any] | None = None  # arguments of `_assemble`, until the parts are created
    _iteration: Iterator[Any] | None = None  # the iterator that `next` uses
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
                "transform, transform_factory: expected at most one of them, got both; leave one out"
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

    def open(self) -> None:
        """Create the parts if they don't exist yet. After a failure the next use tries again."""
        with _opening.lock:  # two threads may make the first use at the same time
            if self._to_open is not None:
                self._assemble(**self._to_open)
                self._to_open = None

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
        storage, sampler, writer, transform, *rest = parts
        if transform_factory is not None:
            transform = transform_factory()
        made = Parts(storage, sampler, writer, transform, *rest)
        if checkpointer is not None:
            made.storage.checkpointer = checkpointer
        gate = made.storage.gate or BufferLock()  # buffers over one storage share its lock
        draws = Draws(gate, made, prefetcher)
        own = self.sample if self._own_sample or overridden(self, "sample", of=ReplayBuffer) else None
        server = BufferServer(draws, gate, made, *served, self._carries, own)
        inserter = self._make_inserter(gate, made)
        if overridden(self, "_add", "_extend", of=ReplayBuffer):
            inserter.put = self._put
        if seed is not None:
            made.sampler.set_seed(seed)
        # Only one of the two, so that a refusal by one doesn't leave the effect of the other.
        if shared or isinstance(made.storage, SharedTensorStorage):
            share_parts(gate, made, limited=rate_limiter is not None)
        elif rate_limiter is not None:
            gate.limit(rate_limiter, made.storage)
        # Nothing fails from here on. A failed construction leaves every part without an owner, and the attributes
        # unset, so that the next use of a delayed buffer tries again.
        self._gate, self._parts, self._draws, self._server, self._intake = gate, made, draws, server, inserter
        made.join(self, gate)

    def _make_inserter(self, gate: BufferLock, parts: Parts) -> Inserter:
        """Return the inserter, which stores records."""
        return Inserter(gate, parts)

    @property
    def initialized(self) -> bool:
        """Whether the parts are created."""
        return self._to_open is None

    @property
    def storage(self) -> Storage:
        """The storage, which keeps the records, as the user passed or created it."""
        found: Storage = self._parts.storage.unwrapped
        return found

    @property
    def sampler(self) -> Sampler:
        """The sampler, which chooses the records of a batch, as the user passed or created it."""
        found: Sampler = self._parts.sampler.unwrapped
        return found

    @property
    def writer(self) -> Writer:
        """The writer, which chooses the slots of new records, as the user passed or created it."""
        found: Writer = self._parts.writer.unwrapped
        return found

    _storage, _sampler, _writer = storage, sampler, writer  # private names that existing programs use

    @property
    def server(self) -> BufferServer:
        """The server of the batches, for ensembles."""
        return self._server

    @property
    def transforms(self) -> Pipeline:
        """The transforms of written records and of batches."""
        return self._parts.transforms

    transform = _transform = transforms

    @property
    def batch_size(self) -> int | None:
        """The default number of transitions in a batch; None for no default."""
        return self._server.batch_size

    _batch_size = batch_size

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time; fixed at construction."""
        return self._parts.dim_extend

    @dim_extend.setter
    def dim_extend(self, dim_extend: int) -> None:
        raise UnsupportedError(
            "dim_extend: can't change, because stored records are laid out by it; make a new buffer with dim_extend=..."
        )

    def set_storage(
        self, storage: Storage | Callable[[], Storage], collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use another storage, empty or filled, and return the old one. Writer and sampler adapt to its content.

        Batches drawn ahead are cancelled. `write_count` becomes the count of the new storage.

        Args:
            storage: the storage, or a callable that creates it. Unlike at construction, no other buffer may use it.
            collate_fn: turns the new storage's result into a batch; None for the storage's default.

        Raises:
            InvalidArgumentError: no storage, one that another buffer uses, or one that doesn't fit the other parts.
            UnsupportedError: the buffer is shared or has a rate limiter.
        """
        return self._draws.exchange("storage", storage, collate_fn)

    def set_sampler(self, sampler: Sampler | Callable[[], Sampler]) -> Sampler:
        """Use another sampler and return the old one. An epoch that the new sampler began on another storage ends.

        Batches drawn ahead are cancelled.

        Raises:
            InvalidArgumentError: no sampler, one of another buffer, or one that doesn't fit the storage.
            UnsupportedError: the buffer is shared, and the sampler has priorities.
        """
        return self._draws.exchange("sampler", sampler)

    def set_writer(self, writer: Writer | Callable[[], Writer]) -> Writer:
        """Use another writer and return the old one. A new ring writer continues at the same position.

        Raises:
            InvalidArgumentError: no writer, one of another buffer, or one that doesn't fit the storage.
            UnsupportedError: the buffer is shared, and the writer is no ring writer.
        """
        return self._draws.exchange("writer", writer)

    def append_transform(self: _Self, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform after the others, and return the buffer; see `insert_transform`."""
        return self.insert_transform(len(self._parts.transforms), transform, invert=invert)

    def insert_transform(self: _Self, index: int, transform: Any, *, invert: bool = False) -> _Self:
        """Add a transform before the one at `index`, and return the buffer. A module is put into evaluation mode.

        Batches pass the transforms in this order, written records in reverse order. `invert` swaps the transform's two
        directions: it then acts on writes as it would on reads, and vice versa.

        Raises:
            InvalidArgumentError: `index` isn't in ``[-n, n]`` for `n` transforms.
            InvalidTypeError: the transform is neither callable nor has `forward`.
        """
        with self._gate.lock:
            self._parts.transforms.insert(index, transform, invert)
        return self

    def register_save_hook(self, hook: Any) -> None:
        """Replace the storage's checkpointer by the form of a save hook of other releases; see `save_form`."""
        self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Any) -> None:
        """Check and ignore the counterpart of a save hook, because a buffer reads checkpoints of any form.

        Raises:
            UnsupportedError: the hook is no `Flat2TED`, `Nested2TED` or `H5Combine`.
        """
        self.storage.register_load_hook(hook)

    @property
    def shared(self) -> bool:
        """Whether several processes use the buffer."""
        return self._gate.shared is not None

    def share(self: _Self, shared: bool = True) -> _Self:
        """Let several processes of this machine extend and sample the buffer at the same time, and return it.

        A copy made by fork holds the same records. So does a copy made by pickle while this process lives, for example
        as an argument of a process of `multiprocessing` or `torch.multiprocessing`. All guarantees for threads also
        hold for processes: no batch holds half a record, generations count every write, and a write is all or nothing.
        The kernel provides the lock. If its holder dies, the kernel frees the lock and the next holder undoes the
        unfinished write.

        The storage must be a `LazyTensorStorage` on the CPU or a `LazyMemmapStorage`, and the writer a ring writer. A
        sampler with priorities or a rate limiter works in one process only, so a shared buffer can't have one.

        Each process has its own sampler, transforms and random sequence. An epoch of `SamplerWithoutReplacement`
        therefore covers one process only.

        Records are stored in anonymous shared memory. The old values of rows that a write replaces need the same amount
        again. A `LazyMemmapStorage` uses an unnamed file of twice the size in its `scratch_dir`.

        Passing a buffer to a spawned process shares it. The buffer stays shared even if that process fails to start,
        because another process may already have opened the memory.

        Args:
            shared: True. False has no effect on a buffer that isn't shared; a shared one can't be unshared.

        Raises:
            UnsupportedError: one of the parts, or the rate limiter, works in one process only. Also for False, if the
                buffer is shared.
            CapacityError: too little memory or disk space.
        """
        with self._gate.lock:
            if shared:
                share_parts(self._gate, self._parts)
            elif self.shared:
                raise UnsupportedError(
                    "share: a shared buffer stays shared, since other processes may use it; make a new buffer"
                )
        return self

    def set_seed(self, seed: int) -> None:
        """Restart the sampler's random sequence from `seed`; this seeds a user's generator, if the sampler has one.

        Batches drawn ahead are cancelled.
        """
        self._draws.set_seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from `generator` from now on (see the constructor), and cancel the batches drawn ahead.

        None replaces a generator of the user by a new one, which takes a seed at the first draw.
        """
        self._draws.set_rng(generator)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of all parts and of the batches drawn ahead."""
        return self._draws.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state and continue exactly as the saved buffer would have, with the same sequence of samples.

        The state must come from a buffer with parts like this one's. It is copied.

        Raises:
            SchemaError: the state doesn't fit; nothing changed.
            UnsupportedError: another buffer writes to the storage; nothing changed.
            CapacityError: too little memory or disk space for the first records; nothing changed.
        """
        self._draws.load_state_dict(state_dict)

    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the storage's checkpointer determines the form of the records."""
        own = overridden(self, "state_dict", of=ReplayBuffer)
        state = self.state_dict() if own else self._draws.checkpoint_dict()
        return {**state, "_storage": self.storage.checkpointer.packed_later(state["_storage"])}

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Check a state from `checkpointed_state` and return the callback that loads it.

        The records may have the form of any checkpointer. The callback can't fail, unless a subclass overrides
        `load_state_dict`.
        """
        if overridden(self, "load_state_dict", of=ReplayBuffer):
            return partial(self.load_state_dict, with_records(state))
        return partial(self._draws.adopt, self._draws.parse(with_records(state)))

    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last step of abandoned trajectories as truncated and done, unless it is an end already.

        That step is stored, or held back by a transform (`MultiStepTransform`). Unknown ids are ignored. Stored records
        of a buffer with an `ImmutableDatasetWriter` don't change.

        Args:
            ids: the ids at ``("collector", "traj_ids")``.
        """
        if self.initialized:
            with self._gate.lock:
                retained = self._parts.transforms.end_retained(ids)
                # A data set may have the same ids, but other trajectories.
                if not isinstance(self._parts.writer, ImmutableDatasetWriter):
                    end_trajectories(self._parts.storage, set(ids) - retained)
                    self._parts.sampler.follow(self._parts.storage)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling. The copy has its own lock and continues with the same sequence of samples.

        If a process is being spawned and the storage can be shared, this buffer itself becomes shared (see `share`).
        The internal iteration of `next` isn't copied.
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

    def _repr_parts(self) -> dict[str, object]:
        if not self.initialized:
            return {"parts": "made at the first use"}
        return {name: getattr(self, name) for name in ("storage", "sampler", "writer", "batch_size")}

    def __repr__(self) -> str:
        """Show the parts and the batch size; records aren't read."""
        return parts_text(type(self).__name__, self._repr_parts())

    def _repr_html_(self) -> str:
        return html_parts(type(self).__name__, self._repr_parts())

    def _add(self, data: Any) -> Any:
        """Store one transformed record. Subclasses may override this."""
        return self._parts.writer.store(data, True, 0, "add")

    def _extend(self, data: Any) -> Any:
        """Store many transformed records, time first. Subclasses may override this."""
        return self._parts.writer.store(data, False, 0, "extend")

    def _put(self, data: Any, single: bool, dim_extend: int, where: str) -> Any:
        if dim_extend:
            data = swap_batch_dims(data, dim_extend, where)
        return self._add(data) if single else self._extend(data)

    @outside_graphs
    def add(self, data: Any) -> Any:
        """Store one record (with ``ndim > 1`` one time step of all batch entries); see `extend`.

        Args:
            data: a record without a time dimension. The buffer neither changes it nor keeps a reference (a
                `ListStorage` keeps the object itself).

        Returns:
            The index: an int, or ``(n, ndim)`` coordinates. -1 if the record is padding or the writer rejected it. An
            empty index if a transform held the record back.
        """
        return self._intake.store(data, True, "add")

    @outside_graphs
    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Store many records, the oldest first. If there are more than fit, the newest remain.

        Args:
            data: records ``[T, ...]``; for ``ndim > 1`` ``[*batch, T]`` with time at `dim_extend`. A TensorDict, a
                tensor, or a dictionary or tuple of tensors is one batch; a list holds single records like the argument
                of `add`. The buffer neither changes the data nor keeps a reference (a `ListStorage` keeps the objects
                of a list). The keys ``index``, ``_weight``, ``priority_weight`` and ``_generation``, which samples may
                carry, are left out. Rows where ``("collector", "mask")`` is False are padding and are left out too;
                with ``ndim > 1`` they are stored but never drawn.
            update_priority: see `TensorDictReplayBuffer`; has no effect here.

        Returns:
            The index of each record, ``(n,)`` int64 or ``(n, ndim)`` coordinates, time first. -1 for a record that
            isn't stored when the call returns: more records came than fit, the row is padding, or the writer rejected
            it. An empty index if a transform held the records back.

        Raises:
            SchemaError: no record, or keys, shapes or dtypes differ from the first write; nothing changed.
            InvalidTypeError: records of another type than the stored ones, or of one that the storage can't hold.
            RateLimiterTimeoutError: the rate limiter's timeout passed; nothing changed.
            CapacityError: the first write found too little memory or disk space.
            UnsupportedError: the writer refuses writes, or another buffer writes to the storage.
        """
        return self._intake.store(data, False, "extend")

    @outside_graphs
    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column by its key. Inverse transforms act first; the cursor stays.

        A prioritized sampler treats records replaced by position as new. It keeps the priorities of records if a column
        is replaced. A key that isn't stored yet becomes a new column of a tensor storage, with zeros in all other
        records. The rate limiter doesn't count these writes. Nothing is written if a transform holds the records back.

        Args:
            index: as in `__getitem__`, within the stored part. If a position repeats, its last value is stored.
            value: records of the schema, in exactly the shape that the index selects. With ``ndim > 1`` a TensorDict
                may lack the first dimensions of that shape; it is then repeated over them.

        Raises:
            IndexRangeError: outside the stored part.
            EmptyBufferError: a tensor storage has no schema yet.
            SchemaError: another shape or dtype, or a missing key; nothing changed.
            InvalidTypeError: the value is None or of another type than the records, or `index` isn't an index.
            CapacityError: too little memory or disk space for a new column.
            UnsupportedError: a key of a storage without columns, a writer that refuses writes, or another buffer writes
                to the storage.
        """
        self._intake.replace(index, value)

    @outside_graphs
    def empty(self, empty_write_count: bool = True) -> None:
        """Remove every record; memory, schema and random state stay. Batches drawn ahead are cancelled.

        Args:
            empty_write_count: whether `write_count` and the rate limiter's counts restart at 0.

        Raises:
            UnsupportedError: the writer refuses, or another buffer writes to the storage; nothing changed.
        """
        self._draws.empty(empty_write_count)

    @outside_graphs
    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Set the priorities of stored records for a prioritized sampler.

        If a slot was overwritten since its record was drawn, its update is dropped and counted
        (`stats().priorities_dropped`), because that record no longer exists. A sampler without priorities ignores the
        call with a warning.

        Args:
            index: slots from `extend` or `sample`: an int or ``(n,)`` integers; with ``ndim > 1`` ``(n, ndim)``
                coordinates or a tuple of ``ndim`` tensors. -1 is skipped.
            priority: one number, or one for each index; 0 or more and finite.
            generation: the generation of each slot when its record was drawn, ``(n,)`` int64, as in samples. None for
                the generation at the slot's last draw; a slot that was never drawn accepts any update.

        Raises:
            IndexRangeError: an index outside the stored part; nothing changed. With `generation`, an index outside the
                storage: updates of records removed by `empty` are dropped and counted instead.
            InvalidArgumentError: a priority that is negative, infinite or NaN; nothing changed.
            InvalidTypeError: `index` isn't an index, or a priority or generation isn't a number; nothing changed.
            SchemaError: the number of priorities or generations differs from the number of indices; nothing changed.
        """
        self._intake.update_priority(index, priority, generation)

    @outside_graphs
    def mark_update(self, index: Any) -> None:
        """Give stored records the priority of new ones; does nothing without priorities.

        Args:
            index: as in `update_priority`.

        Raises:
            IndexRangeError: an index outside the stored part; nothing changed.
            InvalidTypeError: `index` isn't an index.
        """
        self._intake.mark_update(index)

    def generation(self, index: Any) -> torch.Tensor:
        """Return the generation of each slot, for `update_priority`.

        Each write of a slot increments its generation, and `empty` increments it too. A load may raise it. So compare
        generations only for equality.

        After `extend`, ``update_priority(index, priority, buffer.generation(index))`` updates the records just written,
        regardless of earlier draws of their slots.

        Args:
            index: as in `update_priority`, within the stored part and without -1.

        Returns:
            ``(n,)`` int64.

        Raises:
            IndexRangeError: an index is -1 or outside the stored part.
            InvalidTypeError: `index` isn't an index.
        """
        return self._intake.generation(index)

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, *, keys: ChosenKeys = None
    ) -> TensorDictBase: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[True] = ..., *, keys: ChosenKeys = None
    ) -> tuple[TensorDictBase, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        keys: ChosenKeys = None,
    ) -> Any: ...
    @outside_graphs
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        keys: ChosenKeys = None,
    ) -> Any:
        """Return a batch of records in fresh memory.

        Args:
            batch_size: number of transitions; None for the constructor's. Batches drawn ahead (`prefetch`) have the
                constructor's size. Another size is drawn at once, with a warning, and the batches drawn ahead are
                cancelled.
            return_info: whether to return ``(batch, info)``.
            include_info: has no effect: batches of a `TensorDictReplayBuffer` always carry the entries of `info`.
            keys: the only columns to fetch; the key of a group selects all keys below it. None for all. With keys, the
                batch is drawn at once, and the batches drawn ahead are cancelled.

        Returns:
            The batch ``[n]``. ``info`` holds ``"index"`` (``(n,)`` int64, or a tuple of ``ndim`` such tensors),
            ``"generation"`` (``(n,)`` int64, the generation of each slot) and the sampler's extra entries.

        Raises:
            EmptyBufferError: no record is stored.
            RateLimiterTimeoutError: the rate limiter's timeout passed; nothing was drawn.
            UnsupportedError: no batch size, in this call or at construction. Also for `keys` if the storage has no
                columns or a subclass overrides `_sample`.
            InvalidArgumentError: a batch size below 1.
            InvalidTypeError: a transform or `collate_fn` returned None.
            MissingKeyError: one of `keys` isn't stored.
            Exception: an error of the sampler (see its class), a transform or `collate_fn`.
        """
        server = self._server
        size = server.size_of(batch_size)
        if not self._own_sample:
            served = server.serve(size, None if keys is None else key_list(keys), return_info)
            return (served.batch, served.info) if return_info else served.batch
        if keys is not None:
            raise UnsupportedError(
                f"keys: {type(self).__name__} overrides _sample(), which takes no keys; leave keys out, or override "
                "sample() instead"
            )
        batch, info = self._sample(size)
        return (batch, info) if return_info else batch

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return a batch and its info. Subclasses may override this."""
        served = self._server.serve(batch_size, None, True)
        return served.batch, served.info

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one new epoch (forever with samplers without epochs).

        The epoch begins at the first step. The iteration ends with that epoch, even if its remaining records were
        overwritten.

        Raises:
            UnsupportedError: no batch size at construction; raised at the first step.
        """
        return self._server.epoch()

    def next(self) -> Any:
        """Return the next batch of an internal iteration; None once at the end of an epoch.

        The call after that None begins a new epoch. An error ends the iteration: the call after it returns None.
        """
        if self._iteration is None:
            self._iteration = iter(self)
        batch = next(self._iteration, None)
        if batch is None:
            self._iteration = None
        return batch

    @outside_graphs
    def __getitem__(self, index: Any) -> Any:
        """Return transformed records by position, or a column by its key.

        Args:
            index: an int, slice, list, tensor or mask over the first batch dimension, or a tuple of one for each
                dimension. The dimensions are in the written layout: with ``ndim=2`` ``[batch, steps]``, unless
                `dim_extend` says otherwise. Coordinates from `extend` and `sample`, ``(n, ndim)`` or a tuple of
                tensors, always have time first. A key, a string or tuple of strings, reads the whole buffer.

        Returns:
            Copies. Without transforms, ints and slices of a tensor storage return live views. Writes into them change
            the storage, and later writes to the storage show in them.

        Raises:
            IndexRangeError: outside the stored part.
            EmptyBufferError: the storage has no schema, or no records, yet.
            InvalidTypeError: the value isn't an index.
            MissingKeyError: a key that isn't stored.
        """
        return column_of(self[:], index) if is_key(index) else self._server.at(index)

    def __len__(self) -> int:
        """Return the number of stored transitions, without consumed ones (`ConsumingSampler`)."""
        parts = self._parts
        with self._gate.lock:
            return parts.sampler.available(parts.storage)

    @property
    def write_count(self) -> int:
        """Transitions ever written to the storage, by any means, since the last `empty` that restarted the count.

        Records that the storage held at construction count. Amended columns don't.
        """
        return self._draws.write_count

    def stats(self) -> BufferStats:
        """Return the present counters of the buffer and its storage (see `BufferStats`)."""
        return self._draws.stats()

    def verify(self) -> AuditReport:
        """Check every stored record by the rules of `audit`; other threads wait meanwhile."""
        with self._gate.lock:
            return audit(self._parts.storage, self._parts.sampler.episode_table)

    def describe(self) -> BufferDescription:
        """Return statistics of each stored key; other threads wait meanwhile, so they show one moment."""
        with self._gate.lock:
            return describe(self._parts.storage)

    def episodes(self) -> StoredEpisodes:
        """Return the stored trajectories, by the keys of the sampler; other threads wait meanwhile.

        Raises:
            MissingKeyError: no stored column tells where trajectories end.
            SchemaError: a flag isn't 0 or 1, or an id isn't a whole number.
            UnsupportedError: the storage has no columns, or its records aren't in the order of time.
        """
        with self._gate.lock:
            return stored_episodes(self._parts.storage, self._parts.sampler.episode_table)

    to_hdf5, to_minari, to_pandas = export.to_hdf5, export_minari.to_minari, export.to_pandas
    to_parquet, to_safetensors = export.to_parquet, export.to_safetensors
