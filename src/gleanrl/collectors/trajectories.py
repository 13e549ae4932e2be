"""`split_trajectories`: split collected batches into trajectories, padded with a mask or nested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_leaf
from gleanrl._arrays.tensordicts import (
    NestedKey,
    Path,
    TensorDictBuilder,
    as_key,
    as_path,
    empty_groups,
    group_sizes,
    iter_leaves,
)
from gleanrl.data.trajectories import step_mask, take_rows, trajectory_ends
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

__all__ = ["split_trajectories"]


def split_trajectories(
    rollout_tensordict: TensorDictBase | None = None,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool = False,
    rollout: TensorDictBase | None = None,
) -> TensorDict:
    """Split a batch into its trajectories, one per row.

    The result is always ``[n_traj, T_max]``, for any number of batch dimensions and even if all trajectories have the
    same length. Row i holds the i-th trajectory from its first step, followed by padding: zeros, False, None or empty
    tensors. Every entry is padded, ids included. Only a non-tensor value that all steps share stays one value. ``mask``
    is True on the real steps. Trajectories keep the order of the batch: by environment (row-major over ``*B``), then by
    time.

    A trajectory ends where a flag is set, where the id changes, at a masked step, and at the end of each environment's
    row (see `gleanrl.data.trajectories.trajectory_ends`). Fragments of one trajectory that are not adjacent therefore
    give several rows with one id. Steps of different environments are never joined. Steps that the batch's own mask
    excludes are left out.

    The ids are at `trajectory_key`, with ``"mask"`` in the same group. Without `trajectory_key` they are ``traj_ids``
    and ``mask`` below `prefix`. Without both they are below ``"collector"`` if the batch has that group, else at the
    root. Missing ids are computed from the flags (0, 1, 2, ... in row order) and written. ``("collector", "traj_ids")``
    and ``("collector", "mask")`` are respected even if other keys are named.

    The indices are computed once for the batch, and each entry is copied once. No Python loop runs over trajectories or
    steps.

    Args:
        rollout_tensordict: batch ``[*B, T]``, time last, with at least one batch dimension. It is not changed, and the
            result shares no memory with it.
        prefix: group of the ids and the mask.
        trajectory_key: key of the ids, ``[*B, T]`` or ``[*B, T, 1]``; takes precedence over `prefix`.
        done_key: the only flag that ends trajectories, without its leading ``"next"``. None uses ``done``,
            ``terminated`` and ``truncated`` of every group below ``"next"``.
        as_nested: return nested tensors ``[n_traj, -1, ...]``, without padding and without a mask.
            ``to_padded_tensor(mask_key="mask")`` of the result pads them. Entries are copied twice, and PyTorch warns
            once that such tensors are a prototype.
        rollout: another name of `rollout_tensordict`, with precedence.

    Returns:
        The trajectories, ``[n_traj, T_max]``, last dimension named "time"; ``[0, 0]`` if the batch has no real step.

    Raises:
        MissingKeyError: `done_key` is absent, or the batch has neither ids nor flags.
        SchemaError: ids, mask or flags don't fit the batch, or the batch has no time dimension.
        UnsupportedError: an entry is a nested tensor or a tensorclass. With `as_nested`, also if its values differ
            between steps and are no tensors, or have different shapes.
        InvalidArgumentError: the ids and the mask have the same key.
        InvalidTypeError: no batch was passed.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False, True, False], [False, False, False]])
        >>> batch = TensorDict({"obs": torch.arange(1, 7).reshape(2, 3), "next": {"done": done}}, [2, 3])
        >>> split = split_trajectories(batch)
        >>> split["obs"]
        tensor([[1, 2, 0],
                [3, 0, 0],
                [4, 5, 6]])
        >>> split["mask"]
        tensor([[ True,  True, False],
                [ True, False, False],
                [ True,  True,  True]])
    """
    if rollout is None:
        rollout = rollout_tensordict
    if not isinstance(rollout, TensorDictBase):
        raise InvalidTypeError(f"split_trajectories: expected a TensorDict, got {type(rollout).__name__}")
    ids_path, mask_path = _id_and_mask(rollout, prefix, trajectory_key)
    ends = trajectory_ends(rollout, done_key=done_key, id_keys=[ids_path], mask_keys=[mask_path])
    fragments = _fragments_between(ends, step_mask(rollout, [mask_path]))
    depth = ends.ndim
    leaves, constants = _entries(rollout, mask_path, as_nested)
    if rollout.get(ids_path, None) is None:
        numbers = torch.repeat_interleave(
            torch.arange(fragments.count, device=ends.device), fragments.lengths
        )
        rebuilt = numbers.new_zeros(ends.numel()).index_copy_(0, fragments.rows, numbers)
        leaves[ids_path] = rebuilt.reshape(ends.shape)
    if as_nested:
        out = _rebuilt(rollout, leaves, _nested(fragments, depth), torch.Size([fragments.count, -1]), None)
    else:
        padded, mask = _padded(fragments, depth)
        out = _rebuilt(rollout, leaves, padded, mask.shape, [None, "time"])
        out.set(mask_path, mask)
    for path, value in constants.items():
        # One value for all steps has no rows to split or pad.
        out.set(path, NonTensorData(value, batch_size=out.batch_size))
    return out


@dataclass(frozen=True)
class _Fragments:
    """The trajectories of a flattened batch of N steps, M of them real."""

    rows: Tensor  # (M,) int64: positions of the real steps in the flattened batch, increasing
    starts: Tensor  # (n_traj,) int64: positions of first steps among the real ones
    lengths: Tensor  # (n_traj,) int64, each at least 1
    total: int  # N

    @property
    def count(self) -> int:
        return self.lengths.shape[0]

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.count else 0


def _id_and_mask(
    rollout: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[Path, Path]:
    """Return the paths of the ids and the mask."""
    if trajectory_key is not None:
        ids = as_path(trajectory_key)
    elif prefix is not None:
        ids = (*as_path(prefix), "traj_ids")
    else:
        ids = ("collector", "traj_ids") if rollout.get("collector", None) is not None else ("traj_ids",)
    mask = (*ids[:-1], "mask")
    if ids == mask:
        raise InvalidArgumentError(
            f"trajectory_key={as_key(ids)!r} is the key of the mask; choose another key for the ids"
        )
    return ids, mask


def _fragments_between(ends: Tensor, mask: Tensor | None) -> _Fragments:
    """Return the fragments between `ends`. Masked steps are ends, and so is each step before one."""
    total = ends.numel()
    flat = ends.flatten()
    if mask is None:
        rows = torch.arange(total, device=ends.device)
    else:
        rows = mask.to(ends.device).flatten().nonzero().squeeze(1)
        flat = flat.index_select(0, rows)
    lasts = flat.nonzero().squeeze(1)
    lengths = lasts.diff(prepend=lasts.new_full((1,), -1))
    return _Fragments(rows, lasts + 1 - lengths, lengths, total)


def _padded(fragments: _Fragments, depth: int) -> tuple[Callable[[Leaf], Leaf], Tensor]:
    """Return the map from a leaf ``[*B, T, *feature]`` to ``[n_traj, T_max, *feature]``, and the mask."""
    step = torch.arange(fragments.longest, device=fragments.rows.device)
    mask = step < fragments.lengths[:, None]
    real = fragments.rows[(fragments.starts[:, None] + step).clamp(max=fragments.rows.shape[0] - 1)]
    index = torch.where(mask, real, fragments.total).flatten()
    full = bool(mask.all())

    def gather(leaf: Leaf) -> Leaf:
        return take_rows(leaf, depth, index, pad=not full).reshape(*mask.shape, *leaf.shape[depth:])

    return gather, mask


def _nested(fragments: _Fragments, depth: int) -> Callable[[Tensor], Tensor]:
    """Return the map from a leaf ``[*B, T, *feature]`` to a nested tensor ``[n_traj, -1, *feature]``."""
    lengths = fragments.lengths.tolist()

    def gather(leaf: Tensor) -> Tensor:
        pieces = list(take_rows(leaf, depth, fragments.rows).split(lengths))
        return torch.nested.as_nested_tensor(pieces, leaf.dtype, leaf.device)

    return gather


def _entries(rollout: Any, skip: Path, as_nested: bool) -> tuple[dict[Path, Leaf], dict[Path, Any]]:
    """Return the leaves of a batch except `skip`, and the non-tensor values that all steps share."""
    leaves: dict[Path, Leaf] = {}
    constants: dict[Path, Any] = {}
    nodes: list[tuple[Path, Any]] = [((), rollout)]
    while nodes:
        at, node = nodes.pop(0)
        # Leaves of a lazy stack may have different shapes; `iter_leaves` returns these as object columns.
        if isinstance(node, LazyStackedTensorDict):
            leaves |= {path: leaf for path, leaf in iter_leaves(node, at, rollout.ndim) if path != skip}
            continue
        for key in list(node.keys()):
            path, value = (*at, key), node.get(key)
            if isinstance(value, NonTensorData):
                constants[path] = value.data
            elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
                nodes.append((path, value))
            elif path != skip:
                leaves[path] = as_leaf(value)
    for path, leaf in leaves.items():
        nested = isinstance(leaf, Tensor) and leaf.is_nested
        if (
            not isinstance(leaf, (Tensor, ObjectColumn))
            or nested
            or (as_nested and isinstance(leaf, ObjectColumn))
        ):
            raise UnsupportedError(
                f"split_trajectories: {as_key(path)!r} holds {type(leaf).__name__}, whose steps can't be cut and "
                "padded; exclude the key first: rollout.exclude(...)"
            )
    return leaves, constants


def _rebuilt(
    rollout: Any, leaves: dict[Path, Leaf], gather: Callable[[Leaf], Leaf], shape: torch.Size, names: Any
) -> Any:
    """Return a batch of the gathered `leaves`, with `shape` in place of the batch's dimensions."""
    lists = [path for path, leaf in leaves.items() if isinstance(leaf, ObjectColumn)]
    groups = group_sizes(rollout, rollout.ndim) if len(shape) > 1 else None
    layout = TensorDictBuilder(leaves, groups, lists, empty_groups(rollout))
    return layout.build([gather(leaf) for leaf in leaves.values()], shape, rollout.device, names)
