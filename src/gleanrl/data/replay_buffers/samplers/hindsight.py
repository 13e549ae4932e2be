"""Goals in hindsight: what a trajectory achieved, drawn beside its transitions."""

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
from gleanrl.data.replay_buffers.samplers.episode_index import EpisodeTable, expanded, later, locate
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.transitions import Unit, UnitSampler, redrawn_masked
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import EmptyBufferError, MissingKeyError, UnsupportedError

GOAL, CHOSEN, STEPS = "_goal", "_relabelled", "_goal_steps"
"""Where a batch has the goal of each row, which rows get it, ``(n,)`` bool, and how many steps of the trajectory later
(earlier, below 0) it was achieved, ``(n,)`` int64."""


class HindsightStrategy(str, Enum):
    """Which achieved goal takes the place of the desired one."""

    FUTURE = "future"
    """One of the same trajectory, from the transition's own on."""
    FINAL = "final"
    """The last one of the same trajectory, as far as that is stored."""
    EPISODE = "episode"
    """Any one of the same trajectory."""
    RANDOM = "random"
    """Any one that is stored."""


@dataclass(frozen=True)
class HindsightRule:
    """What is drawn beside each batch."""

    strategy: HindsightStrategy
    ratio: float
    """The part of a batch that gets other goals."""
    achieved: Path
    """The column that holds what was achieved."""


class Hindsight(Unit):
    """A unit whose draws come with goals: of some rows, chosen anew at each draw, those of other rows.

    Goals are read at the draw, under the buffer's lock, so that they are of the trajectory that the row is of, whatever
    is written until its record is fetched.

    Args:
        unit: what is drawn.
        rule: which goals.
        table: the trajectories.
    """

    serves_more = True

    def __init__(self, unit: Unit, rule: HindsightRule, table: EpisodeTable) -> None:
        self.unit, self.rule, self.table = unit, rule, table
        self.by_generation = unit.by_generation

    def follow(self, storage: Storage) -> None:
        """Keep the trajectories up to date; whatever is missing is an error of the draw."""
        self.unit.follow(storage)
        self.table.try_sync(storage)

    def name(self, length: int) -> str:
        """Return what the unit says."""
        return self.unit.name(length)

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return what the unit says."""
        return self.unit.sizes(batch_size)

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw units, and goals beside them."""
        return self._with_goals(storage, self.unit.uniform(storage, batch_size, random), random)

    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Draw the stale rows again, and goals of all rows."""
        return self._with_goals(storage, self.unit.again(storage, draw, stale, random), random)

    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw units by priorities, and goals beside them."""
        drawn = self._with_goals(storage, self.unit.weighted(storage, batch_size, priorities, random), random)
        return priorities.remember(storage, drawn) if served else drawn

    def items(self, storage: Storage, length: int) -> torch.Tensor | None:
        """Return what the unit says."""
        return self.unit.items(storage, length)

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """Return what the unit says."""
        return self.unit.living(storage, items, generations, length)

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows of an epoch's items, and goals beside them."""
        return self._with_goals(storage, self.unit.serve(storage, items, batch_size, length, random), random)

    def is_whole(self, storage: Storage, draw: Draw) -> bool:
        """Return whether units are whole, and no trajectory ends between a row and the one that its goal is of."""
        steps = draw.extras.get(STEPS)
        if steps is not None and bool(steps.any()):
            table = self.table.of(storage)
            first, lengths = later(table, draw.slots, steps.clamp(max=0)), steps.abs() + 1
            path = expanded(table, first, lengths)
            if not self.table.holds(storage, path.slots, ~path.last):
                return False
        return self.unit.is_whole(storage, draw)

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row."""
        return self.unit.annotate(draw, records)

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what the unit says."""
        return self.unit.marks(draw, records)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return what the unit says."""
        return self.unit.annotated_paths(storage)

    def none_left(self, length: int) -> EmptyBufferError:
        """Return what the unit says."""
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
        """Return the slots whose goals some slots get, and how many steps of the trajectory lie between.

        ``(n,)`` int64 each; no step lies between rows of any trajectories.
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
        # A row that is no step has no goal either: the transition keeps what itself achieved.
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
    """Have a sampler draw goals beside its units from now on, and return it.

    Raises:
        UnsupportedError: a sampler that isn't a way to draw units.
    """
    if not isinstance(sampler, UnitSampler):
        raise UnsupportedError(
            f"sampler: goals are drawn beside the units of RandomSampler, SamplerWithoutReplacement, "
            f"PrioritizedSampler and the samplers of slices, a {type(sampler).__name__} has none"
        )
    sampler.unit = Hindsight(_plain(sampler.unit), rule, table)
    return sampler


def without_hindsight(sampler: Sampler) -> Sampler:
    """Have a sampler draw its units alone from now on, and return it."""
    if isinstance(sampler, UnitSampler):
        sampler.unit = _plain(sampler.unit)
    return sampler


def _plain(unit: Unit) -> Unit:
    return unit.unit if isinstance(unit, Hindsight) else unit
