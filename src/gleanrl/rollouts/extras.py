"""Where environments of this library do more than the public protocol asks, and what to do about others."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gleanrl.tree import NestedKey

_ABSENT = object()


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


def seed_env(env: Any, seed: int, static_seed: bool) -> int:
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


def actions_vary(env: Any) -> bool:
    """Return whether what may be drawn as an action follows from the row before.

    An environment that doesn't say is taken to change the mask of its action spec, if there is one.
    """
    known = extra(env, "actions_vary")
    if known is not None:
        return bool(known)
    return any(getattr(spec, "mask", None) is not None for spec in env.full_action_spec.values(True, True))


def primed_keys(env: Any) -> list[NestedKey]:
    """Return what a policy may write below ``"next"``: its state, which `env` hands back in the following root.

    Of an environment that doesn't say, it is what it declares both as an observation and as a state that it reads.
    """
    known = extra(env, "primed_keys")
    if known is not None:
        return list(known)
    states = list(env.full_state_spec.keys(True, True))
    return [key for key in env.full_observation_spec.keys(True, True) if key in states]
