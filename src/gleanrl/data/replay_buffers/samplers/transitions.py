"""Uniform draws with replacement.

Rows that are no steps, which a storage's mask tells from those that are: they are never drawn.

What a batch is made of, single transitions or slices of trajectories, and samplers that draw it.
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

MOST_TRIES = 20  # draws of masked rows in a row, before a look whether there are others


def check_any_step(storage: Storage) -> None:
    """Raise `EmptyBufferError` if every stored row is masked out."""
    masked = storage.masked(torch.arange(len(storage), device="cpu"))
    if masked is not None and masked.all():
        raise EmptyBufferError("can't sample: every stored row is masked out, none is a step")


def redrawn_masked(
    storage: Storage, slots: torch.Tensor, draw: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """Return `slots` with those that hold no steps replaced by what `draw` gives, so many at a time."""
    tries = 0
    while (masked := storage.masked(slots)) is not None and masked.any():
        if tries == MOST_TRIES:
            check_any_step(storage)
        slots = slots.masked_scatter(masked, draw(int(masked.sum())))
        tries += 1
    return slots


class Unit(ABC):
    """What a sampler draws; how it chooses among them is the sampler's business. Not thread-safe: the buffer locks."""

    by_generation: bool
    """Whether an item of an epoch is gone once its slot was written again."""

    serves_more = False
    """Whether `serve` adds something to the rows of single slots, so that each draw of an epoch has to pass it."""

    cuts = True
    """Whether units depend on where trajectories end (see `Sampler.cuts`)."""

    follows = True
    """Whether anything is derived from what is stored, so that `follow` does something."""

    @abstractmethod
    def follow(self, storage: Storage) -> None:
        """Come in step with a storage that changed; whatever is missing is an error of the draw."""

    @abstractmethod
    def name(self, length: int) -> str:
        """Return what units of `length` steps are drawn from, in the plural."""

    @abstractmethod
    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return how many units a batch has, and how many steps each."""

    @abstractmethod
    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw units, each with the same probability, with replacement."""

    @abstractmethod
    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Return a uniform draw with other units where rows are `stale`, bool ``(n,)``."""

    @abstractmethod
    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw units in proportion to the priorities of their first steps.

        Args:
            storage: what to draw from.
            batch_size: transitions.
            priorities: of the storage.
            random: the generator.
            served: whether the rows are remembered as drawn (see `PriorityTable.remember`), generations with them.
        """

    @abstractmethod
    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return what an epoch covers, a slot for each unit, ``(n,)`` int64; None for every slot stored."""

    @abstractmethod
    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return which items of an epoch can still be served, ``(n,)`` bool; None for all."""

    @abstractmethod
    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows of living items of an epoch."""

    def is_whole(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside of the units of a draw (see `Sampler.is_whole`)."""
        return True

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row (see `Sampler.annotate`)."""
        return draw.extras

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries by which transforms tell units apart (see `Sampler.marks`)."""
        return {}

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` look at."""
        return ()

    @abstractmethod
    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage without such units."""


class Transitions(Unit):
    """Single rows. One that was overwritten during an epoch is served with what it holds, if that is a step."""

    by_generation = False
    cuts = follows = False

    def follow(self, storage: Storage) -> None:
        """Nothing is derived from what is stored."""

    def name(self, length: int) -> str:
        """Return "transitions"."""
        return "transitions"

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the batch size, and 1."""
        return batch_size, 1

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw rows that are steps."""
        size = storage.num_steps * storage.rows_per_step  # its length, without a call for every batch
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
        """Draw rows in proportion, with their importance weights."""
        slots, weight, generation = priorities.draw(storage, batch_size, random.for_core(batch_size), served)
        extras = {"_weight": weight, "priority_weight": weight}
        return new_tuple(Draw, (slots, extras, generation, None, None, None, 0))

    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return the rows that are steps, None for all."""
        if not storage.has_mask:
            return None
        check_any_step(storage)
        slots = torch.arange(len(storage), device="cpu")
        masked = storage.masked(slots)
        return slots if masked is None else slots[~masked]

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return which rows are steps."""
        masked = storage.masked(items)
        return None if masked is None else ~masked

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows."""
        return Draw(items)

    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage without a step."""
        return EmptyBufferError("can't sample: every stored row is masked out, none is a step")


class UnitSampler(Sampler):
    """Draws units, each with the same probability, with replacement; the base of those that choose otherwise.

    Args:
        unit: what is drawn.
        seed: see `Sampler`.
    """

    def __init__(self, unit: Unit, seed: int | None = None) -> None:
        super().__init__(seed)
        self.unit = unit

    @property
    def follows(self) -> bool:
        """Whether the units, or the way to choose among them, follow the storage."""
        return self.unit.follows or bool(overridden(self, "follow", of=UnitSampler))

    @property
    def weighs(self) -> bool:
        """Whether a user's class may add weights; units have none to add."""
        return self.takes_priorities or bool(
            overridden(self, "sample", "draw", "_draw", "annotate", of=UnitSampler)
        )

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        """Whether the units depend on where trajectories end."""
        return self.unit.cuts

    def is_whole(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside of the units of a draw."""
        return self.unit.is_whole(storage, draw)

    def follow(self, storage: Storage) -> None:
        """Keep what is known of the units up to date."""
        self.unit.follow(storage)

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row."""
        return draw.extras if draw.last is None else self.unit.annotate(draw, records)

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries by which transforms tell units apart."""
        return self.unit.marks(draw, records)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` look at."""
        return self.unit.annotated_paths(storage)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        return self.unit.uniform(storage, batch_size, self.random)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        return self.unit.again(storage, draw, stale, self.random)


class RandomSampler(UnitSampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(Transitions(), seed)
