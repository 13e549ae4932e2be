"""Transforms of rewards and of single values.

`RewardSum` and `TargetReturn` follow the rewards of an episode; the other transforms map each value by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.data.specs import Binary, Bounded, Composite, TensorSpec
from gleanrl.envs.transforms.base import Keys, as_keys
from gleanrl.envs.transforms.counting import Counting, SkippedRows
from gleanrl.envs.transforms.entrywise import EntryTransform, Operation, affine, buffer_on_device, scaled
from gleanrl.envs.transforms.episodic import Following, reward_fields, with_carried
from gleanrl.envs.transforms.row_view import Record, sibling, trailing
from gleanrl.envs.transforms.spec_tools import keys_of, mapped
from gleanrl.errors import InvalidArgumentError, MissingKeyError


class RewardSum(Counting):
    """Sums up the rewards of each episode. The root holds the sum before the step, ``"next"`` the sum after it.

    Args:
        in_keys: rewards; None for all rewards of the environment.
        out_keys: keys of the sums; None for ``"episode_reward"`` next to ``"reward"``, and so on.
        reset_keys: for each sum the ``"_reset"`` mask that sets it to zero. None for the mask of the innermost group of
            flags around the reward.
        reward_spec: whether the sums are declared as rewards, not as observations. They are then below ``"next"``
            only.

    Raises:
        InvalidArgumentError: if `in_keys` and `out_keys` have different lengths; at use, for wrong `reset_keys`.
        MissingKeyError: when specs are derived, if one of `in_keys` is no reward of the environment.
        UnsupportedError: at use outside an environment.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
    """

    on_rows = True
    _summed: list[tuple[NestedKey, NestedKey]] | None
    _begins: list[tuple[NestedKey, NestedKey, torch.Tensor]] | None

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        reset_keys: Keys | None = None,
        *,
        reward_spec: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if in_keys is not None and out_keys is not None:
            self.pairs()  # raises if the lists have different lengths
        self._reset_keys = as_keys("reset_keys", reset_keys)
        self.reward_spec = reward_spec

    def _default_in_keys(self) -> list[NestedKey]:
        return list(self.surroundings().reward_keys)

    def _default_out_keys(self) -> list[NestedKey]:
        return [sibling(key, f"episode_{as_path(key)[-1]}") for key in self.in_keys]

    def empty_cache(self) -> None:
        """Forget keys and specs derived from the environment."""
        super().empty_cache()
        self._summed = self._begins = None

    def carries(self) -> dict[NestedKey, Field]:
        """Return the sums."""
        return reward_fields(self)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        root = {} if self.reward_spec else tensordict  # a reward isn't carried into the root
        if self._summed is None:
            self._summed = self.pairs()
        for in_key, out_key in self._summed:
            reward = next_tensordict.get(in_key)
            total = torch.add(self.last(root, out_key, reward.device), reward)
            self.carried[out_key] = total
            next_tensordict.set(out_key, total)
        return next_tensordict

    def summands(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the keys of the rewards, each with the key of its sum."""
        return self.pairs()

    def catch_up(self, rows: SkippedRows) -> None:
        """Add one reward after the other, as single steps do: the order changes the rounding of float sums."""
        for _, out_key in self.pairs():
            self.carried[out_key] = rows.add_up(out_key)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        here = tensordict_reset.device
        if self._begins is None:
            self._begins = self._find_begins()
        for out_key, reset_key, zero in self._begins:
            zero = zero.clone() if here is None else zero.to(here, copy=True)
            mask = tensordict.get(reset_key, None)
            before = None if self.reward_spec else self.own(tensordict, out_key)
            if mask is not None:
                if mask.ndim > zero.ndim or mask.shape != zero.shape[: mask.ndim]:
                    mask = mask.reshape(*tensordict_reset.batch_size, -1).any(-1)
                mask = trailing(mask, zero)
            zero = self.renewed(out_key, zero, mask, before)
            if not self.reward_spec:
                tensordict_reset.set(out_key, zero)
        return tensordict_reset

    def _find_begins(self) -> list[tuple[NestedKey, NestedKey, torch.Tensor]]:
        """Return the key of each sum, the key of its ``"_reset"`` mask, and its initial value."""
        spec = self.surroundings().full_reward_spec
        pairs = zip(self.pairs(), self.reset_keys, strict=True)
        return [(out_key, reset_key, spec[in_key].zero()) for (in_key, out_key), reset_key in pairs]

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The key of the ``"_reset"`` mask of each sum.

        Raises:
            InvalidArgumentError: if the given keys aren't one mask of the environment for each reward.
        """
        known, keys = list(self.surroundings().reset_keys), self._reset_keys
        if keys is not None:
            if len(keys) != len(self.in_keys) or any(key not in known for key in keys):
                raise InvalidArgumentError(
                    f"RewardSum: reset_keys: expected one of {known} for each of {self.in_keys}, got {keys}"
                )
            return keys
        found: list[NestedKey] = []
        for key in self.in_keys:
            path = as_path(key)[:-1]
            above = [as_key((*path[:n], "_reset")) for n in range(len(path), -1, -1)]
            found.append(next((k for k in above if k in known), known[0]))
        return found

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the specs of the sums, unless they are declared as rewards."""
        return observation_spec if self.reward_spec else self._with_sums(observation_spec)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the specs of the sums if they are declared as rewards."""
        return self._with_sums(reward_spec) if self.reward_spec else reward_spec

    def _with_sums(self, spec: Composite) -> Composite:
        rewards = self.surroundings().full_reward_spec
        unknown = [key for key in self.in_keys if key not in keys_of(rewards)]
        if unknown:
            raise MissingKeyError(
                f"RewardSum: in_keys: expected rewards of the environment, {keys_of(rewards)}, got {unknown}"
            )
        return with_carried(spec, self)


class TargetReturn(Following):
    """Adds the return that the policy should still reach.

    Args:
        target_return: the target at the beginning of each episode.
        mode: ``"reduce"`` subtracts each reward from the target, ``"constant"`` keeps the target.
        in_keys: rewards; None for all rewards of the environment.
        out_keys: keys of the targets; None for ``"target_return"``, if there is one reward.
        reset_key: the ``"_reset"`` mask that sets the target again; None for any of the environment's.

    Raises:
        InvalidArgumentError: if `mode` has another value; at use, if there aren't as many targets as rewards.
    """

    on_rows = True
    MODES = ("reduce", "constant")

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        reset_key: NestedKey | None = None,
    ) -> None:
        if mode not in self.MODES:
            raise InvalidArgumentError(f"mode: expected one of {self.MODES}, got {mode!r}")
        super().__init__(in_keys, out_keys)
        self.target_return, self.mode, self.reset_key = float(target_return), mode, reset_key

    def _default_in_keys(self) -> list[NestedKey]:
        return ["reward"] if self.parent is None else list(self.parent.reward_keys)

    def _default_out_keys(self) -> list[NestedKey]:
        return ["target_return"]

    def carries(self) -> dict[NestedKey, Field]:
        """Return fields of the targets."""
        return reward_fields(self)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for in_key, out_key in self.pairs():
            target = self.last(tensordict, out_key)
            reward = next_tensordict.get(in_key)
            target = target - reward if self.mode == "reduce" else target.clone()
            self.carried[out_key] = target
            next_tensordict.set(out_key, target)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = self.reset_mask(tensordict)
        device = self.home()
        for key, field in self.carries().items():
            initial = torch.full(field.shape, self.target_return, dtype=field.dtype, device=device)
            mask = None if rows is None else trailing(rows, initial)
            tensordict_reset.set(key, self.renewed(key, initial, mask, self.own(tensordict, key)))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the specs of the targets."""
        return with_carried(observation_spec, self)


class _RewardTransform(EntryTransform):
    """Base class: maps the environment's rewards unless keys are given."""

    def _default_in_keys(self) -> list[NestedKey]:
        return ["reward"] if self.parent is None else list(self.parent.reward_keys)


class RewardScaling(_RewardTransform):
    """Maps rewards by ``reward * scale + loc``, or with `standard_normal` by ``(reward - loc) / scale``.

    The result has the reward's dtype, so integer rewards are truncated.

    Args:
        loc: location, a number or a tensor that broadcasts with the rewards.
        scale: scale, a number or a tensor likewise; not zero with `standard_normal`.
        in_keys: entries to map; None for the environment's rewards.
        out_keys: keys of the results; None for in place.
        standard_normal: whether to use the second form.

    Raises:
        InvalidArgumentError: if `scale` holds a zero with `standard_normal`.
    """

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        standard_normal: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.standard_normal = standard_normal
        self.register_buffer("loc", torch.as_tensor(loc).clone())
        self.register_buffer("scale", torch.as_tensor(scale).clone())
        if standard_normal and bool((self._buffers["scale"] == 0).any()):  # type: ignore[union-attr]
            raise InvalidArgumentError(f"scale: expected no zero with standard_normal, got {scale!r}")

    def _apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = buffer_on_device(self, "loc", value), buffer_on_device(self, "scale", value)
        assert loc is not None and scale is not None
        return scaled(value, loc, scale, self.standard_normal).to(value.dtype)

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the two operations if loc and scale have `dtype`, else None."""
        return affine(self._buffers, self.standard_normal, dtype)

    def extra_repr(self) -> str:
        """Show loc, scale and the form."""
        return f"loc={self._buffers['loc']}, scale={self._buffers['scale']}, standard_normal={self.standard_normal}"


class RewardClipping(_RewardTransform):
    """Clips rewards to an interval.

    Args:
        clamp_min: lower bound; None for no bound.
        clamp_max: upper bound; None for no bound.
        in_keys: entries to clip; None for the environment's rewards.
        out_keys: keys of the results; None for in place.

    Raises:
        InvalidArgumentError: if there is no bound, or `clamp_min` is above `clamp_max`.
    """

    def __init__(
        self,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.low, self.high = _interval("clamp_min", clamp_min, "clamp_max", clamp_max)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.clamp(self.low, self.high)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        dtype = self._apply_transform(spec.zero()).dtype
        return _clipped(spec.to(dtype), self.low, self.high)

    def extra_repr(self) -> str:
        """Show the interval."""
        return f"clamp_min={self.low}, clamp_max={self.high}"


class ClipTransform(EntryTransform):
    """Clips outputs and inputs to an interval.

    Integers become floats if a bound isn't a whole number.

    Args:
        in_keys: outputs to clip; None for none.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs to clip; None for none.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.
        low: lower bound, a number or a tensor; None for no bound.
        high: upper bound, a number or a tensor; None for no bound.

    Raises:
        InvalidArgumentError: if there is no bound, or `low` is above `high`.
    """

    on_rows = True

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        *,
        low: float | Tensor | None = None,
        high: float | Tensor | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        low, high = _interval("low", low, "high", high)
        self.register_buffer("low", None if low is None else torch.as_tensor(low).clone())
        self.register_buffer("high", None if high is None else torch.as_tensor(high).clone())

        # Integers stay integers only if the bounds are whole: between bounds 0.1 and 0.9 there is no integer.
        bounds = [torch.as_tensor(bound) for bound in (low, high) if bound is not None]
        self._whole = all(torch.equal(bound, bound.round()) for bound in bounds)

    def _apply_transform(self, value: Tensor) -> Tensor:
        bounds = [buffer_on_device(self, name, value) for name in ("low", "high")]
        if value.is_floating_point():
            return torch.clamp(value, *bounds).to(value.dtype)
        if not self._whole:
            return torch.clamp(value, *bounds)
        return torch.clamp(
            value, *(None if bound is None else _as_integer(bound, value.dtype) for bound in bounds)
        )

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return self._apply_transform(value)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        dtype = self._apply_transform(spec.zero()).dtype
        return _clipped(spec.to(dtype), self._buffers["low"], self._buffers["high"])


class SignTransform(EntryTransform):
    """Replaces values by their signs: -1, 0 or 1.

    Args:
        in_keys: outputs to map, for example ``["reward"]``; None for none.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs to map; None for none.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.
    """

    on_rows = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return Bounded(-1, 1, spec.shape, spec.device, spec.dtype)


class BinarizeReward(_RewardTransform):
    """Replaces positive rewards by 1 and other rewards by 0, in int8.

    Args:
        in_keys: entries to map; None for the environment's rewards.
        out_keys: keys of the results; None for in place.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        return (value > 0).to(torch.int8)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return Binary(shape=spec.shape, device=spec.device, dtype=torch.int8)


class LineariseRewards(EntryTransform):
    """Replaces rewards of several components by their weighted sum, ``(*batch, 1)``.

    Args:
        in_keys: rewards, ``(*batch, n)``.
        out_keys: keys of the sums; None for in place.
        weights: n weights, the same for all of `in_keys`; None for ones.

    Raises:
        InvalidArgumentError: at use, if n isn't the number of components.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys | None = None, *, weights: Sequence[float] | Tensor | None = None
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.register_buffer(
            "weights", None if weights is None else torch.as_tensor(weights, dtype=torch.float32)
        )

    def _apply_transform(self, value: Tensor) -> Tensor:
        weights = buffer_on_device(self, "weights", value)
        if weights is not None and weights.shape != value.shape[-1:]:
            raise InvalidArgumentError(
                f"LineariseRewards: expected {value.shape[-1]} weights, one for each component, got {weights.tolist()}"
            )
        weighted = value if weights is None else value * weights.to(value.dtype)
        return weighted.sum(-1, keepdim=True)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        weights = self._buffers["weights"]
        rising = weights is None or bool((weights >= 0).all())
        return mapped(spec, self._apply_transform, monotone=rising)


def _interval(low_name: str, low: Any, high_name: str, high: Any) -> tuple[Any, Any]:
    if low is None and high is None:
        raise InvalidArgumentError(f"expected {low_name}, {high_name} or both, got neither")
    if low is not None and high is not None and bool((torch.as_tensor(low) > torch.as_tensor(high)).any()):
        raise InvalidArgumentError(f"expected {low_name} <= {high_name}, got {low} and {high}")
    return low, high


def _as_integer(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a whole bound in an integer dtype, limited to the dtype's range. A plain conversion would wrap around."""
    limits, widest = torch.iinfo(dtype), torch.iinfo(torch.int64)
    if bound.is_floating_point():
        # 2**63 - 1024 is the largest double below 2**63, which int64 can't hold.
        exact = bound.double()
        inside = exact.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
        bound = torch.where(exact >= 2.0**63, widest.max, inside)
    return bound.clamp(limits.min, limits.max).to(dtype)


def _clipped(spec: TensorSpec, low: Any, high: Any) -> TensorSpec:
    dtype, shape = spec.dtype, spec.shape
    assert dtype is not None
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    bounds = [
        torch.as_tensor(limits.min if low is None else low),
        torch.as_tensor(limits.max if high is None else high),
    ]
    cast = Tensor.to if dtype.is_floating_point else _as_integer
    bottom, top = (cast(bound, dtype).to(spec.device).expand(shape) for bound in bounds)
    if isinstance(spec, Bounded):
        bottom, top = (torch.clamp(bound, bottom, top) for bound in spec.bounds)
    return Bounded(bottom, top, shape, spec.device, dtype)
