"""Rows that are no steps, which a storage's mask tells from those that are: they are never drawn."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
