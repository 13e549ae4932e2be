"""Slices: consecutive steps of one trajectory, many of them to a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.arguments import positive
from gleanrl.data.boundaries import MASK
from gleanrl.data.replay_buffers.samplers.base import MOST_TRIES, Sampler, check_any_step
from gleanrl.data.replay_buffers.samplers.episodes import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import (
    BatchSizeError,
    EmptyBufferError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)
from gleanrl.native import Episodes
from gleanrl.records import Draw
from gleanrl.tree import NestedKey, Path, key_argument, leaf_at


@dataclass(frozen=True)
class SliceRule:
    """How a batch is cut into slices.

    Exactly one of `num_slices` and `slice_len` is given.
    """

    num_slices: int | None
    slice_len: int | None
    strict: bool
    """Whether trajectories shorter than a slice are left out; they come whole otherwise."""
    left: int
    """Steps by which a slice may begin before its trajectory; those are cut off. -1 for "all but one"."""
    right: int
    """Steps by which a slice may end behind its trajectory; those are cut off. -1 for "all but one"."""
    pad: bool
    """Whether slices that were cut, or are short, are filled up to their length."""
    truncated: Path | None
    """Where the last step of every slice is flagged."""

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch and their length.

        Raises:
            BatchSizeError: a batch size that isn't a multiple.
            InvalidArgumentError: slices no longer than their overhang.
        """
        divisor = self.slice_len or self.num_slices or 1
        quotient, rest = divmod(batch_size, divisor)
        if rest:
            name = "slice_len" if self.slice_len else "num_slices"
            raise BatchSizeError(f"batch_size={batch_size} isn't a multiple of {name}={divisor}")
        count, length = (quotient, divisor) if self.slice_len else (divisor, quotient)
        if max(self.left, self.right) >= length:
            raise InvalidArgumentError(
                f"span=({self.left}, {self.right}): a slice of {length} steps may overhang by {length - 1} at most"
            )
        return count, length

    def overhang(self, length: int) -> tuple[int, int]:
        """Return how far slices of `length` steps may reach beyond both ends of a trajectory."""
        return (length - 1 if self.left < 0 else self.left), (length - 1 if self.right < 0 else self.right)


class SliceSampler(Sampler):
    """Draws slices of trajectories: first a trajectory, then its first step, each uniformly, with replacement.

    A batch is flat, ``[batch_size]``, slice after slice; with `strict_length` (or `pad`) and no `span` it can
    be viewed as ``[num_slices, slice_len]``. A trajectory ends where its id changes, where a flag is set, at
    the write cursor and at the end of its stream (batch entry of the storage): see `EpisodeTable`. The slices
    come from a table that is kept up to date at every write; stored records are never scanned.

    A trajectory of n steps offers the first steps ``0`` to ``n - slice_len``, inclusive.

    Args:
        num_slices: slices in a batch; their length is ``batch_size / num_slices``.
        slice_len: steps of a slice; their number is ``batch_size / slice_len``. Give one of the two.
        end_key: a stored flag that ends trajectories, in addition to ``("next", "done")``; None for every
            ``done``, ``terminated`` and ``truncated`` below ``next``.
        traj_key: a stored integer that changes with the trajectory, in addition to
            ``("collector", "traj_ids")``; None for ``"episode"``, where that is stored.
        ends: ``[steps, *batch]`` bool; further ends in a storage that isn't written any more. Needs
            ``cache_values=True`` and no keys.
        trajectories: ``[steps, *batch]`` integers, likewise.
        cache_values: has no effect of its own: boundaries are always known, and always right.
        truncated_key: where the last step of every slice is flagged as truncated (and as done beside it), in
            the batches of TensorDict buffers and in ``info``; None for nowhere.
        strict_length: whether trajectories shorter than a slice are left out. False takes them whole: the
            batch may then be smaller.
        compile: has no effect: the draw is native code.
        span: ``(left, right)``, or one value for both: by how many steps a slice may begin before its
            trajectory, or end behind it. What overhangs is cut off, so slices may be shorter. False for none,
            True for all but one step.
        pad: whether shorter slices are filled up with copies of their last step, which
            ``("collector", "mask")`` tells from steps.
        trajectory_key: another name of `traj_key`.
        seed: see `Sampler`.

    Raises:
        InvalidTypeError: both of `num_slices` and `slice_len`, or none.
        InvalidArgumentError: a bad value.
        UnsupportedError: options that exclude each other.
    """

    def __init__(
        self,
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
        pad: bool = False,
        trajectory_key: NestedKey | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        traj_key = _one_key(traj_key, trajectory_key)
        static = ends is not None or trajectories is not None
        if static and not (cache_values and end_key is None and traj_key is None):
            raise UnsupportedError(
                "ends, trajectories: they need cache_values=True, and neither end_key nor traj_key beside them"
            )
        if ends is not None and trajectories is not None:
            raise UnsupportedError("ends and trajectories exclude each other; give one of them")
        keys = BoundaryKeys(
            None if end_key is None else key_argument("end_key", end_key),
            None if traj_key is None else key_argument("traj_key", traj_key),
        )
        self._rule = slice_rule(num_slices, slice_len, strict_length, span, pad, truncated_key)
        self._table = EpisodeTable(keys, ends, trajectories)

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        count, length = self._rule.sizes(batch_size)
        table = self._table.of(storage)
        first, lengths = _choose(table, self._rule, length, self._random.uniforms(2 * count))
        tries = 0
        while (masked := storage.masked(first)) is not None and masked.any():
            if tries == MOST_TRIES:
                check_any_step(storage)
            again = _choose(table, self._rule, length, self._random.uniforms(2 * int(masked.sum())))
            first[masked], lengths[masked] = again
            tries += 1
        return cut(table, self._rule, length, first, lengths)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        assert draw.asked is not None
        return self._draw(storage, draw.asked)  # a slice is drawn as a whole

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the flags of a batch, with the last step of each slice truncated, and so done.

        ``terminated`` stays as it is stored (False where it isn't).
        """
        path, last = self._rule.truncated, draw.last
        if path is None or last is None:
            return draw.extras
        done_path, terminated_path = (*path[:-1], "done"), (*path[:-1], "terminated")
        truncated, done, terminated = (_flag(records, p) for p in (path, done_path, terminated_path))
        if truncated is not None:
            cut_off = truncated | _spread(last, truncated)
        else:
            like = terminated if done is None else done
            cut_off = (
                last[:, None].clone() if like is None else _spread(last, like).expand(like.shape).clone()
            )
        return {
            **draw.extras,
            path: cut_off,
            done_path: cut_off if done is None else done | _spread(last, done),
            terminated_path: torch.zeros_like(cut_off) if terminated is None else terminated,
        }

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the stored flags."""
        path = self._rule.truncated
        if path is None or not isinstance(storage, TensorStorage):
            return ()
        schema = storage.format.schema
        return tuple(p for p in (path, (*path[:-1], "done"), (*path[:-1], "terminated")) if p in schema)

    def follow(self, storage: Storage) -> None:
        """Keep the table of trajectories up to date; whatever is missing is an error of the draw."""
        self._table.meet(storage)


def slice_rule(
    num_slices: Any, slice_len: Any, strict: bool, span: Any, pad: bool, truncated_key: NestedKey | None
) -> SliceRule:
    """Check a user's options."""
    if (num_slices is None) == (slice_len is None):
        raise InvalidTypeError(
            f"expected exactly one of num_slices and slice_len, got num_slices={num_slices!r}, "
            f"slice_len={slice_len!r}"
        )
    num_slices = None if num_slices is None else positive("num_slices", num_slices)
    slice_len = None if slice_len is None else positive("slice_len", slice_len)
    both = span if isinstance(span, (tuple, list)) else (span, span)
    if len(both) != 2:
        raise InvalidArgumentError(f"span: expected one value or (left, right), got {span!r}")
    left, right = (_overhang(value, slice_len) for value in both)
    truncated = None if truncated_key is None else key_argument("truncated_key", truncated_key)
    return SliceRule(num_slices, slice_len, bool(strict), left, right, bool(pad), truncated)


def _overhang(value: Any, slice_len: int | None) -> int:
    if isinstance(value, bool):
        return -1 if value else 0
    if not isinstance(value, int) or value < 0 or (slice_len is not None and value >= slice_len):
        raise InvalidArgumentError(
            f"span: expected True, False or an integer of 0 or more below the length of a slice, got {value!r}"
        )
    return value


def _one_key(traj_key: NestedKey | None, trajectory_key: NestedKey | None) -> NestedKey | None:
    given = {"traj_key": traj_key, "trajectory_key": trajectory_key}
    if len({key_argument(name, key) for name, key in given.items() if key is not None}) > 1:
        raise InvalidTypeError(
            f"traj_key and trajectory_key are one argument, got {traj_key!r} and {trajectory_key!r}"
        )
    return trajectory_key if traj_key is None else traj_key


def _choose(
    table: Episodes, rule: SliceRule, length: int, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first slots and the lengths of slices, ``(n,)`` int64 each, with two uniforms for each."""
    count = uniforms.shape[0] // 2
    first = torch.empty(count, dtype=torch.int64, device="cpu")
    lengths = torch.empty(count, dtype=torch.int64, device="cpu")
    left, right = rule.overhang(length)
    first_at, lengths_at = first.data_ptr(), lengths.data_ptr()
    try:
        table.draw(length, count, uniforms.data_ptr(), first_at, lengths_at, rule.strict, left, right)
    except RuntimeError as cause:
        raise no_slices(length) from cause
    return first, lengths


def no_slices(length: int) -> EmptyBufferError:
    """Return the error for a storage without a trajectory that is long enough."""
    return EmptyBufferError(
        f"can't sample: no trajectory of {length} steps is stored; use shorter slices, or strict_length=False"
    )


def cut(table: Episodes, rule: SliceRule, length: int, first: torch.Tensor, lengths: torch.Tensor) -> Draw:
    """Return the rows of slices, given their first slots and lengths, ``(n,)`` int64 each."""
    count = first.shape[0]
    rows = count * length if rule.pad else int(lengths.sum())
    slots = torch.empty(rows, dtype=torch.int64, device="cpu")
    last = torch.empty(rows, dtype=torch.bool, device="cpu")
    table.expand(
        first.data_ptr(),
        lengths.data_ptr(),
        count,
        slots.data_ptr(),
        length if rule.pad else 0,
        last.data_ptr(),
    )
    extras: dict[NestedKey, torch.Tensor] = {}
    if rule.pad:
        extras[MASK] = (torch.arange(length, device="cpu") < lengths[:, None]).view(-1)
    return Draw(slots, extras, last=last, asked=count * length)


def _flag(records: Any, path: Path) -> torch.Tensor | None:
    flag = leaf_at(records, path)
    return flag if flag is not None and flag.dtype == torch.bool else None


def _spread(last: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one mark for each row, ``(n,)``, in a shape that goes with ``(n, ...)`` flags."""
    marks = last if like.is_cpu else last.to(like.device)
    return marks.view(-1, *[1] * (like.ndim - 1))
