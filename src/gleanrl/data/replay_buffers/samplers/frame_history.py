"""Transitions that come with the frames before them, for `CatFrames` in a buffer that stores single frames."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from gleanrl._arrays.native import Episodes
from gleanrl._arrays.results import Draw
from gleanrl._arrays.tensordicts import NestedKey, as_path, leaf_at
from gleanrl._state.rng import RandomSource
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.episode_index import EpisodeTable, later, locate
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.slice_drawing import BlockedRows
from gleanrl.data.replay_buffers.samplers.transitions import Transitions, Unit, UnitSampler, redrawn
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import EmptyBufferError, UnsupportedError

FRAMES = "_frames"
"""The group of a batch's entries that holds the earlier frames, ``(n, count, *field)`` each, the oldest first."""
_OF = "of"  # in that group: the frames
_AGE = "age"  # in that group: how many of them come from the trajectory, ``(n,)`` int64

_ROWS = Transitions()


class FrameHistory(Unit):
    """Transitions with the `count` frames before each, from the same trajectory.

    Frames are read at the draw, under the buffer's lock. So they belong to the row's own trajectory, even if a writer
    overwrites them before the record is fetched. Frames before the trajectory's first step are padded.

    A row is *lost* if a writer has overwritten a frame that its stack needs. Lost rows are never drawn. They are among
    the first `count` steps of the oldest stored trajectory of each stream.

    Args:
        keys: columns of single frames.
        count: number of earlier frames, at least 1.
        padding_value: fills frames before the first step; None repeats the first frame.
        table: the trajectories.
    """

    by_generation = False
    serves_more = True

    def __init__(
        self, keys: list[NestedKey], count: int, padding_value: float | None, table: EpisodeTable
    ) -> None:
        self.keys, self.count, self.padding_value, self.table = keys, count, padding_value, table
        self._blocked: BlockedRows | None = None  # for draws by priority

    def follow(self, storage: Storage) -> None:
        """Keep trajectories and lost rows up to date; a missing column raises at the next draw, not here."""
        if self.table.try_sync(storage) and self._blocked is not None:
            self._blocked.sync(storage)

    def name(self, length: int) -> str:
        """Return "transitions"."""
        return _ROWS.name(length)

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the batch size, and 1."""
        return _ROWS.sizes(batch_size)

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw rows that are neither masked out nor lost."""

        def draw(count: int) -> torch.Tensor:
            return _ROWS.uniform(storage, count, random).slots

        slots = redrawn(
            draw(batch_size), partial(self._lost, storage), draw, lambda: self._check_any(storage)
        )
        return self._with_frames(storage, slots)

    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Draw the stale rows again. The other rows keep their frames, which may be overwritten by now."""
        new = self.uniform(storage, int(stale.sum()), random)
        extras = {key: value.clone() for key, value in draw.extras.items()}
        for key, value in new.extras.items():
            extras[key][stale] = value
        return Draw(draw.slots.masked_scatter(stale, new.slots), extras)

    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw rows that aren't lost by their priorities."""
        self.table.of(storage)
        native = priorities.of(storage)
        if self._blocked is None:
            self._blocked = BlockedRows(self.table, priorities)
        self._blocked.update(storage, self.count, None, self._lost)
        if not native.total > 0.0:
            self._check_any(storage)
        drawn = _ROWS.weighted(storage, batch_size, priorities, random)
        extras = self._with_frames(storage, drawn.slots).extras
        drawn = drawn._replace(extras={**drawn.extras, **extras})
        return priorities.remember(storage, drawn) if served else drawn

    def items(self, storage: Storage, length: int) -> torch.Tensor:
        """Return the rows that are neither masked out nor lost."""
        return self._complete(storage)

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Return which rows are neither masked out nor lost."""
        alive, complete = _ROWS.living(storage, items, generations, length), ~self._lost(storage, items)
        return complete if alive is None else complete & alive

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return the rows, with their frames."""
        return self._with_frames(storage, items)._replace(asked=batch_size)

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends between a row and its frames, by the ends and ids stored now."""
        # The draw's own number of frames: the table may have been read again since the draw.
        if self.table.joins(storage, draw.slots, -draw.extras[FRAMES, _AGE]):
            return True
        if self._blocked is not None:  # `joins` has made the table read the storage again
            self._blocked.unfollow()
        return False

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the frames, which the transform needs in batches of every buffer."""
        return {key: value for key, value in draw.extras.items() if key[0] == FRAMES}

    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage without a row whose frames are all stored."""
        return EmptyBufferError(
            f"can't sample: no stored step has the {self.count} frames before it; use a larger storage"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the blocked rows, which the copy finds again."""
        return {**self.__dict__, "_blocked": None}

    def _complete(self, storage: Storage) -> torch.Tensor:
        """Return the rows that aren't masked out and whose frames are all stored, ``(n,)`` int64."""
        items = _ROWS.items(storage, 1)
        slots = torch.arange(len(storage), device="cpu") if items is None else items
        return slots[~self._lost(storage, slots)]

    def _check_any(self, storage: Storage) -> None:
        """Raise `EmptyBufferError` if every row is masked out or lost."""
        if not self._complete(storage).shape[0]:
            raise self.none_left(1)

    def _lost(self, storage: Storage, slots: torch.Tensor, table: Episodes | None = None) -> torch.Tensor:
        """Return which rows are lost, ``(n,)`` bool."""
        if not storage.overwritten:
            return torch.zeros(slots.shape, dtype=torch.bool, device="cpu")
        table = table or self.table.of(storage)
        before, _ = locate(table, slots)
        first = (slots // table.num_streams - before) % table.capacity
        return (first == storage.oldest_step) & (before < self.count)

    def _with_frames(self, storage: Storage, slots: torch.Tensor) -> Draw:
        table, count = self.table.of(storage), slots.shape[0]
        before = locate(table, slots)[0][:, None]
        back = torch.arange(self.count, 0, -1, device="cpu")
        sources = later(table, slots.repeat_interleave(self.count), -before.minimum(back).view(-1))
        paths = storage.columns_of(self.keys)
        records = storage.fetch(sources, paths)
        extras: dict[NestedKey, torch.Tensor] = {(FRAMES, _AGE): before[:, 0].clamp(max=self.count)}
        for path in paths:
            found = leaf_at(records, path)
            assert found is not None
            frames = found.view(count, self.count, *found.shape[1:])
            if self.padding_value is not None:
                young = (before < back).to(frames.device)
                frames.masked_fill_(
                    young.view(count, self.count, *[1] * (found.ndim - 1)), self.padding_value
                )
            extras[(FRAMES, _OF, *path)] = frames
        return Draw(slots, extras)


def with_frames(
    sampler: Sampler, keys: list[NestedKey], count: int, padding_value: float | None, table: EpisodeTable
) -> Sampler:
    """Make a sampler of transitions draw the frames before each (see `FrameHistory`) from now on, and return it.

    Raises:
        UnsupportedError: the sampler doesn't draw transitions.
    """
    if not isinstance(sampler, UnitSampler) or type(sampler.unit) not in (Transitions, FrameHistory):
        raise UnsupportedError(
            "sampler: stacks of frames need RandomSampler, SamplerWithoutReplacement or PrioritizedSampler, got a "
            f"{type(sampler).__name__}"
        )
    sampler.unit, sampler.episode_table = FrameHistory(keys, count, padding_value, table), table
    return sampler


def frames_before(batch: Any, key: NestedKey) -> torch.Tensor | None:
    """Return a sampled batch's earlier frames at `key`, ``(n, count, *field)``; None if it carries none."""
    return batch.get((FRAMES, _OF, *as_path(key)), None)
