"""Specs handle devices, dispatch of torch functions and the shape argument."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import tensor_specs
from gleanrl.data.specs import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from gleanrl.data.specs.base import as_lead, combinations, stack
from gleanrl.errors import InvalidTypeError, UnsupportedError
from tests.data.specs.cases import COMPOSITES, LEAVES


@pytest.mark.parametrize("name", [*LEAVES, *COMPOSITES])
def test_a_wrong_shape_argument_is_named(name):
    spec = {**LEAVES, **COMPOSITES}[name]()
    for make in (spec.rand, spec.sample, spec.zero, spec.one):
        with pytest.raises(InvalidTypeError, match="shape: expected a sequence"):
            make(5)
    with pytest.raises(InvalidTypeError, match="shape"):
        spec.rand((1.5,))
    assert isinstance(spec, TensorSpec) and bool(spec) == (name != "empty")


def test_devices():
    assert Unbounded((2,), device="cpu").device == torch.device("cpu")


def test_leading_dimensions():
    assert as_lead([2, 3]) == (2, 3) and as_lead(torch.Size(())) == ()


def test_torch_functions_without_a_meaning_are_refused():
    with pytest.raises(
        InvalidTypeError, match=r"torch\.cat: .* expected one of torch\.index_select, .*method"
    ):
        torch.cat([Categorical(2), Categorical(2)])
    with pytest.raises(InvalidTypeError, match=r"torch\.nn\.functional\.relu: specs aren't tensors"):
        torch.nn.functional.relu(Categorical(2))
    assert torch.zeros(2) != Unbounded((2,))


@pytest.mark.parametrize("name", [*LEAVES, *COMPOSITES])
def test_torch_functions_equal_the_methods(name):
    spec = {**LEAVES, **COMPOSITES}[name]()
    wide = spec.expand(2, 1, *spec.shape)
    index = torch.tensor([1, 0, 1])
    assert torch.unsqueeze(spec, 0) == torch.unsqueeze(input=spec, dim=0) == spec.unsqueeze(0)
    assert torch.squeeze(wide) == wide.squeeze() and torch.squeeze(wide, dim=1) == wide.squeeze(1)
    assert torch.squeeze(wide, (1, 0)) == wide.squeeze((0, 1)) == wide.squeeze(1).squeeze(0)
    assert torch.index_select(wide, 0, index) == wide.index_select(dim=0, index=index) == wide[index]


def test_stack_equals_torch_stack():
    specs = [Unbounded((2,)), Unbounded((2,))]
    assert stack(specs, 0) == torch.stack(specs, 0) == Unbounded((2, 2))


def test_the_other_import_path_and_the_old_names():
    assert tensor_specs.Composite is Composite is tensor_specs.CompositeSpec
    old = {
        "BinaryDiscreteTensorSpec": "Binary",
        "BoundedTensorSpec": "Bounded",
        "DiscreteTensorSpec": "Categorical",
        "LazyStackedCompositeSpec": "StackedComposite",
        "LazyStackedTensorSpec": "Stacked",
        "MultiDiscreteTensorSpec": "MultiCategorical",
        "MultiOneHotDiscreteTensorSpec": "MultiOneHot",
        "NonTensorSpec": "NonTensor",
        "OneHotDiscreteTensorSpec": "OneHot",
        "UnboundedContinuousTensorSpec": "UnboundedContinuous",
        "UnboundedDiscreteTensorSpec": "UnboundedDiscrete",
    }
    for before, now in old.items():
        assert getattr(tensor_specs, before) is getattr(tensor_specs, now)
    assert all(hasattr(tensor_specs, name) for name in tensor_specs.__all__)


def test_encoding_needs_no_memory():
    spec = Unbounded(2)
    assert spec.memoize_encode() is spec.memoize_encode(mode=False) is spec.erase_memoize_cache() is None
    assert spec.encode([1, 2]).tolist() == [1, 2]


def test_encoding_where_the_input_is():
    spec = Unbounded(2, device="meta")
    assert spec.encode([1, 2]).device.type == "meta"
    assert spec.encode(val=[1, 2], ignore_device=True).tolist() == [1, 2]
    whole = Composite(a=spec, b={"c": OneHot(2, device="meta")}, device="meta")
    value = whole.encode({"a": [1, 2], "b": {"c": 1}}, ignore_device=True)
    assert value["a"].tolist() == [1, 2] and value["b", "c"].tolist() == [False, True]


def test_combinations():
    assert combinations([]) == []
    first, second = combinations([torch.tensor([5, 6]), torch.tensor([[1], [2]])])
    assert first.tolist() == [5, 5, 6, 6] and second.tolist() == [[1], [2], [1], [2]]


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (Composite({f"a{i}": Categorical(24) for i in range(5)}), 24**5),
        (Composite({f"a{i}": {"b": OneHot(100)} for i in range(4)}), 100**4),
        (MultiCategorical([24] * 5), 24**5),
        (MultiOneHot([24] * 5), 24**5),
        (Binary(24), 2**24),
        (Binary(24, (3, 24)), 2**24),
        (OneHot(100_000), 100_000),
        (torch.stack([Categorical(1000), Categorical(1500)]), 1_500_000),
    ],
)
def test_enumerating_too_many_values_is_refused_with_the_count(spec, count):
    with pytest.raises(UnsupportedError, match=f"{count:,}"):
        spec.enumerate()


def test_many_values_are_enumerated_below_the_limit():
    assert len(MultiCategorical([10] * 6).enumerate()) == 10**6
    masked = MultiCategorical([1000, 1000, 1000], mask=(torch.arange(3000) % 1000) < 50)
    assert len(masked.enumerate(use_mask=True)) == 50**3
