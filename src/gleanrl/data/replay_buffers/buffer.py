"""The replay buffer: a storage, a sampler, a writer and transforms, composed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.data.replay_buffers.parts import Parts
from gleanrl.data.replay_buffers.pipeline import none_returned, pin
from gleanrl.data.replay_buffers.samplers.base import Sampler, coordinates
from gleanrl.data.replay_buffers.samplers.without_replacement import SamplerWithoutReplacement
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, UnsupportedError
from gleanrl.records import BufferStats, Draw, Placement

_WHOLE = slice(None)


class ReplayBuffer(Parts):
    """Stores records and serves batches of them.

    The parts are composed: the *storage* keeps records, the *writer* decides where new ones go, the *sampler*
    decides which ones make a batch, *transforms* act on records on their way in and on batches on their way
    out. A part belongs to one buffer at a time; one of another buffer that is still in use is refused.

    `add`, `extend`, `sample`, indexing, `empty` and the state methods may be called from any threads. One
    lock is held over a whole write, and over the draw of a sample but not over its fetch: writers wait for no
    fetch. Rows that were overwritten while they were fetched are drawn and fetched again under the lock, so
    that a batch never holds half a record. Exchanging parts and transforms while other threads work isn't
    supported.

    Args:
        storage: where records are kept; None for ``ListStorage(1000)``.
        sampler: which records make a batch; None for `RandomSampler`, uniform with replacement.
        writer: where new records go; None for `RoundRobinWriter`, oldest out first.
        collate_fn: makes a batch out of what the storage returns; None for stacking (list storages) or
            nothing at all (tensor storages return batches).
        pin_memory: whether batches come in pinned memory; needs CUDA.
        prefetch: batches fetched ahead; not available yet, must be None or 0.
        transform: a callable on batches, or an object with `forward` (on read) and `inv` (on write). A plain
            callable that changes the batch shape of data with more batch dimensions than the storage has acts
            on the way in: ``lambda data: data.reshape(-1)`` flattens ``[P, T]`` data. That is found out at
            the first write, by calling it on a clone of the data's corner ``[:1, :1]``.
        batch_size: transitions in a batch if `sample` isn't told otherwise; needed for iteration.
        dim_extend: the batch dimension of extended data that is time, 0 or more; it changes places with
            dimension 0. None for the last dimension that the storage takes as slots, ``storage.ndim - 1``.
        checkpointer: not available yet, must be None.
        seed: where the sampler's random sequence starts; None leaves the sampler as it is.

    Raises:
        InvalidArgumentError: a bad value, or a part of another buffer, named.
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
    ) -> None:
        if prefetch:
            raise UnsupportedError(
                f"prefetch={prefetch}: fetching ahead isn't available yet; leave it at None"
            )
        if checkpointer is not None:
            raise UnsupportedError("checkpointer: not available yet; save state_dict() with torch.save")
        if pin_memory and not torch.cuda.is_available():
            raise UnsupportedError("pin_memory=True needs a CUDA device, and torch sees none")
        if batch_size is None and isinstance(sampler, SamplerWithoutReplacement) and sampler.drop_last:
            raise InvalidArgumentError("batch_size: a sampler with drop_last=True needs it at construction")
        self._batch_size = None if batch_size is None else _size(batch_size)
        self._dim_extend = self._checked_dim(dim_extend)
        super().__init__(storage, sampler, writer, transform, seed)
        self._collate_fn = collate_fn
        self._pin_memory = bool(pin_memory)
        self._batches_sampled = 0
        self._rows_redrawn = 0

    def _checked_dim(self, dim_extend: int | None) -> int | None:
        if dim_extend is not None and (not isinstance(dim_extend, int) or dim_extend < 0):
            raise InvalidArgumentError(f"dim_extend: expected an integer of 0 or more, got {dim_extend!r}")
        return dim_extend

    @property
    def batch_size(self) -> int | None:
        """Transitions in a batch if `sample` isn't told otherwise."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time; fixed at construction."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    # Writing

    def add(self, data: Any) -> Any:
        """Store one record (with ``ndim > 1`` one time step of all batch entries).

        Args:
            data: a record without a time dimension. It isn't changed, and nothing of it is kept
                (`ListStorage` keeps the object itself).

        Returns:
            Its index: an int, or ``(n, ndim)`` coordinates. An empty index if a transform held the record
            back.

        Raises:
            SchemaError: other keys, shapes or dtypes than the first write had; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._store(data, single=True, where="add")

    def extend(self, data: Any) -> torch.Tensor:
        """Store many records, the oldest first; the newest stay if they are more than fit.

        Args:
            data: records ``[T, ...]``; for ``ndim > 1`` ``[*batch, T]`` with time at `dim_extend`. A
                TensorDict, a tensor, or a dictionary or tuple of tensors is one batch; a list holds single
                records, as `add` takes them. It isn't changed, and nothing of it is kept (`ListStorage` keeps
                the objects of a list themselves). ``index``, ``_weight``, ``priority_weight`` and
                ``_generation``, which samples may carry, are left out.

        Returns:
            The indices of the records stored, ``(n,)`` int64 or ``(n, ndim)`` coordinates, in the order of
            the data: all of them, or as many of the last as fit. An empty index if a transform held the
            records back.

        Raises:
            SchemaError: no record, or other keys, shapes or dtypes than the first write had; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._store(data, single=False, where="extend")

    def _store(self, data: Any, single: bool, where: str) -> Any:
        with self._lock:
            storage, transforms = self._storage, self._transforms
            dim_extend = 0 if single else self.dim_extend
            if not single and isinstance(data, list):
                data, dim_extend = storage.join(data, where), 0
            if len(transforms):
                slot_dims = storage.ndim - single
                transforms.settle(data, slot_dims)
                data = transforms.write(data, slot_dims)
                if data is None:
                    shape = (0,) if storage.ndim == 1 else (0, storage.ndim)
                    return torch.empty(shape, dtype=torch.int64, device="cpu")
            prepared = storage.prepare(data, single=single, dim_extend=dim_extend, where=where)
            placement = self._writer.place(prepared.num_steps)
            storage.write(prepared, placement)
            self._sampler.on_write(storage, placement)
            transforms.confirm()
            if storage.ndim == 1:
                if single:
                    return placement.start
                slots = _range(placement)
                return slots if not placement.wraps else slots % placement.capacity
            grid = [torch.arange(size, device="cpu") for size in storage.batch_shape]
            return torch.cartesian_prod(_range(placement) % placement.capacity, *grid)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column by its key; inverse transforms act first, the cursor stays.

        Args:
            index: as in `__getitem__`, within the stored part. Of equal positions the last one wins.
            value: records of the schema, of exactly the shape that the index selects.

        Raises:
            IndexRangeError: outside the stored part.
            SchemaError: another shape, dtype or set of keys; nothing changed.
        """
        with self._lock:
            if _is_key(index):
                index, value = _WHOLE, self._with_column(index, value)
            storage = self._storage
            slots, shape = storage.slots_of(index)
            value = self._transforms.write(value, len(shape))
            if value is None:
                return
            prepared: Prepared = storage.prepare_selection(value, shape, "__setitem__")
            if slots.shape[0]:
                storage.write_slots(prepared, slots)
                self._sampler.on_update(storage, slots)

    def _with_column(self, key: Any, column: Any) -> Any:
        """Return the whole content with another tensor at `key`; the content itself isn't changed."""
        whole = self._storage.get(_WHOLE)
        if not isinstance(whole, TensorDictBase):
            raise UnsupportedError(
                f"__setitem__: the key {key!r} needs a buffer of TensorDicts; index by position"
            )
        changed = whole.clone(recurse=False)
        changed[key] = column
        return changed

    def empty(self) -> None:
        """Forget every record; memory, schema and random state stay."""
        with self._lock:
            self._storage.clear()
            self._sampler.clear()

    # Reading

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch of records in fresh memory.

        Args:
            batch_size: transitions; None for the one given at construction.
            return_info: whether to return ``(batch, info)``.

        Returns:
            The batch ``[n]``. ``info`` holds ``"index"`` (``(n,)`` int64, or a tuple of ``ndim`` such
            tensors), ``"generation"`` (``(n,)`` int64, how often each slot had been written) and what the
            sampler adds.

        Raises:
            EmptyBufferError: nothing is stored.
            UnsupportedError: no batch size, here or at construction.
            InvalidArgumentError: a batch size that isn't an integer of 1 or more.
            InvalidTypeError: a transform or `collate_fn` returned None.
        """
        size = self._size_of(batch_size)
        with self._lock:
            storage = self._storage
            drawn = self._sampler.draw(storage, size, return_info)
            changes, content = storage.changes, storage.content
            self._batches_sampled += 1
        try:
            batch = storage.fetch(drawn.slots)
        except IndexError:
            if storage.content is content:
                raise
            batch = None  # the records were forgotten meanwhile: all of them are drawn again
        if storage.content is not content:
            drawn, batch = self._replace(storage, drawn, size, return_info)
        elif storage.changes != changes:
            drawn, batch = self._repair(storage, drawn, batch, changes, return_info)
        batch = self._finish(storage, batch)
        if not return_info:
            return batch
        info = {"index": coordinates(drawn.slots, storage), "generation": drawn.generation, **drawn.extras}
        return batch, info

    def _replace(self, storage: Storage, drawn: Draw, size: int, generations: bool) -> tuple[Draw, Any]:
        """Draw and fetch a whole batch again: the buffer was emptied or loaded during the fetch."""
        with self._lock:
            if not len(storage):
                raise EmptyBufferError("the buffer was emptied while a batch was fetched from it")
            self._rows_redrawn += drawn.slots.shape[0]
            drawn = self._sampler.draw(storage, size, generations)
            return drawn, storage.fetch(drawn.slots)

    def _repair(
        self, storage: Storage, drawn: Draw, batch: Any, changes: int, generations: bool
    ) -> tuple[Draw, Any]:
        """Draw and fetch again what was written during the fetch; the lock keeps writers away this time."""
        with self._lock:
            stale = storage.stale(drawn.slots, changes)
            count = int(stale.sum())
            if not count:
                return drawn, batch
            self._rows_redrawn += count
            drawn = self._sampler.redraw(storage, drawn, stale)
            if generations:
                drawn = drawn._replace(generation=storage.generation(drawn.slots))
            return drawn, storage.fetch(drawn.slots)

    def _finish(self, storage: Storage, records: Any) -> Any:
        """Return what the user gets for records out of the storage: collated, transformed, pinned."""
        collate = self._collate_fn or storage.collate
        if collate is not None:
            records = collate(records)
            if records is None:
                raise none_returned("collate_fn", collate)
        if self._transforms.reads:
            records = self._transforms.read(records)
        return pin(records) if self._pin_memory else records

    def _size_of(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._batch_size is not None:
                return self._batch_size
            raise UnsupportedError("sample: no batch_size was given, to this call or at construction")
        size = batch_size if type(batch_size) is int and batch_size > 0 else _size(batch_size)
        if self._batch_size is not None and size != self._batch_size:
            warnings.warn(
                f"sample: batch_size={size} differs from the buffer's {self._batch_size}; {size} is used",
                stacklevel=3,
            )
        return size

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one whole epoch, a new one (for ever, with samplers without epochs)."""
        if self._batch_size is None:
            raise UnsupportedError("iterating over a buffer needs the batch_size argument of its constructor")
        with self._lock:
            self._sampler.new_epoch()
        while not self._sampler.ran_out:
            yield self.sample()

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
        if _is_key(index):
            return self[:][index]
        with self._lock:
            storage = self._storage
            records = storage.get(index)
            if len(self._transforms) and not isinstance(storage, ListStorage):
                records = records.clone() if hasattr(records, "clone") else _clone_tree(records)
        if isinstance(storage, ListStorage) and not isinstance(records, list):
            return self._transforms.read(records)
        return self._finish(storage, records)

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return len(self._storage)

    def stats(self) -> BufferStats:
        """Return the counters of the buffer."""
        with self._lock:
            storage = self._storage
            return BufferStats(
                len(storage),
                storage.max_size,
                storage.rows_written,
                self._batches_sampled,
                self._rows_redrawn,
            )

    def __repr__(self) -> str:
        """Show the parts."""
        return (
            f"{type(self).__name__}(storage={self._storage!r}, sampler={type(self._sampler).__name__}, "
            f"writer={type(self._writer).__name__}, batch_size={self._batch_size})"
        )


def _size(batch_size: Any) -> int:
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if isinstance(batch_size, bool) or size < 1:
        raise InvalidArgumentError(f"batch_size: expected an integer of 1 or more, got {batch_size!r}")
    return size


def _range(placement: Placement) -> torch.Tensor:
    return torch.arange(placement.start, placement.start + placement.num_steps, device="cpu")


def _is_key(index: Any) -> bool:
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and bool(index) and all(_is_key(part) for part in index)


def _clone_tree(records: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone(), records)
