"""Serving of batches: sizes, the sampler's extra entries, collation, transforms and whole epochs."""

from __future__ import annotations

import inspect
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.devices import pinned
from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._arrays.tensordicts import NestedKey, add_entries, mark_rows
from gleanrl._util import integer, positive_or_none
from gleanrl.data.replay_buffers.components import Parts
from gleanrl.data.replay_buffers.draws import Draws, Keys
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.samplers.base import coordinates
from gleanrl.data.replay_buffers.samplers.frame_history import FRAMES
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import basic_index, is_position, slots_at, swapped
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.storages.record_formats import swap_batch_dims
from gleanrl.data.replay_buffers.transform_pipeline import copied, none_returned
from gleanrl.data.trajectories import MASK, hold_slice_ends
from gleanrl.errors import InvalidArgumentError, UnsupportedError

ChosenKeys: TypeAlias = Iterable[NestedKey] | None


class Served(NamedTuple):
    """A batch as delivered to the user."""

    batch: Any
    info: Any
    """Information about its rows, if the caller asked for it."""
    ran_out: bool
    """Whether the batch ended an epoch."""
    epoch: int
    """The number of its epoch."""


class Server(ABC):
    """Base class that serves batches and whole epochs, of one buffer or of a mixture of several.

    Args:
        batch_size: the default number of transitions in a batch; None for no default.
    """

    of: str
    """The name of the buffer in error messages."""

    warns_of_other_sizes = False
    """Whether to warn if a batch has another size than the default."""

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size = positive_or_none("batch_size", batch_size)

    @abstractmethod
    def serve(self, size: int, keys: Keys | None, wants_info: bool) -> Served:
        """Return a batch of `size` transitions with the columns `keys` (None for all)."""

    @abstractmethod
    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""

    def size_of(self, batch_size: int | None) -> int:
        """Return the number of transitions for the `batch_size` argument of `sample`.

        Args:
            batch_size: None for the default. Another size may cause a warning, at the line that called `sample`.

        Raises:
            UnsupportedError: no batch size and no default.
            InvalidArgumentError: a batch size below 1.
        """
        usual = self.batch_size
        if batch_size is None:
            if usual is not None:
                return usual
            raise UnsupportedError(
                "sample: no batch_size was given; pass it to sample() or to the constructor"
            )
        size = integer("batch_size", batch_size, 1)
        if usual is not None and size != usual and self.warns_of_other_sizes:
            text = f"sample: batch_size={size} differs from the buffer's {usual}; {size} is used"
            warnings.warn(text, stacklevel=3)
        return size

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of one new epoch; forever if the sampler has no epochs.

        The epoch begins at the first step. A drawn batch of a later epoch ends the iteration and isn't yielded.

        Raises:
            UnsupportedError: no default batch size; raised at the first step.
        """
        size = self.batch_size
        if size is None:
            raise UnsupportedError(
                f"iterating over {self.of} needs the batch_size argument of its constructor"
            )
        self.new_epoch()
        served = self.as_user(size, None, False)
        epoch = served.epoch
        while served.epoch == epoch:
            yield served.batch
            if served.ran_out:
                break
            served = self.as_user(size, None, False)

    def as_user(self, size: int, keys: Keys | None, wants_info: bool) -> Served:
        """Serve a batch by `serve`; `BufferServer` calls a user's override of `sample` here."""
        return self.serve(size, keys, wants_info)


class BufferServer(Server):
    """Serves batches of one buffer: adds the sampler's entries, collates, transforms and pins them.

    Args:
        draws: draws and fetches the rows.
        gate: the buffer's lock.
        parts: the buffer's parts.
        batch_size: see `Server`.
        pin_memory: whether batches are in pinned memory.
        carries: whether batches carry index, weights and generations as entries.
        sample: the `sample` method of a user's subclass; None without one.

    Raises:
        UnsupportedError: `pin_memory` without CUDA.
        InvalidArgumentError: no batch size, although the buffer prefetches or its sampler drops the last batch.
    """

    of = "a buffer"
    warns_of_other_sizes = True

    def __init__(
        self,
        draws: Draws,
        gate: BufferLock,
        parts: Parts,
        batch_size: int | None,
        pin_memory: bool,
        carries: bool,
        sample: Callable[..., Any] | None,
    ) -> None:
        super().__init__(batch_size)
        if pin_memory and not torch.cuda.is_available():
            raise UnsupportedError(
                "pin_memory=True needs a CUDA device, but torch finds none; leave pin_memory out"
            )
        if batch_size is None and (
            draws.prefetcher is not None or getattr(parts.sampler, "drop_last", False)
        ):
            raise InvalidArgumentError(
                "batch_size: prefetch and samplers with drop_last=True need it at construction"
            )
        self.draws = draws
        self._gate = gate
        self._parts = parts
        self._pin_memory = bool(pin_memory)
        self._carries = carries
        self._sample, self._arguments = sample, 0 if sample is None else _positional(sample)
        self._last = None if sample is None else threading.local()

    @property
    def draws_ahead(self) -> bool:
        """Whether batches are drawn ahead."""
        return self.draws.prefetcher is not None and self._parts.sampler.draws_ahead

    def serve(self, size: int, keys: Keys | None, wants_info: bool) -> Served:
        """Return a batch. With the default size and all columns, it may have been drawn ahead.

        Any other call cancels the batches drawn ahead. A batch that fails in a transform isn't counted, but its rows
        stay consumed.
        """
        draws, parts, annotated = self.draws, self._parts, wants_info or self._carries
        transforms = parts.transforms
        if (
            draws.prefetcher is not None
            and keys is None
            and size == self.batch_size
            and parts.sampler.draws_ahead
        ):
            ticket, (records, flags) = draws.ahead(draws.prefetcher, size)
        else:
            stamped = wants_info or (annotated and parts.weighs)
            ticket, (records, flags) = draws.now(size, keys, annotated or bool(transforms.reads), stamped)
        try:
            drawn, info = ticket.drawn, None
            seen = records if flags is None else flags
            extras = parts.sampler.annotate(drawn, seen) if annotated else {}
            if transforms.reads and not self._carries:  # transforms need the ends of slices
                mark_rows(records, parts.sampler.marks(drawn, seen), drawn.slots.shape[0])
            own, storage = parts.collate_fn, ticket.storage
            collate = storage.collate if own is None else storage.collated_by(own)
            batch = records if collate is None else _collated(collate, records)
            if self._carries:
                self._carry(batch, drawn, extras)
            if drawn.last is not None and (not self._carries or extras is drawn.extras):
                hold_slice_ends(batch, drawn.last, drawn.extras.get(MASK))
            if wants_info:
                index = coordinates(drawn.slots, ticket.storage)
                entries = {key: value for key, value in extras.items() if key[0] != FRAMES}
                info = {"index": index, "generation": drawn.generation, **entries}
            if transforms.reads or self._pin_memory:
                batch = self._delivered(batch)
        except BaseException:
            draws.not_served(ticket)  # a failed or interrupted batch isn't counted
            raise
        served = new_tuple(Served, (batch, info, ticket.ran_out, ticket.epoch))
        if self._last is not None:
            self._last.served = served
        return served

    def as_user(self, size: int, keys: Keys | None, wants_info: bool) -> Served:
        """Serve a batch through the user's `sample`, if there is one; it must call the buffer's `sample`.

        The batch may differ from the served one, so the user's result replaces it, and epoch data come from the last
        inner call. Without an inner call, the epoch is 0 and never runs out.
        """
        if self._sample is None:
            return self.serve(size, keys, wants_info)
        assert self._last is not None
        self._last.served = Served(None, None, False, 0)
        # Pass only arguments that the override accepts. If it lacks one that matters, Python raises the error.
        num_passed = 2 if wants_info else max(self._arguments, int(size != self.batch_size))
        result = self._sample(*(size, wants_info)[:num_passed], **({} if keys is None else {"keys": keys}))
        batch, info = result if wants_info else (result, None)
        served: Served = self._last.served
        return served._replace(batch=batch, info=info)

    def new_epoch(self) -> None:
        """Cancel the batches drawn ahead, and begin a new epoch with the next batch."""
        self.draws.new_epoch()

    def at(self, index: Any) -> Any:
        """Return transformed records by position (see `ReplayBuffer.__getitem__`).

        A single record of a `ListStorage` isn't collated.
        """
        parts = self._parts
        with self._gate.lock:
            storage = parts.storage
            records = _read(storage, index, parts.written_time)
            if len(parts.transforms):
                records = copied(records)
        if isinstance(storage, ListStorage) and is_position(index):
            return parts.transforms.read(records)
        own = parts.collate_fn
        collate = storage.collate if own is None else storage.collated_by(own)
        return self._delivered(records if collate is None else _collated(collate, records))

    def _delivered(self, batch: Any) -> Any:
        """Return a batch after transforms and pinning."""
        batch = self._parts.transforms.read(batch)
        return pinned(batch) if self._pin_memory else batch

    def _carry(self, records: Any, drawn: Draw, extras: Mapping[NestedKey, torch.Tensor]) -> None:
        """Add index, weights and generations to a batch."""
        slots, storage = drawn.slots, self._parts.storage
        index = slots if storage.ndim == 1 else _stacked(coordinates(slots, storage), records)
        entries: dict[NestedKey, Any] = {"index": index, **extras}
        if "_weight" in extras:
            entries["_generation"] = drawn.generation
        add_entries(records, entries, slots.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without thread-local data."""
        return {**self.__dict__, "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        self._last = None if self._sample is None else threading.local()


def _read(storage: Storage, index: Any, time: int) -> Any:
    """Return the records at an index in the written layout, where `time` is the time dimension."""
    if not time:
        return storage[index]
    basic = basic_index(index, swapped(storage.shape, time))
    if basic is None:
        slots, shape = slots_at(index, storage.shape, time)
        positions = torch.unravel_index(slots.view(shape), storage.shape)
        return storage[positions]
    content = swap_batch_dims(storage[:], time, "__getitem__")
    return (
        content[basic]
        if is_tensor_collection(content)
        else _pytree.tree_map(lambda leaf: leaf[basic], content)
    )


def _collated(collate: Callable[[Any], Any], records: Any) -> Any:
    """Return the storage's result as one batch."""
    batch = collate(records)
    if batch is None:
        raise none_returned("collate_fn", collate)
    return batch


def _stacked(index: tuple[torch.Tensor, ...], records: Any) -> torch.Tensor:
    """Return coordinates repeated over the further batch dimensions of the records, ``(n, *item, ndim)``.

    Without that, `add_entries` would take them for values of the items if the sizes match.
    """
    stacked = torch.stack(index, -1)
    further = records.ndim - 1 if is_tensor_collection(records) else 0
    if further < 1:
        return stacked
    rows = stacked.view(-1, *[1] * further, len(index))
    return rows.expand(-1, *records.shape[1:], len(index))


def _positional(sample: Callable[..., Any]) -> int:
    """Return how many of the arguments `batch_size` and `return_info` the user's `sample` accepts by position."""
    for count in (2, 1):
        with suppress(TypeError):
            inspect.signature(sample).bind(*range(count))
            return count
    return 0
