"""Partial resets: which rows a ``"_reset"`` mask names, and how fresh and old rows are put together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase

from gleanrl.errors import SchemaError
from gleanrl.tree import FLAGS, NestedKey, Path, as_key, as_path, outermost


def reset_masks(tensordict: TensorDictBase | None, groups: Sequence[Path]) -> dict[Path, torch.Tensor]:
    """Return the ``"_reset"`` mask of each group of flags that `tensordict` has one for.

    They are copies: a mask may be the very done flag that the environment is about to overwrite.
    """
    if tensordict is None:
        return {}
    masks = {group: tensordict.get(as_key((*group, "_reset")), None) for group in groups}
    return {group: mask.clone() for group, mask in masks.items() if mask is not None}


def own_request(
    tensordict: TensorDictBase | None, masks: Mapping[Path, torch.Tensor]
) -> TensorDictBase | None:
    """Return a shallow copy of `tensordict` with masks of its own, which an environment may overwrite."""
    if tensordict is None:
        return None
    out = tensordict.copy()
    for group, mask in masks.items():
        out.set(as_key((*group, "_reset")), mask.clone())
    return out


def due_resets(root: TensorDictBase, groups: Sequence[Path]) -> dict[Path, torch.Tensor]:
    """Return the ``"_reset"`` mask of each group of flags, after a step that led to `root`.

    The outermost flags rule: where an environment has a done of its own, agents below it that are done wait for
    it, and all of them are reset with it. Where it hasn't, each group resets by itself.
    """
    outer, masks = outermost(groups), {}
    for group in groups:
        above = next(other for other in outer if group[: len(other)] == other)
        done = root.get(as_key((*above, "done")))
        if above != group:
            own = root.get(as_key((*group, "done")))
            rows = reset_rows({above: done}, root.batch_size)
            done = rows.reshape((*rows.shape, *[1] * (own.ndim - rows.ndim))).expand(own.shape).clone()
        masks[group] = done
    return masks


def is_partial(masks: Mapping[Path, torch.Tensor]) -> bool:
    """Return whether `masks` leave any row as it is."""
    return not all(bool(mask.all()) for mask in masks.values())


def reset_rows(masks: Mapping[Path, torch.Tensor], batch_size: torch.Size) -> torch.Tensor:
    """Return where any mask of any group is True, ``(*batch,)`` bool."""
    return torch.stack([mask.reshape(*batch_size, -1).any(-1) for mask in masks.values()]).any(0)


def merge_reset(
    fresh: TensorDictBase, before: TensorDictBase, masks: Mapping[Path, torch.Tensor]
) -> TensorDictBase:
    """Return the rows of `fresh` where the masks are True and those of `before` elsewhere.

    A group's own mask rules the entries under that group; any mask of any group rules everything else.

    Raises:
        SchemaError: if `before` lacks an observation of the rows that aren't reset.
    """
    size = fresh.batch_size
    out = fresh.copy()
    for key in list(fresh.keys(True, True)):
        path, value, old = as_path(key), fresh.get(key), before.get(key, None)
        if old is None:
            if path[-1] not in FLAGS:
                raise SchemaError(f"partial reset: the input has no {key!r} for the rows that aren't reset")
            warnings.warn(
                f"partial reset: the input has no {key!r} for the rows that aren't reset", stacklevel=4
            )
            continue
        out.set(key, chosen(masks, path, value, old, size))
    return out


def chosen(
    masks: Mapping[Path, torch.Tensor],
    key: NestedKey,
    fresh: torch.Tensor,
    before: torch.Tensor,
    batch_size: torch.Size,
) -> torch.Tensor:
    """Return `fresh` where the masks are True for the entry at `key`, `before` elsewhere; see `merge_reset`."""
    path = as_path(key)
    own = next((mask for group, mask in masks.items() if group and path[: len(group)] == group), None)
    mask = reset_rows(masks, batch_size) if own is None else own
    return torch.where(_aligned(mask, fresh, batch_size), fresh, before)


def _aligned(mask: torch.Tensor, value: torch.Tensor, batch_size: torch.Size) -> torch.Tensor:
    """Return `mask` with as many dimensions as `value`: trailing 1s dropped or added, else rows only."""
    while mask.ndim > len(batch_size) and (mask.ndim > value.ndim or mask.shape[-1] == 1):
        mask = mask.squeeze(-1) if mask.shape[-1] == 1 else mask.any(-1)
    if mask.shape != value.shape[: mask.ndim]:
        mask = mask.reshape(*batch_size, -1).any(-1)
    return mask.reshape((*mask.shape, *[1] * (value.ndim - mask.ndim)))
