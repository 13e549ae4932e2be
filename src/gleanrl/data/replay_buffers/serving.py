"""The reading half of a replay buffer: batches on their way out."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from tensordict import is_tensor_collection

from gleanrl.data.replay_buffers.parts import check_state
from gleanrl.data.replay_buffers.pipeline import none_returned, pin
from gleanrl.data.replay_buffers.prefetch import Prefetcher, Ticket, fetch
from gleanrl.data.replay_buffers.recording import Recording
from gleanrl.data.replay_buffers.samplers.base import coordinates
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import same_generations, touched
from gleanrl.errors import EmptyBufferError, SchemaError
from gleanrl.records import Draw
from gleanrl.tree import NestedKey, Path, add_entries


class Serving(Recording):
    """Draws under the lock, fetches outside of it, and repairs what was written in between.

    A batch whose rows were all still the ones that were drawn when its fetch had ended is served. Of a batch
    that was fetched at once the overwritten rows are drawn again; one that was fetched ahead is drawn again
    as a whole.
    """

    _carries = False
    """Whether batches carry index, weights and generations as entries."""
    _pin_memory = False
    _prefetcher: Prefetcher | None = None

    def _open(self, pin_memory: bool, prefetcher: Prefetcher | None) -> None:
        self._pin_memory = pin_memory
        self._prefetcher = prefetcher
        self._batches_sampled = 0
        self._rows_redrawn = 0

    def _serve(
        self, size: int, ahead: bool, keys: tuple[NestedKey, ...] | None, return_info: bool
    ) -> tuple[Any, dict[str, Any] | None, Ticket]:
        """Return a batch, its info if asked for, and the draw.

        Args:
            size: transitions to draw.
            ahead: whether the batch may be one that was drawn ahead.
            keys: the columns to fetch; None for all.
            return_info: whether the info is wanted.
        """
        generations = return_info or self._carries
        if ahead and self._prefetcher is not None:
            ticket, drawn, records = self._take(self._prefetcher, size)
        else:
            ticket, drawn, records = self._fetch_now(size, keys, generations)
        records = self._collated(ticket.storage, records)
        info = None
        if generations:
            extras = self._sampler.annotate(drawn, records)
            if self._carries:
                self._carry(records, drawn, extras)
            if return_info:
                info = self._info(drawn, extras)
        return self._delivered(records), info, ticket

    def _new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""
        with self._lock:
            self._drop_ahead()
            self._sampler.new_epoch()

    def _collated(self, storage: Storage, records: Any) -> Any:
        """Return what the storage fetched as one batch."""
        collate = self._collate_fn or storage.collate
        if collate is not None:
            records = collate(records)
            if records is None:
                raise none_returned("collate_fn", collate)
        return records

    def _delivered(self, batch: Any) -> Any:
        """Return a batch as the user gets it: transformed and pinned."""
        if self._transforms.reads:
            batch = self._transforms.read(batch)
        return pin(batch) if self._pin_memory else batch

    def _draw(self, size: int, generations: bool, ahead: bool = False) -> Ticket:
        """Draw a batch, to be handed out now or ahead of that; the caller holds the lock."""
        storage, sampler = self._storage, self._sampler
        drawn = sampler.draw(storage, size, generations)
        if not ahead and sampler.takes_priorities:
            sampler.on_serve(storage, drawn)
        return Ticket(drawn, storage, storage.version, sampler.ran_out, sampler.epoch)

    def _fetch_now(
        self, size: int, keys: tuple[NestedKey, ...] | None, generations: bool
    ) -> tuple[Ticket, Draw, Any]:
        with self._lock:
            paths = None if keys is None else self._columns_of(keys)
            self._drop_ahead()
            ticket = self._draw(size, generations)
            self._batches_sampled += 1
        storage, drawn = ticket.storage, ticket.drawn
        records = fetch(ticket, paths)
        if storage.version != ticket.version:
            with self._lock:
                if ticket.is_gone:
                    return self._replace(size, drawn, paths, generations)
                stale = touched(drawn.slots, storage.changed_since(ticket.version))
                if stale.any():
                    drawn = self._redraw(ticket, stale, generations)
                    ticket = ticket._replace(ran_out=self._sampler.ran_out, epoch=self._sampler.epoch)
                    records = storage.fetch(drawn.slots, paths)
        return ticket, drawn, records

    def _columns_of(self, keys: tuple[NestedKey, ...]) -> tuple[Path, ...]:
        """Return the columns to fetch: those asked for and those that the sampler's own entries need."""
        storage = self._storage
        paths = storage.columns_of(keys)
        needed = self._sampler.annotated_paths(storage) if self._carries else ()
        return (*paths, *(path for path in needed if path not in paths))

    def _take(self, prefetcher: Prefetcher, size: int) -> tuple[Ticket, Draw, Any]:
        """Return the batch that was drawn first; draws ahead until enough are on their way."""
        with self._lock:
            prefetcher.forget_gone()
            while prefetcher.wants_more:
                mark = self._sampler.mark()
                prefetcher.put(self._draw(size, True, ahead=True)._replace(mark=mark))
            ticket, coming = prefetcher.take()
            self._sampler.ran_out = ticket.ran_out
            self._batches_sampled += 1
        records = coming.result()
        storage, drawn = ticket.storage, ticket.drawn
        with self._lock:
            if ticket.is_gone:
                return self._replace(size, drawn, None, True)
            if storage.version == ticket.version or torch.equal(
                storage.generation(drawn.slots), _generation(drawn)
            ):
                self._sampler.on_serve(storage, drawn)
            else:
                everything = torch.ones(drawn.slots.shape, dtype=torch.bool, device="cpu")
                drawn = self._redraw(ticket, everything, True)
                ticket = ticket._replace(epoch=self._sampler.epoch)
                self._sampler.ran_out = ticket.ran_out  # later batches may be on their way
                records = storage.fetch(drawn.slots)
        return ticket, drawn, records

    def _replace(
        self, size: int, drawn: Draw, paths: tuple[Path, ...] | None, generations: bool
    ) -> tuple[Ticket, Draw, Any]:
        """Draw and fetch a whole batch again: the buffer was emptied or loaded since its draw.

        The caller holds the lock.
        """
        if not len(self._storage):
            raise EmptyBufferError("the buffer was emptied while a batch was fetched from it")
        self._rows_redrawn += drawn.slots.shape[0]
        ticket = self._draw(size, generations)
        return ticket, ticket.drawn, ticket.storage.fetch(ticket.drawn.slots, paths)

    def _redraw(self, ticket: Ticket, stale: torch.Tensor, generations: bool) -> Draw:
        """Draw the stale rows again; the lock keeps writers away until they are fetched."""
        self._rows_redrawn += int(stale.sum())
        drawn = self._sampler.redraw(ticket.storage, ticket.drawn, stale, generations)
        self._sampler.on_serve(ticket.storage, drawn)
        return drawn

    def _carry(self, records: Any, drawn: Draw, extras: Mapping[NestedKey, torch.Tensor]) -> None:
        """Add index, weights and generations to a batch."""
        slots = drawn.slots
        index = slots if self._storage.ndim == 1 else _stacked(coordinates(slots, self._storage), records)
        entries: dict[NestedKey, torch.Tensor] = {"index": index, **extras}
        if "_weight" in extras:
            entries["_generation"] = _generation(drawn)
        add_entries(records, entries, slots.shape[0])

    def _info(self, drawn: Draw, extras: Mapping[NestedKey, torch.Tensor]) -> dict[Any, Any]:
        return {"index": coordinates(drawn.slots, self._storage), "generation": drawn.generation, **extras}

    # State: batches that were drawn ahead belong to it.

    def _drop_ahead(self) -> None:
        mark = None if self._prefetcher is None else self._prefetcher.clear()
        if mark is not None:
            self._sampler.rewind(mark)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts and of the batches drawn ahead; copies that later calls don't change."""
        with self._lock:
            state = super().state_dict()
            if self._prefetcher is not None:
                self._prefetcher.forget_gone()
                state["_prefetched"] = [_saved(ticket) for ticket in self._prefetcher]
            return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly as the saved buffer would have; the same sequence of samples follows.

        Args:
            state_dict: what `state_dict` returned, of a buffer with parts like this one's. It is copied.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        check_state(state_dict)
        ahead = state_dict.get("_prefetched") or []
        with self._lock:
            if ahead and self._prefetcher is None:
                raise SchemaError(
                    f"load_state_dict: the state holds {len(ahead)} batches drawn ahead; build the buffer with "
                    "prefetch, as the saved one"
                )
            _check_saved(ahead, state_dict["_storage"])
            super().load_state_dict(state_dict)
            if self._prefetcher is not None:
                self._prefetcher.clear()
            storage = self._storage
            for saved in ahead:
                assert self._prefetcher is not None
                drawn = _restored(saved, storage)
                self._prefetcher.put(Ticket(drawn, storage, storage.version, saved["ran_out"]))
            if self._prefetcher is not None:
                self._prefetcher.join(storage.version)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        super().__setstate__(state)
        if self._prefetcher is not None:
            self._prefetcher.join(self._storage.version)


def _stacked(index: tuple[torch.Tensor, ...], records: Any) -> torch.Tensor:
    """Return coordinates repeated over the further batch dimensions of the records, ``(n, *item, ndim)``.

    Left to `add_entries`, they would pass for values of the items where there are as many.
    """
    stacked = torch.stack(index, -1)
    further = records.ndim - 1 if is_tensor_collection(records) else 0
    if further < 1:
        return stacked
    rows = stacked.view(-1, *[1] * further, len(index))
    return rows.expand(-1, *records.shape[1:], len(index))


def _generation(drawn: Draw) -> torch.Tensor:
    assert drawn.generation is not None
    return drawn.generation


def _saved(ticket: Ticket) -> dict[str, Any]:
    """Return a draw as plain values; rows that were overwritten since are marked, their draw is void."""
    drawn, storage = ticket.drawn, ticket.storage
    return {
        "slots": drawn.slots.clone(),
        "extras": [(key, value.clone()) for key, value in drawn.extras.items()],
        "last": None if drawn.last is None else drawn.last.clone(),
        "asked": drawn.asked,
        "origin": _living_origin(drawn.origin, storage),
        "fresh": storage.generation(drawn.slots) == _generation(drawn),
        "ran_out": ticket.ran_out,
    }


def _check_saved(ahead: Any, storage_state: Mapping[str, Any]) -> None:
    """Raise `SchemaError` unless `ahead` are draws as `_saved` returned them, of such a storage."""
    rows = Storage.steps_in(dict(storage_state))[0] * prod(storage_state["batch_shape"])
    try:
        sound = all(_is_sound(saved, rows) for saved in ahead)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
        raise SchemaError("load_state_dict: expected draws under '_prefetched'") from cause
    if not sound:
        raise SchemaError("load_state_dict: a draw under '_prefetched' contradicts itself or the storage")


def _is_sound(saved: Mapping[str, Any], rows: int) -> bool:
    slots, fresh, last, origin = (saved[name] for name in ("slots", "fresh", "last", "origin"))
    entries = [fresh, *(value for _, value in saved["extras"]), *([] if last is None else [last])]
    return (
        all(_are_slots(found, rows) for found in (slots, origin) if found is not None)
        and all(value.shape[:1] == slots.shape for value in entries)
        and all(flags.dtype == torch.bool for flags in (fresh, last) if flags is not None)
        and (saved["asked"] is None or type(saved["asked"]) is int)
        and type(saved["ran_out"]) is bool
    )


def _are_slots(found: torch.Tensor, rows: int) -> bool:
    inside = (found >= 0) & (found < rows)
    return found.dtype == torch.int64 and found.ndim == 1 and bool(inside.all())


def _living_origin(origin: torch.Tensor | None, storage: Storage) -> torch.Tensor | None:
    """Return those slots of an origin whose records are still there."""
    return None if origin is None else origin[0, same_generations(storage.generation(origin[0]), origin[1])]


def _restored(saved: dict[str, Any], storage: Storage) -> Draw:
    slots, tails = saved["slots"].clone(), saved["origin"]
    extras = {key: value.clone() for key, value in saved["extras"]}
    last = None if saved["last"] is None else saved["last"].clone()
    origin = None if tails is None else torch.stack([tails, storage.generation(tails)])
    generation = torch.where(saved["fresh"], storage.generation(slots), -1)
    return Draw(slots, extras, generation, last, saved["asked"], origin)
