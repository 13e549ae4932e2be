"""Specs: descriptions of the values that environments and policies exchange."""

from __future__ import annotations

from gleanrl.compat import bind
from gleanrl.data.specs import torchrl
from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.boxes import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from gleanrl.data.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.non_tensor import Choice, NonTensor
from gleanrl.data.specs.stacked import (
    Stacked,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    has_choices,
    is_masked,
    leaves_of,
    stack_specs,
    without_masks,
)
from gleanrl.data.specs.torchrl import from_torchrl, to_torchrl

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Choice",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "from_torchrl",
    "has_choices",
    "is_masked",
    "leaves_of",
    "stack_specs",
    "to_torchrl",
    "without_masks",
]

bind(__name__, globals())
torchrl.install()
