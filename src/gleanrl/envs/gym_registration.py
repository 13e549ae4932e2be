"""`EnvBase.register_gym`: makes gleanrl environments available under a gymnasium id."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._rollout.step_mdp import advance
from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from gleanrl.errors import InvalidArgumentError, UnsupportedError

_GYMNASIUMS = frozenset(
    (
        *("max_episode_steps", "reward_threshold", "nondeterministic", "order_enforce"),
        *("disable_env_checker", "additional_wrappers", "vector_entry_point", "kwargs"),
    )
)
"""Keywords of `register_gym` that are passed to `gymnasium.register`."""


def register(
    make: Callable[..., Any],
    id: str,
    transform: Any,
    info_keys: Sequence[NestedKey] | None,
    backend: str | None,
    to_numpy: bool,
    kwargs: dict[str, Any],
) -> None:
    """Register an id with gymnasium whose environments `make` makes; see `EnvBase.register_gym`."""
    if backend not in (None, "gymnasium"):
        raise UnsupportedError(f"register_gym: backend: expected 'gymnasium', got {backend!r}")
    if id in gymnasium.registry:
        raise InvalidArgumentError(f"id: {id!r} is registered already")

    def adapted(**options: Any) -> GymAdapter:
        env: Any = make(**options)
        if transform is not None:
            env = env.append_transform(copy.deepcopy(transform))
        return GymAdapter(env, info_keys or (), to_numpy)

    registration = {name: kwargs.pop(name) for name in _GYMNASIUMS & kwargs.keys()}
    registration.setdefault("disable_env_checker", not to_numpy)  # it rejects tensors
    gymnasium.register(
        id, entry_point=adapted, kwargs={**registration.pop("kwargs", {}), **kwargs}, **registration
    )


class GymAdapter(gymnasium.Env[Any, Any]):
    """Adapter that offers one gleanrl environment through gymnasium's interface.

    An observation with a single leaf is returned as that leaf, one with several as a dictionary. Actions are passed in
    the same form. Discrete choices are integers. In info, a nested entry has the names of its path, joined by ``"/"``.

    Args:
        env: the environment, not a batch of several.
        info_keys: entries that are returned in info instead of the observation.
        to_numpy: whether observations are arrays; if False, tensors.

    Raises:
        UnsupportedError: for a batch of environments, several rewards, or a spec without a space.
        InvalidArgumentError: if one of `info_keys` isn't an observation of the environment.
    """

    def __init__(self, env: Any, info_keys: Sequence[NestedKey] = (), to_numpy: bool = True) -> None:
        if tuple(env.batch_size):
            raise UnsupportedError(
                f"register_gym: expected an environment without batch dimensions, {env} has {tuple(env.batch_size)}"
            )
        if len(env.reward_keys) != 1:
            raise UnsupportedError(f"register_gym: expected one reward, {env} has {env.reward_keys}")
        self.env = env
        self._info = [as_key(as_path(key)) for key in info_keys]
        self._numpy = to_numpy
        known = env.full_observation_spec.keys(True, True)
        missing = sorted(map(str, set(self._info) - set(known)))
        if missing:
            raise InvalidArgumentError(
                f"info_keys: {missing} aren't entries of {env}, which has {list(known)}"
            )
        self._observed = [key for key in known if as_key(as_path(key)) not in self._info]
        self._acted = list(env.full_action_spec.keys(True, True))
        self.observation_space = _space(env.full_observation_spec, self._observed)
        self.action_space = _space(env.full_action_spec, self._acted)
        self._root: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return observation and info.

        `options` are keyword arguments of the environment's `reset`. A `seed` seeds the environment first.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.env.set_seed(seed)
        self._root = self.env.reset(**(options or {}))
        return self._observation_and_info(self._root)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action; return observation, reward, terminated, truncated and info. Requires an earlier `reset`.

        Raises:
            SpecError: if a choice isn't in the action spec.
        """
        root = self._root.copy()
        spec = self.env.full_action_spec
        for key in self._acted:
            value = action if len(self._acted) == 1 else _at(action, as_path(key))
            root.set(key, spec[key].encode(value))
        stepped = self.env.step(root)
        after = stepped.get("next")
        self._root = advance(stepped, self.env)
        reward = after.get(self.env.reward_keys[0])
        terminated, truncated = after.get("terminated"), after.get("truncated", None)
        cut = False if truncated is None else bool(truncated.any())
        observation, info = self._observation_and_info(after)
        return observation, float(reward.sum()), bool(terminated.any()), cut, info

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _observation_and_info(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the observation and the info of `batch`."""
        spec = self.env.full_observation_spec
        values = {key: self._value(spec[key], batch.get(key)) for key in (*self._observed, *self._info)}
        info = {name: values[name] for name in self._info}
        return _nested({key: values[key] for key in self._observed}), {
            "/".join(as_path(k)): v for k, v in info.items()
        }

    def _value(self, spec: Any, leaf: torch.Tensor) -> Any:
        if not self._numpy:
            return leaf.clone()
        return np.array(spec.to_numpy(leaf, safe=False))


def _at(action: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        action = action[part]
    return action


def _nested(values: Mapping[NestedKey, Any]) -> Any:
    """Return a dictionary nested by the keys' paths; a single value is returned as such."""
    if len(values) == 1:
        return next(iter(values.values()))
    out: dict[str, Any] = {}
    for key, value in values.items():
        *groups, last = as_path(key)
        inner = out
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return out


def _space(spec: Composite, keys: Sequence[NestedKey]) -> spaces.Space[Any]:
    """Return the space of the leaves `keys`: a Dict, or the leaf's own space if there is one leaf."""
    nested = _nested({key: _leaf_space(key, spec[key]) for key in keys})
    return _dict_space(nested) if isinstance(nested, dict) else nested


def _dict_space(entries: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict({k: _dict_space(v) if isinstance(v, dict) else v for k, v in entries.items()})


def _leaf_space(key: NestedKey, spec: Any) -> spaces.Space[Any]:
    """Return the space of one leaf.

    Raises:
        UnsupportedError: if gymnasium has no such space.
    """
    shape = tuple(spec.shape)
    # `isinstance` also counts these two as OneHot or Categorical, so they come first.
    if isinstance(spec, (MultiCategorical, MultiOneHot)):
        if len(shape) == 1:
            return spaces.MultiDiscrete(np.asarray(torch.as_tensor(spec.nvec).flatten()))
    elif isinstance(spec, OneHot):
        return _choices(int(spec.n), shape[:-1])
    elif isinstance(spec, Binary) or (spec.dtype is torch.bool and isinstance(spec, Categorical)):
        return spaces.MultiBinary(list(shape) or [1])
    elif isinstance(spec, Categorical):
        return _choices(int(spec.n), shape)
    elif isinstance(spec, (Bounded, Unbounded)):
        dtype = spec.zero().numpy().dtype
        low, high = spec.space.low.numpy(), spec.space.high.numpy()
        return spaces.Box(low, high, shape, dtype)
    raise UnsupportedError(f"register_gym: {key!r} has a spec without a gymnasium space: {spec!r}")


def _choices(n: int, shape: tuple[int, ...]) -> spaces.Space[Any]:
    return spaces.Discrete(n) if not shape else spaces.MultiDiscrete(np.full(shape, n))
