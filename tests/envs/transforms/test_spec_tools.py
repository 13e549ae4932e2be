"""Tools for specs map bounds and leaves."""

from __future__ import annotations

import torch

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs.transforms import Transform
from gleanrl.envs.transforms.spec_tools import (
    apply_to_composite,
    apply_to_composite_inv,
    keys_of,
    map_leaves,
    mapped,
)


def test_bounds_follow_a_monotone_function():
    spec = Bounded(torch.tensor([0.0, -1.0]), torch.tensor([1.0, 2.0]), (2,))
    out = mapped(spec, lambda v: -2 * v, monotone=True)
    assert out.low.tolist() == [-2.0, -4.0]
    assert out.high.tolist() == [0.0, 2.0]
    assert isinstance(mapped(spec, lambda v: v.sin()), Unbounded)
    out = mapped(Unbounded((2,)), lambda v: v.double().unsqueeze(0))
    assert (out.shape, out.dtype) == ((1, 2), torch.float64)


def test_leaves_are_mapped_by_pairs():
    spec = Composite(a=Unbounded((1,)), g=Composite(b=Unbounded((2,))))
    out = map_leaves(
        spec, [("a", "c"), (("g", "b"), ("g", "b")), ("x", "y")], lambda leaf: leaf.to(torch.float64)
    )
    assert keys_of(out) == ["a", ("g", "b"), "c"]
    assert out["g", "b"].dtype is torch.float64
    assert spec["g", "b"].dtype is torch.float32


class Doubling(Transform):
    @apply_to_composite
    def transform_observation_spec(self, spec):
        return spec.to(torch.float64)

    @apply_to_composite_inv
    def transform_input_spec(self, spec):
        return spec.to(torch.float64)


def test_methods_for_leaves_take_composites():
    doubling = Doubling(in_keys=["a"], out_keys=["b"], in_keys_inv=["u"])
    leaf = Unbounded((1,))
    assert doubling.transform_observation_spec(leaf).dtype is torch.float64
    out = doubling.transform_observation_spec(Composite(a=leaf))
    assert out["b"].dtype is torch.float64
    assert out["a"].dtype is torch.float32
    inputs = Composite(full_action_spec=Composite(u=leaf), full_state_spec=Composite(s=leaf))
    out = doubling.transform_input_spec(inputs)
    assert out["full_action_spec", "u"].dtype is torch.float64
    assert out["full_state_spec", "s"].dtype is torch.float32
    assert doubling.transform_input_spec(Composite(u=leaf))["u"].dtype is torch.float64
