"""Specs are inferred from data."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from gleanrl.data import NonTensor
from gleanrl.envs import GymEnv, make_tensordict
from gleanrl.envs.utils import make_composite_from_td


def test_every_leaf_has_its_spec() -> None:
    nested = TensorDict(
        {"b": torch.zeros(2, 3, dtype=torch.int64), "c": torch.zeros(2, dtype=torch.bool)}, [2]
    )
    data = TensorDict({"a": torch.zeros(2, 4), "n": nested}, [2])
    spec = make_composite_from_td(data)
    assert spec.shape == (2,) and set(spec.keys(True, True)) == {"a", ("n", "b"), ("n", "c")}
    for key in spec.keys(True, True):
        assert (spec[key].shape, spec[key].dtype) == (data[key].shape, data[key].dtype)
    assert spec.is_in(data)


@pytest.mark.parametrize("unsqueeze", [True, False])
def test_leaves_without_dimensions(unsqueeze: bool) -> None:
    spec = make_composite_from_td(TensorDict({"x": torch.tensor(1.0)}, []), unsqueeze)
    assert spec["x"].shape == ((1,) if unsqueeze else ())


def test_non_tensor_leaves_get_non_tensor_specs() -> None:
    found = make_composite_from_td(TensorDict({"x": NonTensorData("a"), "y": torch.zeros(2)}, []))
    assert isinstance(found["x"], NonTensor) and found["y"].shape == (2,)


def test_a_whole_steps_zeros() -> None:
    env = GymEnv("CartPole-v1")
    assert set(make_tensordict(env).keys(True, True)) == set(env.fake_tensordict().keys(True, True))

    def policy(td: TensorDict) -> TensorDict:
        return td.update({"action": torch.ones(2), "logits": torch.ones(3)})

    found = make_tensordict(env, policy)
    assert found["logits"].tolist() == [0, 0, 0] and ("next", "reward") in found.keys(True)


def test_last_dimensions_of_any_size() -> None:
    data = TensorDict({"x": torch.zeros(2, 3), "y": torch.tensor(1)}, [])
    found = make_composite_from_td(data, dynamic_shape=True)
    assert found["x"].shape == (2, -1) and found["y"].shape == (-1,)


@tensorclass
class Point:
    """A tensorclass with text."""

    at: torch.Tensor
    name: str = "p"


LEAVES = {
    "text": lambda: TensorDict({"x": NonTensorData("a")}, []),
    "texts": lambda: TensorDict({"x": NonTensorStack("a", "b")}, [2]),
    "objects": lambda: TensorDict({"x": NonTensorData({"k": [1]})}, []),
    "bool": lambda: TensorDict({"x": torch.zeros(2, 3, dtype=torch.bool)}, [2]),
    "uint8": lambda: TensorDict({"x": torch.zeros(2, 3, dtype=torch.uint8)}, [2]),
    "half": lambda: TensorDict({"x": torch.zeros(2, 3, dtype=torch.float16)}, [2]),
    "tensorclass": lambda: TensorDict({"x": Point(torch.zeros(2, 3), batch_size=[2])}, [2]),
    "tensorclass at the root": lambda: Point(torch.zeros(2, 3), batch_size=[2]),
    "group": lambda: TensorDict({"g": TensorDict({"x": torch.zeros(2, 4, 3)}, [2, 4])}, [2]),
    "empty group": lambda: TensorDict({"g": {}, "x": torch.zeros(2)}, [2]),
    "lazy stack": lambda: lazy_stack(
        [TensorDict({"x": torch.zeros(3), "g": {"y": torch.ones(1)}}) for _ in range(2)]
    ),
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_data_are_in_their_spec_and_samples_have_their_form(leaf: str) -> None:
    data = LEAVES[leaf]()
    spec = make_composite_from_td(data, unsqueeze_null_shapes=False)
    assert spec.is_in(data)
    for made in (spec.rand(), spec.zero()):
        assert spec.is_in(made) and make_composite_from_td(made, unsqueeze_null_shapes=False) == spec
        assert type(made) is type(data) or leaf == "lazy stack"


def test_text_keeps_its_example_and_tensorclasses_their_class() -> None:
    spec = make_composite_from_td(
        TensorDict({"t": NonTensorData("a"), "p": Point(torch.zeros(3), batch_size=[])}, [])
    )
    assert spec["t"].example_data == "a" and spec.rand()["t"] == "a"
    assert spec["p"].data_cls is Point and spec.rand()["p"].name == "p"


def test_stacked_tensors_of_different_sizes_get_open_dimensions() -> None:
    data = lazy_stack([TensorDict({"x": torch.zeros(size)}) for size in (2, 3)])
    assert make_composite_from_td(data)["x"].shape == (2, -1)
