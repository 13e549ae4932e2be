"""Transforms of rewards and of single numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gleanrl.data.specs import Binary, Bounded, TensorSpec
from gleanrl.envs.transforms.keys import Keys
from gleanrl.envs.transforms.mapping import EntryTransform, beside
from gleanrl.envs.transforms.operations import Operation, affine, scaled
from gleanrl.envs.transforms.spec_tools import mapped
from gleanrl.errors import InvalidArgumentError
from gleanrl.tree import NestedKey


class _OfRewards(EntryTransform):
    """Maps rewards, if no other keys are given."""

    def _default_in_keys(self) -> list[NestedKey]:
        return ["reward"] if self.parent is None else list(self.parent.reward_keys)


class RewardScaling(_OfRewards):
    """Maps rewards by ``reward * scale + loc``, or by ``(reward - loc) / scale`` with `standard_normal`.

    Args:
        loc: location.
        scale: scale; with `standard_normal` not zero.
        in_keys: what to map; None for the environment's rewards.
        out_keys: where the results stand; None for in place.
        standard_normal: which of the two forms.
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
        loc, scale = beside(self, "loc", value), beside(self, "scale", value)
        assert loc is not None and scale is not None
        return scaled(value, loc, scale, self.standard_normal).to(value.dtype)

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the two operations, where the numbers are of the same dtype."""
        return affine(self._buffers, self.standard_normal, dtype)

    def extra_repr(self) -> str:
        """Show the numbers."""
        return f"loc={self._buffers['loc']}, scale={self._buffers['scale']}, standard_normal={self.standard_normal}"


class RewardClipping(_OfRewards):
    """Clips rewards to an interval.

    Args:
        clamp_min: lowest value; None for none.
        clamp_max: highest value; None for none.
        in_keys: what to clip; None for the environment's rewards.
        out_keys: where the results stand; None for in place.
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
        return _clipped(spec, self.low, self.high)

    def extra_repr(self) -> str:
        """Show the interval."""
        return f"clamp_min={self.low}, clamp_max={self.high}"


class ClipTransform(EntryTransform):
    """Clips entries to an interval; inverse keys clip what goes in.

    Integers become floats if a bound isn't a whole number.

    Args:
        in_keys: what to clip of what comes out.
        out_keys: where the results stand; None for in place.
        in_keys_inv: what to clip of what goes in.
        out_keys_inv: what the user writes; None for the same keys.
        low: lowest value, a number or a tensor; None for none.
        high: highest value; likewise.

    Raises:
        InvalidArgumentError: without bounds, or if `low` is above `high`.
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

        # Integers stay integers where the bounds are: none of them lies between 0.1 and 0.9.
        bounds = [torch.as_tensor(bound) for bound in (low, high) if bound is not None]
        self._whole = all(torch.equal(bound, bound.round()) for bound in bounds)

    def _apply_transform(self, value: Tensor) -> Tensor:
        low, high = beside(self, "low", value), beside(self, "high", value)
        clipped = torch.clamp(value, low, high)
        return clipped.to(value.dtype) if self._whole or value.is_floating_point() else clipped

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return self._apply_transform(value)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        dtype = self._apply_transform(spec.zero()).dtype
        return _clipped(spec.to(dtype), self._buffers["low"], self._buffers["high"])


class SignTransform(EntryTransform):
    """Replaces numbers by their signs: -1, 0 or 1.

    Args:
        in_keys: what to map of what comes out, ``["reward"]`` say.
        out_keys: where the results stand; None for in place.
        in_keys_inv: what to map of what goes in.
        out_keys_inv: what the user writes; None for the same keys.
    """

    on_rows = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return Bounded(-1, 1, spec.shape, spec.device, spec.dtype)


class BinarizeReward(_OfRewards):
    """Replaces rewards by whether they are positive: 1 or 0, in int8.

    Args:
        in_keys: what to map; None for the environment's rewards.
        out_keys: where the results stand; None for in place.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        return (value > 0).to(torch.int8)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return Binary(shape=spec.shape, device=spec.device, dtype=torch.int8)


class LineariseRewards(EntryTransform):
    """Replaces rewards with several components by a weighted sum of them, ``(*batch, 1)``.

    Args:
        in_keys: rewards ``(*batch, n)``.
        out_keys: where the sums stand; None for in place.
        weights: n numbers, the same for all of `in_keys`; None for ones.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys | None = None, *, weights: Sequence[float] | Tensor | None = None
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.register_buffer(
            "weights", None if weights is None else torch.as_tensor(weights, dtype=torch.float32)
        )

    def _apply_transform(self, value: Tensor) -> Tensor:
        weights = beside(self, "weights", value)
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


def _clipped(spec: TensorSpec, low: Any, high: Any) -> TensorSpec:
    dtype, shape = spec.dtype, spec.shape
    assert dtype is not None
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    bottom = torch.as_tensor(limits.min if low is None else low, dtype=dtype, device=spec.device).expand(
        shape
    )
    top = torch.as_tensor(limits.max if high is None else high, dtype=dtype, device=spec.device).expand(shape)
    if isinstance(spec, Bounded):
        bottom, top = (torch.clamp(bound, bottom, top) for bound in spec.bounds)
    return Bounded(bottom, top, shape, spec.device, dtype)
