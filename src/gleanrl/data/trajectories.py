"""Ends of trajectories inside a batch of steps: the rule that n-step returns and splitting into trajectories use.

`take_rows` copies selected steps out of an entry of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.tensordicts import FLAGS, SLICE_ENDS, NestedKey, Path, as_key, as_path, flatten, leaf_at
from gleanrl.errors import InvalidTypeError, MissingKeyError, SchemaError

__all__ = ["step_mask", "take_rows", "trajectory_ends"]

TRAJ_IDS: Path = ("collector", "traj_ids")
EPISODE: Path = ("episode",)
MASK: Path = ("collector", "mask")
STEPS: Path = ("steps_to_next_obs",)
_CUT = ("done", "truncated")


def trajectory_ends(
    batch: TensorDictBase,
    *,
    done_key: NestedKey | None = None,
    id_keys: Iterable[NestedKey] = (),
    mask_keys: Iterable[NestedKey] = (),
) -> Tensor:
    """Mark the last step of every fragment of a trajectory in a batch.

    Time is the last batch dimension. A step is the last one of its fragment if one of these conditions holds:

    - a flag is set at the step;
    - the trajectory id of the following step is another one;
    - the step is the last one in time;
    - the step or the following one is masked out, so that every masked step is a fragment by itself;
    - the step is the last one of its slice, in a batch of slices.

    In n-step data (with ``"steps_to_next_obs"``) flags count only in rows where this entry is 1, because the flags of
    other rows belong to a later step. ``("collector", "traj_ids")`` and ``("collector", "mask")`` are always used if
    the batch has them.

    Flags of several agents (nested groups, ``[*B, T, n_agents, 1]``) are combined with "any": the end of one agent is
    an end for all agents.

    Args:
        batch: batch of shape ``[*B, T]``, with at least one batch dimension; it isn't changed.
        done_key: the only flag to use, without its leading ``"next"``. None: use every ``done``, ``terminated`` and
            ``truncated`` below ``"next"``, at any depth.
        id_keys: further integer keys, ``[*B, T]`` or ``[*B, T, 1]``, whose changes end a fragment; missing keys are
            ignored.
        mask_keys: further bool keys of the same shapes, False for padding; missing keys are ignored.

    Returns:
        a new ``[*B, T]`` bool tensor.

    Raises:
        MissingKeyError: if `done_key` is missing, or the batch has neither flags nor trajectory ids.
        SchemaError: if the batch has no time dimension or a named one that isn't last, or the parts of a lazy stack
            differ in keys. Also if a flag isn't a tensor of bools (or of 0 and 1). Also if a flag's entries disagree
            within one step outside a group of agents. Also if a mask isn't bool, or a mask, the ids or
            ``"steps_to_next_obs"`` don't hold one value per step.
        InvalidTypeError: if the batch isn't a TensorDict.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([False, True, False, False])
        >>> trajectory_ends(TensorDict({"next": {"done": done}}, [4]))
        tensor([False,  True, False,  True])
    """
    _require_time(batch)
    ids = [ids for path in _paths(id_keys, TRAJ_IDS) if (ids := _per_step(batch, path)) is not None]
    ends = _flag_ends(batch, done_key)
    slices = vars(batch).get(SLICE_ENDS)
    if ends is None:
        if not ids:
            raise MissingKeyError(
                "expected flags or ids that mark the ends of trajectories: found neither 'done', 'terminated' nor "
                f"'truncated' below 'next' nor trajectory ids such as {TRAJ_IDS!r}; add one, or name a flag by "
                f"done_key; keys below 'next': {_keys_of_next(batch)}"
            )
        ends = torch.zeros_like(ids[0], dtype=torch.bool)
    ends[..., -1:] = True
    for values in ids:
        ends[..., :-1] |= (values[..., 1:] != values[..., :-1]).to(ends.device)
    # The attribute stays with a batch whose batch size was changed in place: then it no longer fits.
    if slices is not None and slices.shape == ends.shape:
        ends |= slices.to(ends.device)
    mask = step_mask(batch, mask_keys)
    if mask is not None:
        missing = ~mask.to(ends.device)
        ends |= missing
        ends[..., :-1] |= missing[..., 1:]
    return ends


def twins(fields: Mapping[Path, Any]) -> list[Path]:
    """Return the paths below ``next`` whose values the root of the following step repeats.

    These are the entries for which the root has an entry of the same key, shape and dtype. Flags are left out.

    Args:
        fields: shape and dtype of each tensor, by path.
    """
    return [
        path
        for path, field in fields.items()
        if len(path) > 1 and path[0] == "next" and path[-1] not in FLAGS and fields.get(path[1:]) == field
    ]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def same_bits(left: Tensor, right: Tensor, dims: int) -> Tensor:
    """Return where two tensors have the same bits, ``[*lead]`` bool.

    So -0.0 differs from 0.0, and a NaN equals a NaN with the same bits.

    Args:
        left: ``[*lead, *field]``.
        right: ``[*lead, *field]``, of the same dtype.
        dims: the number of dimensions of ``lead``.
    """
    lead = left.shape[:dims]
    if not left.numel():
        return torch.ones(lead, dtype=torch.bool, device=left.device)
    both = [
        tensor.resolve_conj()
        .resolve_neg()
        .reshape(lead.numel(), -1)
        .contiguous()
        .view(_INTEGERS[tensor.itemsize])
        for tensor in (left, right)
    ]
    return (both[0] == both[1]).all(1).view(lead)


def telling(pairs: Sequence[tuple[Tensor, Tensor]], ends: Tensor) -> list[int]:
    """Return the numbers of the pairs that can show whether two batches are consecutive; empty unless all pairs chain.

    A pair chains if the outcome of each step inside a trajectory has the same bits as the root of the following step.
    Data that were normalised, augmented or reordered don't chain. Pairs that change from step to step are preferred: a
    constant pair, such as a goal that was written to all steps afterwards, can't distinguish trajectories.

    Args:
        pairs: outcomes and roots (see `twins`), ``[T, *B, *field]`` each, time first.
        ends: where a flag is set, ``[T, *B]`` bool.
    """
    inner = ~ends[:-1]
    if not bool(inner.any()):
        return []
    start, count, changing = 0, 2, set[int]()
    # Two steps first, then ever larger pieces: data that don't chain differ at the first steps
    while start < len(inner):
        stop = min(start + count, len(inner))
        for number, (coming, root) in enumerate(pairs):
            here, following = root[start:stop], root[start + 1 : stop + 1]
            same = same_bits(coming[start:stop], following, ends.ndim)
            if bool((inner[start:stop] & ~same).any()):
                return []
            if number not in changing and bool(
                (inner[start:stop] & ~same_bits(here, following, ends.ndim)).any()
            ):
                changing.add(number)
        start, count = stop, 4 * count
    return sorted(changing) or [*range(len(pairs))]


def seams(
    before: TensorDictBase, batch: TensorDictBase, mask_keys: Iterable[NestedKey] = ()
) -> Tensor | None:
    """Return the streams in which a batch doesn't continue the steps before it, although no id or flag shows this.

    A stream doesn't continue if the last outcome before the batch differs from the first root of the batch. Only the
    entries that `telling` selects are compared. The function returns None for batches with ids or a mask, for n-step
    data, and for batches of a single step.

    Args:
        before: the steps before, ``[*B, T]``, with the same keys.
        batch: ``[*B, T]``.
        mask_keys: keys of further masks.

    Returns:
        ``[*B]`` bool, True where a stream doesn't continue; None if there is no such stream, or it isn't known.
    """
    leaves = {path: leaf for path, leaf in flatten(batch).items() if isinstance(leaf, Tensor)}
    boundary_keys = {TRAJ_IDS, EPISODE, STEPS, MASK, *map(as_path, mask_keys)}
    time = batch.ndim - 1
    found = twins({path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()})
    ends = _flag_ends(batch, None)
    if not found or ends is None or not boundary_keys.isdisjoint(leaves) or batch.shape[time] < 2:
        return None
    differ = []
    for path in found:
        newest, first = leaf_at(before, path), leaves[path[1:]].select(time, 0)
        if newest is None or newest.dtype != first.dtype:
            return None
        differ.append(~same_bits(newest.select(time, before.shape[time] - 1), first, time).to(ends.device))
    if not any(bool(other.any()) for other in differ):
        return None
    pairs = [(leaves[path].movedim(time, 0), leaves[path[1:]].movedim(time, 0)) for path in found]
    deciding = [differ[number] for number in telling(pairs, ends.movedim(time, 0))]
    return torch.stack(deciding).any(0) if deciding else None


def hold_slice_ends(batch: Any, last: Tensor, mask: Tensor | None) -> None:
    """Store the ends of slices in a batch for `trajectory_ends`, in an attribute; no entry changes.

    This is for batches of plain buffers, which hold only the stored records and no flags of slices. Copies and parts
    of the batch don't have the attribute.

    Args:
        batch: slice after slice, ``[n]``; an object that isn't a TensorDict is ignored.
        last: the last step of each slice, ``(n,)`` bool.
        mask: which rows are steps, ``(n,)`` bool, if copies pad the slices; None: all rows are steps.
    """
    if isinstance(batch, TensorDictBase):
        batch.__dict__[SLICE_ENDS] = last if mask is None else last | ~mask


def marks_among(entries: Mapping[Any, Any]) -> dict[NestedKey, Any]:
    """Return the entries of a sampler that mark ends of slices for transforms: end flags and the mask."""
    return {
        key: value
        for key, value in entries.items()
        if type(key) is tuple and (key == MASK or (key[0] == "next" and key[-1] in _CUT))
    }


def cut_trajectories(batch: TensorDictBase, ids: Collection[int]) -> set[int]:
    """Set truncated and done at the last step of each discontinued trajectory; return the ids with steps in the batch.

    A last step that is an end already doesn't change (see `cut_at`).

    Args:
        batch: a batch of steps, in the order of time in each stream; it is changed.
        ids: ids of the trajectories that no collector continues, as in ``("collector", "traj_ids")``.
    """
    newest = newest_steps(step_ids(batch), ids)
    if newest:
        cut_at(batch, [*newest.values()])
    return {*newest}


def newest_steps(steps: Tensor, ids: Collection[int]) -> dict[int, int]:
    """Return the last position of each of `ids` in `steps`, the ids of steps in the order of time, ``(steps,)``.

    Ids without a step are left out.
    """
    matching = torch.isin(steps, torch.tensor(sorted(ids), device="cpu")).nonzero().flatten()
    return dict(zip(steps[matching].tolist(), matching.tolist(), strict=True))


def step_ids(record: Any) -> Tensor:
    """Return the ids of a record's steps, ``(steps,)`` on the CPU, -1 for padding; empty if the record has no ids."""
    ids = leaf_at(record, TRAJ_IDS)
    if ids is None:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    mask = leaf_at(record, MASK)
    if mask is not None and mask.dtype is torch.bool and mask.numel() == ids.numel():
        ids = torch.where(mask.reshape(ids.shape), ids, -1)
    return ids.cpu().reshape(-1)


def cut_at(record: TensorDictBase, places: Sequence[int]) -> int:
    """Set truncated and done at the given steps of a record; return how many of these steps weren't ends before.

    Steps that are ends already don't change: they may be terminated. A record without trajectory ids, or without flags
    of their shape, doesn't change, and the result is 0.

    Args:
        record: steps with ``("collector", "traj_ids")``; its flags are changed in place.
        places: positions in the flattened ids.
    """
    ids = leaf_at(record, TRAJ_IDS)
    if ids is None:
        return 0
    lead = ids.shape[:-1] if ids.ndim and ids.shape[-1] == 1 else ids.shape
    flags = [
        leaf
        for path, leaf in flatten(record).items()
        if path[0] == "next"
        and path[-1] in _CUT
        and isinstance(leaf, Tensor)
        and leaf.shape[: len(lead)] == lead
    ]
    if not flags:
        return 0
    at = torch.tensor(places, device=flags[0].device)
    ended = torch.stack([flag.reshape(ids.numel(), -1)[at].any(1) for flag in flags]).any(0)
    for flag in flags:
        rows = flag.reshape(ids.numel(), -1)
        rows[at[~ended]] = True
        # `reshape` copies a flag whose strides don't allow a view: write the rows back.
        flag.copy_(rows.reshape(flag.shape))
    return int((~ended).sum())


def step_mask(batch: TensorDictBase, mask_keys: Iterable[NestedKey] = ()) -> Tensor | None:
    """Return the mask of real steps: `mask_keys` and ``("collector", "mask")``, combined by "and".

    Returns:
        ``[*B, T]`` bool tensor, which may be a view of the batch; None if the batch has no mask.

    Raises:
        SchemaError: if a mask isn't bool, or doesn't have one value per step.
    """
    total: Tensor | None = None
    for path in _paths(mask_keys, MASK):
        mask = _per_step(batch, path, bool_only=True)
        if mask is not None:
            total = mask if total is None else total & mask.to(total.device)
    return total


def _per_step(batch: TensorDictBase, key: NestedKey, *, bool_only: bool = False) -> Tensor | None:
    """Return the entry at `key` as one value per step, ``[*B, T]`` (a view); None if it is missing.

    Raises:
        SchemaError: if the entry isn't a tensor with one value per step; with `bool_only`, if it isn't bool.
    """
    path = as_path(key)
    value = batch.get(path, None)
    if value is None:
        return None
    shape = batch.batch_size
    if (
        not isinstance(value, Tensor)
        or value.numel() != shape.numel()
        or (bool_only and value.dtype != torch.bool)
    ):
        found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        kind = "bool " if bool_only else ""
        raise SchemaError(
            f"key {as_key(path)!r} expected one {kind}value per step, shape {tuple(shape)} or {(*shape, 1)}, "
            f"got {found}; name another key, or give the batch its time dimension as last batch dimension"
        )
    return value.reshape(shape)


def _require_time(batch: TensorDictBase) -> None:
    """Check that `batch` is a regular TensorDict whose last batch dimension is time.

    Raises:
        InvalidTypeError: if it isn't a TensorDict.
        SchemaError: if it has no batch dimension, a dimension other than the last is named "time", or the parts of a
            lazy stack have different keys.
    """
    if not isinstance(batch, TensorDictBase):
        raise InvalidTypeError(f"expected a TensorDict of shape [*B, T], got {type(batch).__name__}")
    if batch.batch_dims == 0:
        raise SchemaError(
            "expected a batch of shape [*B, T] with time last, got one without batch dimensions; "
            "set its batch_size"
        )
    if "time" in batch.names[:-1]:
        raise SchemaError(
            f"expected time as the last batch dimension, got the names {batch.names}; transpose the batch"
        )
    # A lazy stack hides the keys that only some of its parts have: they would be lost silently.
    if isinstance(batch, LazyStackedTensorDict):
        keys = [set(part.keys(include_nested=True, leaves_only=True)) for part in batch.tensordicts]
        partial = sorted(map(str, set.union(*keys) - set.intersection(*keys)))
        if partial:
            raise SchemaError(
                f"expected the same keys in every part of the stacked batch, got {partial} in some only; "
                "drop them"
            )


def _paths(keys: Iterable[NestedKey], always: Path) -> list[Path]:
    return list(dict.fromkeys([*(as_path(key) for key in keys), always]))


def _flag_ends(batch: TensorDictBase, done_key: NestedKey | None) -> Tensor | None:
    """Return where a flag ends a fragment, a new ``[*B, T]`` bool tensor; None if the batch has no flag.

    In n-step data (with ``"steps_to_next_obs"``) a flag counts only in rows where this entry is 1.

    Raises:
        MissingKeyError: if `done_key` is given and missing.
        SchemaError: if a flag isn't a tensor of bools, or of the numbers 0 and 1. Also if a flag's entries disagree
            within one step outside a group of agents, or ``"steps_to_next_obs"`` doesn't hold one value per step.
    """
    if done_key is not None:
        path = ("next", *as_path(done_key))
        value = batch.get(path, None)
        if value is None:
            raise MissingKeyError(
                f"key {path!r} not found; done_key names an entry below 'next', one of {_keys_of_next(batch)}"
            )
        flags = [(path, value)]
    else:
        paths = [path for path in _paths_of_next(batch) if path[-1] in FLAGS]
        flags = [(path, batch.get(path)) for path in paths]
    ends: Tensor | None = None
    for path, value in flags:
        flag = _reduce_flag(path, value, batch.batch_size)
        ends = flag if ends is None else ends | flag.to(ends.device)
    steps = _per_step(batch, STEPS)
    return ends if ends is None or steps is None else ends & (steps == 1).to(ends.device)


def _reduce_flag(path: Path, value: object, shape: torch.Size) -> Tensor:
    """Return the flag at `path` as ``[*B, T]`` bool, True where any of its entries is.

    Raises:
        SchemaError: if the flag isn't a tensor of bools, or of the numbers 0 and 1. Also if its entries disagree within
            one step outside a group of agents.
    """
    if not isinstance(value, Tensor):
        raise SchemaError(f"flag {path!r} expected a bool tensor, got {type(value).__name__}")
    value = _as_flag(path, value)
    flat = value.reshape(*shape, value.shape[len(shape) :].numel())
    ends = flat.any(-1)
    # A flag of the whole environment is one value per step. If its entries disagree, `shape` isn't the shape of the
    # steps: the batch size may lack time. In a group of agents they may disagree.
    if len(path) == 2 and not torch.equal(ends, flat.all(-1)) and flat.shape[-1]:
        raise SchemaError(
            f"flag {path!r} of shape {tuple(value.shape)} can't be mapped onto the batch {tuple(shape)}: "
            f"a step has entries that disagree; expected {(*shape, 1)}: let the batch size include time, or put "
            "flags of agents into a nested group"
        )
    return ends


def _as_flag(path: Path, value: Tensor) -> Tensor:
    """Return a flag as bool; raise if it holds numbers other than 0 and 1."""
    if value.dtype == torch.bool:
        return value
    flag = value == 1
    other = ~flag & (value != 0)
    if bool(other.any()):
        raise not_a_flag(path, value[other][0].item(), value.dtype)
    return flag


def not_a_flag(path: Path, value: Any, dtype: Any) -> SchemaError:
    """Return the error for an end flag that holds a number other than 0 and 1."""
    return SchemaError(
        f"flag {as_key(path)!r} expected bools, or the numbers 0 and 1, got {value} ({dtype}); store bools that are "
        "True where trajectories end, for example `value != 0`"
    )


def _paths_of_next(batch: TensorDictBase) -> list[Path]:
    """Return the path of every tensor below ``"next"``; empty if the batch has no ``"next"``."""
    following = batch.get("next", None)
    if not isinstance(following, TensorDictBase):
        return []
    return [("next", *as_path(key)) for key in following.keys(include_nested=True, leaves_only=True)]


def _keys_of_next(batch: TensorDictBase) -> list[NestedKey]:
    return [as_key(path[1:]) for path in _paths_of_next(batch)]


# torch can't gather unsigned integers except uint8. The signed dtype of the same size moves the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@overload
def take_rows(leaf: Tensor, dims: int, index: Tensor, *, pad: bool = False) -> Tensor: ...
@overload
def take_rows(leaf: ObjectColumn, dims: int, index: Tensor, *, pad: bool = False) -> ObjectColumn: ...
def take_rows(
    leaf: Tensor | ObjectColumn, dims: int, index: Tensor, *, pad: bool = False
) -> Tensor | ObjectColumn:
    """Copy the steps at `index` out of a batch entry.

    Args:
        leaf: ``[*B, T, *feature]``, any dtype and strides; or a column of objects of this shape, where a step of zeros
            is a blank object.
        dims: number of batch dimensions, including T.
        index: ``[n]`` int64, positions in the flattened batch, on any device. Each is below the number N of steps;
            with `pad` it may be N.
        pad: whether the position N means a step of zeros.

    Returns:
        ``[n, *feature]`` contiguous, on the device of `leaf`, in new memory.

    Examples:
        >>> take_rows(torch.tensor([[5, 6], [7, 8]]), 2, torch.tensor([3, 0, 4]), pad=True)
        tensor([8, 5, 0])
    """
    if isinstance(leaf, ObjectColumn):
        return leaf.reshape(leaf.shape[:dims].numel(), *leaf.shape[dims:]).take(index, pad)
    flat = leaf.reshape(leaf.shape[:dims].numel(), *leaf.shape[dims:])
    signed = _SIGNED.get(leaf.dtype)
    if signed is not None:
        flat = flat.view(signed)
    if pad:
        # Gathering a row of zeros after the data is faster than filling rows of the result.
        flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
    rows = flat.index_select(0, index.to(leaf.device))
    return rows if signed is None else rows.view(leaf.dtype)
