"""Programs for other releases run; these calls belong to no other test module."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Composite, LazyTensorStorage, NonTensor, ReplayBuffer, Unbounded
from gleanrl.envs import (
    ClipTransform,
    ExcludeTransform,
    GymEnv,
    PendulumEnv,
    SqueezeTransform,
    TransformedEnv,
    UnsqueezeTransform,
)


def buffer(records: TensorDict, **kwargs: int) -> ReplayBuffer:
    made = ReplayBuffer(storage=LazyTensorStorage(20, **kwargs), batch_size=4)
    made.extend(records)
    return made


def test_a_tensor_without_dimensions_is_the_index_of_one_record() -> None:
    record = buffer(TensorDict({"a": torch.arange(5)}, [5]))[torch.tensor(2)]
    assert record.batch_size == () and record["a"] == 2


def test_a_part_of_the_written_layout_is_replaced() -> None:
    written = buffer(TensorDict({"a": torch.arange(10).reshape(2, 5)}, [2, 5]), ndim=2)
    written[:, 1:3] = TensorDict({"a": -torch.ones(2, 2, dtype=torch.int64)}, [2, 2])
    written[0, 4:5] = TensorDict({"a": torch.tensor([70])}, [1])
    assert written[:]["a"].tolist() == [[0, -1, -1, 3, 70], [5, -1, -1, 8, 9]]


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_policy_sees_the_device_that_the_environment_was_given(device: str | None) -> None:
    seen = []

    def policy(td: TensorDict) -> TensorDict:
        seen.append(td.device)
        return td.set("action", torch.tensor([0, 1]))

    env = GymEnv("CartPole-v1", device=device)
    next(iter(SyncDataCollector(env, policy, frames_per_batch=3, total_frames=3)))
    assert set(seen) == {None if device is None else torch.device(device)}


def test_an_environment_of_any_size_takes_that_of_its_reset() -> None:
    env = PendulumEnv()
    root = env.reset(TensorDict({}, [10]))
    assert root.shape == (10,) and env.rollout(3, auto_reset=False, tensordict=root).shape == (10, 3)


def test_transforms_without_keys_do_nothing_and_specs_may_be_leaves() -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), SqueezeTransform(dim=-1))
    env.append_transform(ExcludeTransform())
    assert env.rollout(2)["observation"].shape == (2, 4)
    assert UnsqueezeTransform(-1, in_keys=["x"]).transform_observation_spec(Unbounded((3,))).shape == (3, 1)


def test_integers_are_clipped_among_integers() -> None:
    clipped = ClipTransform(in_keys=["x"], low=0, high=2)(TensorDict({"x": torch.tensor([-1, 1, 5])}, []))
    assert clipped["x"].tolist() == [0, 1, 2] and clipped["x"].dtype == torch.int64


def test_calls_on_specs_of_other_releases_work() -> None:
    assert Composite(a=Unbounded(1)).to(torch.float64)["a"].dtype == torch.float64
    assert NonTensor(shape=()).is_in("x")
    bounded = Bounded(-1.0, 1.0, (2,))
    bounded.space.low = torch.full((2,), -3.0)
    assert bounded.is_in(torch.full((2,), -2.0))
    assert Bounded(0, 1, (1,), dtype=torch.bool).rand().dtype == torch.bool
    td = TensorDict({"a": torch.tensor([3.0, -5.0])}, [])
    assert Composite(a=bounded).project(td) is td and td["a"].tolist() == [1.0, -3.0]
