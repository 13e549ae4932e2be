"""Transforms for environments that reset themselves: `AutoResetTransform`, `AutoResetEnv`, `VecGymEnvTransform`.

The step that ends an episode of such an environment already returns the first observation of the next episode.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.data.specs import Composite
from gleanrl.envs.env_specs import RESETTING_ITSELF
from gleanrl.envs.outcomes import any_of
from gleanrl.envs.transforms.base import missing_key
from gleanrl.envs.transforms.episodic import EnvTransform
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.errors import InvalidArgumentError, UnsupportedError

_WAITING = "_waiting"
"""Key of the carried mask of environments with kept first observations, ``(*batch,)`` bool."""


class _Keeper(EnvTransform):
    """Keeps the first observations of episodes until a reset returns them."""

    def carries(self) -> dict[NestedKey, Field]:
        """Return fields of the first observations, and of the mask of environments that they belong to."""
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
            merged = value.clone() if before is None else torch.where(trailing(ended, value), value, before)
            self.carried[key] = merged
        before = self.carried.get(_WAITING)
        self.carried[_WAITING] = ended.clone() if before is None else before | ended

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        keys = self.parent.reset_keys
        rows = reset_rows(tensordict, keys)
        has_mask = any(tensordict.get(key, None) is not None for key in keys)
        if has_mask and self.keeps_first(rows):
            for key in self._observations():
                tensordict_reset.set(key, self.carried[key].clone())
        # Otherwise the whole base environment was reset, and `tensordict_reset` holds its first observations.
        if rows is None:
            self.carried = {}
        elif _WAITING in self.carried:
            self.carried[_WAITING] = self.carried[_WAITING] & ~rows
        return tensordict_reset

    def _ended(self, outcome: Record) -> Tensor:
        flags = [outcome.get(key) for key in self.parent.done_keys if as_path(key)[-1] == "done"]
        return any_of(flags, outcome.batch_size)


class AutoResetTransform(_Keeper):
    """Moves the first observations of an environment that resets itself from the last step to the reset.

    The observation of a step that ends an episode belongs to the next episode. The transform keeps it for the reset
    that follows. The environment doesn't return the true last observation, so fill values replace it.

    Args:
        replace: whether fill values replace the lost observation; otherwise the first observation of the next episode
            remains there.
        fill_float: fill value of floating-point entries, ``"nan"`` or a number.
        fill_int: fill value of integers; None for -1, and 0 for unsigned integers such as uint8 images.
        fill_bool: fill value of booleans.

    Raises:
        InvalidArgumentError: when specs are derived, if the dtype of an observation can't hold `fill_int`.
    """

    def __init__(
        self,
        *,
        replace: bool = True,
        fill_float: float | str = "nan",
        fill_int: int | None = None,
        fill_bool: bool = False,
    ) -> None:
        super().__init__()
        self.replace = replace
        self.fill_float = float(fill_float)
        self.loses_last = replace and not math.isfinite(self.fill_float)
        self.fill_int, self.fill_bool = None if fill_int is None else int(fill_int), bool(fill_bool)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        ended = self._ended(next_tensordict)
        if bool(ended.any()):
            self._keep(next_tensordict, ended)
            for key in self._observations() if self.replace else ():
                value = next_tensordict.get(key)
                next_tensordict.set(key, value.masked_fill(trailing(ended, value), self._fill(value.dtype)))
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec unchanged, after a check that each dtype can hold its fill value."""
        for key in keys_of(observation_spec) if self.replace else ():
            if observation_spec[key].dtype is not None:
                self._fill(observation_spec[key].dtype)
        return super().transform_observation_spec(observation_spec)

    def _fill(self, dtype: torch.dtype) -> float:
        if dtype.is_floating_point:
            return self.fill_float
        if dtype is torch.bool:
            return self.fill_bool
        limits = torch.iinfo(dtype)
        fill = max(-1, limits.min) if self.fill_int is None else self.fill_int
        if not limits.min <= fill <= limits.max:
            raise InvalidArgumentError(
                f"fill_int: expected a number from {limits.min} to {limits.max} for {dtype}, got {fill}"
            )
        return fill


class AutoResetEnv(TransformedEnv):
    """Makes an environment that resets itself behave like one that doesn't; see `AutoResetTransform`.

    If environments have just reset themselves, a reset of them returns the kept observations and doesn't touch them.
    Any other reset resets the whole base environment. So a partial reset in mid-episode raises `UnsupportedError`.

    Args:
        env: the environment.
        transform: an `AutoResetTransform`; None for one with ``replace=True``.
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
    """Puts the last observations of a vector environment that resets itself into the step that ends the episode.

    The environment returns last observations under `final_name`, and the first observations of the next episode in
    their place. The transform keeps the first observations for the reset that follows. `GymEnv` and `GymWrapper` need
    no such transform. The group `final_name` is removed from all outputs.

    Args:
        final_name: group of the last observations: ``(final_name, *key)`` for the observation at ``key``.

    Raises:
        MissingKeyError: when an episode ends, if a last observation is absent.
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
        """Return a copy of the spec without the entries under `final_name`."""
        out = observation_spec.clone()
        for key in keys_of(observation_spec):
            if as_path(key)[0] == self.final_name:
                del out[as_key(as_path(key))]
        return out.exclude(self.final_name)
