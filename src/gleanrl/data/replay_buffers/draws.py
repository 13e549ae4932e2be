"""Rows on their way out of a buffer: drawn under the lock, fetched outside of it, repaired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.results import BufferStats, Draw, RateCounts, new_tuple
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import Stateful, StateReader, plain
from gleanrl.data.replay_buffers.change_log import touched
from gleanrl.data.replay_buffers.components import Parts, PartsState
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.prefetch import Fetched, PendingSample, PendingState, Prefetcher
from gleanrl.data.replay_buffers.samplers.base import SamplerState, all_rows
from gleanrl.data.replay_buffers.storages.snapshots import Ahead
from gleanrl.errors import EmptyBufferError, SchemaError

Keys = tuple[NestedKey, ...]


class DrawsState(NamedTuple):
    """What a buffer lives by."""

    parts: PartsState
    tickets: tuple[PendingState, ...] | None
    """Batches drawn ahead, the oldest first; None where nothing is."""
    counts: RateCounts | None = None
    """What the rate limiter goes by; None where there is none."""
    written_before: int = 0
    """Transitions written that don't count for `write_count`."""


class DrawPosition(NamedTuple):
    """Where a buffer's next batch is drawn."""

    sampler: Any
    """The sampler's place."""
    batches: int
    """Batches handed out until then."""
    permits: int | None
    """Rows that the rate limiter has counted until then; None where there is no limiter."""


class Draws(Stateful[DrawsState]):
    """Draws batches, at once or ahead, and repairs what was written in between.

    A batch whose rows were all still the ones that were drawn when its fetch had ended is good. Of a batch
    that was fetched at once the overwritten rows are drawn and fetched again; one that was fetched ahead is drawn again
    as a whole. A batch whose call fails or is interrupted isn't counted, but its rows stay drawn.

    Args:
        gate: the buffer's.
        parts: the buffer's.
        prefetcher: what fetches ahead; None for nothing.
    """

    def __init__(self, gate: BufferLock, parts: Parts, prefetcher: Prefetcher | None) -> None:
        self._batches_sampled = 0
        self._rows_redrawn = 0
        self._written_before = 0  # what doesn't count for `write_count`
        self.prefetcher = prefetcher
        self._gate = gate
        self._parts = parts

    def now(
        self, size: int, keys: Keys | None, annotated: bool, stamped: bool
    ) -> tuple[PendingSample, Fetched]:
        """Return a batch that is drawn now; what was drawn ahead is taken back first.

        Args:
            size: transitions.
            keys: the columns to fetch; None for all.
            annotated: whether what the sampler adds is wanted.
            stamped: whether generations are.
        """
        paths = flags = None
        self._gate.asked = True
        with self._gate.sampling:
            self._gate.asked = False
            if keys is not None:
                storage = self._parts.storage
                paths = storage.columns_of(keys)
                flags = self._parts.sampler.annotated_paths(storage) if annotated else ()
            if self.prefetcher is not None:
                self.take_back()
            ticket = self._draw(size, stamped)
            self._batches_sampled += 1
            if self._gate.limiter is not None:
                self._gate.limiter.sampled(ticket.drawn.slots.shape[0])
        try:
            fetched = ticket.fetch(paths, flags)
            parts, storage = self._parts, ticket.storage
            exposed = parts.cuts and storage.exposed
            if exposed or storage.version != ticket.version:
                self._gate.asked = True
                with self._gate.lock:
                    self._gate.asked = False
                    if storage.version == ticket.version and parts.sampler.is_whole(storage, ticket.drawn):
                        return ticket, fetched
                    held = [fetched]
                    del fetched  # memory for the new one
                    repaired = self._repaired(size, ticket, held, stamped, paths, flags)
                    return self._mended(repaired, stamped, paths, flags) if exposed else repaired
        except BaseException:
            self.not_served(ticket)
            raise
        return ticket, fetched

    def ahead(self, prefetcher: Prefetcher, size: int) -> tuple[PendingSample, Fetched]:
        """Return the batch that was drawn first; draws ahead until enough are on their way."""
        sampler = self._parts.sampler
        self._gate.asked = True
        with self._gate.sampling:
            self._gate.asked = False
            if prefetcher.forked:
                self.take_back()
            self._draw_ahead(prefetcher, size)
            ticket, coming = prefetcher.take()
            sampler.ran_out = ticket.ran_out
            self._batches_sampled += 1
            if self._gate.limiter is not None:
                self._gate.limiter.sampled(ticket.drawn.slots.shape[0])
        try:
            fetched = coming.result()
            storage, drawn = ticket.storage, ticket.drawn
            exposed = self._parts.cuts and storage.exposed
            if storage.version == ticket.version and not sampler.takes_priorities and not exposed:
                return ticket, fetched
            self._gate.asked = True
            with self._gate.lock:
                self._gate.asked = False
                if ticket.is_gone:
                    ticket = self._replace(size, drawn, True)
                elif storage.version == ticket.version or torch.equal(
                    storage.generation(drawn.slots), stamps(drawn)
                ):
                    sampler.on_serve(storage, drawn)
                    return self._mended((ticket, fetched), True, ahead=True) if exposed else (ticket, fetched)
                else:
                    ticket = self._redraw(ticket, all_rows(drawn), True, ahead=True)
                del coming, fetched  # memory for the new one, if the thread has let go of it, too
                batch = ticket, ticket.fetch()
                return self._mended(batch, True, ahead=True) if exposed else batch
        except BaseException:
            self.not_served(ticket)
            raise

    def not_served(self, ticket: PendingSample) -> None:
        """Take a batch that nobody gets off the counts, and give back its permits; its rows stay drawn."""
        limiter, rows = self._gate.limiter, ticket.drawn.slots.shape[0]

        def change() -> None:
            self._batches_sampled = batches
            if limiter is not None and not ticket.is_gone:
                limiter.sampled(sampled - limiter.counts.sampled)

        with self._gate.lock:
            batches = self._batches_sampled - 1
            sampled = 0 if limiter is None else max(limiter.counts.sampled - rows, 0)
            to_the_end(change)

    def take_back(self) -> None:
        """Take back what was drawn ahead: what it was drawn from, or by, becomes another one; under the lock."""
        prefetcher, sampler = self.prefetcher, self._parts.sampler
        if prefetcher is None or not len(prefetcher):
            return
        place = prefetcher.place
        if prefetcher.forked and isinstance(place, SamplerState):
            # What the parent had drawn: this process goes on in the epoch, with its own random sequence.
            place = place._replace(generator=sampler.place().generator)
        self._go_to(place)

    def _go_to(self, place: Any) -> None:
        """Draw the next batch at a place of the sampler, None for where that is; forget what was drawn ahead."""

        def change() -> None:
            if place is not None:
                self._parts.sampler.adopt(place)
                self._parts.sampler.follow(self._parts.storage)  # a loaded place names no content
            if self.prefetcher is not None:
                self.prefetcher.clear()

        to_the_end(change)

    def place(self) -> DrawPosition | None:
        """Return where the next batch is drawn, to go back there; None where draws use nothing up."""
        sampler, prefetcher, limiter = self._parts.sampler, self.prefetcher, self._gate.limiter
        if not sampler.uses_up and limiter is None:
            return None
        with self._gate.lock:
            place = None
            if sampler.uses_up:
                sampler.random.begin()
                place = prefetcher.place if prefetcher is not None and len(prefetcher) else sampler.place()
            return DrawPosition(
                place, self._batches_sampled, None if limiter is None else limiter.counts.sampled
            )

    def go_back(self, place: DrawPosition, batches: int) -> None:
        """Take back so many batches, which nobody gets, if they are all that were handed out since a place."""
        limiter = self._gate.limiter
        with self._gate.lock:
            if self._batches_sampled != place.batches + batches:
                return
            if limiter is not None and place.permits is not None:
                limiter.counts = limiter.counts._replace(sampled=place.permits)
            if place.sampler is not None:
                self._go_to(place.sampler)
                self._batches_sampled = place.batches

    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""
        with self._gate.lock:
            self.take_back()
            self._parts.sampler.new_epoch()

    def set_seed(self, seed: int) -> None:
        """Start another random sequence."""
        with self._gate.lock:
            self.take_back()
            self._parts.sampler.set_seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator."""
        with self._gate.lock:
            self.take_back()
            self._parts.set_rng(generator)

    @property
    def write_count(self) -> int:
        """Transitions written since the buffer was made, or emptied."""
        counted = self._parts.storage.rows_written - self._written_before
        return max(counted, 0)  # the storage's state may have been loaded by itself

    def empty(self, empty_write_count: bool) -> None:
        """Forget every record; whether they count as written, too."""
        parts, limiter = self._parts, self._gate.limiter

        def clear() -> None:
            self.take_back()
            parts.storage.clear()
            parts.writer.emptied()
            if empty_write_count:
                self._written_before = parts.storage.rows_written
                if limiter is not None:
                    limiter.restart()

        with self._gate.lock:
            parts.claim()
            parts.writer.check_clear()
            to_the_end(clear)
            parts.sampler.follow(parts.storage)

    def exchange(self, name: str, part: Any, collate_fn: Callable[[Any], Any] | None = None) -> Any:
        """Take another storage, sampler or writer; return the old one (see `Parts.exchange`)."""
        with self._gate.lock:
            if name != "writer":
                self.take_back()
            before = self._parts.exchange(name, part, self._gate, collate_fn)
            if name == "storage":
                self._written_before = 0  # what the other one had counted
            return before

    # The caller holds the lock

    def _draw(self, size: int, stamped: bool, ahead: bool = False, place: Any = None) -> PendingSample:
        """Draw a batch, to be handed out now or ahead of that; `place` is the sampler's before."""
        storage, sampler = self._parts.storage, self._parts.sampler
        served = sampler.takes_priorities and not ahead
        drawn = (sampler.draw_served if served else sampler.draw)(storage, size, stamped)
        return new_tuple(
            PendingSample, (drawn, storage, storage.version, sampler.ran_out, sampler.epoch, place)
        )

    def _draw_ahead(self, prefetcher: Prefetcher, size: int) -> None:
        """Draw until enough batches are on their way; of a draw that fails nothing is left."""
        sampler = self._parts.sampler
        prefetcher.forget_gone()
        sampler.random.begin()  # places are gone back to
        while prefetcher.wants_more:
            place, drawn = sampler.place(), len(prefetcher)
            try:
                prefetcher.put(self._draw(size, True, True, place))
            except BaseException:
                if len(prefetcher) == drawn:
                    sampler.adopt(place)
                raise

    def _repaired(
        self,
        size: int,
        ticket: PendingSample,
        held: list[Fetched],
        stamped: bool,
        paths: tuple[Path, ...] | None,
        flags: tuple[Path, ...] | None,
    ) -> tuple[PendingSample, Fetched]:
        """Draw and fetch again those rows of a batch that were overwritten since its draw.

        Its records are the only ones in `held`, and may be let go of.
        """
        fetched = held.pop()
        if ticket.storage.version == ticket.version:
            return ticket, fetched
        if ticket.is_gone:
            ticket = self._replace(size, ticket.drawn, stamped)
        else:
            stale = touched(ticket.drawn.slots, ticket.storage.changed_since(ticket.version))
            if not stale.any():
                return ticket, fetched
            before, ticket = ticket, self._redraw(ticket, stale, stamped)
            renewed = ticket.renewed(before, stale)
            if renewed is not None:
                return ticket, ticket.fetch_again(renewed, fetched, paths, flags)
        del fetched  # memory for the new one
        return ticket, ticket.fetch(paths, flags)

    def _mended(
        self,
        batch: tuple[PendingSample, Fetched],
        stamped: bool,
        paths: tuple[Path, ...] | None = None,
        flags: tuple[Path, ...] | None = None,
        ahead: bool = False,
    ) -> tuple[PendingSample, Fetched]:
        """Draw and fetch a batch again that ends were written into through live views (see `Sampler.mended`)."""
        ticket, fetched = batch

        def redraw(draw: Draw) -> Draw:
            nonlocal ticket, fetched
            ticket = self._redraw(ticket, all_rows(draw), stamped, ahead)
            fetched = ticket.fetch(paths, flags)
            return ticket.drawn

        self._parts.sampler.mended(ticket.storage, ticket.drawn, redraw)
        return ticket, fetched

    def _redraw(
        self, ticket: PendingSample, stale: torch.Tensor, stamped: bool, ahead: bool = False
    ) -> PendingSample:
        """Draw the stale rows again; the lock keeps writers away until they are fetched.

        Args:
            ticket: the batch.
            stale: which rows, ``(n,)`` bool.
            stamped: whether generations are wanted.
            ahead: whether the batch had been drawn ahead: later ones may be on their way.
        """
        storage, sampler = ticket.storage, self._parts.sampler
        self._rows_redrawn += int(stale.sum())
        drawn = sampler.redraw(storage, ticket.drawn, stale, stamped)
        sampler.on_serve(storage, drawn)
        if ahead:
            sampler.ran_out = ticket.ran_out
        return ticket._replace(drawn=drawn, ran_out=sampler.ran_out, epoch=sampler.epoch)

    def _replace(self, size: int, drawn: Draw, stamped: bool) -> PendingSample:
        """Draw a whole batch again: the buffer was emptied or loaded since its draw."""
        if not len(self._parts.storage):
            raise EmptyBufferError("the buffer was emptied while a batch was fetched from it")
        self._rows_redrawn += drawn.slots.shape[0]
        return self._draw(size, stamped)

    # State

    def stats(self) -> BufferStats:
        """Return the counters of the buffer."""
        with self._gate.lock:
            storage, sampler = self._parts.storage, self._parts.sampler
            return BufferStats(
                len(storage),
                storage.max_size,
                storage.rows_written,
                self._batches_sampled,
                self._rows_redrawn,
                sampler.priorities_dropped,
                self._counts(),
            )

    def _counts(self) -> RateCounts | None:
        return None if self._gate.limiter is None else self._gate.limiter.snapshot()

    def snapshot(self, ahead: Ahead | None = None) -> DrawsState:
        """Return the parts' state and the batches drawn ahead; writers wait only for what they wrote meanwhile.

        Args:
            ahead: how the records are copied (see `Storage.moment_ahead`); None for now.
        """
        ahead, prefetcher = ahead or self._parts.storage.copy_ahead(), self.prefetcher
        with self._gate.lock:
            tickets = None
            if prefetcher is not None:
                prefetcher.forget_gone()
            parts = self._parts.snapshot(ahead)
            if prefetcher is not None:
                tickets = tuple(ticket.value() for ticket in prefetcher)
            before = parts.storage.rows_written - self.write_count
            return DrawsState(parts, tickets, self._counts(), before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors of its own."""
        return self._plain(self.snapshot())

    def moment_dict(self) -> dict[str, Any]:
        """Return the state as checkpoints take it: records may be copied only when they are written."""
        return self._plain(self.snapshot(self._parts.storage.moment_ahead()))

    def _plain(self, value: DrawsState) -> dict[str, Any]:
        state = self._parts.plain(value.parts)
        if value.written_before:
            state["_written_before"] = value.written_before
        if value.counts is not None:
            state["_rate_limiter"] = plain(value.counts)
        if value.tickets is not None:
            copies: dict[int, torch.Tensor] = {}  # the places of several draws share what is large
            state["_prefetched"] = [ticket.plain(copies) for ticket in value.tickets]
        return state

    def parse(self, state: Any) -> DrawsState:
        """Return the value of a saved state; `SchemaError` for one that isn't of such a buffer."""
        reader = StateReader(state, "a ReplayBuffer")
        self._parts.claim()  # loading writes
        parts = self._parts.parse(state)
        counts, limiter = None, self._gate.limiter
        if limiter is not None:
            saved = reader.get("_rate_limiter") if "_rate_limiter" in reader else None
            counts = limiter.parse(saved, parts.storage.rows)
        before = 0
        if "_written_before" in reader:
            before = reader.integer("_written_before", 0, parts.storage.rows_written)
        ahead = reader.parts("_prefetched") if "_prefetched" in reader else []
        if not ahead:
            return DrawsState(parts, (), counts, before)
        if parts.storage.moved:
            raise SchemaError(
                f"load_state_dict: the state holds {len(ahead)} batches drawn ahead, and its records move, since "
                "the ring had come around: build the storage with the same max_size"
            )
        if self.prefetcher is None:
            raise SchemaError(
                f"load_state_dict: the state holds {len(ahead)} batches drawn ahead; build the buffer with "
                "prefetch, as the saved one"
            )
        parse_place, rows = self._parts.sampler.parse_place, parts.storage.rows
        tickets = tuple(PendingState.read(saved, rows, parse_place) for saved in ahead)
        return DrawsState(parts, tickets, counts, before)

    def adopt(self, value: DrawsState) -> None:
        """Go on from a value."""
        parts, prefetcher, limiter = self._parts, self.prefetcher, self._gate.limiter

        def change() -> None:
            parts.adopt(value.parts)
            if limiter is not None:
                limiter.adopt(value.counts)
            self._written_before = value.written_before
            if prefetcher is not None:
                prefetcher.clear()
                for ticket in value.tickets or ():
                    prefetcher.put(ticket.ticket(parts.storage))

        with self._gate.lock:
            to_the_end(change)
            parts.sampler.follow(parts.storage)

    def rejoin(self) -> None:
        """Go on in a copy: what was drawn ahead is of the storage's copy."""
        storage = self._parts.storage
        if self.prefetcher is not None:
            self.prefetcher.join(storage.version)
        with self._gate.lock:
            self._parts.sampler.follow(storage)


def stamps(drawn: Draw) -> torch.Tensor:
    """Return the generations of a draw, ``(n,)`` int64, which has to have them."""
    assert drawn.generation is not None
    return drawn.generation
