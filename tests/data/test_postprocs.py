"""MultiStep agrees with a slow, plain oracle, and avoids known mistakes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from gleanrl.data.postprocs import DensifyReward, MultiStep
from gleanrl.errors import GleanError, InvalidArgumentError, MissingKeyError, SchemaError, UnsupportedError

ADDED = ("steps_to_next_obs", "gamma", "nonterminal")


def stream(length: int, ends: dict[int, str], envs: int = 1, column: bool = True) -> TensorDict:
    """Return ``[envs, length]`` steps that observe (environment, episode, step); `ends` maps t to its flag."""
    obs = torch.zeros(envs, length, 3, dtype=torch.int64)
    following = obs.clone()
    terminated, truncated = torch.zeros(2, envs, length, dtype=torch.bool)
    ids = torch.zeros(envs, length, dtype=torch.int64)
    for env in range(envs):
        episode = step = 0
        for t in range(length):
            obs[env, t] = torch.tensor([env, episode, step])
            following[env, t] = torch.tensor([env, episode, step + 1])
            ids[env, t] = env + envs * episode
            terminated[env, t] = ends.get(t) == "terminated"
            truncated[env, t] = ends.get(t) == "truncated"
            episode, step = (episode + 1, 0) if t in ends else (episode, step + 1)
    reward = torch.linspace(-1, 2, envs * length, dtype=torch.float64).reshape(envs, length)
    shape = (envs, length, 1) if column else (envs, length)
    following_entries = {
        "observation": following,
        "reward": reward.reshape(shape),
        "done": (terminated | truncated).reshape(shape),
        "terminated": terminated.reshape(shape),
        "truncated": truncated.reshape(shape),
    }
    entries = {"observation": obs, "collector": {"traj_ids": ids}, "next": following_entries}
    return TensorDict(entries, [envs, length], names=[None, "time"])


def slow_multi_step(batch: TensorDictBase, gamma: float, n_steps: int) -> list[list[dict[str, Any]]]:
    """Return the fields of the n-step transition for each step of ``[P, T]``, computed step by step."""
    ids, mask = batch.get(("collector", "traj_ids"), None), batch.get(("collector", "mask"), None)
    following = batch["next"]
    length = batch.batch_size[1]
    table = []
    for env in range(batch.batch_size[0]):
        row = []
        for t in range(length):
            last, total, k = t, float(following["reward"][env, t]), 1
            real = mask is None or bool(mask[env, t])
            while real and k < n_steps and last + 1 < length:
                if following["done"][env, last].any() or (
                    ids is not None and ids[env, last] != ids[env, last + 1]
                ):
                    break
                if mask is not None and not mask[env, last + 1]:
                    break
                last += 1
                total += gamma**k * float(following["reward"][env, last])
                k += 1
            row.append({"k": k, "reward": total, "last": last, "nonterminal": real and k != 1})
        table.append(row)
    return table


def check(batch: TensorDictBase, gamma: float, n_steps: int) -> TensorDictBase:
    """Compare MultiStep with the oracle on ``[P, T]`` data, and return its result."""
    before = batch.clone()
    out = MultiStep(gamma, n_steps)(batch)
    assert (batch == before).all() and set(batch.keys(True)) == set(before.keys(True))
    assert out.batch_size == batch.batch_size and out.names == batch.names
    for env, row in enumerate(slow_multi_step(batch, gamma, n_steps)):
        for t, expected in enumerate(row):
            where = (env, t)
            assert int(out["steps_to_next_obs"][where]) == expected["k"], where
            assert math.isclose(float(out["gamma"][where]), gamma ** expected["k"], rel_tol=1e-6), where
            assert bool(out["nonterminal"][where]) == expected["nonterminal"], where
            assert math.isclose(
                float(out["next", "reward"][where]), expected["reward"], rel_tol=1e-5, abs_tol=1e-6
            )
            assert torch.equal(out["next", "original_reward"][where], batch["next", "reward"][where]), where
            for key in ("observation", "done", "terminated", "truncated"):
                assert torch.equal(out["next", key][where], batch["next", key][env, expected["last"]]), (
                    key,
                    where,
                )
    for key in set(batch.keys(True, True)) - set(batch.select("next").keys(True, True)):
        assert torch.equal(out[key], batch[key]), key
    return out


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 12),
    ends=st.dictionaries(st.integers(0, 11), st.sampled_from(["terminated", "truncated", "cut"]), max_size=5),
    envs=st.integers(1, 3),
    n_steps=st.integers(1, 14),
    gamma=st.sampled_from([0.1, 0.5, 0.99, 1.0]),
    masked=st.none() | st.lists(st.booleans(), min_size=36, max_size=36),
    with_ids=st.booleans(),
    column=st.booleans(),
)
def test_every_batch_agrees_with_the_slow_oracle(
    length: int,
    ends: dict[int, str],
    envs: int,
    n_steps: int,
    gamma: float,
    masked: list[bool] | None,
    with_ids: bool,
    column: bool,
) -> None:
    # "cut" is an end without a flag: only the id changes, as after `reset_at_each_iter`.
    batch = stream(length, ends, envs, column)
    if masked is not None:
        batch["collector", "mask"] = torch.tensor(masked)[: envs * length].reshape(envs, length)
    if not with_ids:
        del batch["collector", "traj_ids"]
    out = check(batch, gamma, n_steps)
    for key in ADDED:
        assert out[key].shape == (envs, length)


def test_the_example_of_the_api() -> None:
    done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    batch = TensorDict({"next": {"reward": torch.ones(6, 1), "done": done}}, [6], names=["time"])
    out = MultiStep(gamma=0.5, n_steps=3)(batch)
    assert out["steps_to_next_obs"].squeeze(-1).tolist() == [3, 2, 1, 3, 2, 1]
    assert out["gamma"].squeeze(-1).tolist() == [0.125, 0.25, 0.5, 0.125, 0.25, 0.5]
    assert out["next", "reward"].squeeze(-1).tolist() == [1.75, 1.5, 1, 1.75, 1.5, 1]
    assert out["nonterminal"].squeeze(-1).tolist() == [True, True, False, True, True, False]
    assert out["next", "original_reward"].squeeze(-1).tolist() == [1] * 6
    assert (out["steps_to_next_obs"].dtype, out["gamma"].dtype) == (torch.int64, torch.float32)


def test_one_step_is_the_identity() -> None:
    batch = stream(7, {2: "terminated", 4: "truncated"}, envs=2)
    out = check(batch, 0.9, 1)
    assert (out.select(*batch.keys(True, True)) == batch).all()
    assert out["observation"] is batch["observation"]
    assert not out["nonterminal"].any() and (out["steps_to_next_obs"] == 1).all()


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_flags_observation_and_discount_belong_to_one_step(flag: str) -> None:
    # In an episode of 4 steps, the target of step 1 (n = 3) is the last step. A library that doesn't move the flags
    # with the observation bootstraps there from the value of a terminal state.
    out = MultiStep(0.5, 3)(stream(8, {3: flag}))[0]
    assert out["next", "done"].squeeze(-1).tolist() == [False, True, True, True, False, False, False, False]
    assert torch.equal(out["next", flag], out["next", "done"])
    assert out["next", "observation"][1].tolist() == [0, 0, 4]
    assert out["gamma"].squeeze(-1).tolist()[:4] == [0.125, 0.125, 0.25, 0.5]


def test_the_n_step_target_is_the_value_of_a_known_chain() -> None:
    # The reward is 1 per step, and V(s) sums the rest of the episode. Exact bootstrapping gives V for any n.
    length, gamma = 9, 0.9
    # The learner's value of the terminal state is wrong on purpose, so that any use of it fails.
    value = torch.tensor(
        [(1 - gamma ** (length - t)) / (1 - gamma) for t in range(length)] + [100.0], dtype=torch.float64
    )
    time = torch.arange(length)
    terminated = time == length - 1
    following = {
        "time": time + 1,
        "reward": torch.ones(length, dtype=torch.float64),
        "terminated": terminated,
    }
    whole = TensorDict({"time": time, "next": following}, [length])
    for stop in range(1, length + 1):  # the batch ends in the middle of the episode
        for n_steps in range(1, length + 2):
            out = MultiStep(gamma, n_steps)(whole[:stop])
            bootstrap = out["gamma"] * ~out["next", "terminated"] * value[out["next", "time"]]
            torch.testing.assert_close(out["next", "reward"] + bootstrap, value[:stop])


def test_the_end_of_the_batch_is_no_end_of_the_episode() -> None:
    out = MultiStep(0.5, 4)(stream(5, {}))[0]
    assert not out["next", "done"].any()
    assert out["steps_to_next_obs"].squeeze(-1).tolist() == [4, 4, 3, 2, 1]
    assert out["next", "observation"][:, 2].tolist() == [4, 5, 5, 5, 5]


def test_nan_and_infinity_do_not_come_in_from_the_next_trajectory() -> None:
    batch = stream(6, {2: "terminated"}, envs=2)
    batch["next", "reward"][:, 3] = math.nan
    batch["next", "reward"][1, 4] = math.inf
    out = MultiStep(0.9, 5)(batch)
    assert out["next", "reward"][:, :3].isfinite().all()


def test_several_agents_and_several_rewards() -> None:
    batch = stream(6, {2: "terminated"}, envs=2)
    agents = TensorDict({"reward": torch.rand(2, 6, 3, 1), "observation": torch.rand(2, 6, 3, 4)}, [2, 6, 3])
    batch["next", "agents"] = agents
    out = check(batch, 0.5, 2)
    assert out["next", "agents"].batch_size == (2, 6, 3)
    for agent in range(3):
        single = batch.clone()
        single["next", "reward"] = agents["reward"][:, :, agent]
        expected = MultiStep(0.5, 2)(single)
        assert torch.equal(out["next", "agents", "reward"][:, :, agent], expected["next", "reward"])
    assert torch.equal(out["next", "agents", "original_reward"], agents["reward"])
    assert torch.equal(out["next", "agents", "observation"][:, 2], agents["observation"][:, 2])
    assert torch.equal(out["next", "agents", "observation"][:, 3], agents["observation"][:, 4])
    assert out["gamma"].shape == (2, 6) and out["gamma"].dtype == torch.float64


@pytest.mark.parametrize("batch", [(5,), (2, 5)])
def test_added_entries_have_the_shape_of_the_batch(batch: tuple[int, ...]) -> None:
    following = {"reward": torch.ones(*batch, 3, 1), "done": torch.zeros(*batch, 3, 1, dtype=torch.bool)}
    out = MultiStep(0.5, 2)(TensorDict({"next": {"agents": following}}, batch))
    for key in ADDED:
        assert out[key].shape == batch


@pytest.mark.parametrize("keys", ["bonus", ("bonus",), ["bonus"]])
def test_named_rewards_are_the_only_ones(keys: Any) -> None:
    batch = stream(4, {})
    batch["next", "bonus"] = torch.ones(1, 4, 1)
    out = MultiStep(0.5, 2, reward_keys=keys)(batch)
    assert out["next", "bonus"].flatten().tolist() == [1.5, 1.5, 1.5, 1.0]
    assert torch.equal(out["next", "reward"].flatten(), batch["next", "reward"].flatten()[[1, 2, 3, 3]])


def test_deeper_batches_are_rows_of_time() -> None:
    batch = stream(6, {1: "terminated", 4: "truncated"}, envs=4)
    out = MultiStep(0.7, 3)(batch.reshape(2, 2, 6))
    assert (out.reshape(4, 6) == MultiStep(0.7, 3)(batch)).all()
    assert (MultiStep(0.7, 3)(batch[1]) == MultiStep(0.7, 3)(batch)[1]).all()


def test_padding_of_split_trajectories_is_not_reached() -> None:
    batch = stream(4, {})
    batch["collector", "mask"] = torch.tensor([[True, True, False, False]])
    batch["collector", "traj_ids"] = torch.zeros(1, 4, dtype=torch.int64)  # a padded id equals the id 0
    out = check(batch, 0.5, 3)[0]
    assert out["steps_to_next_obs"].squeeze(-1).tolist() == [2, 1, 1, 1]
    assert out["nonterminal"].squeeze(-1).tolist() == [True, False, False, False]


def test_results_do_not_share_next_with_the_input_and_locked_inputs_work() -> None:
    batch = stream(5, {}).lock_()
    out = MultiStep(0.5, 1)(batch)
    before = batch.clone()
    out["next"].apply_(lambda leaf: leaf.zero_())
    assert (batch == before).all()


def test_strided_batches_and_gradients_pass() -> None:
    batch = stream(6, {2: "terminated"}, envs=2)
    strided = batch.transpose(0, 1).contiguous().transpose(0, 1)
    assert (MultiStep(0.5, 3)(strided) == MultiStep(0.5, 3)(batch)).all()
    reward = torch.ones(3, 1, requires_grad=True)
    done = torch.zeros(3, 1, dtype=torch.bool)
    MultiStep(0.5, 2)(TensorDict({"next": {"reward": reward, "done": done}}, [3]))[
        "next", "reward"
    ].sum().backward()
    assert reward.grad is not None and reward.grad.flatten().tolist() == [1.0, 1.5, 1.5]


def test_it_is_a_module_that_can_be_moved() -> None:
    module = MultiStep(gamma=torch.tensor(0.5), n_steps=np.int64(3)).to("cpu")  # type: ignore[arg-type]
    assert (module.gamma, module.n_steps, type(module.gamma), type(module.n_steps)) == (0.5, 3, float, int)
    assert repr(module) == "MultiStep(gamma=0.5, n_steps=3)"


@pytest.mark.parametrize(
    "arguments",
    [
        {"gamma": 0.0, "n_steps": 1},
        {"gamma": -0.1, "n_steps": 1},
        {"gamma": 1.01, "n_steps": 1},
        {"gamma": math.nan, "n_steps": 1},
        {"gamma": None, "n_steps": 1},
        {"gamma": 0.9, "n_steps": 0},
        {"gamma": 0.9, "n_steps": -3},
        {"gamma": 0.9, "n_steps": 2.0},
        {"gamma": 0.9, "n_steps": True},
        {"gamma": 0.9, "n_steps": 1, "reward_keys": []},
        {"gamma": 0.9, "n_steps": 1, "reward_keys": ["a", "a"]},
    ],
)
def test_bad_arguments_are_value_errors_that_name_them(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gamma|n_steps|reward_keys") as caught:
        MultiStep(**arguments)
    assert isinstance(caught.value, InvalidArgumentError)


def bad_batches() -> dict[str, tuple[TensorDict, type[GleanError], str]]:
    """Return a batch, the error and a part of its message for each mistake."""
    good = stream(3, {})
    disagreeing = torch.zeros(1, 3, 2, dtype=torch.bool)
    disagreeing[0, 1, 0] = True
    return {
        "no reward": (good.exclude(("next", "reward")), MissingKeyError, "'observation'"),
        "no next": (good.exclude("next"), MissingKeyError, "('next', 'reward')"),
        "no ends": (
            good.select("observation", ("next", "reward"), ("next", "observation")),
            MissingKeyError,
            "mark the ends of trajectories",
        ),
        "integer reward": (
            good.clone().set(("next", "reward"), torch.ones(1, 3, 1).int()),
            SchemaError,
            "int32",
        ),
        "twice": (MultiStep(0.9, 2)(good), UnsupportedError, "twice"),
        "gamma is there": (good.clone().set("gamma", torch.ones(1, 3)), UnsupportedError, "gamma"),
        "flag dims": (good.clone().set(("next", "done"), disagreeing), SchemaError, "can't be mapped"),
    }


@pytest.mark.parametrize("case", bad_batches())
def test_bad_batches_raise_at_the_cause(case: str) -> None:
    batch, error, part = bad_batches()[case]
    with pytest.raises(error) as caught:
        MultiStep(0.9, 2)(batch)
    assert part in str(caught.value)
    if error is not MissingKeyError:
        assert isinstance(caught.value, RuntimeError)


def test_a_named_reward_that_is_absent_raises() -> None:
    with pytest.raises(MissingKeyError, match="bonus"):
        MultiStep(0.9, 2, reward_keys=["reward", "bonus"])(stream(3, {}))


def test_strings_below_next_belong_to_the_last_step() -> None:
    batch = stream(4, {1: "terminated"})
    batch["next", "text"] = NonTensorStack(NonTensorStack(*"abcd"))
    assert MultiStep(0.9, 2)(batch)["next", "text"] == [["b", "b", "d", "d"]]


def test_strings_outside_next_stay() -> None:
    batch = stream(3, {})
    batch["task"] = NonTensorData("walk", batch_size=[1, 3])
    assert MultiStep(0.9, 2)(batch)["task"] == "walk"


def test_sparse_rewards_become_dense() -> None:
    done, reward = torch.zeros(10, 1, dtype=torch.bool), torch.zeros(10, 1)
    done[[3, 7]], reward[[3, 7]] = True, torch.tensor([[3.0], [7.0]])
    data = TensorDict({"next": {"reward": reward, "done": done}}, [10])
    out = DensifyReward(reward_key_out="dense")(data.clone())
    assert out["next", "dense"].flatten().tolist() == [3.0] * 4 + [7.0] * 4 + [0.0] * 2
    assert torch.equal(out["next", "reward"], reward)
    out = DensifyReward(discount=0.5)(torch.stack([data, data]))
    assert out["next", "reward"][1, :4].flatten().tolist() == [0.375, 0.75, 1.5, 3.0]
    with pytest.raises(MissingKeyError, match="bonus"):
        DensifyReward(reward_key="bonus")(data)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_dense_rewards_of_integers_are_refused_instead_of_truncated(dtype: torch.dtype) -> None:
    done, reward = torch.zeros(4, 1, dtype=torch.bool), torch.zeros(4, 1, dtype=dtype)
    done[3] = reward[3] = 1
    data = TensorDict({"next": {"reward": reward, "done": done}}, [4])
    with pytest.raises(SchemaError, match=f"floating dtype.*got {dtype}; cast"):
        DensifyReward(discount=0.5)(data)
