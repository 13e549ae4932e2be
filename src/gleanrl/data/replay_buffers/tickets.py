"""Draws that wait for their records: a draw, what its storage looked like then, and both as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import Version, same_generations
from gleanrl.errors import SchemaError
from gleanrl.records import Draw
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
    mark: Any = None
    """The sampler's place before the draw, if it may have to be taken back."""

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
            return Fetched(records, storage.fetch(slots, flags) if flags else None)
        except IndexError:
            if not self.is_gone:
                raise
            return Fetched(None, None)

    def state(self) -> dict[str, Any]:
        """Return the draw as plain values; rows that were overwritten since are marked, their draw is void."""
        drawn, storage = self.drawn, self.storage
        now = storage.generation(drawn.slots)
        assert drawn.generation is not None
        return {
            "slots": drawn.slots.clone(),
            "extras": [(key, value.clone()) for key, value in drawn.extras.items()],
            "last": None if drawn.last is None else drawn.last.clone(),
            "asked": drawn.asked,
            "epoch": drawn.epoch,
            "origin": _living_origin(drawn.origin, storage),
            "fresh": now == drawn.generation,
            "ran_out": self.ran_out,
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any], storage: Storage) -> Ticket:
        """Return the draw that `state` made plain, of a storage that holds what it was drawn from."""
        slots, tails = saved["slots"].clone(), saved["origin"]
        extras = {key: value.clone() for key, value in saved["extras"]}
        last = None if saved["last"] is None else saved["last"].clone()
        origin = None if tails is None else torch.stack([tails, storage.generation(tails)])
        generation = torch.where(saved["fresh"], storage.generation(slots), -1)
        drawn = Draw(slots, extras, generation, last, saved["asked"], origin, saved["epoch"])
        # Before every change: whether its rows are still there shows by generations.
        return cls(drawn, storage, storage.version._replace(changes=-1), saved["ran_out"], drawn.epoch)


def check_states(ahead: Any, storage_state: Mapping[str, Any]) -> None:
    """Raise `SchemaError` unless `ahead` are draws as `Ticket.state` returns them, of such a storage."""
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
        and type(saved["epoch"]) is int
    )


def _are_slots(found: torch.Tensor, rows: int) -> bool:
    inside = (found >= 0) & (found < rows)
    return found.dtype == torch.int64 and found.ndim == 1 and bool(inside.all())


def _living_origin(origin: torch.Tensor | None, storage: Storage) -> torch.Tensor | None:
    """Return those slots of an origin whose records are still there."""
    return None if origin is None else origin[0, same_generations(storage.generation(origin[0]), origin[1])]
