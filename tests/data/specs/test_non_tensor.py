"""Specs of values that aren't tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from gleanrl.data.specs import Composite, NonTensor, Unbounded
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError


def test_all_drawn_values_equal_the_example():
    spec = NonTensor((2,), example_data="text")
    for make in (spec.rand, spec.sample, spec.zero, spec.one, spec.zeros, spec.ones):
        value = make((3,))
        assert value.batch_size == (3, 2) and value.data == "text" and spec.is_in(value)


def test_the_domain():
    spec = NonTensor((2,))
    assert spec.is_in(NonTensorData("x", batch_size=(5, 2))) and not spec.is_in(NonTensorData("x"))
    assert spec.is_in("x") and not spec.is_in(torch.zeros(2)) and not spec.is_in(TensorDict({}, [2]))
    stack = torch.stack([NonTensorData("a"), NonTensorData("b")])
    assert spec.is_in(stack) and spec.to_numpy(stack) == ["a", "b"] and spec.project(stack) is stack
    with pytest.raises(SpecError, match=r"NonTensor\(shape=\(2,\)\), got batch size \(\)"):
        spec.assert_is_in(NonTensorData("x"))
    assert spec.project("x") == spec.to_numpy("x") == "x" and NonTensor(()).is_in("x")
    assert NonTensor().shape == (1,) and NonTensor((), dtype=torch.int64).dtype == torch.int64


def test_one_wrapper_for_each_position_or_for_several():
    whole = NonTensor((2, 3), example_data="a")
    assert whole.feature_dims == 2 and not whole.batched and isinstance(whole.rand((4,)), NonTensorData)
    rows = NonTensor((2, 3), example_data="a", feature_dims=1)
    assert rows.rand().tolist() == [["a"] * 3] * 2 and rows.rand((4,)).batch_size == (4, 2, 3)
    each = NonTensor((2,), example_data="a", batched=True)
    assert each.batched and each.feature_dims == 0 and each.zero((3,)).tolist() == [["a", "a"]] * 3
    assert each.clone().batched and each.expand(3, 2).batched and each.is_in(each.rand((4,)))
    with pytest.raises(InvalidArgumentError, match="either batched or feature_dims"):
        NonTensor((2,), batched=True, feature_dims=1)


def test_there_and_back():
    spec = NonTensor(())
    for value in ("text", {"a": 1}, None, object()):
        assert spec.to_numpy(spec.encode(value)) == value or value is None
    wrapped = NonTensorData("x")
    assert spec.encode(wrapped) is wrapped and spec.to_numpy(wrapped, safe=False) == "x"


def test_geometry():
    spec = NonTensor((2, 3), example_data=1)
    assert spec[0].shape == (3,) and spec.expand(4, 2, 3).shape == (4, 2, 3) and len(spec.unbind(1)) == 3
    assert torch.stack([spec, spec]).shape == (2, 2, 3) and [s.shape for s in spec] == [(3,), (3,)]
    assert spec[0].rand().data == 1


def test_copies_devices_and_types():
    spec = NonTensor((2,), example_data="x")
    assert spec == spec.clone() == copy.deepcopy(spec) != NonTensor((3,), example_data="x")
    assert (
        spec != Unbounded((2,))
        and NonTensor(2, example_data="x") == spec
        and spec.dtype is spec.space is None
    )
    moved = spec.to("cpu")
    assert (
        moved != spec
        and moved.to("cpu") is moved
        and "cpu" in repr(moved)
        and moved.zero().device.type == "cpu"
    )
    assert spec.cardinality() == float("inf") and spec.type_check(spec.rand()) is None
    assert spec.to(torch.float32) is spec
    with pytest.raises(InvalidTypeError, match="'k'.*got Tensor"):
        spec.type_check(torch.zeros(2), "k")


def test_inside_a_composite():
    spec = Composite(text=NonTensor((2,), example_data="x"), obs=Unbounded((2, 3)), shape=(2,))
    value = spec.rand((4,))
    assert spec.is_in(value) and value["text"] == "x"
    assert not spec.is_in(TensorDict({"text": torch.zeros(2), "obs": torch.zeros(2, 3)}, [2]))
    assert spec.to_numpy(spec.rand())["text"] == "x"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"example_data": "a"}, {"example_data": "b"}),
        ({"example_data": "a"}, {}),
        ({"example_data": np.zeros(2)}, {"example_data": np.ones(2)}),
        ({"example_data": 1}, {"example_data": True}),
        ({"batched": True}, {"batched": False}),
        ({"feature_dims": 1}, {}),
        ({"dtype": torch.float32}, {}),
    ],
)
def test_specs_with_different_drawn_values_are_unequal(left, right):
    for one in (left, right):
        assert NonTensor((2, 3), **one) == NonTensor((2, 3), **one)
    assert NonTensor((2, 3), **left) != NonTensor((2, 3), **right)
    with pytest.raises(TypeError):
        hash(NonTensor(**left))
