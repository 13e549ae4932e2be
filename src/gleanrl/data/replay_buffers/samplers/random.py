"""Uniform draws with replacement."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.records import Draw

_NOTHING: Mapping[str, torch.Tensor] = {}


class RandomSampler(Sampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.
    """

    def _draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return self._random.integers(len(storage), batch_size), _NOTHING

    def redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Draw the stale rows anew."""
        again = self._random.integers(len(storage), int(stale.sum()))
        return Draw(draw.slots.masked_scatter(stale, again), draw.extras)
