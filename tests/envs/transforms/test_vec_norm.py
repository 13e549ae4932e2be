"""`VecNorm` normalises each value by the statistics of all values so far."""

from __future__ import annotations

import copy

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, GymWrapper, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    Compose,
    ConditionalSkip,
    DoubleToFloat,
    ObservationNorm,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, UnsupportedError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single


def seen(batch, key="observation"):
    """Return all observations of an environment in order, from an untransformed batch of one row."""
    rows = [batch[key][0]]
    for t in range(batch.shape[0]):
        rows.append(batch["next", key][t])
        if bool(batch["next", "done"][t]) and t + 1 < batch.shape[0]:
            rows.append(batch[key][t + 1])
    return torch.stack(rows).double()


@pytest.mark.parametrize("env", [single, batched])
def test_rows_and_tensordicts_agree(env):
    collect_both_ways(env, lambda: [VecNorm(decay=0.9)])


def test_each_value_is_normalised_by_all_values_so_far():
    raw = joined(collect_both_ways(single, lambda: [], sizes=(20,)))
    batch = joined(
        collect_both_ways(single, lambda: [VecNorm(in_keys=["observation"], decay=1.0)], sizes=(20,))
    )
    rows = seen(raw)
    n = 1
    for t in range(5):
        n += 1
        mean, std = rows[:n].mean(0), rows[:n].std(0, unbiased=False).clamp_min(1e-4)
        want = (raw["next", "observation"][t] - mean) / std
        assert torch.allclose(batch["next", "observation"][t].double(), want, atol=1e-5)
        n += bool(raw["next", "done"][t])


def test_a_partial_reset_counts_its_rows_only():
    norm = VecNorm(in_keys=["observation"], decay=1.0)
    env = TransformedEnv(batched(), norm)
    root = env.reset()
    assert float(norm._sums._view("observation")[0, 0]) == 3
    env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert float(norm._sums._view("observation")[0, 0]) == 4


@pytest.mark.parametrize("make", [VecNorm, VecNormV2])
@pytest.mark.parametrize("skips", [True, False])
def test_a_step_counts_the_environments_that_take_it(make, skips):
    norm = make(["observation"], ["o"], decay=1.0)
    mask = torch.tensor([False, True])
    chain = [norm, ConditionalSkip(lambda tensordict: ~mask)] if skips else [norm]
    env = TransformedEnv(SerialEnv(2, single), Compose(*chain))
    root = env.rand_action(env.reset())
    env.step(root if skips else root.set("_step", mask))
    counts = norm._sums._view("observation")[:, 0]
    assert counts.tolist() == ([3] if make is VecNorm else [1, 2])


def test_frozen_statistics_do_not_change():
    norm = VecNorm()
    env = TransformedEnv(batched(), norm)
    env.rollout(10, break_when_any_done=False)
    before = norm.loc["observation"]
    norm.freeze()
    env.rollout(10, break_when_any_done=False)
    assert torch.equal(norm.loc["observation"], before)
    norm.unfreeze()
    env.rollout(10, break_when_any_done=False)
    assert not torch.equal(norm.loc["observation"], before)
    norm.eval()
    before = norm.loc["observation"]
    env.rollout(10, break_when_any_done=False)
    assert torch.equal(norm.loc["observation"], before)


def test_to_observation_norm_fixes_the_statistics():
    norm = VecNorm(in_keys=["observation"])
    env = TransformedEnv(batched(), norm)
    env.rollout(30, break_when_any_done=False)
    fixed = norm.to_observation_norm()
    assert isinstance(fixed, ObservationNorm)
    value = torch.tensor([[1.0, 2.0, 3.0]])
    want = norm.freeze()._normalised(value, "observation")
    assert torch.allclose(fixed._apply_transform(value), want, atol=1e-5)


def test_fixed_transforms_of_several_keys_are_a_chain():
    norm = VecNorm()
    TransformedEnv(batched(), norm).rollout(3)
    fixed = norm.to_observation_norm()
    assert isinstance(fixed, Compose)
    assert [transform.in_keys for transform in fixed] == [["observation"], ["reward"]]


def test_statistics_are_state():
    norm, other = VecNorm(in_keys=["observation"]), VecNorm(in_keys=["observation"])
    env = TransformedEnv(batched(), norm)
    env.rollout(10, break_when_any_done=False)
    twin = TransformedEnv(batched(), other)
    twin.load_state_dict(copy.deepcopy(env.state_dict()))
    assert torch.equal(other.loc["observation"], norm.loc["observation"])
    twin.rollout(3)
    assert not torch.equal(other.loc["observation"], norm.loc["observation"])


def test_copies_share_a_shared_td():
    shared = VecNorm.build_td_for_shared_vecnorm(batched, ["observation"])

    def make():
        return TransformedEnv(batched(), VecNorm(in_keys=["observation"], shared_td=shared))

    first = make()
    second = cloudpickle.loads(cloudpickle.dumps(make))()
    first.rollout(5, break_when_any_done=False)
    assert torch.equal(second.transform.loc["observation"], first.transform.loc["observation"])
    second.rollout(5, break_when_any_done=False)
    assert torch.equal(second.transform.loc["observation"], first.transform.loc["observation"])


def test_specs_hold_and_mistakes_are_named():
    check_env_specs(TransformedEnv(batched(), VecNorm()))
    with pytest.raises(InvalidArgumentError, match="decay"):
        VecNorm(decay=0.0)
    with pytest.raises(InvalidTypeError, match="build_td_for_shared_vecnorm"):
        VecNorm(shared_td={})
    with pytest.raises(MissingKeyError, match="nothing"):
        TransformedEnv(batched(), VecNorm(in_keys=["nothing"])).rollout(2)
    shared = VecNorm.build_td_for_shared_vecnorm(batched(), ["observation"])
    with pytest.raises(MissingKeyError, match="reward"):
        VecNorm(shared_td=shared)


def test_called_without_an_environment_it_learns_from_its_input():
    norm, rows = VecNorm(in_keys=["a"]), torch.tensor([[0.0, 1.0], [2.0, 5.0]])
    assert torch.equal(norm(TensorDict({"a": rows}, [2]))["a"], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert norm.loc["a"].tolist() == [1.0, 3.0] and norm.scale["a"].tolist() == [1.0, 2.0]
    assert norm.loc["a"].dtype is norm.scale["a"].dtype is torch.float32
    with pytest.raises(UnsupportedError, match="call it"):
        VecNorm(in_keys=["a"]).loc  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learned_statistics_in_observation_norm_keep_the_dtype(dtype):
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64)

    class Env(gymnasium.Env):
        observation_space, action_space = space, gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return space.sample(), {}

        def step(self, action):
            return space.sample(), 0.0, False, False, {}

    def over(norm):
        casts = [DoubleToFloat()] if dtype is torch.float32 else []
        return TransformedEnv(GymWrapper(Env()), Compose(*casts, norm))

    learned = over(VecNorm(in_keys=["observation"]))
    learned.rollout(5)
    norm = learned.transform[-1]
    numbers = norm.loc["observation"], norm.scale["observation"]
    env = over(ObservationNorm(*numbers, in_keys=["observation"], standard_normal=True))
    assert env.rollout(3)["observation"].dtype is env.observation_spec["observation"].dtype is dtype


@pytest.mark.parametrize("chained", [False, True])
def test_learning_continues_in_a_buffer(chained):
    norm = VecNorm(in_keys=["a"])
    transform = Compose(ObservationNorm(0.0, 1.0, in_keys=["a"]), norm) if chained else norm
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=transform, batch_size=4)
    buffer.extend(TensorDict({"a": torch.arange(8.0).reshape(4, 2)}, [4]))
    served = buffer[:]["a"]
    assert served.mean(0).abs().max() < 1e-6 and (served.std(0, unbiased=False) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("make", [VecNorm, VecNormV2])
def test_missing_entries_are_skipped(make):
    norm = make(["observation", "reward"], ["o", "r"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=norm, batch_size=4)
    data = TensorDict(
        {"observation": torch.arange(8.0).reshape(4, 2), "next": {"reward": torch.ones(4)}}, [4]
    )
    buffer.extend(data)
    assert {"o", "observation"} < set(buffer.sample().keys()) and "r" not in buffer.sample().keys()
    assert list(norm.loc.keys()) == ["observation"] and norm.initialized
    assert norm.to_observation_norm().in_keys == ["observation"]
    again = make(["observation", "reward"], ["o", "r"])
    again.load_state_dict(norm.state_dict())
    again(data.clone())
    with pytest.raises(MissingKeyError, match="'reward' wasn't in the first batch"):
        norm(data.clone().set("reward", torch.ones(4)))
    with pytest.raises(MissingKeyError, match="key 'observation' not found"):
        norm(data.select("next"))
    norm.set_missing_tolerance(True)
    assert list(norm(data.select("next")).keys()) == ["next"]


def test_frozen_copy_does_not_change():
    shared = VecNorm.build_td_for_shared_vecnorm(single(), ["observation"])
    for given in (None, shared):
        env = TransformedEnv(single(), VecNorm(in_keys=["observation"], shared_td=given))
        env.rollout(5, break_when_any_done=False)
        copy = env.transform.frozen_copy()
        before = copy.loc["observation"].clone()
        assert torch.equal(before, env.transform.loc["observation"]) and copy.frozen
        fresh = TransformedEnv(single(), copy)
        fresh.rollout(5, break_when_any_done=False)
        env.rollout(7, break_when_any_done=False)
        assert torch.equal(copy.loc["observation"], before)
        assert not torch.equal(env.transform.loc["observation"], before)


def test_older_class_accepts_the_new_api_flag():
    assert VecNorm(["a"], None, None, None, 0.5, new_api=True).decay == 0.5


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_seeded_rollouts_do_not_depend_on_earlier_resets(kind):
    found = []
    for resets in range(3):
        env = TransformedEnv(GymEnv("Pendulum-v1"), kind(in_keys=["observation"]))
        for _ in range(resets):
            env.reset()
        env.set_seed(0)
        torch.manual_seed(0)  # seeds the actions
        found.append(env.rollout(5)["observation"])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("learned", ["stepped", "loaded", "shared"])
def test_seeding_keeps_learned_statistics(learned):
    shared = VecNorm.build_td_for_shared_vecnorm(single(), ["observation"]) if learned == "shared" else None
    env = TransformedEnv(single(), VecNorm(in_keys=["observation"], shared_td=shared))
    env.rollout(5) if learned == "stepped" else env.reset()
    if learned == "loaded":
        env.transform.load_state_dict(env.transform.state_dict())
    before = env.transform.loc["observation"].clone()
    env.set_seed(0)
    assert torch.equal(env.transform.loc["observation"], before)


@pytest.mark.parametrize("cls", [VecNorm, VecNormV2])
def test_initialized_reports_whether_values_were_seen(cls) -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), norm := cls(in_keys=["observation"]))
    assert not norm.initialized
    env.reset()
    env.rollout(2)
    assert norm.initialized
    assert env._env is env.base_env._env
