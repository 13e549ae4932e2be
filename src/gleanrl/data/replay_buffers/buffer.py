"""The replay buffer: a storage, a sampler, a writer and transforms, composed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import is_tensor_collection, is_tensorclass
from torch.utils import _pytree

from gleanrl.arguments import key_list, non_negative, positive
from gleanrl.data.replay_buffers.audit import AuditReport, audit
from gleanrl.data.replay_buffers.prefetch import Prefetcher
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.serving import Serving
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key, is_position
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, UnsupportedError
from gleanrl.records import BufferStats
from gleanrl.system import proc
from gleanrl.tree import NestedKey


class ReplayBuffer(Serving):
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
        prefetch_threads: int | None = None,
    ) -> None:
        prefetcher = _prefetcher(prefetch, prefetch_threads)
        if checkpointer is not None:
            raise UnsupportedError("checkpointer: not available yet; save state_dict() with torch.save")
        if pin_memory and not torch.cuda.is_available():
            raise UnsupportedError("pin_memory=True needs a CUDA device, and torch sees none")
        if batch_size is None and (prefetcher is not None or getattr(sampler, "drop_last", False)):
            raise InvalidArgumentError(
                "batch_size: prefetch and samplers with drop_last=True need it at construction"
            )
        self._batch_size = None if batch_size is None else positive("batch_size", batch_size)
        if collate_fn is not None and not callable(collate_fn):
            raise InvalidTypeError(f"collate_fn: expected a callable, got {collate_fn!r}")
        self._dim_extend = None if dim_extend is None else non_negative("dim_extend", dim_extend)
        super().__init__(storage, sampler, writer, transform, seed)
        self._collate_fn = collate_fn
        self._open(bool(pin_memory), prefetcher)

    @property
    def batch_size(self) -> int | None:
        """Transitions in a batch if `sample` isn't told otherwise."""
        return self._batch_size

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
            InvalidArgumentError: a batch size that isn't an integer of 1 or more.
            InvalidTypeError: a transform or `collate_fn` returned None.
            MissingKeyError: one of `keys` isn't stored.
        """
        size = self._size_of(batch_size)
        chosen = None if keys is None else key_list(keys)
        ahead = chosen is None and size == self._batch_size
        batch, info, _ = self._serve(size, ahead, chosen, return_info)
        return (batch, info) if return_info else batch

    def _size_of(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._batch_size is not None:
                return self._batch_size
            raise UnsupportedError("sample: no batch_size was given, to this call or at construction")
        size = (
            batch_size if type(batch_size) is int and batch_size > 0 else positive("batch_size", batch_size)
        )
        if self._batch_size is not None and size != self._batch_size:
            warnings.warn(
                f"sample: batch_size={size} differs from the buffer's {self._batch_size}; {size} is used",
                stacklevel=3,
            )
        return size

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one whole epoch, a new one (for ever, with samplers without epochs).

        Ends with that epoch, also where what was left of it has been overwritten.
        """
        if self._batch_size is None:
            raise UnsupportedError("iterating over a buffer needs the batch_size argument of its constructor")
        self._new_epoch()
        batch, _, ticket = self._serve(self._batch_size, True, None, False)
        epoch = ticket.epoch
        while ticket.epoch == epoch:
            yield batch
            if ticket.ran_out:
                break
            batch, _, ticket = self._serve(self._batch_size, True, None, False)

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
        if is_key(index):
            whole = self[:]
            try:
                # Brackets of a tensorclass take positions only.
                return (
                    whole.to_tensordict(retain_none=False)[index] if is_tensorclass(whole) else whole[index]
                )
            except KeyError as cause:
                raise MissingKeyError(f"{index!r} isn't stored") from cause
        with self._lock:
            storage = self._storage
            records = storage.get(index)
            if len(self._transforms):
                records = _copied(records)
        if isinstance(storage, ListStorage) and is_position(index):
            return self._transforms.read(records)
        return self._delivered(self._collated(storage, records))

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
                self._sampler.priorities_dropped,
            )

    def verify(self) -> AuditReport:
        """Look at every stored record for what can't be; nothing changes.

        See `gleanrl.data.replay_buffers.audit.audit` for the rules. Other threads wait meanwhile.

        Returns:
            A report: `ok`, `problems` (rule, number of rows, first slot, message), `checks` that applied,
            `rows` and `trajectories`.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
            >>> steps = TensorDict({"observation": torch.arange(3), "done": torch.zeros(3, 1).bool()}, [3])
            >>> steps["next"] = TensorDict({"observation": torch.tensor([1, 7, 3]), "done": steps["done"]}, [3])
            >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> index = buffer.extend(steps)
            >>> [(problem.rule, problem.slot) for problem in buffer.verify().problems]
            [('next observation', 1)]
        """
        with self._lock:
            return audit(self._storage)

    def __repr__(self) -> str:
        """Show the parts."""
        return (
            f"{type(self).__name__}(storage={self._storage!r}, sampler={type(self._sampler).__name__}, "
            f"writer={type(self._writer).__name__}, batch_size={self._batch_size})"
        )


def _prefetcher(depth: Any, threads: Any) -> Prefetcher | None:
    depth = 0 if depth is None else non_negative("prefetch", depth)
    threads = 0 if threads is None else non_negative("prefetch_threads", threads)
    if not depth:
        if threads:
            raise InvalidArgumentError("prefetch_threads: there is nothing to fetch ahead without prefetch")
        return None
    return Prefetcher(depth, threads or min(depth, proc.cpu_count()))


def _copied(records: Any) -> Any:
    """Return a copy for transforms to change."""
    return _pytree.tree_map(
        lambda leaf: leaf.clone() if hasattr(leaf, "clone") else copy.deepcopy(leaf),
        records,
        is_leaf=is_tensor_collection,
    )
