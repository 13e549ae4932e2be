"""An environment's declarations can be read under the names of the public API."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs.utils import RandomPolicy
from gleanrl.errors import MissingKeyError, UnsupportedError
from tests.fakes_base import CountingEnv, TeamEnv, TwoActionEnv

FLAGS = ["done", "terminated", "truncated"]


def test_single_agent_has_singular_keys() -> None:
    env = CountingEnv(batch_size=(3,))
    assert env.action_keys == ["action"] and env.reward_keys == ["reward"] and env.state_keys == []
    assert env.done_keys == FLAGS and env.reset_keys == ["_reset"] and env.done_keys_groups == [FLAGS]
    assert (env.action_key, env.reward_key, env.done_key) == ("action", "reward", "done")
    assert (
        env.action_spec is env.full_action_spec["action"]
        and env.reward_spec is env.full_reward_spec["reward"]
    )
    assert env.done_spec is env.full_done_spec and env.observation_spec is env.full_observation_spec
    assert env.state_spec is env.full_state_spec


def test_several_agents_have_grouped_keys() -> None:
    env = TeamEnv(nested_flags=True)
    nested = [("agents", name) for name in FLAGS]
    assert env.done_keys == [*FLAGS, *nested] and env.done_keys_groups == [FLAGS, nested]
    assert env.reset_keys == ["_reset", ("agents", "_reset")]
    assert env.action_key == ("agents", "action") and env.reward_key == ("agents", "reward")
    assert env.action_spec is env.full_action_spec and env.reward_spec is env.full_reward_spec
    assert RandomPolicy(env.action_spec)(env.reset())["agents", "action"].shape == (2, 2)
    with pytest.raises(MissingKeyError, match="done_key.*use done_keys"):
        _ = env.done_key
    two = TwoActionEnv()
    assert two.action_spec is two.full_action_spec
    with pytest.raises(KeyError, match="use action_keys"):
        _ = two.action_key


@pytest.mark.parametrize("device", [None, "cpu"])
def test_input_and_output_specs_are_grouped(device: Any) -> None:
    env = CountingEnv(batch_size=(3,), device=device)
    assert set(env.input_spec.keys()) == {"full_action_spec", "full_state_spec"}
    assert set(env.output_spec.keys()) == {"full_observation_spec", "full_reward_spec", "full_done_spec"}
    assert set(env.specs.keys()) == {"input_spec", "output_spec"}
    assert env.specs.shape == (3,) == env.input_spec.shape and env.specs.device == env.device
    assert env.specs["output_spec", "full_done_spec", "done"].shape == (3, 1)


def test_setters_update_the_keys() -> None:
    env = CountingEnv()
    env.action_spec = Bounded(low=0.0, high=1.0, shape=(5,))
    env.reward_spec = Composite(a=Unbounded(shape=(1,)), b=Unbounded(shape=(1,)))
    env.state_spec = Composite(hidden=Unbounded(shape=(4,)))
    env.observation_spec = Composite(seen=Unbounded(shape=(2,)))
    env.done_spec = CountingEnv(flags=("truncated",)).done_spec
    assert env.action_spec.shape == (5,) and env.reward_keys == ["a", "b"] and env.state_keys == ["hidden"]
    assert list(env.observation_spec.keys()) == ["seen"] and set(env.done_keys) == set(FLAGS)
    env.state_spec = None
    assert env.state_keys == []


def test_add_truncated_keys_extends_every_group() -> None:
    env = TeamEnv(flags=("done",), nested_flags=True)
    assert env.add_truncated_keys() is env
    assert env.full_done_spec["agents", "truncated"].shape == (2, 1)
    assert env.full_done_spec["truncated"].dtype == torch.bool


def test_a_device_set_after_the_constructor_is_refused():
    env = CountingEnv()
    with pytest.raises(UnsupportedError, match=r"env\.to\(device\)"):
        env.device = "meta"
    assert env.device != torch.device("meta") and env.reset() is not None
