"""Specs of other libraries are converted; here they are classes with the same names and public attributes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gleanrl.data import specs
from gleanrl.data.specs import from_torchrl
from gleanrl.errors import InvalidTypeError


class Foreign:
    """Keeps its attributes."""

    def __init__(self, **attributes):
        self.device = torch.device("cpu")
        vars(self).update(attributes)


def made(name, *bases, **attributes):
    return type(name, bases or (Foreign,), {})(**attributes)


def count(n):
    return SimpleNamespace(n=n)


def box(low, high):
    return SimpleNamespace(low=low, high=high)


def masked_binary():
    spec = specs.Binary(2, device="cpu")
    spec.update_mask(torch.tensor([[True, False], [True, True]]))
    return spec


MASK = torch.tensor([True, False, True])

LEAVES = [
    (
        made("Binary", shape=torch.Size([4, 3]), dtype=torch.int8, mask=None),
        specs.Binary(shape=(4, 3), device="cpu"),
    ),
    (
        made(
            "Binary",
            shape=torch.Size([2]),
            dtype=torch.int8,
            mask=torch.tensor([[True, False], [True, True]]),
        ),
        masked_binary(),
    ),
    (
        made(
            "Bounded",
            shape=torch.Size([2]),
            dtype=torch.float64,
            space=box(torch.tensor([-1.0, -2.0]).double(), torch.tensor([1.0, torch.inf]).double()),
        ),
        specs.Bounded(
            torch.tensor([-1.0, -2.0]), torch.tensor([1.0, torch.inf]), device="cpu", dtype=torch.float64
        ),
    ),
    (
        made("Categorical", shape=torch.Size([1]), dtype=torch.bool, space=count(2), mask=None),
        specs.Categorical(2, (1,), "cpu", torch.bool),
    ),
    (
        made("Categorical", shape=torch.Size([]), dtype=torch.int64, space=count(3), mask=MASK),
        specs.Categorical(3, device="cpu", mask=MASK),
    ),
    (
        made("MultiCategorical", shape=torch.Size([2]), dtype=torch.int64, nvec=[2, 3], mask=None),
        specs.MultiCategorical([2, 3], device="cpu"),
    ),
    (
        made("MultiOneHot", shape=torch.Size([5]), dtype=torch.bool, nvec=[2, 3], mask=None),
        specs.MultiOneHot([2, 3], device="cpu"),
    ),
    (
        made("NonTensor", shape=torch.Size([2]), example_data="a"),
        specs.NonTensor((2,), "cpu", example_data="a"),
    ),
    (
        made("OneHot", shape=torch.Size([3]), dtype=torch.int64, n=3, mask=MASK),
        specs.OneHot(3, device="cpu", dtype=torch.int64, mask=MASK),
    ),
    (
        made("Unbounded", shape=torch.Size([3]), dtype=torch.uint8),
        specs.Unbounded((3,), "cpu", torch.uint8),
    ),
]


@pytest.mark.parametrize(("foreign", "ours"), LEAVES, ids=[type(leaf).__name__ for leaf, _ in LEAVES])
def test_a_leaf_becomes_the_one_of_its_name(foreign, ours):
    assert from_torchrl(foreign) == ours


def test_derived_classes_convert_as_their_base():
    derived = type("PixelSpec", (type("BoundedDiscrete", (type("Bounded", (Foreign,), {}),), {}),), {})
    pixels = derived(shape=torch.Size([2]), dtype=torch.uint8, space=box(torch.tensor(0), torch.tensor(255)))
    assert from_torchrl(pixels) == specs.Bounded(0, 255, (2,), "cpu", torch.uint8)


def test_composites_keep_keys_shape_device_and_unspecified_entries():
    agent = made("Unbounded", shape=torch.Size([2, 3]), dtype=torch.float32)
    group = made("Composite", shape=torch.Size([2]), device=None, items={"obs": agent, "any": None}.items)
    whole = made("Composite", shape=torch.Size([]), device=None, items={"agents": group}.items)
    found = from_torchrl(whole)
    agents = specs.Composite({"obs": specs.Unbounded((2, 3), "cpu"), "any": None}, shape=(2,))
    assert found == specs.Composite(agents=agents)
    assert found["agents", "obs"].shape == (2, 3)


@pytest.mark.parametrize("name", ["Stacked", "StackedComposite"])
def test_stacks_are_stacked_along_their_dimension(name):
    leaves = [made("Unbounded", shape=torch.Size([4, n]), dtype=torch.float32) for n in (2, 3)]
    parts = leaves
    if name == "StackedComposite":
        parts = [made("Composite", shape=torch.Size([4]), items={"a": leaf}.items) for leaf in leaves]
    found = from_torchrl(made(name, dim=1, unbind=lambda dim: parts if dim == 1 else None))
    assert type(found) is getattr(specs, name)
    assert found.stack_dim == 1
    assert [spec.shape for spec in found.unbind(1)] == ([(4, 2), (4, 3)] if name == "Stacked" else [(4,)] * 2)


def test_library_specs_and_none_pass_unchanged():
    ours = specs.Unbounded()
    assert from_torchrl(ours) is ours
    assert from_torchrl(None) is None


def test_spec_without_a_counterpart_is_named():
    with pytest.raises(InvalidTypeError, match="Choice has no counterpart; expected one of.*'Bounded'"):
        from_torchrl(made("Choice"))
