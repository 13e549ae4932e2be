"""`VectorSimulator`: the gymnasium vector environment inside a wrapper, with the same behaviour in all autoreset modes.

In every mode, a step returns the observations that the actions led to. A reset of some rows returns the first
observations of their new episodes:

- DISABLED: the environment resets the rows in ``options={"reset_mask": ...}``.
- SAME_STEP: the environment has already reset the rows that ended. `step` returns their last observations
  (``final_obs``) instead and keeps the first ones until `reset` is called for these rows.
- NEXT_STEP: the environment uses the next step of a row that ended for its reset. Such a row is no step; `skipped`
  marks it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from gleanrl.envs.libs.gym_codecs import Array, as_flags, describe
from gleanrl.envs.libs.gym_simulator import OpenEnv, StepResult, checked_reset, checked_step
from gleanrl.errors import EnvironmentContractError, UnsupportedError

_FINAL = ("final_obs", "final_info", "_final_obs", "_final_info")


class VectorSimulator(OpenEnv):
    """P gymnasium environments that step together. Not thread-safe.

    Args:
        env: the vector environment.
        frame_skip: number of times that its members repeat an action by themselves.

    Raises:
        EnvironmentContractError: if the environment doesn't declare its autoreset mode.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], frame_skip: int = 1) -> None:
        super().__init__(env)
        self.frame_skip = frame_skip
        self.num_envs = int(env.num_envs)
        self.mode = autoreset_mode(env)
        known = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self.partial = known or self.mode is AutoresetMode.DISABLED
        """Whether the environment can reset some rows without the others."""
        # Without shared memory, the workers of AsyncVectorEnv reset at the next step even after an explicit reset.
        self._forgets = not (isinstance(env.unwrapped, AsyncVectorEnv) and not env.unwrapped.shared_memory)
        self.pending: Array | None = None
        """NEXT_STEP: the rows that the next step will reset, ``(P,)`` bool; None for no row."""
        self.skipped: Array | None = None
        """NEXT_STEP: the rows that the last step reset, ``(P,)`` bool, so that they are no steps; None for no row."""
        self._first: tuple[Array, Any, dict[str, Any]] | None = None  # SAME_STEP: rows, observations, info
        self._seeds: list[int | None] = [None] * self.num_envs
        self._warned = False

    # ------------------------------------------------------------------ step
    def stepping(self) -> Callable[[Any], StepResult]:
        """Return the function that takes the actions of all environments."""
        return self.step

    def step(self, action: Any) -> StepResult:
        """Step all environments.

        Returns:
            The result of gymnasium's `step`, with the true last observation (and info) of rows that ended and flags
            ``(P,)`` bool. Rows in `skipped` have no flag set. The arrays may belong to the environment, so they
            are valid only until its next call.

        Raises:
            EnvironmentContractError: if the environment breaks gymnasium's interface or its autoreset mode.
        """
        obs, reward, terminated, truncated, info = checked_step(self.env.step(action))
        terminated = as_flags("terminated", terminated, self.num_envs)
        truncated = as_flags("truncated", truncated, self.num_envs)
        if self.mode is AutoresetMode.NEXT_STEP:
            ended = terminated | truncated
            self.skipped, self.pending = self.pending, ended if np.count_nonzero(ended) else None
            if self.skipped is not None:
                terminated, truncated = terminated & ~self.skipped, truncated & ~self.skipped
        elif self.mode is AutoresetMode.SAME_STEP:
            ended = terminated | truncated
            self._first = (ended, obs, info) if np.count_nonzero(ended) else None
            if self._first is not None:
                obs, info = self._last(ended, obs, info)
        return obs, reward, terminated, truncated, info

    def _last(self, ended: Array, obs: Any, info: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the observations and the info that the actions led to, including the rows of `ended`."""
        final = info.get("final_obs")
        if (
            final is None
            or len(final) != self.num_envs
            or any(final[i] is None for i in np.flatnonzero(ended))
        ):
            raise EnvironmentContractError(
                f"step: {self.env} resets in the same step, but info['final_obs'] lacks the last observation of "
                f"the environments {np.flatnonzero(ended).tolist()}, which ended"
            )
        rows = {int(i): final[i] for i in np.flatnonzero(ended)}
        last = with_rows(obs, rows)
        if not self._warned and any(_equal_row(obs, last, i) for i in rows):
            self._warned = True
            warnings.warn(
                f"{self.env}: final_obs equals the first observation of the next episode. If the environments "
                "overwrite the array that they returned, their last observation is lost. Make them return new arrays, "
                "or build the vector environment with AutoresetMode.DISABLED",
                stacklevel=2,
            )
        # Entries that final_info lacks come from wrappers around the vector environment: they belong to this step.
        return last, merge_info(info, {**info, **info.get("final_info", {})}, ended)

    # ----------------------------------------------------------------- reset
    def seed(self, seed: int | None, static: bool = False) -> None:
        """Seed the environments at their next reset, and only at that one; environment i gets ``seed + i``.

        Args:
            seed: seed of the first environment; None for no seed.
            static: whether all environments get `seed` itself.

        Raises:
            UnsupportedError: for `static`, if the environment takes one seed for all.
        """
        if static and not isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            raise UnsupportedError(f"static_seed: {self.env} takes one seed for all of its environments")
        self._seeds = [None if seed is None else seed + (0 if static else i) for i in range(self.num_envs)]

    def reset(self, mask: Array | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        In SAME_STEP mode, rows that the environment has reset itself are returned without another reset. They are reset
        again only if `mask` is None or there are `kwargs`.

        Args:
            mask: the environments to reset, ``(P,)`` bool; None for all.
            **kwargs: arguments of the environment's `reset`. A `seed` here takes precedence over seeds set by `seed`.

        Returns:
            The observations and the info. Only the rows of `mask` are meaningful.

        Raises:
            UnsupportedError: if the environment can't reset some rows without the others.
            EnvironmentContractError: if the environment doesn't return a pair.
            ClosedError: if the simulator was closed.
        """
        self.require_open()
        first, self._first = self._first, None
        if mask is None:
            return self._reset(None, **kwargs)
        if first is None or kwargs:
            return self._reset(None if mask.all() else mask, **kwargs)
        ended, obs, info = first
        info = {name: value for name, value in info.items() if name not in _FINAL}
        rest = mask & ~ended
        if (ended & ~mask).any():
            self._first = (ended & ~mask, obs, info)
        if not rest.any():
            return obs, info
        # Only gymnasium's own classes reach this line, and they leave the other rows of their array unchanged.
        new_obs, new_info = self._reset(rest)
        return merged(obs, new_obs, rest), merge_info(info, new_info, rest)

    def _reset(self, mask: Array | None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if mask is not None and not self.partial:
            raise UnsupportedError(
                f"reset: {self.env} resets its environments by itself, only in the step after their end, so it can't "
                "reset some without the others. Build the vector environment with GymEnv(name, num_envs=...), or from "
                "single environments with AutoresetMode.DISABLED"
            )
        if kwargs.get("seed") is None and (seed := self._take_seed(mask)) is not None:
            kwargs["seed"] = seed
        if mask is not None:
            kwargs["options"] = {**(kwargs.get("options") or {}), "reset_mask": mask.copy()}
        result = checked_reset(self.env.reset(**kwargs))
        self.skipped = None
        if self._forgets and self.pending is not None:
            left = None if mask is None else self.pending & ~mask
            self.pending = left if left is not None and left.any() else None
        return result

    def _take_seed(self, mask: Array | None) -> Any:
        """Return the stored seeds of the rows to reset, and clear them; None if there are none."""
        if self._seeds.count(None) == self.num_envs:
            return None
        rows = [True] * self.num_envs if mask is None else mask.tolist()
        seeds = [seed if row else None for seed, row in zip(self._seeds, rows, strict=True)]
        self._seeds = [None if row else seed for seed, row in zip(self._seeds, rows, strict=True)]
        if all(seed is None for seed in seeds):
            return None
        first = seeds[0]
        # A single number is the form that every vector environment accepts; only gymnasium's own take a list.
        chained = first is not None and seeds == list(range(first, first + self.num_envs))
        return first if chained else seeds


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode that `env` declares in its metadata.

    Raises:
        EnvironmentContractError: if it declares none.
    """
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError as cause:
        raise EnvironmentContractError(
            f"{env}: expected metadata['autoreset_mode'], one of gymnasium's AutoresetMode, got {mode!r}; it "
            "tells last observations from first ones, so set it in the environment's class"
        ) from cause


def with_rows(batch: Any, rows: Mapping[int, Any]) -> Any:
    """Return a copy of batched values with some rows replaced by values of single environments.

    Args:
        batch: an array ``(P, *leaf)``, or a dict or tuple of such values.
        rows: the new value for each environment's index.

    Raises:
        EnvironmentContractError: if a value doesn't fit its row.
    """
    if isinstance(batch, Mapping):
        return {
            name: with_rows(part, {i: row[name] for i, row in rows.items()}) for name, part in batch.items()
        }
    if isinstance(batch, tuple):
        return tuple(with_rows(part, {i: row[k] for i, row in rows.items()}) for k, part in enumerate(batch))
    out = np.array(batch)
    for i, row in rows.items():
        value = np.asarray(row)
        if value.shape != out.shape[1:] or not np.can_cast(value.dtype, out.dtype, "same_kind"):
            raise EnvironmentContractError(
                f"step: final_obs of environment {i} expected shape {out.shape[1:]} {out.dtype}, got {describe(value)}"
            )
        out[i] = value
    return out


def merged(old: Any, new: Any, mask: Array) -> Any:
    """Return the rows of `new` where `mask` is True and the rows of `old` elsewhere."""
    if isinstance(old, Mapping):
        return {name: merged(part, new[name], mask) for name, part in old.items()}
    if isinstance(old, tuple):
        return tuple(merged(part, other, mask) for part, other in zip(old, new, strict=True))
    out = np.array(old)
    out[mask] = np.asarray(new)[mask]
    return out


def merge_info(old: Mapping[str, Any], new: Mapping[str, Any], mask: Array) -> dict[str, Any]:
    """Return the info `old` with the rows of `mask` taken from `new`. An entry that one of them lacks is zero there.

    An entry with one value for all environments comes from `old`. Entries like ``final_obs`` are left out.
    """
    out: dict[str, Any] = {}
    for name in {**old, **new}:
        if name in _FINAL:
            continue
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            out[name] = merge_info(before or {}, after or {}, mask)
            continue
        known = np.asarray(before if before is not None else after)
        if known.shape[:1] != mask.shape:
            out[name] = after if before is None else before  # one value for all environments
            continue
        value = np.zeros_like(known) if before is None else known.copy()
        value[mask] = 0 if after is None else np.asarray(after)[mask]
        out[name] = value
    return out


def _equal_row(first: Any, last: Any, i: int) -> bool:
    if isinstance(first, Mapping):
        return all(_equal_row(first[name], last[name], i) for name in first)
    if isinstance(first, tuple):
        return all(_equal_row(a, b, i) for a, b in zip(first, last, strict=True))
    return bool(np.array_equal(first[i], last[i]))
