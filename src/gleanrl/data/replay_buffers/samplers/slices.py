"""The public samplers of slices, each made of a way to draw and a rule for cutting slices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from gleanrl._arrays.tensordicts import NestedKey, Path, key_argument
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.prioritized import Prioritized, PrioritizedSampler
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.slice_drawing import Slices, slice_rule
from gleanrl.data.replay_buffers.samplers.transitions import UnitSampler
from gleanrl.data.replay_buffers.samplers.without_replacement import EpochSampler, SamplerWithoutReplacement
from gleanrl.errors import InvalidTypeError, UnsupportedError


def _rule_property(name: str, doc: str) -> Any:
    """Return a property that shows a field of the sampler's slice rule.

    It reads `_slices`, because `unit` may be another unit around the slices (see `Hindsight`).
    """
    return property(attrgetter(f"_slices.rule.{name}"), doc=doc)


_TABLE = property(attrgetter("_slices.table"), doc="The table of the trajectories that slices are cut from.")
_NUM_SLICES = _rule_property("num_slices", "Slices in a batch; None if `slice_len` is given.")
_SLICE_LEN = _rule_property("slice_len", "Steps of a slice; None if `num_slices` is given.")
_STRICT_LENGTH = _rule_property("strict", "Whether trajectories shorter than a slice are left out.")
_TRUNCATED_KEY = _rule_property(
    "truncated_key", "Key that flags the last step of every slice; None for no flag."
)
_SPAN = _rule_property(
    "span",
    "``(left, right)``: steps by which slices may overhang; True for all but one step, False for none.",
)


class SliceSampler(UnitSampler):
    """Draws slices of trajectories: a trajectory, then its first step, each uniformly and with replacement.

    A batch is flat, ``[batch_size]``, slice after slice. With `strict_length` (or `pad`) and without `span` it can be
    viewed as ``[num_slices, slice_len]``. A trajectory ends where its id changes, where a flag is set, and at the write
    cursor. It also ends with its stream (batch entry of the storage). See `EpisodeTable`, which is updated at every
    write, so that a draw never scans the stored records.

    A trajectory of n steps offers the first steps ``0`` to ``n - slice_len``, inclusive.

    Args:
        num_slices: slices in a batch; their length is ``batch_size / num_slices``.
        slice_len: steps of a slice; their number is ``batch_size / slice_len``. Give one of the two.
        end_key: a stored flag that ends trajectories, in addition to ``("next", "done")``. None for every ``done``,
            ``terminated`` and ``truncated`` below ``next``.
        end_keys: several such flags. At least one of them has to be stored; missing ones are ignored.
        traj_key: a stored integer, or a float with whole values, that changes with the trajectory. It is used in
            addition to ``("collector", "traj_ids")``. None for ``"episode"`` if that is stored.
        ends: ``[steps, *batch]`` bool; further ends in a storage that isn't written any more. Needs
            ``cache_values=True`` and no keys.
        trajectories: ``[steps, *batch]`` integers, whose changes are further ends. Has the same needs as `ends`.
        cache_values: only permits `ends` and `trajectories`: ends are always cached and up to date.
        truncated_key: key that flags the last step of every slice as truncated, in the batches of TensorDict buffers
            and in ``info``. ``done`` next to it is set, too. None for no flag.
        init_key: key that flags the first step of every slice, in addition to the stored values, so that recurrent
            policies reset their state. For example ``"is_init"``; None for no flag.
        strict_length: whether trajectories shorter than a slice are left out. If False, they are drawn whole and the
            batch may be smaller.
        compile: has no effect: the draw is native code.
        span: ``(left, right)``, or one value for both. A slice may begin up to `left` steps before its trajectory and
            end up to `right` steps after it. The steps outside are cut off, so slices may be shorter. False for none,
            True for all but one step.
        pad: whether shorter slices are filled up with copies of their last step. ``("collector", "mask")`` is False for
            these copies.
        use_gpu: has no effect: ends are known before the draw.
        seed: see `Sampler`.

    Raises:
        InvalidTypeError: both of `num_slices` and `slice_len` are given, or neither. Also if both `end_key` and
            `end_keys` are given, or a value isn't a key.
        InvalidArgumentError: a value is out of range. Also at a draw, if slices are no longer than their overhang.
        UnsupportedError: options that exclude each other. Also at a draw, if the storage has no columns, or its records
            aren't in the order of time. Also if it was written after its `ends` had been given.
        BatchSizeError: at a draw, the batch size isn't a multiple of `num_slices` or `slice_len`.
        EmptyBufferError: at a draw, no trajectory is long enough.
        MissingKeyError: at a draw, no stored column tells where trajectories end, or no end key is stored.
        SchemaError: at a draw, a flag isn't 0 or 1, an id isn't a whole number, or `ends` has another length than the
            storage.
    """

    num_slices, slice_len, strict_length = _NUM_SLICES, _SLICE_LEN, _STRICT_LENGTH
    truncated_key, span, episode_table = _TRUNCATED_KEY, _SPAN, _TABLE

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = None,
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        pad: bool = False,
        use_gpu: bool | torch.device = False,
        seed: int | None = None,
    ) -> None:
        rule = slice_rule(num_slices, slice_len, strict_length, span, pad, truncated_key, init_key)
        table = _table(_end_keys(end_key, end_keys), traj_key, ends, trajectories, cache_values)
        self._slices = Slices(rule, table)
        super().__init__(self._slices, seed)


class SliceSamplerWithoutReplacement(EpochSampler):
    """Draws one slice of every trajectory per epoch, its first step uniformly.

    An epoch covers the trajectories that were stored when it began; with `strict_length`, trajectories shorter than a
    slice are left out. A trajectory that was overwritten since is left out, too. A trajectory that was partly
    overwritten gives a slice of its rest, if the rest is long enough. New trajectories join the next epoch. The last
    batch of an epoch has fewer slices if fewer are left (with `drop_last` it is left out). It sets `ran_out`.

    Memory: 24 bytes for each trajectory of the epoch.

    `SliceSampler` describes the other arguments, and further errors.

    Args:
        drop_last: whether a batch of fewer slices is left out.
        ends: see `SliceSampler`; `cache_values` isn't needed here.
        shuffle: whether the order of trajectories is random. If False, streams come one after the other, each with its
            oldest trajectory first.
        compile: has no effect.
        use_gpu: has no effect.

    Raises:
        InvalidTypeError: `drop_last` or `shuffle` is neither True nor False.
        InvalidArgumentError: at a draw with `drop_last`, fewer slices can be drawn than a batch has.
    """

    num_slices, slice_len, strict_length = _NUM_SLICES, _SLICE_LEN, _STRICT_LENGTH
    truncated_key, span, episode_table = _TRUNCATED_KEY, _SPAN, _TABLE

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = None,
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        pad: bool = False,
        use_gpu: bool | torch.device = False,
        seed: int | None = None,
    ) -> None:
        rule = slice_rule(num_slices, slice_len, strict_length, False, pad, truncated_key, init_key)
        table = _table(_end_keys(end_key, end_keys), traj_key, ends, trajectories, True)
        self._slices = Slices(rule, table)
        super().__init__(self._slices, drop_last, shuffle, seed)


class PrioritizedSliceSampler(Prioritized):
    """Draws slices by the priority of their first step.

    A stored step is a first step if a whole slice follows in its trajectory. Without `strict_length`, the first step of
    a shorter trajectory is one, too; that trajectory is drawn whole. First steps are drawn in proportion to ``(priority
    + eps) ** alpha``. The other steps of a slice are included whatever their priority. Each step carries the importance
    weight of its slice.

    A write costs O((steps written + slice_len) * log trajectories) for updating the first steps. The first draw with
    another slice length, and the first after records were replaced by index, reads every stored slot once.

    `PrioritizedSampler` and `SliceSampler` describe the other arguments, and the errors.

    Args:
        cache_values: see `SliceSampler`.
        compile: has no effect.
        span: see `SliceSampler`. Slices can't begin before the drawn step, so the left value is ignored with a warning.
        use_gpu: has no effect.
    """

    num_slices, slice_len, strict_length = _NUM_SLICES, _SLICE_LEN, _STRICT_LENGTH
    truncated_key, span, episode_table = _TRUNCATED_KEY, _SPAN, _TABLE

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = None,
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        max_priority_within_buffer: bool = False,
        normalize: str = "buffer",
        pad: bool = False,
        use_gpu: bool | torch.device = False,
        seed: int | None = None,
    ) -> None:
        rule = slice_rule(num_slices, slice_len, strict_length, span, pad, truncated_key, init_key)
        if rule.left:
            warnings.warn(
                f"span={span!r}: a PrioritizedSliceSampler begins each slice with the drawn step; the left value is "
                "ignored",
                stacklevel=2,
            )
        table = _table(_end_keys(end_key, end_keys), traj_key, ends, trajectories, cache_values)
        priorities = PriorityTable(
            max_capacity, alpha, beta, eps, dtype, max_priority_within_buffer, normalize
        )
        self._slices = Slices(replace(rule, left=0), table)
        super().__init__(self._slices, priorities, reduction, seed)


def _end_keys(end_key: NestedKey | None, end_keys: Sequence[NestedKey] | None) -> tuple[Path, ...]:
    """Return the paths of the flags that a user's arguments name."""
    if end_keys is None:
        return () if end_key is None else (key_argument("end_key", end_key),)
    if end_key is not None:
        raise InvalidTypeError("end_key, end_keys: give one flag or several, not both")
    if isinstance(end_keys, str) or not end_keys:
        raise InvalidTypeError(f"end_keys: expected a list of keys, got {end_keys!r}")
    return tuple(key_argument("end_keys", key) for key in end_keys)


def _table(
    end_keys: tuple[Path, ...],
    traj_key: NestedKey | None,
    ends: torch.Tensor | None,
    trajectories: torch.Tensor | None,
    cached: bool,
) -> EpisodeTable:
    """Return a table of trajectories with the ends that a user's arguments describe."""
    static = ends is not None or trajectories is not None
    if static and (not cached or end_keys or traj_key is not None):
        raise UnsupportedError(
            "ends, trajectories: they need cache_values=True and exclude end_key, end_keys and traj_key"
        )
    if ends is not None and trajectories is not None:
        raise UnsupportedError("ends and trajectories exclude each other; give one of them")
    keys = BoundaryKeys(end_keys, None if traj_key is None else key_argument("traj_key", traj_key))
    return EpisodeTable(keys, ends, trajectories)


# The classes are composed of a way to draw and a unit, not derived from each other. Code written for other releases
# tests them with `isinstance`, so register them as subclasses.
SliceSampler.register(SliceSamplerWithoutReplacement)
SliceSampler.register(PrioritizedSliceSampler)
SamplerWithoutReplacement.register(SliceSamplerWithoutReplacement)
PrioritizedSampler.register(PrioritizedSliceSampler)
