"""A sampler that uses records up."""

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
    """Slots of these records, ``(m,)`` int64, each once."""
    uses: torch.Tensor
    """Number of draws of each record so far, ``(m,)`` int64."""
    version: tuple[int, ...] | None
    """The storage's version that they belong to (see `Version`); None before the first storage."""


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


class ConsumingSampler(Sampler):
    """Draws each record at most `max_sample_count` times; then it is used up until its slot is written again.

    Each record that is left has the same probability, and no batch holds a record twice. A batch is short if fewer
    records are left. The batch that uses up the last record sets `ran_out` and ends ``for batch in buffer``.
    ``len(buffer)`` is the number of records that are left. Used-up records keep their slots until the writer overwrites
    them: the buffer still forgets its oldest record first, used up or not.

    A draw uses records up, even if an interrupt loses the batch. Therefore no batch is drawn ahead, whatever the value
    of `prefetch`. If several processes share a buffer, each process counts only its own draws.

    A draw costs O(records left), and a write O(records left + records written). Memory: 16 bytes for each record that
    is left.

    Args:
        max_sample_count: largest number of draws of a record, at least 1.
        seed: see `Sampler`.

    Raises:
        InvalidArgumentError: `max_sample_count` isn't a positive integer.
        EmptyBufferError: at a draw, no record is left.

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
        """The records that could still be drawn when the sampler last compared versions."""

    def available(self, storage: Storage) -> int:
        """Return the number of records that are left."""
        self.follow(storage)
        return len(self.left.slots)

    def follow(self, storage: Storage) -> None:
        """Add records that were written, and drop records whose slots were overwritten.

        If the storage has another content, all its records are new ones. Masked rows are left out.
        """
        left, version = self.left, tuple(storage.version)
        if left.version == version:
            return
        changes = changes_since(left.version, storage)
        if changes is None:
            slots = torch.arange(len(storage), device="cpu")
            uses = torch.zeros_like(slots)
        else:
            changes = [change for change in changes if not change.amended]
            still_stored = ~touched(left.slots, changes) & (left.slots < len(storage))
            new = slots_in(changes) if changes else _NOTHING
            new = new[new < len(storage)]
            slots = torch.cat([left.slots[still_stored], new])
            uses = torch.cat([left.uses[still_stored], torch.zeros_like(new)])
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
        """Keep the rows that are still stored. Other records replace the rest.

        The batch is shorter if too few records are left.
        """
        self.follow(storage)
        remaining, missing = draw.slots[~stale], int(stale.sum())
        # Records that are kept may be left for further draws: without them, so that no batch holds a record twice.
        candidates = torch.from_numpy(np.flatnonzero(~np.isin(self.left.slots.numpy(), remaining.numpy())))
        picks = candidates[_some(len(candidates), missing, self.random)]
        slots = torch.cat([remaining, self._use(picks)])
        self.ran_out = not len(self.left.slots)
        return Draw(slots)

    def _use(self, picks: torch.Tensor) -> torch.Tensor:
        """Count a draw of records and return their slots, ``(n,)`` int64; update `left` and `ran_out`.

        Args:
            picks: positions among the records that are left, ``(n,)`` int64.
        """
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

    def snapshot(self) -> SamplerState:
        """Return the position in the sequence of draws, and the records that are left."""
        state: SamplerState = super().snapshot()
        return state._replace(running=self.left)

    def parse(self, state: Any) -> SamplerState:
        """Return the value of a saved state (see `Sampler.parse`)."""
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
        """Continue from a position or a state; its records belong to the storage it was saved with, or to a copy."""
        super().adopt(value)
        self.left = value.running


def _some(size: int, count: int, random: RandomSource) -> torch.Tensor:
    """Return `count` different numbers of ``[0, size)``, or all of them, in random order, int64."""
    # A permutation costs O(size). If `count` is far smaller, draw twice as many with replacement and take the first
    # `count` different ones: the same distribution, in nearly every case without a second attempt.
    if 4 * count < size:
        drawn = random.integers(size, 2 * count).numpy()
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= count:
            return torch.from_numpy(drawn[first[:count]])
    return random.permutation(size)[:count]
