"""Draws that use records up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.results import Draw
from gleanrl._state.rng import RandomSource
from gleanrl._state.state import StateReader
from gleanrl._util import positive
from gleanrl.data.replay_buffers.change_log import changes_since, slots_in, touched
from gleanrl.data.replay_buffers.samplers.base import Sampler, SamplerState
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import EmptyBufferError


class Left(NamedTuple):
    """The records that can still be drawn. Its tensors are never written again."""

    slots: torch.Tensor
    """Where they are, ``(m,)`` int64, each once."""
    uses: torch.Tensor
    """How often each was drawn, ``(m,)`` int64."""
    version: tuple[int, ...] | None
    """Of which version of the storage (see `Version`); None for none."""


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


class ConsumingSampler(Sampler):
    """Draws each record so many times at most; then it is used up, until its slot is written again.

    Of the records that are left each has the same probability, and no batch holds one twice. A batch is short where
    fewer are left; the one that uses up the last sets `ran_out`, and ends ``for batch in buffer``. ``len(buffer)`` is
    the number of records that are left. Used-up records keep their slots until the writer comes round: the buffer still
    forgets its oldest record first, be it used up or not.

    What a batch has used up counts from its draw, also if an interrupt loses the batch; therefore none is drawn ahead,
    whatever `prefetch` says. Of a buffer that several processes share, each process uses up records for itself.

    A draw costs O(records left), a write what it wrote beside that; memory: 16 bytes for each record that is left.

    Args:
        max_sample_count: how often a record is drawn, at least 1.
        seed: see `Sampler`.

    Examples:
        >>> import torch
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> index = buffer.extend(torch.arange(4))
        >>> len(buffer.sample()), len(buffer)
        (3, 1)
        >>> len(buffer.sample()), len(buffer)
        (1, 0)
    """

    uses_up = True
    draws_ahead = False

    def __init__(self, max_sample_count: int = 1, *, seed: int | None = None) -> None:
        super().__init__(seed)
        self.max_sample_count = positive("max_sample_count", max_sample_count)
        self.left = Left(_NOTHING, _NOTHING, None)
        """The records that could still be drawn when the sampler last looked."""

    def available(self, storage: Storage) -> int:
        """Return the number of records that are left."""
        self.follow(storage)
        return len(self.left.slots)

    def follow(self, storage: Storage) -> None:
        """Take in what was written."""
        left, version = self.left, tuple(storage.version)
        if left.version == version:
            return
        changes = changes_since(left.version, storage)
        if changes is None:
            slots = torch.arange(len(storage), device="cpu")
            uses = torch.zeros_like(slots)
        else:
            changes = [change for change in changes if not change.amended]
            kept = ~touched(left.slots, changes) & (left.slots < len(storage))
            fresh = slots_in(changes) if changes else _NOTHING
            fresh = fresh[fresh < len(storage)]
            slots = torch.cat([left.slots[kept], fresh])
            uses = torch.cat([left.uses[kept], torch.zeros_like(fresh)])
        if (masked := storage.masked(slots)) is not None:
            slots, uses = slots[~masked], uses[~masked]
        self.left = Left(slots, uses, version)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        self.follow(storage)
        left = self.left
        if not len(left.slots):
            raise EmptyBufferError(
                f"can't sample: every stored record was drawn max_sample_count={self.max_sample_count} times; write "
                "new ones"
            )
        return Draw(self._use(_some(len(left.slots), batch_size, self.random)))

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Keep the rows that are still there, and draw others, as far as there are, instead of the rest."""
        self.follow(storage)
        kept, missing = draw.slots[~stale], int(stale.sum())
        others = torch.from_numpy(np.flatnonzero(~np.isin(self.left.slots.numpy(), kept.numpy())))
        picks = others[_some(len(others), missing, self.random)]
        slots = torch.cat([kept, self._use(picks)])
        self.ran_out = not len(self.left.slots)
        return Draw(slots)

    def _use(self, picks: torch.Tensor) -> torch.Tensor:
        """Return the slots at places among those that are left, ``(n,)`` int64 each, counted as drawn once more."""
        slots, uses, version = self.left
        drawn, uses = slots[picks], uses.clone()
        uses[picks] += 1
        over = uses[picks] >= self.max_sample_count
        if over.any():
            stays = torch.ones(slots.shape, dtype=torch.bool, device="cpu")
            stays[picks[over]] = False
            slots, uses = slots[stays], uses[stays]
        self.left = Left(slots, uses, version)
        self.ran_out = not len(slots)
        return drawn

    # State

    def snapshot(self) -> SamplerState:
        """Return the place in the sequence of draws, and the records that are left."""
        state: SamplerState = super().snapshot()
        return state._replace(running=self.left)

    def parse(self, state: Any) -> SamplerState:
        """Return the value that a saved state stands for (see `Sampler.parse`)."""
        value: SamplerState = super().parse(state)
        reader = StateReader(state, "a ConsumingSampler").part("running")
        slots = reader.tensor("slots", torch.int64, (None,))
        uses = reader.tensor("uses", torch.int64, slots.shape)
        if slots.unique().shape != slots.shape or bool((slots < 0).any()):
            raise reader.wrong("slots", "different slots")
        if not bool(((uses >= 0) & (uses < self.max_sample_count)).all()):
            raise reader.wrong("uses", f"numbers of [0, {self.max_sample_count})")
        version = reader.optional("version", lambda name: reader.numbers(name, int))
        return value._replace(running=Left(slots, uses, version))

    def adopt(self, value: SamplerState) -> None:
        """Go on from a place or a state; what is left is of the storage that it was saved with, or of a copy of it."""
        super().adopt(value)
        self.left = value.running


def _some(size: int, count: int, random: RandomSource) -> torch.Tensor:
    """Return `count` different numbers of ``[0, size)``, or all of them, in random order, int64."""
    if 4 * count < size:  # as if drawn one after the other, repetitions left out
        drawn = random.integers(size, 2 * count).numpy()
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= count:
            return torch.from_numpy(drawn[first[:count]])
    return random.permutation(size)[:count]
