"""Uniform draws with replacement."""

from __future__ import annotations

from gleanrl.data.replay_buffers.samplers.units import Transitions, UnitSampler


class RandomSampler(UnitSampler):
    """Draws every stored transition with the same probability, with replacement.

    Args:
        seed: see `Sampler`.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(Transitions(), seed)
