"""`Env`, the environment protocol that rollouts need, and `EnvTraits`, an environment's optional abilities."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, Path, as_path
from gleanrl.data.specs import TensorSpec, from_torchrl, has_choices, is_masked

_ABSENT = object()


class Env(Protocol):
    """The part of `EnvBase` that rollouts use. Any environment with these attributes works, including torchrl's.

    Specs may come from either library. Rollouts use their keys and the shapes and dtypes of their leaves.
    """

    full_observation_spec: Any
    full_action_spec: Any
    full_reward_spec: Any
    full_done_spec: Any
    full_state_spec: Any
    observation_spec: Any
    action_keys: Any
    reward_keys: Any
    done_keys: Any
    state_keys: Any

    @property
    def batch_size(self) -> torch.Size:
        """Batch dimensions, ``()`` for one environment."""

    @property
    def device(self) -> torch.device | None:
        """Device of its TensorDicts; None if they have none."""

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Take the action in `tensordict` and write the outcome below its ``"next"``."""

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Return the first observations; with a ``"_reset"`` mask, of some environments."""

    def maybe_reset(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Reset the environments that are done in a root."""

    def rand_action(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Write a random action."""

    def set_seed(self, seed: int, /, *, static_seed: bool = False) -> Any:
        """Seed the environment."""


def extra(env: Any, name: str, default: Any = None) -> Any:
    """Return an attribute that `env` or its class defines; the default if neither does.

    This bypasses `__getattr__`. A wrapper would return the attribute of the wrapped environment, and its shortcuts
    would bypass the wrapper. A batch of environments would start its members, or ask them.

    Args:
        env: any environment.
        name: name of the attribute.
        default: result for an environment without it.
    """
    if inspect.getattr_static(env, name, _ABSENT) is _ABSENT:
        return default
    return getattr(env, name)


def is_closed(env: Any) -> bool:
    """Return whether an environment reports that it was closed.

    Batches of other libraries may report it before their first reset, too; if they were really closed, that reset
    raises.
    """
    return bool(extra(env, "was_closed", extra(env, "is_closed", False)))


def seed_env(env: Env, seed: int, static_seed: bool) -> int:
    """Seed any environment and return the last seed used.

    The result of another library's `set_seed` may be another number, for example the next seed. Batches of other
    libraries seed their members in their own way. This function assumes one seed per environment.

    Args:
        env: any environment.
        seed: seed of the first environment of a batch.
        static_seed: whether all environments of a batch get `seed`.
    """
    last = env.set_seed(seed, static_seed=static_seed)
    if extra(env, "usage") is not None:
        return int(last)
    return seed if static_seed else seed + max(1, torch.Size(env.batch_size).numel()) - 1


@dataclass(frozen=True)
class EnvTraits:
    """Optional abilities of an environment beyond the public protocol; `of` determines them at each call.

    Attributes:
        masks_frames: whether some steps of a rollout are resets instead of frames.
        loses_last: whether the last observations of trajectories are lost and replaced by NaN.
        resets_some: whether some environments of a batch can be reset without the others.
        stackable: whether the data of a batch of environments have the same keys, dtypes and numbers of dimensions.
        actions_vary: whether the allowed actions depend on the row before.
        own_actions: whether `rand_action` does more than draw from the action spec.
        allow_done_after_reset: whether a reset may return done.
        notes_masks: whether each change of the action spec's masks replaces `Changes.latest` (see there).
        primed_keys: keys of the policy's state. A policy may write them below ``"next"``, and the environment returns
            them in the next root.
    """

    masks_frames: bool = False
    loses_last: bool = False
    resets_some: bool = True
    stackable: bool = True
    actions_vary: bool = False
    own_actions: bool = False
    allow_done_after_reset: bool = False
    notes_masks: bool = False
    primed_keys: tuple[NestedKey, ...] = ()

    @property
    def primed_paths(self) -> frozenset[Path]:
        """The paths below ``"next"`` at which a policy may write its state."""
        return frozenset(("next", *as_path(key)) for key in self.primed_keys)

    @classmethod
    def of(cls, env: Env) -> EnvTraits:
        """Return the traits of `env`.

        Environments of other libraries have no attribute `traits`. For these, keys declared both as observation and as
        state are the policy's state. Actions vary if the action spec has a mask. An attribute
        `allow_done_after_reset` of the environment is used. All other traits have their defaults.
        """
        traits: EnvTraits | None = extra(env, "traits")
        if traits is not None:
            return traits
        states = list(env.full_state_spec.keys(True, True))
        return cls(
            actions_vary=has_mask(env),
            allow_done_after_reset=bool(extra(env, "allow_done_after_reset", False)),
            primed_keys=tuple(k for k in env.full_observation_spec.keys(True, True) if k in states),
        )


def has_mask(env: Env) -> bool:
    """Return whether a mask restricts the actions in the action spec of `env`."""
    return is_masked(from_torchrl(env.full_action_spec))


def may_mask(env: Env) -> bool:
    """Return whether the actions of `env` include choices, which a mask can restrict at any time."""
    return has_choices(from_torchrl(env.full_action_spec))


def masked_now(env: Env) -> bool:
    """Return whether a mask currently restricts the actions of any environment in `env`."""
    spec = live_actions(env)
    if isinstance(spec, TensorSpec):
        return is_masked(spec)
    # Another library's spec isn't converted, because that would take longer than the step.
    return any(extra(leaf, "mask") is not None for leaf in spec.values(True, True))


def live_actions(env: Env) -> Any:
    """Return the full action spec of any environment, with its current masks (see `EnvBase.live_action_spec`)."""
    kind: Any = type(env)  # looked up in the class: a wrapper would forward it
    try:
        live = kind.live_action_spec
    except AttributeError:
        return env.full_action_spec
    return live(env)
