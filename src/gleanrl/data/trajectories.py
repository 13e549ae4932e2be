"""Picking steps out of one entry of a batch.

Where trajectories end inside a batch of steps: the one rule that n-step returns and splitting go by.
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

    Time is the last batch dimension. A step is the last one of its fragment if any of these holds: a flag is
    set; the trajectory id of the following step is another one; it is the last step in time of its row; it is
    masked out or the following step is (so every masked step stands alone); it is the last one of its slice, in a
    batch of slices. In n-step data
    (``"steps_to_next_obs"`` is there) flags count only in rows where it is 1, because the flags of the other
    rows belong to a later step. ``("collector", "traj_ids")`` and ``("collector", "mask")`` always take part
    when they are there.

    Flags of several agents (nested groups, ``[*B, T, n_agents, 1]``) are combined with "any": an agent's end
    bounds all of them.

    Args:
        batch: batch of shape ``[*B, T]``, with at least one batch dimension; not changed.
        done_key: the only flag to look at, without its leading ``"next"``. None takes every ``done``,
            ``terminated`` and ``truncated`` below ``"next"``, at any depth.
        id_keys: further integer keys, ``[*B, T]`` or ``[*B, T, 1]``, whose changes end a fragment; absent ones
            are ignored.
        mask_keys: further bool keys, same shapes, False on steps that are none; absent ones are ignored.

    Returns:
        ``[*B, T]`` bool tensor, fresh.

    Raises:
        MissingKeyError: if `done_key` is absent, or there is neither a flag nor an id to go by.
        SchemaError: if the batch has no time dimension, a flag holds anything but bools, 0 and 1, a mask isn't
            bool, or a value can't be mapped onto the batch.

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
                "nothing tells where trajectories end: found neither 'done', 'terminated' nor 'truncated' "
                f"below 'next' nor trajectory ids such as {TRAJ_IDS!r}; "
                f"keys below 'next': {_keys_of_next(batch)}"
            )
        ends = torch.zeros_like(ids[0], dtype=torch.bool)
    ends[..., -1:] = True
    for values in ids:
        ends[..., :-1] |= (values[..., 1:] != values[..., :-1]).to(ends.device)
    if slices is not None and slices.shape == ends.shape:
        ends |= slices.to(ends.device)
    mask = step_mask(batch, mask_keys)
    if mask is not None:
        missing = ~mask.to(ends.device)
        ends |= missing
        ends[..., :-1] |= missing[..., 1:]
    return ends


def twins(fields: Mapping[Path, Any]) -> list[Path]:
    """Return the entries below ``next`` that the root of the following step repeats: the root has their like.

    Args:
        fields: what each tensor looks like, its shape and dtype, by path; flags are left out.
    """
    return [
        path
        for path, field in fields.items()
        if len(path) > 1 and path[0] == "next" and path[-1] not in FLAGS and fields.get(path[1:]) == field
    ]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def same_bits(left: Tensor, right: Tensor, dims: int) -> Tensor:
    """Return where two tensors ``[*lead, *field]`` of one dtype are equal bit for bit: -0.0 isn't 0.0, a NaN is itself.

    Args:
        left: one.
        right: the other.
        dims: the dimensions of ``lead``.

    Returns:
        ``[*lead]`` bool.
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
    """Return which outcomes and roots tell whether other steps go on with these; none unless all of them chain.

    They chain if each step that doesn't end a trajectory leads to the following one, bit for bit, and there is such a
    step inside. Data that were normalised, augmented or put in another order don't. Of several pairs those tell that
    change from step to step; a goal, for example, may have been given to all of these steps afterwards.

    Args:
        pairs: outcomes and roots (see `twins`), ``[T, *B, *field]`` each, time first.
        ends: where a flag is set, ``[T, *B]`` bool.
    """
    inner = ~ends[:-1]
    if not bool(inner.any()):
        return []
    start, count, changing = 0, 2, set[int]()
    while start < len(inner):  # data that don't chain show that at once
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
    """Return in which streams a batch doesn't go on with the steps before it, though neither ids nor flags tell.

    That is so where the last outcome differs from the first root, in entries of the batch that are `telling`. Ids, a
    mask, n-step data, and batches of a single step say nothing here.

    Args:
        before: ``[*B, T]``, of the same structure.
        batch: ``[*B, T]``.
        mask_keys: further masks.

    Returns:
        ``[*B]`` bool; None for none.
    """
    leaves = {path: leaf for path, leaf in flatten(batch).items() if isinstance(leaf, Tensor)}
    told = {TRAJ_IDS, EPISODE, STEPS, MASK, *map(as_path, mask_keys)}
    time = batch.ndim - 1
    found = twins({path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()})
    ends = _flag_ends(batch, None)
    if not found or ends is None or not told.isdisjoint(leaves) or batch.shape[time] < 2:
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
    told_by = [differ[number] for number in telling(pairs, ends.movedim(time, 0))]
    return torch.stack(told_by).any(0) if told_by else None


def hold_slice_ends(batch: Any, last: Tensor, mask: Tensor | None) -> None:
    """Let `trajectory_ends` of this very batch know where its slices end; no entry changes.

    For batches that carry no flags of slices: those of plain buffers hold the stored records and nothing else. Copies
    and parts of the batch don't know.

    Args:
        batch: slice after slice, ``[n]``; other things than TensorDicts are left as they are.
        last: the last step of each slice, ``(n,)`` bool.
        mask: which rows are steps, ``(n,)`` bool, where copies fill slices up; None for all.
    """
    if isinstance(batch, TensorDictBase):
        batch.__dict__[SLICE_ENDS] = last if mask is None else last | ~mask


def marks_among(entries: Mapping[Any, Any]) -> dict[NestedKey, Any]:
    """Return those of a sampler's entries by which transforms tell neighbouring rows apart: end flags and the mask."""
    return {
        key: value
        for key, value in entries.items()
        if type(key) is tuple and (key == MASK or (key[0] == "next" and key[-1] in _CUT))
    }


def cut_trajectories(batch: TensorDictBase, ids: Collection[int]) -> set[int]:
    """Mark the last step of each trajectory in a batch that nobody goes on with; return which ones have steps there.

    Args:
        batch: of steps, each stream's in the order of time; it's written.
        ids: of the trajectories, as ``("collector", "traj_ids")`` has them.
    """
    newest = newest_steps(step_ids(batch), ids)
    if newest:
        cut_at(batch, [*newest.values()])
    return {*newest}


def newest_steps(steps: Tensor, ids: Collection[int]) -> dict[int, int]:
    """Return at which place of steps' ids, ``(steps,)`` in the order of time, each of `ids` stands last."""
    mine = torch.isin(steps, torch.tensor(sorted(ids), device="cpu")).nonzero().flatten()
    return dict(zip(steps[mine].tolist(), mine.tolist(), strict=True))


def step_ids(record: Any) -> Tensor:
    """Return the ids of a record's steps, ``(steps,)`` on the CPU, -1 for padding; none of what has none."""
    ids = leaf_at(record, TRAJ_IDS)
    if ids is None:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    mask = leaf_at(record, MASK)
    if mask is not None and mask.dtype is torch.bool and mask.numel() == ids.numel():
        ids = torch.where(mask.reshape(ids.shape), ids, -1)
    return ids.cpu().reshape(-1)


def cut_at(record: TensorDictBase, places: Sequence[int]) -> int:
    """Set truncated, and with it done, at places among a record's steps; return how many of them didn't end there."""
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
        flag.copy_(rows.reshape(flag.shape))
    return int((~ended).sum())


def step_mask(batch: TensorDictBase, mask_keys: Iterable[NestedKey] = ()) -> Tensor | None:
    """Return the mask of real steps, all of `mask_keys` and ``("collector", "mask")`` combined.

    Returns:
        ``[*B, T]`` bool tensor (it may be a view of the batch), or None if the batch has no mask.

    Raises:
        SchemaError: if a mask isn't bool or not of shape ``[*B, T]`` or ``[*B, T, 1]``.
    """
    total: Tensor | None = None
    for path in _paths(mask_keys, MASK):
        mask = _per_step(batch, path, bool_only=True)
        if mask is not None:
            total = mask if total is None else total & mask.to(total.device)
    return total


def _per_step(batch: TensorDictBase, key: NestedKey, *, bool_only: bool = False) -> Tensor | None:
    """Return the entry at `key` as one value per step, ``[*B, T]`` (a view), or None if it is absent.

    Raises:
        SchemaError: if the entry isn't a tensor of shape ``[*B, T]`` or ``[*B, T, 1]``, or isn't bool though
            it has to be.
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
        SchemaError: if it has no batch dimension, another one is named "time", or parts of a lazy stack have
            different keys.
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
    # A lazy stack hides the keys that only some of its parts have: they would be lost without a word.
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
    """Return where a flag ends a fragment, ``[*B, T]`` bool, fresh; None if there is no flag."""
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
    """Return the flag at `path` as ``[*B, T]`` bool."""
    if not isinstance(value, Tensor):
        raise SchemaError(f"flag {path!r} expected a bool tensor, got {type(value).__name__}")
    value = _as_flag(path, value)
    flat = value.reshape(*shape, value.shape[len(shape) :].numel())
    ends = flat.any(-1)
    # A flag of the whole environment is one value per step. Entries that disagree mean that `shape` isn't the
    # shape of the steps (a batch size without time, say); for a group of agents they are normal.
    if len(path) == 2 and not torch.equal(ends, flat.all(-1)) and flat.shape[-1]:
        raise SchemaError(
            f"flag {path!r} of shape {tuple(value.shape)} can't be mapped onto the batch {tuple(shape)}: "
            f"a step has entries that disagree; expected {(*shape, 1)}: let the batch size include time, or put "
            "flags of agents into a group of their own"
        )
    return ends


def _as_flag(path: Path, value: Tensor) -> Tensor:
    """Return a flag as bool."""
    if value.dtype == torch.bool:
        return value
    flag = value == 1
    other = ~flag & (value != 0)
    if bool(other.any()):
        raise not_a_flag(path, value[other][0].item(), value.dtype)
    return flag


def not_a_flag(path: Path, value: Any, dtype: Any) -> SchemaError:
    """Return the error for an end flag that holds another number than 0 and 1."""
    return SchemaError(
        f"flag {as_key(path)!r} expected bools, or the numbers 0 and 1, got {value} ({dtype}); store "
        "`value != 0`, or whatever says where trajectories end"
    )


def _paths_of_next(batch: TensorDictBase) -> list[Path]:
    """Return the path of every tensor below ``"next"``; empty if there is no such group."""
    following = batch.get("next", None)
    if not isinstance(following, TensorDictBase):
        return []
    return [("next", *as_path(key)) for key in following.keys(include_nested=True, leaves_only=True)]


def _keys_of_next(batch: TensorDictBase) -> list[NestedKey]:
    return [as_key(path[1:]) for path in _paths_of_next(batch)]


# torch gathers no unsigned integers but uint8; the bits are the same.
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
        leaf: ``[*B, T, *feature]``, any dtype and strides; or objects of that shape, of which a blank one is a step of
            zeros.
        dims: number of batch dimensions, T included.
        index: ``[n]`` int64, positions in the flattened batch, on any device; each below the number N of
            steps, or with `pad` at most N.
        pad: whether N stands for a step of zeros.

    Returns:
        ``[n, *feature]`` contiguous, on the device of `leaf`, sharing no memory with it.

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
        # Reading a row of zeros behind the data is faster than filling rows of the result.
        flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
    rows = flat.index_select(0, index.to(leaf.device))
    return rows if signed is None else rows.view(leaf.dtype)
