"""Environments that reset themselves: `AutoResetTransform`, `AutoResetEnv`, `VecGymEnvTransform`.

Such an environment returns the first observation of the new episode from the very step that ends the old one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.envs.env_specs import RESETTING_ITSELF
from gleanrl.envs.outcomes import any_of
from gleanrl.envs.transforms.base import missing_key
from gleanrl.envs.transforms.episodic import OfEnvironment
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.errors import InvalidArgumentError, UnsupportedError

_WAITING = "_waiting"
"""Where a keeper carries whose first observations it has."""


class _Keeper(OfEnvironment):
    """Keeps the first observations of episodes until they are asked for."""

    def carries(self) -> dict[NestedKey, Field]:
        """Return the first observations, and whose they are, ``(*batch,)`` bool."""
        spec = self.parent.full_observation_spec
        fields = {key: Field(spec[key].shape, spec[key].dtype) for key in self._observations()}
        return {**fields, _WAITING: Field(torch.Size(self.parent.batch_size), torch.bool)}

    def keeps_first(self, rows: Tensor | None) -> bool:
        """Return whether the first observations of `rows` (all if None) are kept."""
        waiting = self.carried.get(_WAITING)
        if waiting is None:
            return False
        return bool(waiting.all() if rows is None else (waiting | ~rows).all())

    def _observations(self) -> list[NestedKey]:
        return keys_of(self.parent.full_observation_spec)

    def _keep(self, outcome: Record, ended: Tensor) -> None:
        for key in self._observations():
            value = outcome.get(key)
            before = self.carried.get(key)
            kept = value.clone() if before is None else torch.where(trailing(ended, value), value, before)
            self.carried[key] = kept
        before = self.carried.get(_WAITING)
        self.carried[_WAITING] = ended.clone() if before is None else before | ended

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        keys = self.parent.reset_keys
        rows = reset_rows(tensordict, keys)
        asked = any(tensordict.get(key, None) is not None for key in keys)
        if asked and self.keeps_first(rows):
            for key in self._observations():
                tensordict_reset.set(key, self.carried[key].clone())
        # Otherwise the environment itself was reset, all of it.
        if rows is None:
            self.carried = {}
        elif _WAITING in self.carried:
            self.carried[_WAITING] = self.carried[_WAITING] & ~rows
        return tensordict_reset

    def _ended(self, outcome: Record) -> Tensor:
        flags = [outcome.get(key) for key in self.parent.done_keys if as_path(key)[-1] == "done"]
        return any_of(flags, outcome.batch_size)


class AutoResetTransform(_Keeper):
    """What `AutoResetEnv` does to the observations: those of a step that ends an episode belong to the next one.

    They are kept for the reset that follows. The true last observation is lost in the environment: in its place stand
    fill values, or, without `replace`, the first observation of the next episode.

    Args:
        replace: whether to put fill values in place of the lost observation.
        fill_float: for floating-point entries; ``"nan"`` or a number.
        fill_int: for integers.
        fill_bool: for booleans.
    """

    def __init__(
        self,
        *,
        replace: bool = True,
        fill_float: float | str = "nan",
        fill_int: int = -1,
        fill_bool: bool = False,
    ) -> None:
        super().__init__()
        self.replace = replace
        self.fill_float = float(fill_float)
        self.loses_last = replace and not math.isfinite(self.fill_float)
        self.fill_int, self.fill_bool = int(fill_int), bool(fill_bool)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        ended = self._ended(next_tensordict)
        if bool(ended.any()):
            self._keep(next_tensordict, ended)
            for key in self._observations() if self.replace else ():
                value = next_tensordict.get(key)
                next_tensordict.set(key, value.masked_fill(trailing(ended, value), self._fill(value)))
        return next_tensordict

    def _fill(self, value: Tensor) -> float:
        if value.dtype.is_floating_point:
            return self.fill_float
        if value.dtype is torch.bool:
            return self.fill_bool
        if self.fill_int < torch.iinfo(value.dtype).min:
            raise InvalidArgumentError(
                f"fill_int: {value.dtype} can't hold {self.fill_int}; choose another number"
            )
        return self.fill_int


class AutoResetEnv(TransformedEnv):
    """An environment that resets itself, as one that doesn't; see `AutoResetTransform`.

    A reset of environments that have just reset themselves hands out what they returned then, and doesn't disturb
    them. Any other reset resets all of the base environment, so that a partial one is refused.

    Args:
        env: the environment.
        transform: an `AutoResetTransform`; None for one that replaces.
        **kwargs: passed to `TransformedEnv`.
    """

    def __init__(self, env: Any, transform: AutoResetTransform | None = None, **kwargs: Any) -> None:
        super().__init__(env, AutoResetTransform() if transform is None else transform, **kwargs)

    def _base_reset(
        self, tensordict: TensorDictBase, partial: bool, kwargs: dict[str, Any]
    ) -> TensorDictBase:
        rows = reset_rows(tensordict, self.reset_keys)
        if self.transform.keeps_first(rows):
            return super()._base_reset(tensordict, partial, kwargs)
        if rows is not None:
            raise UnsupportedError(
                "AutoResetEnv: environments that reset themselves can't be reset one by one in mid-episode; reset "
                "all of them"
            )
        return self.base_env.reset(**kwargs)


RESETTING_ITSELF.append(lambda env, replace: AutoResetEnv(env, AutoResetTransform(replace=replace)))


class VecGymEnvTransform(_Keeper):
    """Puts the last observations of a vector environment that resets itself where they belong.

    The environment delivers them under a name of their own, `final_name`, beside the first ones of the next episode.
    `GymEnv` and `GymWrapper` do this by themselves.

    Args:
        final_name: where they stand: ``(final_name, *key)`` for the observation at ``key``.
    """

    def __init__(self, final_name: str = "final") -> None:
        super().__init__()
        self.final_name = final_name

    def _observations(self) -> list[NestedKey]:
        return [key for key in super()._observations() if as_path(key)[0] != self.final_name]

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        ended = self._ended(next_tensordict)
        if bool(ended.any()):
            self._keep(next_tensordict, ended)
            for key in self._observations():
                first = next_tensordict.get(key)
                last = next_tensordict.get((self.final_name, *as_path(key)), None)
                if last is None:
                    raise missing_key(self, (self.final_name, *as_path(key)), next_tensordict)
                next_tensordict.set(key, torch.where(trailing(ended, first), last.to(first.dtype), first))
        return self._without_final(next_tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._without_final(super()._reset(tensordict, tensordict_reset))

    def _without_final(self, record: Record) -> Record:
        assert isinstance(record, TensorDictBase)
        return record.exclude(self.final_name)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Drop the last observations' own entries."""
        out = observation_spec.clone()
        for key in keys_of(observation_spec):
            if as_path(key)[0] == self.final_name:
                del out[as_key(as_path(key))]
        return out.exclude(self.final_name)
