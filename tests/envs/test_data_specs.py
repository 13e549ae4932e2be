"""Specs from data."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict

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


def test_leaves_that_are_no_tensors() -> None:
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
