"""Uniform draws with replacement."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers.samplers.base import Sampler, redrawn_masked
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.records import Draw


class RandomSampler(Sampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.
    """

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        return Draw(self._some(storage, batch_size))

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        return Draw(draw.slots.masked_scatter(stale, self._some(storage, int(stale.sum()))))

    def _some(self, storage: Storage, count: int) -> torch.Tensor:
        size, random = len(storage), self._random
        return redrawn_masked(storage, random.integers(size, count), lambda more: random.integers(size, more))
