"""Uniform draws with replacement."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.records import Draw


class RandomSampler(Sampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.
    """

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        return Draw(self._random.integers(len(storage), batch_size))

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        again = self._random.integers(len(storage), int(stale.sum()))
        return Draw(draw.slots.masked_scatter(stale, again))
