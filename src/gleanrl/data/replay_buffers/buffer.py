"""The replay buffer: a storage, a sampler, a writer and transforms, composed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from gleanrl.arguments import non_negative
from gleanrl.data.replay_buffers.audit import AuditReport, audit
from gleanrl.data.replay_buffers.draws import Draws
from gleanrl.data.replay_buffers.gate import Gate
from gleanrl.data.replay_buffers.intake import Intake
from gleanrl.data.replay_buffers.parts import Parts
from gleanrl.data.replay_buffers.pipeline import Pipeline
from gleanrl.data.replay_buffers.prefetch import make_prefetcher
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.server import BufferServer, column_of
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import UnsupportedError
from gleanrl.overrides import overridden, refuse_overrides
from gleanrl.records import BufferStats
from gleanrl.tree import NestedKey

_Self = TypeVar("_Self", bound="ReplayBuffer")


class ReplayBuffer:
    """Stores records and serves batches of them.

    The parts are composed: the *storage* keeps records, the *writer* decides where new ones go, the *sampler*
    decides which ones make a batch, *transforms* act on records on their way in and on batches on their way
    out. A part belongs to one buffer at a time; one of another buffer that is still in use is refused.

    `add`, `extend`, `sample`, indexing, `empty` and the state methods may be called from any threads. Writers wait
    for no fetch: rows that were overwritten while they were fetched are drawn and fetched again, so that a batch
    never holds half a record. Exchanging parts and transforms while other threads work isn't supported. A write
    that has begun ends: an interrupt (Ctrl-C) is raised after it.

    A subclass may override any public method, and ``_sample(batch_size) -> (batch, info)``, which `sample` and
    iteration then call; methods that nothing would call are refused when the class is made.

    Args:
        storage: where records are kept; None for ``ListStorage(1000)``.
        sampler: which records make a batch; None for `RandomSampler`, uniform with replacement.
        writer: where new records go; None for `RoundRobinWriter`, oldest out first.
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
        batch_size: transitions in a batch if `sample` isn't told otherwise; needed for iteration.
        dim_extend: the batch dimension of extended data that is time, 0 or more; it changes places with
            dimension 0. None for the last dimension that the storage takes as slots, ``storage.ndim - 1``.
        checkpointer: not available yet, must be None.
        seed: where the sampler's random sequence starts; None leaves the sampler as it is.
        prefetch_threads: threads that fetch ahead; None for one for each batch, as far as there are CPUs.

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

    _carries = False  # whether batches carry index, weights and generations as entries
    _intake_class = Intake

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods that other libraries' buffers call and this one doesn't."""
        super().__init_subclass__(**options)
        refuse_overrides(cls, ReplayBuffer, {"_add": "override add()", "_extend": "override extend()"})

    def __init__(
        self,
        *,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        seed: int | None = None,
        prefetch_threads: int | None = None,
    ) -> None:
        if checkpointer is not None:
            raise UnsupportedError("checkpointer: not available yet; save state_dict() with torch.save")
        dim_extend = None if dim_extend is None else non_negative("dim_extend", dim_extend)
        prefetcher = make_prefetcher(prefetch, prefetch_threads)
        self._gate = Gate()
        self._parts = parts = Parts(storage, sampler, writer, transform, collate_fn)
        self._own_sample = bool(overridden(self, "_sample", of=ReplayBuffer))
        own = self.sample if self._own_sample or overridden(self, "sample", of=ReplayBuffer) else None
        self._draws = Draws(self._gate, parts, prefetcher)
        self._server = BufferServer(
            self._draws, self._gate, parts, batch_size, pin_memory, self._carries, own
        )
        self._intake = self._intake_class(self._gate, parts, dim_extend)
        if seed is not None:
            parts.sampler.set_seed(seed)
        # Nothing fails from here on: a buffer that couldn't be made keeps no part.
        parts.join(self, self._gate)

    # Parts

    @property
    def storage(self) -> Storage:
        """Where the records are."""
        return self._parts.storage

    @property
    def sampler(self) -> Sampler:
        """What decides which records make a batch."""
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        """What decides where new records go."""
        return self._parts.writer

    _storage, _sampler, _writer = storage, sampler, writer

    @property
    def server(self) -> BufferServer:
        """What serves the batches; for ensembles."""
        return self._server

    @property
    def transforms(self) -> Pipeline:
        """What records and batches pass."""
        return self._parts.transforms

    @property
    def batch_size(self) -> int | None:
        """Transitions in a batch if `sample` isn't told otherwise."""
        return self._server.batch_size

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time."""
        return self._intake.dim_extend

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Use another storage, empty or filled, and return the old one; writer and sampler go on with its content.

        `collate_fn` makes a batch out of what it returns; None for its default.
        """
        return self._draws.exchange("storage", storage, collate_fn)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use another sampler and return the old one; an epoch of another storage ends."""
        return self._draws.exchange("sampler", sampler)

    def set_writer(self, writer: Writer) -> Writer:
        """Use another writer, which goes on where the old one stands, and return the old one."""
        return self._draws.exchange("writer", writer)

    def set_seed(self, seed: int) -> None:
        """Start the sampler's random sequence of `seed`."""
        self._draws.set_seed(seed)

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

    # Writing

    def add(self, data: Any) -> Any:
        """Store one record (with ``ndim > 1`` one time step of all batch entries); see `extend`.

        Args:
            data: a record without a time dimension. It isn't changed, and nothing of it is kept
                (`ListStorage` keeps the object itself).

        Returns:
            Its index: an int, or ``(n, ndim)`` coordinates; an empty one if a transform held the record back.
        """
        return self._intake.store(data, True, "add")

    def extend(self, data: Any) -> torch.Tensor:
        """Store many records, the oldest first; the newest stay if they are more than fit.

        Args:
            data: records ``[T, ...]``; for ``ndim > 1`` ``[*batch, T]`` with time at `dim_extend`. A
                TensorDict, a tensor, or a dictionary or tuple of tensors is one batch; a list holds single
                records, as `add` takes them. It isn't changed, and nothing of it is kept (`ListStorage` keeps
                the objects of a list themselves). ``index``, ``_weight``, ``priority_weight`` and
                ``_generation``, which samples may carry, are left out, and so are rows that are no steps:
                those where a stored ``("collector", "mask")`` is False (with ``ndim > 1`` they are kept, and
                never drawn).

        Returns:
            The indices of the records stored, ``(n,)`` int64 or ``(n, ndim)`` coordinates, in the order of
            the data: all of them, or as many of the last as fit. An empty index if a transform held the
            records back.

        Raises:
            SchemaError: no record, or other keys, shapes or dtypes than the first write had; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._intake.store(data, False, "extend")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column by its key; inverse transforms act first, the cursor stays.

        Records replaced by position are new ones to a prioritized sampler; with another column they aren't.

        Args:
            index: as in `__getitem__`, within the stored part. Of equal positions the last one wins.
            value: records of the schema, of exactly the shape that the index selects.

        Raises:
            IndexRangeError: outside the stored part.
            SchemaError: another shape, dtype or set of keys; nothing changed.
        """
        self._intake.replace(index, value)

    def empty(self) -> None:
        """Forget every record; memory, schema and random state stay."""
        self._draws.empty()

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

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        keys: Iterable[NestedKey] | None = None,
    ) -> Any:
        """Return a batch of records in fresh memory.

        Args:
            batch_size: transitions; None for the one given at construction. Batches drawn ahead (`prefetch`)
                have that size; another one is drawn at once, beside them.
            return_info: whether to return ``(batch, info)``.
            keys: the only columns to fetch; the key of a group stands for all below it. None for all. Such a
                batch isn't fetched ahead.

        Returns:
            The batch ``[n]``. ``info`` holds ``"index"`` (``(n,)`` int64, or a tuple of ``ndim`` such
            tensors), ``"generation"`` (``(n,)`` int64, how often each slot had been written) and what the
            sampler adds.

        Raises:
            EmptyBufferError: nothing is stored.
            UnsupportedError: no batch size, here or at construction.
            InvalidTypeError: a transform or `collate_fn` returned None.
            MissingKeyError: one of `keys` isn't stored.
        """
        if not self._own_sample:
            return self._server.sample(batch_size, return_info, keys)
        if keys is not None:
            raise UnsupportedError(f"keys: {type(self).__name__} has a _sample of its own, which takes none")
        batch, info = self._sample(self._server.size_of(batch_size))
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

    def __getitem__(self, index: Any) -> Any:
        """Return stored records by position, or a column by its key; transforms act on what is returned.

        Args:
            index: an int, slice, list, tensor or mask over the stored time steps; a tuple of these, one for
                each batch dimension; a key, a string or tuple of strings, which reads the whole buffer.

        Returns:
            For ints and slices live views of a tensor storage (what is written into them is written into the
            storage, and later writes show in them), unless there are transforms; copies otherwise.

        Raises:
            IndexRangeError: outside the stored part.
        """
        return column_of(self[:], index) if is_key(index) else self._server.at(index)

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return len(self._parts.storage)

    def stats(self) -> BufferStats:
        """Return the counters of the buffer."""
        return self._draws.stats()

    def verify(self) -> AuditReport:
        """Look at every stored record for what can't be, by the rules of `audit`; other threads wait meanwhile."""
        with self._gate.lock:
            return audit(self._parts.storage)

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

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything; the copy has a lock of its own and goes on with the same sequence of samples."""
        with self._gate.lock:
            return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        self._parts.join(self, self._gate)
        self._draws.rejoin()

    def __repr__(self) -> str:
        """Show the parts."""
        return (
            f"{type(self).__name__}(storage={self._storage!r}, sampler={self._sampler!r}, "
            f"writer={type(self._writer).__name__}, batch_size={self.batch_size})"
        )
