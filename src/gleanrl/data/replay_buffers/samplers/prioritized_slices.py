"""Slices whose first steps are drawn by priority."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from gleanrl.data.replay_buffers.samplers.episodes import EpisodeTable, locate
from gleanrl.data.replay_buffers.samplers.priorities import PriorityTable
from gleanrl.data.replay_buffers.samplers.prioritized import Prioritized
from gleanrl.data.replay_buffers.samplers.slices import SliceRule, SliceSampler, cut, no_slices
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import Change, Follower
from gleanrl.errors import EmptyBufferError
from gleanrl.native import Episodes
from gleanrl.records import Draw
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
        self._starts = _FirstSteps(self._table, table, self._rule)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        count, length = self._rule.sizes(batch_size)
        self._starts.of_slices(length, storage)
        table = self._table.of(storage)
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

    def follow(self, storage: Storage) -> None:
        """Keep trajectories, priorities and first steps up to date."""
        self._priorities.of(storage)
        if self._table.meet(storage) and self._starts.length:
            self._starts.sync(storage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state_dict)
        self._starts.unfollow()


class _FirstSteps(Follower[Storage]):
    """Sees to it that the rows which slices may begin with are the only ones that are drawn.

    Args:
        table: the trajectories.
        priorities: what rows are drawn by.
        rule: how slices are cut.
    """

    def __init__(self, table: EpisodeTable, priorities: PriorityTable, rule: SliceRule) -> None:
        self._table, self._priorities, self._rule = table, priorities, rule
        self.length = 0
        """Steps of the slices whose first steps are known; 0 before the first draw."""

    def of_slices(self, length: int, storage: Storage) -> None:
        """Come in step with a storage for slices of `length` steps."""
        if length != self.length:
            self.unfollow()
            self.length = length
        self.sync(storage)

    def _look_at_all(self, storage: Storage) -> None:
        self._find(storage, 0, storage.num_steps)

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        # What was written makes, or takes away, first steps up to a slice before it and behind it.
        around, streams = self.length, max(storage.rows_per_step, 1)
        stored, capacity = storage.num_steps, storage.capacity_steps
        for start, stop, _ in changes:
            first, behind = start // streams - around, -(-stop // streams) + around
            if stored < capacity:
                first, behind = max(first, 0), min(behind, stored)
            self._find(storage, first % capacity, min(behind - first, stored))

    def _find(self, storage: Storage, step: int, count: int) -> None:
        """Learn which of `count` time steps from `step` on, around the ring, are first steps."""
        table, native = self._table.of(storage), self._priorities.of(storage)
        for begin in range(step, step + count, _CHUNK):
            steps = torch.arange(begin, min(begin + _CHUNK, step + count), device="cpu") % table.capacity
            slots = (steps[:, None] * table.num_streams + torch.arange(table.num_streams, device="cpu")).view(
                -1
            )
            blocked = self._are_no_starts(table, slots)
            masked = storage.masked(slots)
            blocked = blocked if masked is None else blocked | masked
            native.block(slots.data_ptr(), slots.shape[0], blocked.data_ptr())

    def _are_no_starts(self, table: Episodes, slots: torch.Tensor) -> torch.Tensor:
        length = self.length
        before, after = locate(table, slots)
        total, reach = before + after, max(length - self._rule.overhang(length)[1], 1)
        if self._rule.strict:
            return (after < reach) | (total < length)
        return (after < reach) & ((before > 0) | (total >= reach))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the first steps, which the copy finds again."""
        return {**self.__dict__, "_followed": None}
