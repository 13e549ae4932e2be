"""Epochs of slices: one out of every stored trajectory."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.replay_buffers.samplers.episodes import locate, runs_of
from gleanrl.data.replay_buffers.samplers.slices import SliceSampler, cut, no_slices
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import same_generations
from gleanrl.errors import InvalidArgumentError, SchemaError
from gleanrl.native import Episodes
from gleanrl.records import Draw
from gleanrl.tree import NestedKey


class SliceSamplerWithoutReplacement(SliceSampler):
    """Draws one slice of every trajectory per epoch, its first step uniformly.

    An epoch covers the trajectories that were stored when it began (with `strict_length`, those of a slice
    and more). One that was overwritten since is left out, one that was overwritten in part gives a slice of
    the rest, as long as that is long enough; new ones join the next epoch. The last batch of an epoch has
    fewer slices if fewer are left (it is left out with `drop_last`) and sets `ran_out`.

    Memory: 24 bytes for each trajectory of the epoch.

    Args:
        num_slices: see `SliceSampler`; so are the others that aren't named here.
        slice_len: see `SliceSampler`.
        drop_last: whether a batch of fewer slices is left out.
        end_key: see `SliceSampler`.
        traj_key: see `SliceSampler`.
        ends: see `SliceSampler`; `cache_values` isn't needed here.
        trajectories: see `SliceSampler`.
        truncated_key: see `SliceSampler`.
        strict_length: see `SliceSampler`.
        shuffle: whether the order of trajectories is random; otherwise stream by stream, the oldest first.
        compile: has no effect.
        pad: see `SliceSampler`.
        trajectory_key: another name of `traj_key`.
        seed: see `Sampler`.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        pad: bool = False,
        trajectory_key: NestedKey | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            strict_length=strict_length,
            compile=compile,
            pad=pad,
            trajectory_key=trajectory_key,
            seed=seed,
        )
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self._reset_epoch()

    def _reset_epoch(self) -> None:
        # A trajectory is known by its last slot when the epoch began, which is overwritten last, and by that
        # slot's generation.
        self._tails = torch.empty(0, dtype=torch.int64, device="cpu")
        self._generations = torch.empty(0, dtype=torch.int64, device="cpu")
        self._position = 0
        self._epoch_of: int | None = None

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        count, length = self._rule.sizes(batch_size)
        self.follow(storage)
        table = self._table.of(storage)
        if self._epoch_of is None:
            if not self._fits(storage):
                self._reset_epoch()
            self._epoch_of = storage.version.content
        fewest = count if self.drop_last else 1
        taken = self._take(storage, table, count, length)
        if len(taken[0]) < fewest:
            self._begin(storage, table, length)
            taken = self._take(storage, table, count, length)
            if len(taken[0]) < fewest:
                raise InvalidArgumentError(
                    f"batch_size={batch_size} with drop_last=True asks for {count} slices of {length} steps, but "
                    f"only {len(taken[0])} trajectories are that long: no batch is left"
                )
        self.ran_out = self._count_left(storage, table, fewest, length) < fewest
        first, lengths, origin = taken
        return cut(table, self._rule, length, first, lengths)._replace(asked=batch_size, origin=origin)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        assert draw.asked is not None and draw.origin is not None
        # Its trajectories are due again, before all others: each that is still stored comes once.
        left = torch.stack([self._tails[self._position :], self._generations[self._position :]])
        self._tails, self._generations = torch.cat([draw.origin, left], 1)
        self._position = 0
        return self._draw(storage, draw.asked)

    def follow(self, storage: Storage) -> None:
        """Keep the table of trajectories up to date, and end the epoch of another content."""
        super().follow(storage)
        if self._epoch_of not in (None, storage.version.content):
            self.new_epoch()

    def _fits(self, storage: Storage) -> bool:
        """Return whether an epoch that was loaded is one of this storage."""
        tails = self._tails
        return not tails.shape[0] or int(tails.max()) < len(storage)

    def _begin(self, storage: Storage, table: Episodes, length: int) -> None:
        first, lengths = runs_of(table, length if self._rule.strict else 1)
        tails = _later(table, first, lengths - 1)
        masked = storage.masked(tails)
        if masked is not None:
            tails = tails[~masked]
        if not tails.shape[0]:
            raise no_slices(length)
        order = self._random.permutation(tails.shape[0]) if self.shuffle else slice(None)
        self._tails = tails[order]
        self._generations = storage.generation(self._tails)
        self._position = 0
        self.epoch += 1

    def _living(self, storage: Storage, table: Episodes, count: int, length: int) -> tuple[torch.Tensor, ...]:
        """Return the next trajectories that are still stored: first slots, lengths and origins, at most `count`."""
        found: list[tuple[torch.Tensor, ...]] = []
        missing = count
        while missing and self._position < self._tails.shape[0]:
            rows = slice(self._position, self._position + missing)
            tails = self._tails[rows]
            self._position += tails.shape[0]
            alive = same_generations(storage.generation(tails), self._generations[rows])
            before, after = locate(table, tails)
            lengths = before + after
            if self._rule.strict:
                alive &= lengths >= length
            origin = torch.stack([tails, self._generations[rows]])
            found.append((_later(table, tails, -before)[alive], lengths[alive], origin[:, alive]))
            missing -= int(alive.sum())
        if not found:
            none = torch.empty(2, 0, dtype=torch.int64, device="cpu")
            return none[0], none[0], none
        return tuple(torch.cat(parts, -1) for parts in zip(*found, strict=True))

    def _take(self, storage: Storage, table: Episodes, count: int, length: int) -> tuple[torch.Tensor, ...]:
        """Return first slots, lengths and origins of the next slices, at most `count` of them."""
        first, lengths, origin = self._living(storage, table, count, length)
        spare = (lengths - length).clamp_(min=0)
        offset = (self._random.uniforms(first.shape[0]) * (spare + 1)).long().minimum(spare)
        return _later(table, first, offset), lengths.clamp(max=length), origin

    def _count_left(self, storage: Storage, table: Episodes, count: int, length: int) -> int:
        """Return how many trajectories are left of the epoch, counted up to `count`."""
        position = self._position
        left = self._living(storage, table, count, length)[0].shape[0]
        self._position = position
        return left

    def mark(self) -> tuple[Any, ...]:
        """Return the present place in the sequence of draws, for `rewind`."""
        return super().mark(), self._tails, self._generations, self._position, self._epoch_of

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to a place that `mark` returned, as if nothing had been drawn since."""
        base, self._tails, self._generations, self._position, self._epoch_of = mark
        super().rewind(base)

    def new_epoch(self) -> None:
        """Drop what is left of the epoch; the next draw begins a new one."""
        super().new_epoch()
        self._reset_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch, and the random generator."""
        return {
            **super().state_dict(),
            "tails": self._tails.clone(),
            "generations": self._generations.clone(),
            "position": self._position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in a saved epoch."""
        try:
            tails, generations = (
                state_dict[name].to("cpu", torch.int64, copy=True) for name in ("tails", "generations")
            )
            position = int(state_dict["position"])
            sound = tails.ndim == 1 and tails.shape == generations.shape and 0 <= position <= tails.shape[0]
            sound = sound and not bool((tails < 0).any())
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise SchemaError(
                "load_state_dict: expected what SliceSamplerWithoutReplacement.state_dict() returned"
            ) from cause
        if not sound:
            raise SchemaError(
                f"load_state_dict: position {position} doesn't fit an epoch of {tails.shape[0]}"
            )
        super().load_state_dict(state_dict)
        self._tails, self._generations, self._position = tails, generations, position
        self._epoch_of = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the epoch as one of the storage of the copy's next draw."""
        return {**super().__getstate__(), "_epoch_of": None}


def _later(table: Episodes, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the slots `steps` time steps later in the same streams, around the ring."""
    streams = table.num_streams
    place = (slots // streams + steps) % table.capacity
    return place * streams + slots % streams
