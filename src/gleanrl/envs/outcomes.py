"""Completing and checking the TensorDicts that ``_step`` and ``_reset`` return; merging rows of partial resets."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_entry
from gleanrl._arrays.tensordicts import (
    FLAGS,
    NestedKey,
    Path,
    as_key,
    as_path,
    drop_entry,
    flatten,
    leaf_at,
    level_of,
    outermost,
    put_leaf,
    record_of,
    shallow_copy,
)
from gleanrl.envs.env_specs import EnvSpecs, complete_flags
from gleanrl.errors import EnvironmentContractError, MissingKeyError

_ONE = torch.Size((1,))


def reset_masks(tensordict: TensorDictBase | None, groups: Sequence[Path]) -> dict[Path, torch.Tensor]:
    """Return copies of the ``"_reset"`` masks in `tensordict`, by group of flags; groups without a mask are left out.

    The masks are copied, because a mask may share memory with a done flag that the environment is about to overwrite.
    """
    if tensordict is None:
        return {}
    masks = {group: leaf_at(tensordict, (*group, "_reset")) for group in groups}
    return {group: mask.clone() for group, mask in masks.items() if mask is not None}


def own_request(
    tensordict: TensorDictBase | None, masks: Mapping[Path, torch.Tensor]
) -> TensorDictBase | None:
    """Return a shallow copy of `tensordict` with copies of `masks`, which environments may overwrite; None for None."""
    if tensordict is None:
        return None
    return request_of(tensordict, {group: mask.clone() for group, mask in masks.items()})


def request_of(root: TensorDictBase, masks: Mapping[Path, torch.Tensor]) -> TensorDictBase:
    """Return a shallow copy of `root` with `masks` as its ``"_reset"`` entries."""
    out: TensorDictBase = shallow_copy(root)
    for group, mask in masks.items():
        put_leaf(out, (*group, "_reset"), mask)
    return out


def without_masks(root: TensorDictBase, reset_keys: Sequence[NestedKey]) -> TensorDictBase:
    """Return the result of a reset without ``"_reset"`` masks that the environment copied from its input."""
    copied = [key for key in reset_keys if leaf_at(root, as_path(key)) is not None]
    return root.exclude(*copied) if copied else root


def put_root(
    request: TensorDictBase, root: TensorDictBase, reset_keys: Sequence[NestedKey]
) -> TensorDictBase:
    """Write the root of a reset into `request`, the caller's TensorDict, without its masks; return it."""
    # Only a plain TensorDict allows the faster access below, which skips TensorDict's checks.
    if type(request) is not TensorDict or type(root) is not TensorDict:
        return request.exclude(*reset_keys, inplace=True).update(root)
    for key in reset_keys:
        drop_entry(request, as_path(key))
    for name, value in level_of(root).items():
        if isinstance(value, torch.Tensor):
            put_leaf(request, (name,), value)
        else:
            request.update({name: value})
    return request


def due_resets(root: TensorDictBase, groups: Sequence[Path]) -> dict[Path, torch.Tensor]:
    """Return the ``"_reset"`` mask of each group of flags, after a step that led to `root`.

    The outermost flags decide. If an environment has a done flag above its agents, agents that are done earlier wait
    for it, and all agents are reset together. Otherwise each group is reset by its own flags. Only done flags count.
    A mask may be the flag itself, not a copy.
    """
    done = {group: root.get(as_key((*group, "done"))) for group in groups}
    return _ruled_by_outermost(done, root.batch_size)


def terminated_or_truncated(
    data: TensorDictBase,
    full_done_spec: Any = None,
    key: str | None = "_reset",
    write_full_false: bool = False,
) -> bool:
    """Return whether any trajectory in `data` ended; if so, write masks of the ended ones next to the flags.

    A trajectory has ended if it is done, terminated or truncated. Flags below ``"next"`` don't count. If a
    group of flags lies below another one (agents below the environment), the outer group decides, as in `due_resets`.

    Args:
        data: the flags, at any depth; written in place.
        full_done_spec: the environment's done spec, whose flags are read; `data` may lack some. None reads all flags
            in `data`.
        key: name of the mask written for each group of flags, of their shape; None writes nothing.
        write_full_false: whether to write the masks even if no trajectory ended.

    Raises:
        MissingKeyError: if there are no flags.
    """
    source = data if full_done_spec is None else full_done_spec
    paths = [path for k in source.keys(True, True) if (path := as_path(k))[-1] in FLAGS and path[0] != "next"]
    ended: dict[Path, torch.Tensor] = {}
    for path in paths:
        flag = data.get(as_key(path), None)
        if flag is not None:
            ended[path[:-1]] = ended[path[:-1]] | flag if path[:-1] in ended else flag.clone()
    if not ended:
        raise MissingKeyError("terminated_or_truncated: found no done, terminated or truncated")
    masks = _ruled_by_outermost(ended, data.batch_size)
    found = any(bool(mask.any()) for mask in masks.values())
    if key is not None and (found or write_full_false):
        for group, mask in masks.items():
            data.set(as_key((*group, key)), mask)
    return found


def _ruled_by_outermost(
    ended: Mapping[Path, torch.Tensor], batch_size: torch.Size
) -> dict[Path, torch.Tensor]:
    """Return the mask of each group: its outermost group's mask, expanded to the group's shape."""
    if len(ended) == 1:
        return dict(ended)
    outer, masks = outermost(ended), {}
    for group, own in ended.items():
        above = next(other for other in outer if group[: len(other)] == other)
        if above != group:
            rows = reset_rows({above: ended[above]}, batch_size)
            own = rows.reshape((*rows.shape, *[1] * (own.ndim - rows.ndim))).expand(own.shape).clone()
        masks[group] = own
    return masks


def is_partial(masks: Mapping[Path, torch.Tensor]) -> bool:
    """Return whether any of `masks` leaves a row without a reset; False if there are no masks."""
    return not all(bool(mask.all()) for mask in masks.values())


def reset_rows(masks: Mapping[Path, torch.Tensor], batch_size: torch.Size) -> torch.Tensor:
    """Return where a mask of any group is True, ``(*batch,)`` bool; see `any_of`."""
    return any_of(masks.values(), batch_size)


def any_of(flags: Collection[torch.Tensor], batch_size: torch.Size) -> torch.Tensor:
    """Return where any flag is set, ``(*batch,)`` bool. The result of a single flag may share its memory."""
    rows = [
        flag.reshape(*batch_size, -1).any(-1) if flag.shape[len(batch_size) :] != _ONE else flag.squeeze(-1)
        for flag in flags
    ]
    return rows[0] if len(rows) == 1 else torch.stack(rows).any(0)


def merge_reset(
    after: TensorDictBase, before: TensorDictBase, masks: Mapping[Path, torch.Tensor]
) -> TensorDictBase:
    """Return the rows of `after` where the masks are True and the rows of `before` elsewhere.

    A group's mask applies to the entries below that group. For all other entries, a row is fresh if any group's mask is
    True. If `before` lacks an entry, this warns, and all rows keep the environment's values.
    """
    size, leaves, old_leaves = after.batch_size, flatten(after), flatten(before)
    for path, value in leaves.items():
        key, old = as_key(path), old_leaves.get(path)
        if old is None:
            warnings.warn(
                f"partial reset: the input has no {key!r} for the rows that aren't reset", stacklevel=4
            )
            continue
        leaves[path] = chosen(masks, path, value, old, size)
    # Leaves of different shapes per row need a lazy stack, not a TensorDict.
    if any(isinstance(leaf, ObjectColumn) and leaf.blank is not None for leaf in leaves.values()):
        stacked: TensorDictBase = record_of(leaves, size, after.device)
        return stacked
    out: TensorDictBase = shallow_copy(after)
    for path, leaf in leaves.items():
        put_leaf(out, path, as_entry(leaf))
    return out


def chosen(
    masks: Mapping[Path, torch.Tensor], key: NestedKey, after: Leaf, before: Leaf, batch_size: torch.Size
) -> Leaf:
    """Return `after` where the masks are True for the entry at `key`, `before` elsewhere; see `merge_reset`."""
    path = as_path(key)
    own = next((mask for group, mask in masks.items() if group and path[: len(group)] == group), None)
    mask = reset_rows(masks, batch_size) if own is None else own
    # `torch.where` would broadcast different shapes; rows of an `ObjectColumn` may have any shape.
    if isinstance(after, ObjectColumn) or isinstance(before, ObjectColumn) or after.shape != before.shape:
        new, old = (
            leaf if isinstance(leaf, ObjectColumn) else ObjectColumn.rows_of(leaf, batch_size)
            for leaf in (after, before)
        )
        return new.where(_aligned(mask, new, batch_size), old)
    return torch.where(_aligned(mask, after, batch_size), after, before)


def keep_flags(
    values: dict[NestedKey, Any],
    before: Mapping[NestedKey, Any],
    after: Any,
    masks: Mapping[Path, torch.Tensor] | None,
    batch_size: torch.Size,
) -> None:
    """Add to `values` the flags that only `before` has: the fresh flag where the masks are True, else the old one.

    Args:
        values: outputs of the transforms for a reset. Flags that transforms write only in steps are missing.
        before: outputs of the transforms for the step before.
        after: the reset's result, by key.
        masks: the ``"_reset"`` masks by group; None for a full reset.
        batch_size: the batch dimensions.
    """
    for key in before.keys() - values.keys():
        if as_path(key)[-1] in FLAGS:
            value = after.get(key)
            values[key] = (
                value.clone() if masks is None else chosen(masks, key, value, before[key], batch_size)
            )


def _aligned(mask: torch.Tensor, value: Leaf, batch_size: torch.Size) -> torch.Tensor:
    """Return `mask` with as many dimensions as `value`, so that it broadcasts over the value's dimensions.

    Trailing dimensions of size 1 are dropped or added. If the shapes still don't match, the mask is reduced to one
    value per row.
    """
    while mask.ndim > len(batch_size) and (mask.ndim > value.ndim or mask.shape[-1] == 1):
        mask = mask.squeeze(-1) if mask.shape[-1] == 1 else mask.any(-1)
    if mask.shape != value.shape[: mask.ndim]:
        mask = mask.reshape(*batch_size, -1).any(-1)
    return mask.reshape((*mask.shape, *[1] * (value.ndim - mask.ndim)))


def ended_since(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], batch_size: torch.Size
) -> torch.Tensor:
    """Return where a flag of `after` is set and no flag of `before`, ``(*batch,)`` bool."""
    return any_of(after, batch_size) & ~any_of(before, batch_size)


def complete_root(batch: TensorDictBase, specs: EnvSpecs) -> TensorDictBase:
    """Add missing flags to `batch`, in place, and the last dimension if flags lack it; return `batch`.

    Raises:
        EnvironmentContractError: if done and truncated came without terminated.
    """
    if _is_complete(batch, specs, "done"):
        return batch
    lead, leaves = _lead(batch, specs), specs.leaves("done")
    found = {key: batch.get(key, None) for key in leaves}
    shaped = {k: _with_last_dim(v, (*lead, *leaves[k].shape)) for k, v in found.items() if v is not None}
    if len(shaped) == len(leaves) and all(shaped[key] is value for key, value in found.items()):
        return batch  # already complete, although its batch size isn't the specs'
    for group in specs.groups():
        keys = {path[-1]: key for key in leaves if (path := as_path(key))[:-1] == group}
        flags = {name: shaped[key] for name, key in keys.items() if key in shaped}
        zeros = {name: leaves[key].zero(lead) for name, key in keys.items()}
        for name, value in complete_flags(flags, zeros).items():
            batch.set(keys[name], value)
    return batch


def complete_outcome(batch: TensorDictBase, specs: EnvSpecs) -> TensorDictBase:
    """Complete the flags and rewards of a step's outcome, in place; return it.

    Rewards are cast to the dtype of their spec, and get its last dimension of size 1 if they lack it.

    Raises:
        EnvironmentContractError: if a reward is missing, or done and truncated came without terminated.
    """
    if _is_complete(batch, specs, "reward", "done"):
        return batch
    lead = _lead(batch, specs)
    for key, spec in specs.leaves("reward").items():
        value = batch.get(key, None)
        if value is None:
            raise EnvironmentContractError(
                f"_step returned no {key!r}; got {sorted(map(str, batch.keys(True)))}. An environment without rewards "
                "declares that: reward_spec = Composite()"
            )
        shaped = _with_last_dim(value, (*lead, *spec.shape)).to(spec.dtype)
        if shaped is not value:
            batch.set(key, shaped)
    return complete_root(batch, specs)


def _is_complete(batch: TensorDictBase, specs: EnvSpecs, *roles: str) -> bool:
    """Return whether all leaves of these roles have their declared shapes and dtypes: the usual, fast case."""
    if batch.batch_size != specs.batch_size:
        return False
    for role in roles:
        for path, shape, dtype in specs.forms(role):
            leaf = leaf_at(batch, path)
            if leaf is None or leaf.shape != shape or not (dtype is None or leaf.dtype is dtype):
                return False
    return True


def with_unstepped_rows(
    outcome: TensorDictBase, root: TensorDictBase, mask: torch.Tensor, specs: EnvSpecs
) -> TensorDictBase:
    """Return `outcome` where `mask` is True; the other rows hold the entries of `root` and zero rewards.

    For an entry that `root` lacks, `merge_reset` warns and keeps the rows of `outcome`.
    """
    if bool(mask.all()):
        return outcome
    before = root.copy()
    for key in specs.keys("reward"):
        before.set(key, torch.zeros_like(outcome.get(key)))
    return merge_reset(outcome, before, {(): mask})


def check_outcome(outcome: TensorDictBase, specs: EnvSpecs) -> None:
    """Check that every value of a step's outcome is in its spec's domain.

    Raises:
        SpecError: at the first value outside.
    """
    lead = _lead(outcome, specs)
    for role in ("observation", "reward", "done"):
        spec = specs.full(role)
        for key in spec.keys(True, True):
            leaf = spec[key]
            leaf.expand(*lead, *leaf.shape).assert_is_in(outcome.get(key))


def check_not_done(
    root: TensorDictBase, masks: Mapping[Path, torch.Tensor], specs: EnvSpecs, name: str
) -> None:
    """Check that no row that was reset is done.

    Args:
        root: the result of a reset.
        masks: the ``"_reset"`` masks by group; empty for a reset of all rows.
        specs: the environment's specs.
        name: the environment's name, for the message.

    Raises:
        EnvironmentContractError: if a reset row is done.
    """
    for group in specs.groups():
        done = root.get(as_key((*group, "done")))
        if masks:
            mask = masks[group] if group in masks else reset_rows(masks, root.batch_size)
            done = done & mask.reshape((*mask.shape, *[1] * (done.ndim - mask.ndim)))
        if bool(done.any()):
            raise EnvironmentContractError(
                f"reset of {name} returned done; pass allow_done_after_reset=True if that is meant"
            )


def _lead(batch: TensorDictBase, specs: EnvSpecs) -> torch.Size:
    """Return the batch dimensions before the specs' own, which only environments without a fixed batch size have."""
    return batch.batch_size[: batch.ndim - len(specs.batch_size)]


def _with_last_dim(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Add the last dimension of size 1 if `value` lacks it."""
    if value.shape != shape and len(shape) and shape[-1] == 1 and value.shape == shape[:-1]:
        return value.unsqueeze(-1)
    return value
