"""What becomes of specs: leaves mapped by the function that maps their values."""

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
    """Return the spec of an int64 that counts from 0, to `most` or without end."""
    end = torch.iinfo(torch.int64).max if most is None else most
    return Bounded(0, end, shape, device, torch.int64)


def mapped(
    spec: TensorSpec, function: Callable[[torch.Tensor], torch.Tensor], monotone: bool = False
) -> TensorSpec:
    """Return the spec of ``function(value)`` for the values of `spec`.

    Args:
        spec: a leaf.
        function: without effects; called on a zero value, and with `monotone` on the bounds.
        monotone: whether the function maps bounds to bounds, element by element (it may turn them round).

    Returns:
        A `Bounded` spec if `spec` is one and the function is monotone, an unbounded one otherwise.
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
    """Return a composite with ``function(leaf)`` under the second key of each pair, the leaf from under the first.

    Pairs whose first key `spec` doesn't have are left out.
    """
    out = spec.clone()
    for in_key, out_key in pairs:
        if in_key in spec.keys(True, True):
            out[out_key] = function(spec[in_key])
    return out


def rename_leaves(
    spec: Any, pairs: Iterable[tuple[NestedKey, NestedKey]], function: Callable[[TensorSpec], TensorSpec]
) -> Any:
    """Return a composite with ``function(leaf)`` under the second key of each pair, and without the first keys.

    So inputs are declared: the user writes the second key, and the transform makes the first one of it. Pairs whose
    first key `spec` doesn't have are left out.
    """
    found = [(in_key, out_key) for in_key, out_key in pairs if in_key in spec.keys(True, True)]
    out = spec.clone()
    for in_key, _ in found:
        del out[in_key]
    for in_key, out_key in found:
        out[out_key] = function(spec[in_key])
    return out


def apply_to_composite(method: Callable[[Any, TensorSpec], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Let a spec method of a transform that is written for one leaf take composites.

    It is called for each of the transform's `in_keys` that the composite has, and the result is written under the
    matching one of `out_keys`.
    """
    return _of_composites(method, "in_keys", "out_keys", map_leaves)


def apply_to_composite_inv(method: Callable[[Any, TensorSpec], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Let an input spec method of a transform that is written for one leaf take composites.

    It is called for each of the transform's `in_keys_inv` that the action or state spec has, and the result takes its
    place under the matching one of `out_keys_inv`.
    """
    parts = ("full_action_spec", "full_state_spec")
    return _of_composites(method, "in_keys_inv", "out_keys_inv", rename_leaves, parts)


def _of_composites(
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
