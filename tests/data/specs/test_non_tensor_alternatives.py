"""Choices among specs, and choices among values that aren't tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from gleanrl.data.specs import (
    Bounded,
    Categorical,
    Choice,
    Composite,
    Unbounded,
    is_masked,
    without_masks,
)
from gleanrl.data.specs.non_tensor import Constant
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError


def words():
    return Choice([NonTensorData("left"), NonTensorData("right")])


def numbers():
    return Choice([Bounded(0, 1, (2, 1)), Bounded(2, 3, (2, 1))])


def test_numbers():
    torch.manual_seed(0)
    spec = numbers()
    assert spec.shape == (2, 1) and spec.dtype == torch.float32 and spec.device == torch.device("cpu")
    assert spec.domain is spec.space is None
    drawn = [spec.rand((3,)) for _ in range(20)]
    assert all(spec.is_in(value) and value.shape == (3, 2, 1) for value in drawn)
    assert {bool((value > 1).all()) for value in drawn} == {True, False}
    assert not spec.is_in(torch.full((2, 1), 1.5)) and not spec.is_in(torch.tensor([[0.5], [2.5]]))
    assert spec.zero().tolist() == [[0], [0]] and spec.one().tolist() == [[1], [1]]
    assert spec.project(torch.full((2, 1), 9.0)).tolist() == [[1], [1]] and spec.cardinality() == float("inf")
    assert spec.to_numpy(spec.encode([[2.5], [2.5]])).tolist() == [[2.5], [2.5]]
    assert spec.type_check(spec.rand()) is None
    with pytest.raises(SpecError, match="none of the choices: .*high=1.0.*high=3.0"):
        spec.assert_is_in(torch.full((2, 1), 1.5))


def test_words():
    torch.manual_seed(0)
    spec = words()
    assert spec.shape == () and spec.num_choices == spec.cardinality() == 2 and spec.dtype is None
    assert {spec.rand().data for _ in range(20)} == {"left", "right"} and spec.zero().data == "left"
    assert spec.is_in(NonTensorData("right")) and spec.is_in("right") and not spec.is_in(NonTensorData("up"))
    assert [value.data for value in spec.enumerate()] == ["left", "right"] and spec.encode("up").data == "up"
    assert spec.to_numpy(NonTensorData("left")) == "left"
    with pytest.raises(SpecError, match="expected 'right', got 'up'"):
        spec.to_numpy(NonTensorData("up"))


def test_values_of_all_choices():
    assert [int(v) for v in Choice([Categorical(2), Categorical(3)]).enumerate()] == [0, 1, 0, 1, 2]
    assert Choice([Categorical(2), Categorical(3)]).cardinality() == 5


@pytest.mark.parametrize("make", [words, numbers])
def test_copies_and_geometry(make):
    spec = make()
    assert spec == spec.clone() == copy.deepcopy(spec) and repr(spec) == repr(spec.clone())
    assert spec != Choice(list(reversed(spec.choices))) and spec != spec.expand(3, *spec.shape)
    assert (
        spec.expand(3, *spec.shape).rand().shape
        == (3, *spec.shape)
        == spec.unsqueeze(0).expand(3, *spec.shape).shape
    )
    assert torch.stack([spec, spec]).shape == (2, *spec.shape) and spec.to("meta").device.type == "meta"


def test_inside_a_composite():
    spec = Composite(word=words(), number=numbers())
    assert spec.is_in(spec.rand()) and not spec.is_in(spec.rand().set("word", NonTensorData("up")))


def test_a_generator_draws():
    drawn = [words().rand(generator=torch.Generator().manual_seed(7)).data for _ in range(3)]
    assert len(set(drawn)) == 1


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ([], InvalidArgumentError),
        ([Unbounded(1), Bounded(0, 1, (1,))], InvalidArgumentError),
        ([Unbounded(1), Unbounded(2)], InvalidArgumentError),
        ([Unbounded(1), Unbounded(1, dtype=torch.float64)], InvalidArgumentError),
        (["left", "right"], InvalidTypeError),
    ],
)
def test_bad_arguments(choices, error):
    with pytest.raises(error, match="Choice: expected"):
        Choice(choices)


def test_constants():
    one = Constant((), example_data="a")
    assert one == Constant((), example_data="a") != Constant((), example_data="b") and one.cardinality() == 1
    assert repr(one) == "Constant('a', shape=())"


def test_choices_of_stacks_of_text():
    spec = Choice([NonTensorStack("a", "b"), NonTensorStack("c", "d")])
    assert spec.shape == (2,) and spec.cardinality() == 2
    assert {tuple(spec.rand().tolist()) for _ in range(50)} == {("a", "b"), ("c", "d")}
    assert spec.is_in(NonTensorStack("c", "d")) and not spec.is_in(NonTensorStack("a", "d"))
    two = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("a", "b"))
    assert spec.is_in(two) and not spec.is_in(
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("a", "c"))
    )
    assert spec.zero((3,)).tolist() == [["a", "b"]] * 3
    assert spec.expand(3, 2).rand().tolist() in ([["a", "b"]] * 3, [["c", "d"]] * 3)
    assert spec[1].rand().data in ("b", "d") and spec.to_numpy(NonTensorStack("a", "b")) == ["a", "b"]
    assert spec.encode(["c", "d"]).tolist() == ["c", "d"] and spec == spec.clone()
    with pytest.raises(InvalidArgumentError):
        Choice([NonTensorStack("a", "b"), NonTensorStack("c", "d", "e")])


def test_specs_without_masks_have_none_in_choices():
    masked = Choice([Categorical(3, mask=torch.tensor([True, False, False])), Categorical(4)])
    spec = Composite(a=Composite(b=masked))
    found = without_masks(spec)
    assert is_masked(spec) and not is_masked(found)
    assert found["a", "b"] == Choice([Categorical(3), Categorical(4)])
