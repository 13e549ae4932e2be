"""Specs: descriptions of the values that environments and policies exchange."""

from __future__ import annotations

from gleanrl.compat import bind
from gleanrl.data.specs import torchrl_hook
from gleanrl.data.specs.alternatives import Choice
from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.binary import Binary
from gleanrl.data.specs.bounded import Bounded, BoundedContinuous, BoundedDiscrete
from gleanrl.data.specs.bridge import from_torchrl, to_torchrl
from gleanrl.data.specs.categorical import Categorical, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.lazy import (
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    has_choices,
    is_masked,
    leaves_of,
    without_masks,
)
from gleanrl.data.specs.multi_categorical import MultiCategorical, MultiOneHot
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.data.specs.stacks import Stacked, StackedComposite, stack_specs
from gleanrl.data.specs.unbounded import Unbounded, UnboundedContinuous, UnboundedDiscrete

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
torchrl_hook.install()
