"""What a rollout needs of an environment, and where those of this library do more than the public protocol asks."""

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
    """The part of `EnvBase` that rollouts use: any environment that has it can be stepped, torchrl's included.

    Specs are those of either library; their keys and leaves' shapes and dtypes are looked at.
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
        """Reset what is done in a root."""

    def rand_action(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Write a random action."""

    def set_seed(self, seed: int, /, *, static_seed: bool = False) -> Any:
        """Seed the environment."""


def extra(env: Any, name: str, default: Any = None) -> Any:
    """Return an attribute that `env` itself defines, or the default if neither it nor its class does.

    `__getattr__` isn't asked: a wrapper would answer for what it wraps, whose shortcuts would bypass the wrapper; a
    batch of environments would start its members, or pass the question on to them.

    Args:
        env: any environment.
        name: of the attribute.
        default: what an environment without it has.
    """
    if inspect.getattr_static(env, name, _ABSENT) is _ABSENT:
        return default
    return getattr(env, name)


def is_closed(env: Any) -> bool:
    """Return whether an environment says that it was closed.

    Those of other libraries may say so until they are first reset, and raise if they are closed then.
    """
    return bool(extra(env, "was_closed", extra(env, "is_closed", False)))


def seed_env(env: Env, seed: int, static_seed: bool) -> int:
    """Seed any environment and return the last seed that it was given.

    What other libraries' `set_seed` returns may be another number, the seed that follows say. Their batches seed their
    members in their own way; they are taken to have used one seed for each environment.

    Args:
        env: any environment.
        seed: of the first environment of a batch.
        static_seed: whether all environments of a batch get `seed`.
    """
    last = env.set_seed(seed, static_seed=static_seed)
    if extra(env, "usage") is not None:
        return int(last)
    return seed if static_seed else seed + max(1, torch.Size(env.batch_size).numel()) - 1


@dataclass(frozen=True)
class EnvTraits:
    """What an environment does more, or otherwise, than the public protocol asks; gathered once, by `of`.

    Attributes:
        masks_frames: whether rollouts hold steps that are no frames but resets.
        loses_last: whether the last observations of episodes are lost, with NaN in their place.
        resets_some: whether some environments of a batch can be reset while the others go on.
        stackable: whether the data of a batch of environments have the same keys, dtypes and numbers of dimensions.
        actions_vary: whether what may be drawn as an action follows from the row before.
        own_actions: whether its `rand_action` is more than a draw from the action spec.
        allow_done_after_reset: whether a reset may return done.
        notes_masks: whether each change of its action spec's masks changes `Changes.latest` (see there).
        primed_keys: what a policy may write below ``"next"``: its state, which the environment hands back in the
            following root.
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
        """Where a policy may write its state: `primed_keys` below ``"next"``."""
        return frozenset(("next", *as_path(key)) for key in self.primed_keys)

    @classmethod
    def of(cls, env: Env) -> EnvTraits:
        """Return what `env` says of itself.

        Of one that says nothing, another library's, a policy's state is what it declares both as an observation and as
        a state that it reads, and actions vary if their spec has a mask.
        """
        told: EnvTraits | None = extra(env, "traits")
        if told is not None:
            return told
        states = list(env.full_state_spec.keys(True, True))
        return cls(
            actions_vary=has_mask(env),
            allow_done_after_reset=bool(extra(env, "allow_done_after_reset", False)),
            primed_keys=tuple(k for k in env.full_observation_spec.keys(True, True) if k in states),
        )


def has_mask(env: Env) -> bool:
    """Return whether a mask says which actions are allowed."""
    return is_masked(from_torchrl(env.full_action_spec))


def may_mask(env: Env) -> bool:
    """Return whether the actions of `env` have choices, which a mask can restrict at any time."""
    return has_choices(from_torchrl(env.full_action_spec))


def masked_now(env: Env) -> bool:
    """Return whether a mask restricts the actions of any environment at present."""
    spec = live_actions(env)
    if isinstance(spec, TensorSpec):
        return is_masked(spec)
    # Another library's spec: a conversion would cost more than the step.
    return any(extra(leaf, "mask") is not None for leaf in spec.values(True, True))


def live_actions(env: Env) -> Any:
    """Return the full action spec of any environment, with the masks that hold at present (see `EnvBase`)."""
    kind: Any = type(env)  # the class is asked: a wrapper would pass the question on
    try:
        live = kind.live_action_spec
    except AttributeError:
        return env.full_action_spec
    return live(env)
