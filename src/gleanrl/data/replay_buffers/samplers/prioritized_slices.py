"""Slices whose first steps are drawn by priority."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from gleanrl.data.replay_buffers.samplers.episodes import locate
from gleanrl.data.replay_buffers.samplers.priorities import PriorityTable
from gleanrl.data.replay_buffers.samplers.prioritized import Prioritized
from gleanrl.data.replay_buffers.samplers.slices import SliceSampler, cut, no_slices
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import EmptyBufferError
from gleanrl.native import Episodes
from gleanrl.records import Draw, Placement
from gleanrl.tree import NestedKey

_CHUNK = 1 << 14  # time steps looked at together


class PrioritizedSliceSampler(Prioritized, SliceSampler):
    """Draws slices by the priority of their first step.

    A stored step is a first step if a whole slice follows in its trajectory; without `strict_length` also the
    first step of a trajectory shorter than a slice, which comes whole. First steps are drawn in proportion to
    ``(priority + eps) ** alpha``; the other steps of a slice come along, whatever their priority. Each step
    carries the importance weight of its slice.

    A write costs O((steps written + slice_len) * log trajectories) for keeping the first steps. The first
    draw with another slice length, and the first after records were replaced by index, looks at every
    stored slot once.

    Args:
        max_capacity: see `PrioritizedSampler`.
        alpha: see `PrioritizedSampler`.
        beta: see `PrioritizedSampler`.
        eps: see `PrioritizedSampler`.
        dtype: see `PrioritizedSampler`.
        reduction: see `PrioritizedSampler`.
        num_slices: see `SliceSampler`.
        slice_len: see `SliceSampler`.
        end_key: see `SliceSampler`.
        traj_key: see `SliceSampler`.
        ends: see `SliceSampler`.
        trajectories: see `SliceSampler`.
        cache_values: has no effect of its own, see `SliceSampler`.
        truncated_key: see `SliceSampler`.
        strict_length: see `SliceSampler`.
        compile: has no effect.
        span: see `SliceSampler`; slices can't begin before their first step, so the left one is turned off.
        max_priority_within_buffer: see `PrioritizedSampler`.
        normalize: see `PrioritizedSampler`.
        pad: see `SliceSampler`.
        trajectory_key: another name of `traj_key`.
        seed: see `Sampler`.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        max_priority_within_buffer: bool = False,
        normalize: str = "buffer",
        pad: bool = False,
        trajectory_key: NestedKey | None = None,
        seed: int | None = None,
    ) -> None:
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            strict_length=strict_length,
            compile=compile,
            span=span,
            pad=pad,
            trajectory_key=trajectory_key,
            seed=seed,
        )
        if self._rule.left:
            warnings.warn(
                f"span={span!r}: a slice begins with the step that was drawn; the left overhang is turned off",
                stacklevel=2,
            )
            self._rule = replace(self._rule, left=0)
        table = PriorityTable(max_capacity, alpha, beta, eps, dtype, max_priority_within_buffer, normalize)
        self._prioritize(table, reduction)
        self._forget_starts()

    def _forget_starts(self) -> None:
        self._length = 0  # the slices whose first steps are known, at this state of the storage:
        self._content: object | None = None
        self._changes = -1

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        count, length = self._rule.sizes(batch_size)
        table = self._table.sync(storage)
        self._priorities.sync(storage)
        if (length, storage.content, storage.changes) != (self._length, self._content, self._changes):
            self._find_starts(storage, table, length, 0, storage.num_steps)
            self._length, self._content, self._changes = length, storage.content, storage.changes
        try:
            first, weight, _ = self._priorities.draw(storage, self._random.uniforms(count))
        except EmptyBufferError:
            if not table.num_runs(length if self._rule.strict else 1):
                raise no_slices(length) from None
            raise
        lengths = locate(table, first)[1].clamp_(max=length)
        drawn = cut(table, self._rule, length, first, lengths)
        weight = weight.repeat_interleave(length if self._rule.pad else lengths)
        extras = {**drawn.extras, "_weight": weight, "priority_weight": weight}
        return drawn._replace(extras=extras, asked=batch_size)

    def _find_starts(self, storage: Storage, table: Episodes, length: int, step: int, count: int) -> None:
        """Learn which of `count` time steps from `step` on, around the ring, are first steps."""
        for begin in range(step, step + count, _CHUNK):
            self._find_some(storage, table, length, begin, min(_CHUNK, step + count - begin))

    def _find_some(self, storage: Storage, table: Episodes, length: int, step: int, count: int) -> None:
        streams = table.num_streams
        steps = torch.arange(step, step + count, device="cpu") % table.capacity
        slots = (steps[:, None] * streams + torch.arange(streams, device="cpu")).view(-1)
        before, after = locate(table, slots)
        total, reach = before + after, max(length - self._rule.overhang(length)[1], 1)
        if self._rule.strict:
            fits = (after >= reach) & (total >= length)
        else:
            fits = (after >= reach) | ((before == 0) & (total < reach))
        masked = storage.masked(slots)
        self._priorities.block(storage, slots, ~fits if masked is None else ~fits | masked)

    def on_write(self, storage: Storage, placement: Placement) -> None:
        """Keep trajectories, priorities and first steps up to date."""
        followed = self._table.on_write(storage, placement)
        self._priorities.on_write(storage, placement)
        if not followed or (self._content, self._changes) != (storage.content, storage.changes - 1):
            return
        # First steps that the write made lie up to a slice before it; those that it took away, by cutting the
        # oldest trajectories, up to a slice behind it.
        around, capacity = self._length, placement.capacity
        if placement.length < capacity:
            begin = max(placement.start - around, 0)
            count = placement.start + placement.num_steps - begin
        else:
            count = min(placement.num_steps + 2 * around, capacity)
            begin = (placement.start - around) % capacity
        self._find_starts(storage, self._table.sync(storage), self._length, begin, count)
        self._changes = storage.changes

    def on_update(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give replaced records the priority of new ones, and look at the boundaries again."""
        SliceSampler.on_update(self, storage, slots)
        self._priorities.on_update(storage, slots)

    def on_column(self, storage: Storage) -> None:
        """Keep priorities, and look at the boundaries again."""
        SliceSampler.on_column(self, storage)
        self._priorities.on_column(storage)

    def on_load(self, storage: Storage, generations: torch.Tensor | None = None) -> None:
        """Look at what was loaded, and take the loaded priorities as those of `storage`."""
        SliceSampler.on_load(self, storage)
        self._priorities.on_load(storage, generations)

    def clear(self) -> None:
        """Forget every priority and trajectory."""
        super().clear()
        self._forget_starts()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state_dict)
        self._forget_starts()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the first steps, which the copy finds again."""
        return {**super().__getstate__(), "_length": 0, "_content": None, "_changes": -1}
