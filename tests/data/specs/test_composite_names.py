"""Composites name their dimensions, and the values that they make have these names."""

import copy

import pytest
import torch

from gleanrl.data.specs import Composite, Unbounded
from gleanrl.errors import InvalidArgumentError


def named(*names, shape=(2, 3)):
    return Composite(
        a=Unbounded((*shape, 4)), g=Composite(b=Unbounded(shape), shape=shape), shape=shape, names=names
    )


def test_values_have_the_names_of_their_spec():
    spec = named("env", "time")
    assert spec.names == ["env", "time"]
    assert spec["g"].names == ["env", "time"], "nested composites have them, too"
    for made in (spec.zero(), spec.rand(), spec.one()):
        assert made.names == ["env", "time"]
        assert made["g"].names == ["env", "time"]
    assert spec.rand((5,)).names == [None, "env", "time"]
    plain = Composite(a=Unbounded((2,)), shape=(2,))
    assert plain.names == [None]
    assert plain.rand().names == [None]
    assert spec == named(None, None), "they aren't part of the domain"


@pytest.mark.parametrize(
    "copied", [Composite.clone, copy.deepcopy, lambda s: s.to("cpu"), lambda s: s.empty()]
)
def test_copies_keep_names(copied):
    assert copied(named("env", "time")).names == ["env", "time"]


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        (lambda s: s.expand(7, 2, 3), [None, "env", "time"]),
        (lambda s: s.unsqueeze(1), ["env", None, "time"]),
        (lambda s: s.unsqueeze(0).squeeze(0), ["env", "time"]),
        (lambda s: s.unsqueeze(-1).squeeze(), ["env", "time"]),
        (lambda s: s[0], ["time"]),
        (lambda s: s[:, 1:], ["env", "time"]),
        (lambda s: s.unbind(1)[0], ["env"]),
        (lambda s: s.reshape(6), [None]),
        (lambda s: torch.stack([s, s], 0), [None, "env", "time"]),
    ],
)
def test_shape_operations_keep_the_names_of_kept_dimensions(operation, names):
    made = operation(named("env", "time"))
    assert made.names == names
    assert made.zero().names == names
    assert made["g"].names == names


def test_a_dimension_of_any_size_has_a_name():
    assert named("env", "time", shape=(-1, 3)).unsqueeze(0).names == [None, "env", "time"]


def test_assigning_and_refining():
    spec = named(None, None)
    assert spec.refine_names(..., "time") is spec
    assert spec.names == [None, "time"]
    spec.refine_names("env", None)
    assert spec.names == ["env", "time"]
    spec.refine_names("env", "time")
    for wrong in (("other", None), ("env",), ("a", "b", "c"), (..., "env")):
        with pytest.raises(InvalidArgumentError, match="refine_names"):
            spec.refine_names(*wrong)
    assert spec.names == ["env", "time"], "nothing changed"
    spec.names = None
    assert spec.names == spec["g"].names == [None, None]
    for wrong in (["a"], ["a", "a"]):
        with pytest.raises(InvalidArgumentError, match="names: expected 2 different"):
            spec.names = wrong


def test_a_shape_with_more_dimensions_leaves_them_without_names():
    spec = Composite(a=Unbounded((2, 3)), shape=(2,), names=["env"])
    spec.shape = (2, 3)
    assert spec.names == ["env", None]
