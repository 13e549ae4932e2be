"""Uniform draws with replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.units import Transitions, Unit
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.records import Draw
from gleanrl.tree import NestedKey, Path


class UnitSampler(Sampler):
    """Draws units, each with the same probability, with replacement; the base of those that choose otherwise.

    Args:
        unit: what is drawn.
        seed: see `Sampler`.
    """

    def __init__(self, unit: Unit, seed: int | None = None) -> None:
        super().__init__(seed)
        self.unit = unit

    def follow(self, storage: Storage) -> None:
        """Keep what is known of the units up to date."""
        self.unit.follow(storage)

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row."""
        return draw.extras if draw.last is None else self.unit.annotate(draw, records)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` looks at."""
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
