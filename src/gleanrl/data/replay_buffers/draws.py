"""Draws of batches: drawn under the lock, fetched outside of it, and repaired after overwrites."""

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
from gleanrl.errors import EmptyBufferError, SchemaError

Keys = tuple[NestedKey, ...]


class DrawsState(NamedTuple):
    """The complete state of a buffer."""

    parts: PartsState
    tickets: tuple[PendingState, ...] | None
    """Batches drawn ahead, the oldest first; None in the snapshot of a buffer without a prefetcher."""
    counts: RateCounts | None = None
    """Counts of the rate limiter; None without one."""
    written_before: int = 0
    """Transitions written before the last `empty`, which `write_count` leaves out."""


class DrawPosition(NamedTuple):
    """The position at which a buffer draws its next batch."""

    sampler: Any
    """The sampler's position; None if draws consume nothing."""
    batches: int
    """Batches handed out so far."""
    permits: int | None
    """Sampled rows that the rate limiter has counted so far; None without a limiter."""


class Draws(Stateful[DrawsState]):
    """Draws batches, at once or ahead of their use, and repairs rows that a writer overwrote meanwhile.

    A batch is valid if none of its rows was overwritten or amended between its draw and the end of its fetch. Rows are
    repaired as follows:

    - In a batch that is fetched at once, only the overwritten rows are drawn and fetched again.
    - A batch that was fetched ahead is drawn and fetched again as a whole.

    A batch whose call fails or is interrupted isn't counted, but its rows stay consumed.

    Args:
        gate: the buffer's lock.
        parts: the buffer's parts.
        prefetcher: fetches batches ahead; None for no prefetching.
    """

    def __init__(self, gate: BufferLock, parts: Parts, prefetcher: Prefetcher | None) -> None:
        self._batches_sampled = 0
        self._rows_redrawn = 0
        self._written_before = 0  # written before the last `empty`: `write_count` leaves these out
        self.prefetcher = prefetcher
        self._gate = gate
        self._parts = parts

    def now(
        self, size: int, keys: Keys | None, annotated: bool, stamped: bool
    ) -> tuple[PendingSample, Fetched]:
        """Draw and return a batch now, after cancelling all batches drawn ahead.

        The draws ahead advanced the sampler. It returns to its earlier position, so that the sequence of batches
        doesn't depend on the prefetch depth.

        Args:
            size: number of transitions.
            keys: the columns to fetch; None for all.
            annotated: whether the sampler's extra entries are wanted.
            stamped: whether the slots' generations are wanted.

        Raises:
            EmptyBufferError: nothing is stored.
            RateLimiterTimeoutError: see `ReplayBuffer.sample`.
            MissingKeyError: one of `keys` isn't stored. Nothing was drawn or cancelled.
            UnsupportedError: `keys` of a storage without columns. Nothing was drawn or cancelled.
        """
        parts, paths, flags = self._parts, None, None
        self._gate.learner_waits = True
        with self._gate.sampling:
            self._gate.learner_waits = False
            storage, sampler = parts.storage, parts.sampler
            if keys is not None:
                paths = storage.columns_of(keys)
                flags = sampler.annotated_paths(storage) if annotated else ()
            if self.prefetcher is not None:
                self.take_back()
            # This is `_draw` without the call, since it runs for every batch.
            drawn = (sampler.draw_served if sampler.takes_priorities else sampler.draw)(
                storage, size, stamped
            )
            ticket = new_tuple(
                PendingSample, (drawn, storage, storage.version, sampler.ran_out, sampler.epoch, None)
            )
            self._batches_sampled += 1
            if self._gate.limiter is not None:
                self._gate.limiter.sampled(drawn.slots.shape[0])
        try:
            fetched = ticket.fetch(paths, flags)
            # The fetch held no lock, so a writer may have overwritten rows meanwhile. The repair holds the lock: no
            # writer can overwrite the new rows before they are fetched. Live views write without a new version, so
            # an exposed storage is always checked.
            exposed = parts.cuts and storage.exposed
            if exposed or storage.version != ticket.version:
                self._gate.learner_waits = True
                with self._gate.lock:
                    self._gate.learner_waits = False
                    if storage.version == ticket.version and parts.sampler.is_unbroken(storage, ticket.drawn):
                        return ticket, fetched
                    only_reference = [fetched]
                    del fetched  # lets `_repaired` free the old records before it fetches new ones
                    repaired = self._repaired(size, ticket, only_reference, stamped, paths, flags)
                    return self._mended(repaired, stamped, paths, flags) if exposed else repaired
        except BaseException:
            self.not_served(ticket)
            raise
        return ticket, fetched

    def ahead(self, prefetcher: Prefetcher, size: int) -> tuple[PendingSample, Fetched]:
        """Draw batches until the queue is full, then take the oldest one and return it, repaired.

        `Sampler.ran_out` is then the value of that batch. Errors as in `now`.
        """
        sampler = self._parts.sampler
        self._gate.learner_waits = True
        with self._gate.sampling:
            self._gate.learner_waits = False
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
            # Without a change, and with no priorities to record at the time of serving, no lock is needed.
            if storage.version == ticket.version and not sampler.takes_priorities and not exposed:
                return ticket, fetched
            self._gate.learner_waits = True
            with self._gate.lock:
                self._gate.learner_waits = False
                if ticket.is_gone:
                    ticket = self._replace(size, drawn, True)
                elif storage.version == ticket.version or torch.equal(
                    storage.generation(drawn.slots), stamps(drawn)
                ):
                    sampler.on_serve(storage, drawn)
                    return self._mended((ticket, fetched), True, ahead=True) if exposed else (ticket, fetched)
                else:
                    ticket = self._redraw(ticket, all_rows(drawn), True, ahead=True)
                # Frees the old records before the new fetch, unless a thread still holds them.
                del coming, fetched
                batch = ticket, ticket.fetch()
                return self._mended(batch, True, ahead=True) if exposed else batch
        except BaseException:
            self.not_served(ticket)
            raise

    def not_served(self, ticket: PendingSample) -> None:
        """Remove a batch that wasn't delivered from the counts and return its permits; its rows stay consumed.

        The permits stay counted if the storage was cleared or loaded since the draw.
        """
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
        """Cancel all batches drawn ahead and return the sampler to its position before them. The caller holds the lock.

        Needed before a change of the sampler, the storage's content or the random sequence, all of which these batches
        were drawn from.
        """
        prefetcher, sampler = self.prefetcher, self._parts.sampler
        if prefetcher is None or not len(prefetcher):
            return
        position = prefetcher.position
        if prefetcher.forked and isinstance(position, SamplerState):
            # The parent process drew these batches. The child keeps the position in the epoch but its own generator,
            # or both processes would draw the same batches.
            position = position._replace(generator=sampler.draw_position().generator)
        self._go_to(position)

    def _go_to(self, position: Any) -> None:
        """Move the sampler to a position (None for no move) and forget all batches drawn ahead."""

        def change() -> None:
            if position is not None:
                self._parts.sampler.adopt(position)
                self._parts.sampler.follow(self._parts.storage)  # a loaded position has no storage version
            if self.prefetcher is not None:
                self.prefetcher.clear()

        to_the_end(change)

    def position(self) -> DrawPosition | None:
        """Return the position of the next draw, for `go_back`; None if draws consume neither records nor permits.

        The call may seed an unused generator of the sampler.
        """
        sampler, prefetcher, limiter = self._parts.sampler, self.prefetcher, self._gate.limiter
        if not sampler.uses_up and limiter is None:
            return None
        with self._gate.lock:
            sampler_position = None
            if sampler.uses_up:
                sampler.random.begin()
                sampler_position = (
                    prefetcher.position
                    if prefetcher is not None and len(prefetcher)
                    else sampler.draw_position()
                )
            return DrawPosition(
                sampler_position, self._batches_sampled, None if limiter is None else limiter.counts.sampled
            )

    def go_back(self, position: DrawPosition, batches: int) -> None:
        """Return to an earlier position, because the last `batches` batches weren't delivered.

        The permits return. The sampler and the count of batches go back only if draws use records up. Does nothing if
        another thread was served batches since that position: its rows can't be drawn again.
        """
        limiter = self._gate.limiter
        with self._gate.lock:
            if self._batches_sampled != position.batches + batches:
                return
            if limiter is not None and position.permits is not None:
                limiter.counts = limiter.counts._replace(sampled=position.permits)
            if position.sampler is not None:
                self._go_to(position.sampler)
                self._batches_sampled = position.batches

    def new_epoch(self) -> None:
        """Cancel the batches drawn ahead, and begin a new epoch with the next batch."""
        with self._gate.lock:
            self.take_back()
            self._parts.sampler.new_epoch()

    def set_seed(self, seed: int) -> None:
        """Cancel the batches drawn ahead, and restart the random sequence from `seed`."""
        with self._gate.lock:
            self.take_back()
            self._parts.sampler.set_seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Cancel the batches drawn ahead, and draw from another generator from now on; see `Parts.set_rng`."""
        with self._gate.lock:
            self.take_back()
            self._parts.set_rng(generator)

    @property
    def write_count(self) -> int:
        """Transitions ever written to the storage, by any means, since the last `empty` that restarted the count."""
        counted = self._parts.storage.rows_written - self._written_before
        return max(counted, 0)  # a direct load of the storage may have lowered `rows_written`

    def empty(self, empty_write_count: bool) -> None:
        """Remove every record; `empty_write_count` also restarts `write_count` and the rate limiter's counts.

        Batches drawn ahead are cancelled.

        Raises:
            UnsupportedError: another buffer writes to the storage, or the writer refuses. Nothing changed.
        """
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
        """Replace the storage, sampler or writer and return the old one (see `Parts.exchange`).

        Batches drawn ahead are cancelled first, except for a new writer. With a new storage, `write_count` is that
        storage's `rows_written`.
        """
        with self._gate.lock:
            if name != "writer":
                self.take_back()
            before = self._parts.exchange(name, part, self._gate, collate_fn)
            if name == "storage":
                self._written_before = 0  # it counted rows of the old storage
            return before

    # The caller of the methods from `_draw` to `_replace` holds the lock.

    def _draw(self, size: int, stamped: bool, ahead: bool = False, position: Any = None) -> PendingSample:
        """Draw a batch for now or, with `ahead`, for later. `position` is the sampler's position before the draw."""
        storage, sampler = self._parts.storage, self._parts.sampler
        served = sampler.takes_priorities and not ahead
        drawn = (sampler.draw_served if served else sampler.draw)(storage, size, stamped)
        return new_tuple(
            PendingSample, (drawn, storage, storage.version, sampler.ran_out, sampler.epoch, position)
        )

    def _draw_ahead(self, prefetcher: Prefetcher, size: int) -> None:
        """Draw batches until the queue is full; a failed draw is undone, and its error is raised."""
        sampler = self._parts.sampler
        prefetcher.forget_gone()
        # Seeds an unused generator now: a return to an earlier position must restore that seed.
        sampler.random.begin()
        while prefetcher.wants_more:
            position, drawn = sampler.draw_position(), len(prefetcher)
            try:
                prefetcher.put(self._draw(size, True, True, position))
            except BaseException:
                if len(prefetcher) == drawn:
                    sampler.adopt(position)
                raise

    def _repaired(
        self,
        size: int,
        ticket: PendingSample,
        only_reference: list[Fetched],
        stamped: bool,
        paths: tuple[Path, ...] | None,
        flags: tuple[Path, ...] | None,
    ) -> tuple[PendingSample, Fetched]:
        """Draw and fetch the rows of a batch again that were overwritten since its draw.

        `only_reference` contains the only reference to the records. So this method can free them before a full fetch.
        """
        fetched = only_reference.pop()
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
        del fetched  # frees the old records before the new fetch
        return ticket, ticket.fetch(paths, flags)

    def _mended(
        self,
        batch: tuple[PendingSample, Fetched],
        stamped: bool,
        paths: tuple[Path, ...] | None = None,
        flags: tuple[Path, ...] | None = None,
        ahead: bool = False,
    ) -> tuple[PendingSample, Fetched]:
        """Draw and fetch again until no trajectory ends inside a slice (see `Sampler.mended`).

        Live views write end flags without a new version, so such a batch may have ends that the sampler didn't know.
        """
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
        """Draw the stale rows again. The caller holds the lock until they are fetched, against overwrites.

        Args:
            ticket: the batch.
            stale: mask of the stale rows, ``(n,)`` bool.
            stamped: whether generations are wanted.
            ahead: whether the batch was drawn ahead. Later batches may then be queued, so `ran_out` stays unchanged.
        """
        storage, sampler = ticket.storage, self._parts.sampler
        self._rows_redrawn += int(stale.sum())
        drawn = sampler.redraw(storage, ticket.drawn, stale, stamped)
        sampler.on_serve(storage, drawn)
        if ahead:
            sampler.ran_out = ticket.ran_out
        return ticket._replace(drawn=drawn, ran_out=sampler.ran_out, epoch=sampler.epoch)

    def _replace(self, size: int, drawn: Draw, stamped: bool) -> PendingSample:
        """Draw a whole batch again, because the buffer was emptied or loaded since its draw."""
        if not len(self._parts.storage):
            raise EmptyBufferError(
                "sample: the buffer was emptied while a batch was fetched from it; extend it before the next sample()"
            )
        self._rows_redrawn += drawn.slots.shape[0]
        return self._draw(size, stamped)

    def stats(self) -> BufferStats:
        """Return the present counters of the buffer and its storage."""
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
                storage.stored_apart,
            )

    def _counts(self) -> RateCounts | None:
        return None if self._gate.limiter is None else self._gate.limiter.snapshot()

    def snapshot(self) -> DrawsState:
        """Return the parts' state and the batches drawn ahead. See `Storage.snapshot` for the time under the lock."""
        prefetcher = self.prefetcher
        with self._gate.lock:
            tickets = None
            if prefetcher is not None:
                prefetcher.forget_gone()
            parts = self._parts.snapshot()
            if prefetcher is not None:
                tickets = tuple(ticket.value() for ticket in prefetcher)
            before = parts.storage.rows_written - self.write_count
            return DrawsState(parts, tickets, self._counts(), before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and private tensors."""
        return self._plain(self.snapshot(), live=False)

    def checkpoint_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, whose records may be copied later, while they are saved."""
        return self._plain(self.snapshot(), live=True)

    def _plain(self, value: DrawsState, live: bool) -> dict[str, Any]:
        state = self._parts.plain(value.parts, live)
        if value.written_before:
            state["_written_before"] = value.written_before
        if value.counts is not None:
            state["_rate_limiter"] = plain(value.counts)
        if value.tickets is not None:
            copies: dict[int, torch.Tensor] = {}  # the positions of several draws share large tensors
            state["_prefetched"] = [ticket.plain(copies) for ticket in value.tickets]
        return state

    def parse(self, state: Any) -> DrawsState:
        """Return the value of a saved state. The buffer claims its storage, because a load writes to it.

        Raises:
            SchemaError: the state doesn't fit this buffer.
            UnsupportedError: another buffer writes to the storage.
            CapacityError: see `Parts.parse`.
        """
        reader = StateReader(state, "a ReplayBuffer")
        self._parts.claim()  # a load writes to the storage
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
                f"load_state_dict: the state holds {len(ahead)} batches drawn ahead, which a storage of another size "
                "can't restore after the ring has wrapped around; build the storage with the same max_size"
            )
        if self.prefetcher is None:
            raise SchemaError(
                f"load_state_dict: the state holds {len(ahead)} batches drawn ahead; build the buffer with "
                "prefetch, as the saved one"
            )
        parse_position, rows = self._parts.sampler.parse_draw_position, parts.storage.rows
        tickets = tuple(PendingState.read(saved, rows, parse_position) for saved in ahead)
        return DrawsState(parts, tickets, counts, before)

    def adopt(self, value: DrawsState) -> None:
        """Take over a value that `parse` returned."""
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
        """Bind the batches drawn ahead to this copy's storage, after a copy or unpickling."""
        storage = self._parts.storage
        if self.prefetcher is not None:
            self.prefetcher.join(storage.version)
        with self._gate.lock:
            self._parts.sampler.follow(storage)


def stamps(drawn: Draw) -> torch.Tensor:
    """Return the generations of a draw, ``(n,)`` int64; the draw must have them."""
    assert drawn.generation is not None
    return drawn.generation
