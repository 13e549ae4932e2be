"""Units that batches are made of, and uniform draws of them with replacement.

A `Unit` is one transition or one slice of a trajectory. To add a kind of unit, derive from `Unit`. Rows that a
storage's mask excludes (no steps of an environment) are never drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._state.rng import RandomSource
from gleanrl._util import overridden
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import EmptyBufferError

# Draws in a row that may hit masked rows before a pass over the whole mask, which costs O(rows), looks for others.
MOST_TRIES = 20


def check_any_step(storage: Storage) -> None:
    """Raise `EmptyBufferError` if every stored row is masked out."""
    masked = storage.masked(torch.arange(len(storage), device="cpu"))
    if masked is not None and masked.all():
        raise EmptyBufferError("can't sample: every stored row is masked out, none is a step")


def redrawn(
    slots: torch.Tensor,
    excluded: Callable[[torch.Tensor], torch.Tensor | None],
    draw: Callable[[int], torch.Tensor],
    check_any: Callable[[], object],
) -> torch.Tensor:
    """Return `slots` with excluded rows replaced.

    Args:
        slots: drawn slots, ``(n,)`` int64.
        excluded: returns which slots may not be drawn, ``(n,)`` bool; None for none.
        draw: returns new slots, ``(n,)`` int64, for a number `n`.
        check_any: called once after `MOST_TRIES` draws; it raises if all rows are excluded.
    """
    tries = 0
    while (found := excluded(slots)) is not None and found.any():
        if tries == MOST_TRIES:
            check_any()
        slots = slots.masked_scatter(found, draw(int(found.sum())))
        tries += 1
    return slots


def redrawn_masked(
    storage: Storage, slots: torch.Tensor, draw: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """Return `slots` with masked rows replaced; `draw(n)` returns n new slots.

    Raises:
        EmptyBufferError: every stored row is masked out.
    """
    return redrawn(slots, storage.masked, draw, lambda: check_any_step(storage))


class Unit(ABC):
    """A kind of thing that samplers draw; the sampler decides how to choose among units.

    Not thread-safe: the buffer locks.
    """

    by_generation: bool
    """Whether an item of an epoch is lost once its slot is written again."""

    serves_more = False
    """Whether `serve` adds entries to single slots, so that each draw of an epoch has to call it."""

    cuts = True
    """Whether units depend on where trajectories end (see `Sampler.cuts`)."""

    follows = True
    """Whether the unit derives data from the stored records, so that `follow` has an effect."""

    @abstractmethod
    def follow(self, storage: Storage) -> None:
        """Update data that the unit derives from a changed storage.

        A missing column raises at the next draw, not here.
        """

    @abstractmethod
    def name(self, length: int) -> str:
        """Return the plural noun that error messages use for units of `length` steps."""

    @abstractmethod
    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of units in a batch, and the steps of each."""

    @abstractmethod
    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw units, each with the same probability, with replacement; raise `EmptyBufferError` if there are none."""

    @abstractmethod
    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Return a uniform draw with other units where rows are `stale`, ``(n,)`` bool."""

    @abstractmethod
    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw units in proportion to the priorities of their first steps, with weights as entries.

        Args:
            storage: storage to draw from.
            batch_size: transitions to draw.
            priorities: the storage's priorities.
            random: generator to draw with.
            served: whether to remember the rows as drawn, with their generations (see `PriorityTable.remember`).
        """

    @abstractmethod
    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return the items of a new epoch, one slot for each unit, ``(n,)`` int64; None for every stored slot."""

    @abstractmethod
    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return which items of an epoch can still be served, ``(n,)`` bool; None for all."""

    @abstractmethod
    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows of items of an epoch, which are all living. It may draw from `random`, for example goals."""

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside a drawn unit (see `Sampler.is_unbroken`)."""
        return True

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that are delivered with each row (see `Sampler.annotate`)."""
        return draw.extras

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that show transforms where units begin and end (see `Sampler.marks`)."""
        return {}

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` read."""
        return ()

    @abstractmethod
    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage that holds no such unit."""


class Transitions(Unit):
    """Single rows.

    A row that was overwritten during an epoch is served with its new record, unless that is masked out.
    """

    by_generation = False
    cuts = follows = False

    def follow(self, storage: Storage) -> None:
        """Do nothing: transitions need no derived data."""

    def name(self, length: int) -> str:
        """Return "transitions"."""
        return "transitions"

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the batch size, and 1."""
        return batch_size, 1

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw rows that aren't masked out."""
        # This is `len(storage)` without the call, since it runs for every batch.
        size = storage.num_steps * storage.rows_per_step
        drawn = random.integers(size, batch_size)
        if storage.has_mask:
            drawn = redrawn_masked(storage, drawn, lambda more: random.integers(size, more))
        return Draw(drawn)

    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Draw the stale rows again."""
        return Draw(draw.slots.masked_scatter(stale, self.uniform(storage, int(stale.sum()), random).slots))

    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw rows in proportion to their priorities, with their importance weights."""
        slots, weight, generation = priorities.draw(storage, batch_size, random.for_core(batch_size), served)
        extras = {"_weight": weight, "priority_weight": weight}
        return new_tuple(Draw, (slots, extras, generation, None, None, None, 0))

    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return the rows that aren't masked out; None for all."""
        if not storage.has_mask:
            return None
        check_any_step(storage)
        slots = torch.arange(len(storage), device="cpu")
        masked = storage.masked(slots)
        return slots if masked is None else slots[~masked]

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return which rows aren't masked out; None for all."""
        masked = storage.masked(items)
        return None if masked is None else ~masked

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows."""
        return Draw(items)

    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage whose rows are all masked out."""
        return EmptyBufferError("can't sample: every stored row is masked out, none is a step")


class UnitSampler(Sampler):
    """Draws units uniformly, with replacement; subclasses choose among units in other ways.

    Args:
        unit: kind of unit to draw.
        seed: see `Sampler`.
    """

    def __init__(self, unit: Unit, seed: int | None = None) -> None:
        super().__init__(seed)
        self.unit = unit

    @property
    def follows(self) -> bool:
        """Whether the unit or the sampler's class derives data from the storage."""
        return self.unit.follows or bool(overridden(self, "follow", of=UnitSampler))

    @property
    def weighs(self) -> bool:
        """Whether draws may include importance weights: by priorities, or added by a user's class."""
        return self.takes_priorities or bool(
            overridden(self, "sample", "draw", "_draw", "annotate", of=UnitSampler)
        )

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        """Whether the units depend on where trajectories end."""
        return self.unit.cuts

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside a drawn unit."""
        return self.unit.is_unbroken(storage, draw)

    def follow(self, storage: Storage) -> None:
        """Update data that the unit derives from the storage."""
        self.unit.follow(storage)

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that are delivered with each row."""
        return draw.extras if draw.last is None else self.unit.annotate(draw, records)

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that show transforms where units begin and end."""
        return self.unit.marks(draw, records)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` read."""
        return self.unit.annotated_paths(storage)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        return self.unit.uniform(storage, batch_size, self.random)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        return self.unit.again(storage, draw, stale, self.random)


class RandomSampler(UnitSampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.

    Raises:
        EmptyBufferError: at a draw, every stored record is masked out.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(Transitions(), seed)
