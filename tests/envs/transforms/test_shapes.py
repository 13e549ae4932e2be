"""Transforms of shapes: unsqueeze, squeeze, flatten, permute, concatenate."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Bounded, Composite
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import (
    CatTensors,
    Compose,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    TransformedEnv,
    UnsqueezeTransform,
)
from gleanrl.envs.transforms.base import Transform
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways, joined, single
from tests.fakes_base import TwoKeyEnv


def two():
    return TwoKeyEnv(SCRIPT, (2,))


@pytest.mark.parametrize("env", [single, batched])
def test_unsqueeze_and_squeeze_change_dimensions(env):
    more = UnsqueezeTransform(-2, in_keys=["observation"], out_keys=["tall"])
    assert isinstance(more, Transform)
    batch = joined(
        collect_both_ways(env, lambda: [UnsqueezeTransform(-2, in_keys=["observation"], out_keys=["tall"])])
    )
    assert torch.equal(batch["next", "tall"].squeeze(-2), batch["next", "observation"])
    batch = joined(
        collect_both_ways(
            env,
            lambda: [
                UnsqueezeTransform(0, True, in_keys=["observation"]),
                SqueezeTransform(0, True, in_keys=["observation"], out_keys=["flat"]),
            ],
        )
    )
    assert torch.equal(batch["observation"].squeeze(-2), batch["flat"])


def test_actions_get_their_dimension_back():
    env = single()
    transformed = TransformedEnv(env, UnsqueezeTransform(-1, in_keys_inv=["action"]))
    assert transformed.action_spec.shape == (2, 1)
    batch = transformed.rollout(2)
    assert torch.equal(torch.from_numpy(env.unwrapped.actions[0]), batch["action"][0].squeeze(-1))


def test_flatten_and_permute_reorder_values():
    td = TensorDict({"pixels": torch.arange(24.0).reshape(1, 2, 3, 4)}, [1])
    assert FlattenObservation(-3, -1)(td.clone())["pixels"].shape == (1, 24)
    out = PermuteTransform([-1, -3, -2])(td.clone())["pixels"]
    assert torch.equal(out, td["pixels"].movedim(-1, -3))
    back = PermuteTransform([-1, -3, -2], in_keys=[], in_keys_inv=["pixels"])
    assert torch.equal(back.inv(TensorDict({"pixels": out}, [1]))["pixels"], td["pixels"])


def test_positive_dimensions_count_after_the_batch():
    env = TransformedEnv(batched(), Compose(UnsqueezeTransform(-1, in_keys=["observation"])))
    env.append_transform(FlattenObservation(0, 1, in_keys=["observation"], allow_positive_dim=True))
    assert env.observation_spec["observation"].shape == (3, 3)
    with pytest.raises(InvalidArgumentError, match="negative"):
        FlattenObservation(0, 1)


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("del_keys", [True, False])
def test_entries_are_concatenated(sort, del_keys):
    def chain():
        return [CatTensors(["place", "clock"], "all", sort=sort, del_keys=del_keys)]

    batch = joined(collect_both_ways(two, chain))
    raw = joined(collect_both_ways(two, lambda: []))
    order = ["clock", "place"] if sort else ["place", "clock"]
    assert torch.equal(batch["all"], torch.cat([raw[key] for key in order], -1))
    assert torch.equal(batch["next", "all"], torch.cat([raw["next", key] for key in order], -1))
    assert ("place" in batch.keys()) is not del_keys
    assert (("next", "place") in batch.keys(True)) is not del_keys


def test_all_observations_by_default_and_specs_hold():
    env = TransformedEnv(two(), CatTensors())
    assert set(env.observation_spec.keys()) == {"observation_vector"}
    assert env.observation_spec["observation_vector"].shape == (2, 3)
    check_env_specs(env)


def test_bounds_are_concatenated():
    cat = CatTensors(["a", "b"], "c")
    spec = cat.transform_observation_spec(Composite(a=Bounded(0.0, 1.0, (2,)), b=Bounded(-1.0, 3.0, (1,))))
    assert spec["c"].low.tolist() == [0.0, 0.0, -1.0]
    assert spec["c"].high.tolist() == [1.0, 1.0, 3.0]


def test_scalars_are_unsqueezed_if_asked():
    td = TensorDict({"a": torch.tensor(1.0), "b": torch.tensor([2.0, 3.0])}, [])
    assert CatTensors(["a", "b"], "c", unsqueeze_if_oor=True)(td)["c"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("make", [SqueezeTransform, UnsqueezeTransform])
def test_transforms_without_keys_change_nothing(make):
    data = TensorDict({"a": torch.ones(2, 1)}, [2])
    assert make(dim=-1)(data)["a"].shape == (2, 1)
    env = TransformedEnv(single(), make(-1))
    assert env.rollout(2)["observation"].shape == (2, 3)


def test_older_keywords_are_accepted():
    data = TensorDict({"a": torch.ones(2, 1)}, [2])
    assert SqueezeTransform(squeeze_dim=-1, in_keys=["a"])(data.clone())["a"].shape == (2,)
    assert UnsqueezeTransform(unsqueeze_dim=-1, in_keys=["a"])(data)["a"].shape == (2, 1, 1)
    assert TransformedEnv(base_env=single()).reset().batch_size == ()


def test_invalid_arguments_are_refused():
    with pytest.raises(MissingKeyError, match="nothing"):
        CatTensors(["nothing"])(TensorDict({"a": torch.ones(1)}, []))
    with pytest.raises(InvalidArgumentError, match="dims"):
        PermuteTransform([-1, -1])
    mixed = Composite(a=Bounded(0.0, 1.0, (2,)), b=Bounded(0, 3, (1,), dtype=torch.int64))
    with pytest.raises(InvalidArgumentError, match="one dtype"):
        CatTensors(["a", "b"]).transform_observation_spec(mixed)
