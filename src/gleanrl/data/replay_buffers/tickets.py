"""Draws that wait for their records: a draw, what its storage looked like then, and both as plain values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key
from gleanrl.data.replay_buffers.versions import Version, same_generations
from gleanrl.records import Draw, new_tuple
from gleanrl.state import StateReader, plain
from gleanrl.tree import Path


class Fetched(NamedTuple):
    """The records of a draw."""

    records: Any
    """As the storage returns them."""
    flags: Any
    """The columns that the sampler's entries are made of, where the records may lack them; None otherwise."""


class Ticket(NamedTuple):
    """A draw, and what its storage looked like at that moment."""

    drawn: Draw
    storage: Storage
    version: Version
    """The storage's version at the draw."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    epoch: int = 0
    """`Sampler.epoch` after the draw."""
    place: Any = None
    """The sampler's place before the draw (`Sampler.place`), if it may have to be taken back."""

    @property
    def is_gone(self) -> bool:
        """Whether the storage was cleared or loaded since the draw."""
        return self.storage.version.content != self.version.content

    def fetch(self, paths: tuple[Path, ...] | None = None, flags: tuple[Path, ...] | None = None) -> Fetched:
        """Return the records, None if the storage forgot them meanwhile; takes no lock.

        Args:
            paths: their columns; None for all.
            flags: further columns to fetch beside them.
        """
        storage, slots = self.storage, self.drawn.slots
        try:
            records = storage.fetch(slots, paths)
            return new_tuple(Fetched, (records, storage.fetch(slots, flags) if flags else None))
        except IndexError:
            if not self.is_gone:
                raise
            return Fetched(None, None)

    def renewed(self, before: Ticket, stale: torch.Tensor) -> torch.Tensor | None:
        """Return which rows have to be fetched again, ``(n,)`` bool; None if it's less work to fetch all of them.

        Args:
            before: the draw that this one has come from.
            stale: which of its rows were overwritten, ``(n,)`` bool; no others were.
        """
        slots, old = self.drawn.slots, before.drawn.slots
        if slots.shape != old.shape:
            return None
        renewed = stale | (slots != old)
        return renewed if 2 * int(renewed.sum()) <= len(slots) else None

    def fetch_again(
        self,
        renewed: torch.Tensor,
        fetched: Fetched,
        paths: tuple[Path, ...] | None = None,
        flags: tuple[Path, ...] | None = None,
    ) -> Fetched:
        """Return what `fetch` does, where all but the renewed rows are as they were fetched; writes into these."""
        storage, slots = self.storage, self.drawn.slots
        records = storage.fetch_again(fetched.records, slots, renewed, paths)
        return Fetched(records, storage.fetch_again(fetched.flags, slots, renewed, flags) if flags else None)

    def value(self) -> TicketState:
        """Return the draw as plain values; rows that were overwritten since are marked, their draw is void."""
        drawn, storage = self.drawn, self.storage
        now, origin = storage.generation(drawn.slots), drawn.origin
        assert drawn.generation is not None
        if origin is not None:  # those whose records are still there
            origin = origin[0, same_generations(storage.generation(origin[0]), origin[1])]
        fresh = now == drawn.generation
        extras = tuple(drawn.extras.items())
        return TicketState(
            drawn.slots, extras, drawn.last, drawn.asked, drawn.epoch, origin, fresh, self.ran_out, self.place
        )


class TicketState(NamedTuple):
    """A draw that wasn't handed out yet."""

    slots: torch.Tensor
    """``(n,)`` int64."""
    extras: tuple[tuple[Any, torch.Tensor], ...]
    """What else comes with each row, ``(n, ...)``, by key."""
    last: torch.Tensor | None
    """See `Draw.last`."""
    asked: int | None
    """See `Draw.asked`."""
    epoch: int
    """See `Draw.epoch`."""
    origin: torch.Tensor | None
    """Slots of `Draw.origin` whose records are still there, ``(m,)`` int64."""
    fresh: torch.Tensor
    """Which rows weren't overwritten since the draw, ``(n,)`` bool."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    place: Any
    """The sampler's place before the draw; None if it isn't known."""

    def plain(self, copies: dict[int, torch.Tensor]) -> dict[str, Any]:
        """Return plain values and tensors of their own; see `gleanrl.state.plain`."""
        state: dict[str, Any] = plain(self._replace(extras=()), copies)
        return {**state, "extras": [(key, value.clone()) for key, value in self.extras]}

    @classmethod
    def read(cls, reader: StateReader, rows: int, parse_place: Callable[[Any], Any]) -> TicketState:
        """Return what `plain` made plain, of a storage with so many rows; `SchemaError` for anything else."""
        slots, origin = (
            _slots(reader, "slots", rows),
            reader.optional("origin", partial(_slots, reader, rows=rows)),
        )
        count = slots.shape[0]
        flags = partial(reader.tensor, dtype=torch.bool, shape=(count,))
        return cls(
            slots,
            _extras(reader, count),
            reader.optional("last", flags),
            reader.optional("asked", partial(reader.integer, least=1)),
            reader.integer("epoch"),
            origin,
            flags("fresh"),
            reader.flag("ran_out"),
            reader.optional("place", lambda name: parse_place(reader.get(name))),
        )

    def ticket(self, storage: Storage) -> Ticket:
        """Return the draw again, of a storage that holds what it was drawn from."""
        slots, tails = self.slots, self.origin
        origin = None if tails is None else torch.stack([tails, storage.generation(tails)])
        generation = torch.where(self.fresh, storage.generation(slots), -1)
        drawn = Draw(slots, dict(self.extras), generation, self.last, self.asked, origin, self.epoch)
        # Before every change: whether its rows are still there shows by generations.
        version = storage.version._replace(changes=-1)
        return Ticket(drawn, storage, version, self.ran_out, self.epoch, self.place)


def _slots(reader: StateReader, name: str, rows: int) -> torch.Tensor:
    slots = reader.tensor(name, torch.int64, (None,))
    if not bool(((slots >= 0) & (slots < rows)).all()):
        raise reader.wrong(name, f"slots in [0, {rows})")
    return slots


def _extras(reader: StateReader, count: int) -> tuple[tuple[Any, torch.Tensor], ...]:
    found = []
    pairs = reader.get("extras")
    for pair in pairs if isinstance(pairs, (list, tuple)) else (None,):
        sound = isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)
        if not sound or pair[1].shape[:1] != (count,) or not is_key(pair[0]):
            raise reader.wrong("extras", f"pairs of a key and a tensor ({count}, ...)")
        found.append((pair[0], pair[1].clone()))
    return tuple(found)
