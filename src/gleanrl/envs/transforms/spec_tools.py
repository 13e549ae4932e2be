"""Functions that map the leaves of specs in the way that a transform maps their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.data.specs import Bounded, Composite, TensorSpec, Unbounded


def keys_of(spec: Any) -> list[NestedKey]:
    """Return the keys of all leaves of a composite spec."""
    return [as_key(as_path(key)) for key in spec.keys(True, True)]


def count_spec(shape: torch.Size, device: Any, most: int | None = None) -> TensorSpec:
    """Return the spec of an int64 count from 0 to `most`, included; None for no limit."""
    end = torch.iinfo(torch.int64).max if most is None else most
    return Bounded(0, end, shape, device, torch.int64)


def mapped(
    spec: TensorSpec, function: Callable[[torch.Tensor], torch.Tensor], monotone: bool = False
) -> TensorSpec:
    """Return the spec of ``function(value)`` for the values of `spec`.

    Args:
        spec: a leaf.
        function: has no side effects. It is called on a zero value, and with `monotone` on the bounds.
        monotone: whether the function maps bounds to bounds, element by element, in either order.

    Returns:
        A `Bounded` spec if `spec` is bounded, the function is monotone and no new bound is NaN; otherwise an unbounded
        spec.
    """
    out = function(spec.zero())
    if monotone and isinstance(spec, Bounded):
        low, high = map(function, spec.bounds)
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        if not bool(low.isnan().any() | high.isnan().any()):
            return Bounded(low, high, out.shape, spec.device, out.dtype)
    return Unbounded(out.shape, device=spec.device, dtype=out.dtype)


def map_leaves(
    spec: Any, pairs: Iterable[tuple[NestedKey, NestedKey]], function: Callable[[TensorSpec], TensorSpec]
) -> Any:
    """Return a copy of `spec` with ``function(leaf)`` at the second key of each pair, for the leaf at the first key.

    Pairs whose first key isn't in `spec` are skipped.
    """
    out = spec.clone()
    for in_key, out_key in pairs:
        if in_key in spec.keys(True, True):
            out[out_key] = function(spec[in_key])
    return out


def rename_leaves(
    spec: Any, pairs: Iterable[tuple[NestedKey, NestedKey]], function: Callable[[TensorSpec], TensorSpec]
) -> Any:
    """Return a copy of `spec` with ``function(leaf)`` at the second key of each pair, and without the first keys.

    This is the rule for inputs: the user writes the second key, and the transform computes the first one from it.
    Pairs whose first key isn't in `spec` are skipped.
    """
    found = [(in_key, out_key) for in_key, out_key in pairs if in_key in spec.keys(True, True)]
    out = spec.clone()
    for in_key, _ in found:
        del out[in_key]
    for in_key, out_key in found:
        out[out_key] = function(spec[in_key])
    return out


def apply_to_composite(method: Callable[[Any, TensorSpec], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Return a spec method that also accepts composites, for a `method` that maps one leaf.

    The method is called for each of the transform's `in_keys` in the composite. Its result is set at the matching one
    of `out_keys`.
    """
    return _for_composites(method, "in_keys", "out_keys", map_leaves)


def apply_to_composite_inv(method: Callable[[Any, TensorSpec], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Return a spec method for inputs that also accepts composites, for a `method` that maps one leaf.

    The method is called for each of the transform's `in_keys_inv` in the action or state spec. The leaf is
    removed, and the result is set at the matching key of `out_keys_inv`.
    """
    parts = ("full_action_spec", "full_state_spec")
    return _for_composites(method, "in_keys_inv", "out_keys_inv", rename_leaves, parts)


def _for_composites(
    method: Callable[[Any, TensorSpec], TensorSpec],
    ins: str,
    outs: str,
    combine: Callable[..., Any],
    parts: tuple[str, ...] = (),
) -> Callable[[Any, Any], Any]:
    @functools.wraps(method)
    def wrapper(self: Any, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            return method(self, spec)
        pairs = list(zip(getattr(self, ins), getattr(self, outs), strict=True))
        there = [name for name in parts if name in spec.keys()]
        if not there:
            return combine(spec, pairs, lambda leaf: method(self, leaf))
        out = spec.clone()
        for name in there:
            out[name] = combine(spec[name], pairs, lambda leaf: method(self, leaf))
        return out

    return wrapper
