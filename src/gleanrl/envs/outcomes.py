"""What `step` and `reset` make of the TensorDicts that an environment's own methods return."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

from gleanrl.envs.env_specs import EnvSpecs, complete_flags
from gleanrl.envs.resets import merge_reset, reset_rows
from gleanrl.errors import EnvironmentContractError
from gleanrl.tree import Path, as_key, as_path, leaf_at


def complete_root(batch: TensorDictBase, specs: EnvSpecs) -> TensorDictBase:
    """Add missing flags to `batch`, in place, and the trailing dimension that flags may come without; return it."""
    if _came_whole(batch, specs, "done"):
        return batch
    lead, leaves = _lead(batch, specs), specs.leaves("done")
    came = {key: batch.get(key, None) for key in leaves}
    given = {k: _with_last_dim(v, (*lead, *leaves[k].shape)) for k, v in came.items() if v is not None}
    if len(given) == len(leaves) and all(given[key] is value for key, value in came.items()):
        return batch  # complete as it came, from an environment whose batch size isn't fixed
    for group in specs.groups():
        keys = {path[-1]: key for key in leaves if (path := as_path(key))[:-1] == group}
        flags = {name: given[key] for name, key in keys.items() if key in given}
        zeros = {name: leaves[key].zero(lead) for name, key in keys.items()}
        for name, value in complete_flags(flags, zeros).items():
            batch.set(keys[name], value)
    return batch


def complete_outcome(batch: TensorDictBase, specs: EnvSpecs) -> TensorDictBase:
    """Complete flags and rewards of a step's outcome, in place; return it.

    Raises:
        EnvironmentContractError: if a reward is missing.
    """
    if _came_whole(batch, specs, "reward", "done"):
        return batch
    lead = _lead(batch, specs)
    for key, spec in specs.leaves("reward").items():
        value = batch.get(key, None)
        if value is None:
            raise EnvironmentContractError(
                f"_step returned no {key!r}; got {sorted(map(str, batch.keys(True)))}. An environment without rewards "
                "declares that: reward_spec = Composite()"
            )
        whole = _with_last_dim(value, (*lead, *spec.shape)).to(spec.dtype)
        if whole is not value:
            batch.set(key, whole)
    return complete_root(batch, specs)


def _came_whole(batch: TensorDictBase, specs: EnvSpecs, *roles: str) -> bool:
    """Return whether the leaves of these roles came as they are declared, all of them, as they mostly do."""
    if batch.batch_size != specs.batch_size:
        return False
    for role in roles:
        for path, shape, dtype in specs.forms(role):
            leaf = leaf_at(batch, path)
            if leaf is None or leaf.shape != shape or not (dtype is None or leaf.dtype is dtype):
                return False
    return True


def with_rows_held(
    outcome: TensorDictBase, root: TensorDictBase, mask: torch.Tensor, specs: EnvSpecs
) -> TensorDictBase:
    """Return `outcome` where `mask` is True; in the other rows the entries of `root`, and rewards of zero."""
    if bool(mask.all()):
        return outcome
    before = root.copy()
    for key in specs.keys("reward"):
        before.set(key, torch.zeros_like(outcome.get(key)))
    return merge_reset(outcome, before, {(): mask})


def check_outcome(outcome: TensorDictBase, specs: EnvSpecs) -> None:
    """Raise unless every value of a step's outcome is as declared.

    Raises:
        SpecError: at the first that isn't.
    """
    lead = _lead(outcome, specs)
    for role in ("observation", "reward", "done"):
        spec = specs.full(role)
        for key in spec.keys(True, True):
            leaf = spec[key]
            leaf.expand(*lead, *leaf.shape).assert_is_in(outcome.get(key))


def check_not_done(
    fresh: TensorDictBase, masks: Mapping[Path, torch.Tensor], specs: EnvSpecs, name: str
) -> None:
    """Raise if a row that was reset is done.

    Args:
        fresh: what a reset returns.
        masks: the groups' ``"_reset"`` masks; none for all rows.
        specs: the environment's.
        name: the environment's.

    Raises:
        EnvironmentContractError: if one is.
    """
    for group in specs.groups():
        done = fresh.get(as_key((*group, "done")))
        if masks:
            mask = masks[group] if group in masks else reset_rows(masks, fresh.batch_size)
            done = done & mask.reshape((*mask.shape, *[1] * (done.ndim - mask.ndim)))
        if bool(done.any()):
            raise EnvironmentContractError(
                f"reset of {name} returned done; pass allow_done_after_reset=True if that is meant"
            )


def _lead(batch: TensorDictBase, specs: EnvSpecs) -> torch.Size:
    """Return the batch dimensions that data have beyond the specs', of environments without a fixed batch size."""
    return batch.batch_size[: batch.ndim - len(specs.batch_size)]


def _with_last_dim(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Add the last dimension of size 1 that `value` may have come without."""
    if value.shape != shape and len(shape) and shape[-1] == 1 and value.shape == shape[:-1]:
        return value.unsqueeze(-1)
    return value
