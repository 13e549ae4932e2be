"""Specs: descriptions of the values that environments and policies exchange."""

from __future__ import annotations

from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.binary import Binary
from gleanrl.data.specs.bounded import Bounded, BoundedContinuous, BoundedDiscrete
from gleanrl.data.specs.categorical import Categorical, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.foreign import as_spec
from gleanrl.data.specs.lazy import check_no_exclusive_keys, consolidate_spec, contains_lazy_spec
from gleanrl.data.specs.multi_categorical import MultiCategorical, MultiOneHot
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.data.specs.stack import Stacked, StackedComposite, stack_specs
from gleanrl.data.specs.unbounded import Unbounded, UnboundedContinuous, UnboundedDiscrete

# The names of TorchRL v0.5
BinaryDiscreteTensorSpec = Binary
BoundedTensorSpec = Bounded
CompositeSpec = Composite
DiscreteTensorSpec = Categorical
LazyStackedCompositeSpec = StackedComposite
LazyStackedTensorSpec = Stacked
MultiDiscreteTensorSpec = MultiCategorical
MultiOneHotDiscreteTensorSpec = MultiOneHot
NonTensorSpec = NonTensor
OneHotDiscreteTensorSpec = OneHot
UnboundedContinuousTensorSpec = UnboundedContinuous
UnboundedDiscreteTensorSpec = UnboundedDiscrete

__all__ = [
    "Binary",
    "BinaryDiscreteTensorSpec",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "Categorical",
    "Composite",
    "CompositeSpec",
    "DiscreteTensorSpec",
    "LazyStackedCompositeSpec",
    "LazyStackedTensorSpec",
    "MultiCategorical",
    "MultiDiscreteTensorSpec",
    "MultiOneHot",
    "MultiOneHotDiscreteTensorSpec",
    "NonTensor",
    "NonTensorSpec",
    "OneHot",
    "OneHotDiscreteTensorSpec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscrete",
    "UnboundedDiscreteTensorSpec",
    "as_spec",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "stack_specs",
]
