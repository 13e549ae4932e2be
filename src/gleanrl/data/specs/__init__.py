"""Specs: descriptions of the values that environments and policies exchange."""

from __future__ import annotations

from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.binary import Binary
from gleanrl.data.specs.bounded import Bounded, BoundedContinuous, BoundedDiscrete
from gleanrl.data.specs.choice import Categorical, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.unbounded import Unbounded, UnboundedContinuous, UnboundedDiscrete

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "OneHot",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]
