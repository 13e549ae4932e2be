"""`check_env_specs`: checks an environment's outputs against its specs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.ragged import Leaf, ObjectColumn, values_of
from gleanrl._arrays.tensordicts import Path, as_key, as_path, flatten
from gleanrl._rollout.env_traits import Env
from gleanrl._rollout.tensordict_stepper import CastWarning, UndeclaredKeyWarning
from gleanrl._state.rng import torch_rng_preserved
from gleanrl.data.specs import is_masked, without_masks
from gleanrl.data.trajectories import MASK
from gleanrl.errors import EnvironmentContractError, GleanError, SpecError


def check_env_specs(
    env: Any,
    return_contiguous: bool = True,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool = True,
) -> None:
    """Run at most three random steps and compare them with the specs: keys, shapes, dtypes and domains.

    Torch's random state is restored afterwards; the environment's state isn't. Errors that the environment raises
    itself pass through.

    Args:
        env: the environment; it is reset.
        return_contiguous: see `rollout`.
        check_dtype: whether to compare dtypes. Rewards of another dtype pass, because each step casts them to the
            declared one.
        seed: seeds the environment, and torch for the duration of the check.
        tensordict: passed to the first reset. For environments without a fixed batch size it also sets the batch size.
        break_when_any_done: see `rollout`.

    Raises:
        SpecError: at the first difference (also an AssertionError). The message names the key, the expected and the
            actual value.
    """
    with torch_rng_preserved(), warnings.catch_warnings():
        warnings.simplefilter("error", UndeclaredKeyWarning)
        if check_dtype:
            warnings.simplefilter("error", CastWarning)
        if seed is not None:
            torch.manual_seed(seed)
            env.set_seed(seed)
        try:
            real = env.rollout(
                3,
                return_contiguous=return_contiguous,
                tensordict=tensordict,
                break_when_any_done=break_when_any_done,
            )
        except (EnvironmentContractError, UndeclaredKeyWarning, CastWarning) as cause:
            raise SpecError(f"check_env_specs: {cause}") from cause
    if not return_contiguous:
        real = real.contiguous()
    dims = real.ndim - 1
    lead = real.batch_size[: dims - len(env.batch_size)]  # without a fixed batch size: the `tensordict`'s
    fake = flatten(env.fake_tensordict().expand(*lead, *env.batch_size))
    found = {path: leaf for path, leaf in flatten(real).items() if path != MASK}  # the rollout adds it
    if set(fake) != set(found):
        missing, extra = sorted(set(fake) - set(found)), sorted(set(found) - set(fake))
        raise SpecError(f"check_env_specs: the rollout lacks {missing} and has {extra} beyond the specs")
    open_sizes = {path for path, spec in _declared(env) if -1 in spec.shape}
    for path, expected in fake.items():
        leaf = found[path]
        if path in open_sizes or (isinstance(leaf, ObjectColumn) and isinstance(expected, ObjectColumn)):
            continue
        shape = (*expected.shape[:dims], real.shape[-1], *expected.shape[dims:])
        if tuple(leaf.shape) != shape:
            raise SpecError(
                f"check_env_specs: {as_key(path)!r} expected shape {shape}, got {tuple(leaf.shape)}"
            )
        if check_dtype and leaf.dtype != expected.dtype:
            raise SpecError(f"check_env_specs: {as_key(path)!r} expected {expected.dtype}, got {leaf.dtype}")
    _check_domains(env, found, lead)


def _declared(env: Env) -> list[tuple[Path, Any]]:
    """Return the path and the spec of each leaf of a rollout."""
    roles = (
        (("next",), (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)),
        ((), (env.full_observation_spec, env.full_action_spec, env.full_done_spec)),
    )
    return [
        ((*prefix, *as_path(key)), spec[key])
        for prefix, specs in roles
        for spec in specs
        for key in spec.keys(True, True)
        if spec[key] is not None
    ]


def _check_domains(env: Env, found: dict[Path, Leaf], lead: torch.Size) -> None:
    dims = len(lead) + len(env.batch_size)
    for full, declared in _declared(env):
        spec = declared.expand(*lead, *declared.shape) if lead else declared
        if is_masked(spec):  # The spec holds the last row's mask, but each row had its own.
            spec = without_masks(spec)
        for step in found[full].unbind(dims):
            try:
                for value, part in values_of(step, spec):
                    part.assert_is_in(value)
            except GleanError as cause:
                raise SpecError(f"check_env_specs: {full}: {cause}") from cause
