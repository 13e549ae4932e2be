"""Samplers that draw by priority."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl._arrays.results import Draw
from gleanrl.data.replay_buffers.samplers.base import Sampler, SamplerState
from gleanrl.data.replay_buffers.samplers.priority_table import (
    PriorityTable,
    check_reduction,
    reduce_priority,
)
from gleanrl.data.replay_buffers.samplers.transitions import Transitions, Unit, UnitSampler
from gleanrl.data.replay_buffers.storages.base import Storage

_PARTS_OF_A_DRAW = frozenset({"sample", "draw", "_draw", "on_serve"})


class Prioritized(UnitSampler):
    """Draws units in proportion to the priorities of their first steps; see `PrioritizedSampler`.

    Args:
        unit: kind of unit to draw.
        table: the priorities.
        reduction: how several priorities of one record are reduced to one.
        seed: see `Sampler`.
    """

    takes_priorities = True

    def __init__(self, unit: Unit, table: PriorityTable, reduction: str, seed: int | None) -> None:
        super().__init__(unit, seed)
        self.reduction = check_reduction(reduction)
        """How several priorities of one record are reduced to one."""
        self._priorities = table

    @property
    def alpha(self) -> float:
        """Exponent of the priorities. Setting it recomputes the probabilities of all stored records.

        An invalid value raises `InvalidArgumentError` and changes nothing. The same holds for `beta` and `eps`.
        """
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        with self.guard():
            self._priorities.alpha = value

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._priorities.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._priorities.beta = value

    @property
    def eps(self) -> float:
        """Constant added to every priority. Setting it recomputes the probabilities of all stored records."""
        return self._priorities.eps

    @eps.setter
    def eps(self, value: float) -> None:
        with self.guard():
            self._priorities.eps = value

    @property
    def default_priority(self) -> float:
        """The priority of new records."""
        return self._priorities.default

    @property
    def priorities_dropped(self) -> int:
        """Number of priority updates that came too late."""
        return self._priorities.dropped

    @property
    def room(self) -> int | None:
        """The most rows that a storage may have; None for any number."""
        return self._priorities.max_capacity

    @property
    def max_size(self) -> int | None:
        """Number of rows that priorities have room for; None while neither `max_capacity` nor a buffer sets it."""
        if self.room is not None or self.owner is None:
            return self.room
        return int(self.owner.storage.max_size)

    def check_storage(self, storage: Storage) -> None:
        """Raise `InvalidArgumentError` if `storage` has more rows than the priorities have room for."""
        self._priorities.check_room(storage)

    def draw_served(self, storage: Storage, batch_size: int, generations: bool = False) -> Draw:
        """Draw a batch that is delivered; the core remembers its rows in the same call."""
        # The fast path skips these methods, so it may be used only if no user's class or instance overrides them. The
        # test does what `overridden` does in a third of the time: it runs for every batch.
        cls, usual = type(self), Prioritized
        by_core = (
            cls._draw is usual._draw
            and cls.on_serve is usual.on_serve
            and cls.draw is usual.draw
            and cls.sample is usual.sample
            and vars(self).keys().isdisjoint(_PARTS_OF_A_DRAW)
        )
        if not by_core or not storage.num_steps:
            return super().draw_served(storage, batch_size, generations)
        return self.unit.weighted(storage, batch_size, self._priorities, self.random, served=True)

    def on_serve(self, storage: Storage, draw: Draw) -> None:
        """Remember the generations of the rows, to which later updates refer."""
        self._priorities.remember(storage, draw)

    def follow(self, storage: Storage) -> None:
        """Give new records their priority."""
        self._priorities.of(storage)
        self.unit.follow(storage)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        return self.unit.weighted(storage, batch_size, self._priorities, self.random)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        # Redraw all rows: weights normalized in different draws can't be mixed.
        return self._draw(storage, draw.slots.shape[0] if draw.asked is None else draw.asked)

    def prioritize(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Set new priorities; updates for records that were overwritten since their draw are dropped and counted.

        Several priorities for each slot, ``(n, ...)``, are reduced to one. `PriorityTable.update` describes errors.
        """
        if isinstance(priority, (torch.Tensor, np.ndarray)) and priority.ndim > 1:
            values, count = torch.as_tensor(priority).detach(), slots.shape[0]
            if values.numel() == count:  # one priority for each slot, in the shape of the index
                values = values.reshape(count)
            priority = reduce_priority(values, count, self.reduction)
        self._priorities.update(storage, slots, priority, generation)

    def check_priorities(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless `values`, ``(n,)``, are valid priorities of rows."""
        self._priorities.check(values)

    def mark(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots` the priority of new records."""
        self._priorities.reset(storage, slots)

    # A position excludes the priorities: they stay when a draw is taken back.
    draw_position, parse_draw_position = Sampler.snapshot, Sampler.parse

    def snapshot(self) -> SamplerState:
        """Return the position in the sequence of draws, the rule and the priorities."""
        return self.draw_position()._replace(priorities=self._priorities.snapshot())

    def parse(self, state: Any) -> SamplerState:
        """Return the value of a saved state (see `Sampler.parse`)."""
        position = self.parse_draw_position(state)
        return position._replace(priorities=self._priorities.parse(state.get("priorities")))

    def turned(self, value: SamplerState, by: int, rows: int) -> SamplerState:
        """Return the value with the priorities at their rows' new slots."""
        found = value.priorities
        if found.raw.shape[0] == rows:
            # Without the version: it says which of the old slots changed, and nothing about the new ones.
            found = found._replace(raw=found.raw.roll(-by), mark=found.mark.roll(-by), version=None)
        rest: SamplerState = super().turned(value._replace(priorities=None), by, rows)
        return rest._replace(priorities=found)

    def adopt(self, value: SamplerState) -> None:
        """Continue from a position or a state; its priorities apply to the storage of the next draw or write."""
        super().adopt(value)
        if value.priorities is not None:
            self._priorities.adopt(value.priorities)


class PrioritizedSampler(Prioritized):
    """Draws transitions in proportion to ``(priority + eps) ** alpha``, with replacement.

    Batches carry importance weights as ``_weight`` and ``priority_weight`` (one tensor, ``(n,)``, of `dtype`). A row of
    probability p has the weight ``(p / p_ref) ** -beta``. With ``normalize="buffer"`` p_ref is the smallest probability
    of a stored row, so that weights are at most 1. With ``"batch"`` it is the smallest probability in the batch, so
    that the largest weight of the batch is exactly 1.

    New records get the largest priority that was ever set (1 before the first). An update for a slot that was
    overwritten since its record was drawn is dropped, and counted in ``buffer.stats()``.

    A draw or an update of n rows costs O(n log8 capacity). Memory: 19 bytes for each row, 27 in float64.

    Args:
        max_capacity: size of the storage; None for any size. A list storage without a size takes this one.
        alpha: 0 draws uniformly, 1 in full proportion. Required; can be set at any time.
        beta: 0 makes all weights 1, 1 corrects the draw in full. Required; can be set at any time.
        eps: constant added to every priority, so that none is 0.
        dtype: dtype in which priorities are kept: float32 or float64.
        reduction: how `update_tensordict_priority` reduces several priorities of one record to one: ``"max"``,
            ``"min"``, ``"mean"``, ``"median"`` or ``"sum"``.
        max_priority_within_buffer: whether new records get the largest priority stored instead. That is 1 if the
            largest is 0 or nothing is stored.
        normalize: ``"buffer"`` or ``"batch"``.
        seed: see `Sampler`.

    Raises:
        InvalidArgumentError: a value is out of range. Also when a buffer takes the sampler, if its storage has more
            than `max_capacity` rows.
        UnsupportedError: another dtype.
        EmptyBufferError: at a draw, every stored record has probability 0.

    Source: Schaul et al., Prioritized Experience Replay, https://arxiv.org/abs/1511.05952.

    Examples:
        >>> import torch
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0, seed=0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
        >>> index = buffer.extend(torch.arange(4))
        >>> buffer.update_priority(index, torch.tensor([0.0, 0.0, 3.0, 0.0]))
        >>> buffer.sample(3)
        tensor([2, 2, 2])
    """

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        normalize: str = "buffer",
        seed: int | None = None,
    ) -> None:
        table = PriorityTable(max_capacity, alpha, beta, eps, dtype, max_priority_within_buffer, normalize)
        super().__init__(Transitions(), table, reduction, seed)
