"""Units that come with hindsight goals: goals that a trajectory achieved, drawn for its transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from gleanrl._arrays.results import Draw
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key
from gleanrl._state.rng import RandomSource
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.episode_index import EpisodeTable, later, locate
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.transitions import Unit, UnitSampler, redrawn_masked
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import EmptyBufferError, MissingKeyError, UnsupportedError

GOAL, CHOSEN, STEPS = "_goal", "_relabelled", "_goal_steps"
"""Keys of a draw's entries, in this order.

The goal of each row. Which rows get it, ``(n,)`` bool. The number of steps from a row to the step that achieved its
goal, ``(n,)`` int64, negative for earlier steps.
"""


class HindsightStrategy(str, Enum):
    """Which achieved goal replaces the desired one."""

    FUTURE = "future"
    """A goal that the same trajectory achieved at the transition or later."""
    FINAL = "final"
    """The goal of the last stored step of the same trajectory."""
    EPISODE = "episode"
    """Any goal that the same trajectory achieved."""
    RANDOM = "random"
    """Any achieved goal that is stored."""


@dataclass(frozen=True)
class HindsightRule:
    """How many rows of a batch get which goals."""

    strategy: HindsightStrategy
    ratio: float
    """Fraction of a batch's rows that get other goals; their number is rounded."""
    achieved: Path
    """Column of the achieved goals."""


class Hindsight(Unit):
    """A unit around another unit: each draw gives some of its rows the goals of other rows, chosen anew each time.

    Goals are read at the draw, under the buffer's lock. So a goal belongs to the row's own trajectory, even if a writer
    overwrites that trajectory before the record is fetched. (`HindsightStrategy.RANDOM` takes goals of any trajectory.)

    Args:
        unit: kind of unit to draw.
        rule: which goals to draw.
        table: the trajectories.
    """

    serves_more = True

    def __init__(self, unit: Unit, rule: HindsightRule, table: EpisodeTable) -> None:
        self.unit, self.rule, self.table = unit, rule, table
        self.by_generation = unit.by_generation

    def follow(self, storage: Storage) -> None:
        """Keep the trajectories up to date; a missing column raises at the next draw, not here."""
        self.unit.follow(storage)
        self.table.try_sync(storage)

    def name(self, length: int) -> str:
        """Return the inner unit's name."""
        return self.unit.name(length)

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the inner unit's sizes."""
        return self.unit.sizes(batch_size)

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw units uniformly, with goals."""
        return self._with_goals(storage, self.unit.uniform(storage, batch_size, random), random)

    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Draw the stale rows again, and goals for all rows."""
        return self._with_goals(storage, self.unit.again(storage, draw, stale, random), random)

    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw units by priority, with goals."""
        drawn = self._with_goals(storage, self.unit.weighted(storage, batch_size, priorities, random), random)
        return priorities.remember(storage, drawn) if served else drawn

    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return the inner unit's items."""
        return self.unit.items(storage, length)

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return which of the inner unit's items can still be served."""
        return self.unit.living(storage, items, generations, length)

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows of an epoch's items, with goals."""
        return self._with_goals(storage, self.unit.serve(storage, items, batch_size, length, random), random)

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside a unit, or between a row and the row of its goal."""
        steps = draw.extras.get(STEPS)
        if steps is not None and bool(steps.any()) and not self.table.joins(storage, draw.slots, steps):
            return False
        return self.unit.is_unbroken(storage, draw)

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that are delivered with each row."""
        return self.unit.annotate(draw, records)

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the inner unit's marks."""
        return self.unit.marks(draw, records)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that the inner unit reads."""
        return self.unit.annotated_paths(storage)

    def none_left(self, length: int) -> EmptyBufferError:
        """Return the inner unit's error."""
        return self.unit.none_left(length)

    def _with_goals(self, storage: Storage, draw: Draw, random: RandomSource) -> Draw:
        slots, rule = draw.slots, self.rule
        chosen = random.permutation(slots.shape[0])[: round(rule.ratio * slots.shape[0])]
        mark = torch.zeros(slots.shape, dtype=torch.bool, device="cpu")
        mark[chosen] = True
        sources, steps = slots.clone(), torch.zeros_like(slots)
        sources[chosen], steps[chosen] = self._sources(storage, slots[chosen], random)
        goals = {GOAL: _column(storage, rule.achieved)[sources], CHOSEN: mark, STEPS: steps}
        return draw._replace(extras={**draw.extras, **goals})

    def _sources(
        self, storage: Storage, slots: torch.Tensor, random: RandomSource
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots whose goals the given slots get, and the steps of the trajectory in between.

        Both are ``(n,)`` int64. The steps are 0 for goals of any trajectory (`HindsightStrategy.RANDOM`).
        """
        strategy, count = self.rule.strategy, slots.shape[0]
        if strategy is HindsightStrategy.RANDOM:
            size = len(storage)
            drawn = redrawn_masked(storage, random.integers(size, count), lambda n: random.integers(size, n))
            return drawn, torch.zeros_like(drawn)
        table = self.table.of(storage)
        before, after = locate(table, slots)  # `after` counts the slot itself
        if strategy is HindsightStrategy.FINAL:
            return later(table, slots, after - 1), after - 1
        if strategy is HindsightStrategy.FUTURE:
            before = torch.zeros_like(before)
        choices = before + after
        steps = (random.uniforms(count) * choices).long().minimum(choices - 1) - before
        sources = later(table, slots, steps)
        # A masked row has no goal: the transition gets the goal that it achieved itself.
        masked = storage.masked(sources)
        if masked is None:
            return sources, steps
        return torch.where(masked, slots, sources), torch.where(masked, 0, steps)


def _column(storage: Storage, path: Path) -> torch.Tensor:
    if not isinstance(storage, TensorStorage):
        raise UnsupportedError(
            f"goals are read from a column, a {type(storage).__name__} holds single objects; use LazyTensorStorage"
        )
    schema = storage.format.schema
    if path not in schema:
        raise MissingKeyError(
            f"achieved_goal_key: {as_key(path)!r} isn't stored; there are {[as_key(p) for p in schema.paths]}"
        )
    return storage.column(path)


def with_hindsight(sampler: Sampler, rule: HindsightRule, table: EpisodeTable) -> Sampler:
    """Make a sampler draw goals with its units from now on, by this rule alone, and return it.

    Raises:
        UnsupportedError: the sampler doesn't draw units.
    """
    if not isinstance(sampler, UnitSampler):
        raise UnsupportedError(
            f"sampler: hindsight goals need RandomSampler, SamplerWithoutReplacement, PrioritizedSampler or a sampler "
            f"of slices, got a {type(sampler).__name__}"
        )
    sampler.unit = Hindsight(_plain(sampler.unit), rule, table)
    return sampler


def without_hindsight(sampler: Sampler) -> Sampler:
    """Make a sampler draw its units without goals from now on, and return it."""
    if isinstance(sampler, UnitSampler):
        sampler.unit = _plain(sampler.unit)
    return sampler


def _plain(unit: Unit) -> Unit:
    return unit.unit if isinstance(unit, Hindsight) else unit
