"""Wrappers call overridden hooks, pass attributes through, and choose the stepper."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs.libs.gym import GymEnv, GymLikeEnv, GymWrapper
from gleanrl.envs.libs.gym_stepper import GymStepper
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    InvalidArgumentError,
    InvalidTypeError,
    PolicyError,
    SpaceError,
    UnsupportedError,
)
from tests.fakes import DictEnv, InfoEnv, OracleEnv, RaisingEnv, ReusingEnv, Script

LONG = Script(lengths=(50,))


class Doubling(GymWrapper):
    def read_reward(self, reward: Any) -> torch.Tensor:
        return 2 * super().read_reward(reward)


class Shifting(GymWrapper):
    def read_obs(self, observations: Any) -> Any:
        read = super().read_obs(observations)
        read["observation"] += 100
        return read


class Ending(GymWrapper):
    def read_done(self, terminated: Any = None, truncated: Any = None, done: Any = None) -> Any:
        return super().read_done(terminated, self._env.unwrapped.step_index == 2, done)


class Flipping(GymWrapper):
    def read_action(self, action: Any) -> Any:
        return -super().read_action(action)


class Counting(GymWrapper):
    steps = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        return super()._step(tensordict)


class TestHooks:
    """A rollout calls the hooks that a subclass overrides."""

    def test_overridden_read_reward_is_called(self) -> None:
        data, plain = (
            Doubling(OracleEnv(script=LONG)).rollout(3),
            GymWrapper(OracleEnv(script=LONG)).rollout(3),
        )
        assert torch.equal(data["next", "reward"], 2 * plain["next", "reward"])

    def test_overridden_read_obs_is_called(self) -> None:
        data = Shifting(OracleEnv(script=LONG)).rollout(3)
        assert data["observation"][:, 2].tolist() == [100, 101, 102]
        assert data["next", "observation"][:, 2].tolist() == [101, 102, 103]

    def test_overridden_read_done_is_called(self) -> None:
        data = Ending(OracleEnv(script=LONG)).rollout(5)
        assert len(data) == 2 and data["next", "truncated"][-1] and not data["next", "terminated"].any()

    def test_overridden_read_action_is_called(self) -> None:
        inner = OracleEnv(script=LONG)
        data = Flipping(inner).rollout(3)
        assert np.array_equal(-data["action"].numpy(), np.stack(inner.actions))

    def test_overridden_step_is_called(self) -> None:
        env = Counting(OracleEnv(script=LONG))
        env.rollout(4)
        assert env.steps == 4

    def test_hook_assigned_to_the_instance_is_called(self) -> None:
        env = GymWrapper(OracleEnv(script=LONG))
        env.read_reward = lambda reward: torch.tensor([7.0])
        assert (env.rollout(3)["next", "reward"] == 7).all()


class TestChoiceOfStepper:
    """A wrapper writes arrays into blocks directly if no hook or reader is overridden."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: GymWrapper(OracleEnv()),
            lambda: GymWrapper(OracleEnv(), device="cpu"),
            lambda: GymWrapper(DictEnv(), frame_skip=2),
            lambda: GymWrapper(InfoEnv()).auto_register_info_dict(),
            lambda: GymLikeEnv(OracleEnv()),
            lambda: type("Named", (GymWrapper,), {"extra": 1})(OracleEnv()),
        ],
    )
    def test_plain_wrappers_use_the_direct_stepper(self, make: Any) -> None:
        assert type(make().make_stepper()) is GymStepper

    @pytest.mark.parametrize("cls", [Doubling, Shifting, Ending, Flipping, Counting])
    def test_overridden_hook_uses_the_tensordict_stepper(self, cls: Any) -> None:
        assert type(cls(OracleEnv()).make_stepper()) is TensorDictStepper

    def test_other_device_uses_the_tensordict_stepper(self) -> None:
        assert type(GymWrapper(OracleEnv(), device="meta").make_stepper()) is TensorDictStepper

    @pytest.mark.parametrize(
        ("name", "spec"),
        [
            ("reward_spec", Unbounded((1,), dtype=torch.float64)),
            ("observation_spec", Composite(observation=Unbounded((3,), dtype=torch.float64))),
            ("observation_spec", Composite(observation=Unbounded((3,)), more=Unbounded((1,)))),
        ],
    )
    def test_changed_specs_use_the_tensordict_stepper(self, name: str, spec: Any) -> None:
        env = GymWrapper(OracleEnv())
        setattr(env, name, spec)
        assert type(env.make_stepper()) is TensorDictStepper

    def test_narrower_bounds_change_nothing(self) -> None:
        env = GymWrapper(OracleEnv())
        env.reward_spec = Unbounded((1,))
        assert type(env.make_stepper()) is GymStepper

    def test_a_replaced_reward_dtype_reaches_the_batch(self) -> None:
        env = GymWrapper(OracleEnv(script=LONG))
        env.reward_spec = Unbounded((1,), dtype=torch.float64)
        assert env.rollout(2)["next", "reward"].dtype == torch.float64


class TestProtocol:
    """`reset` and `step` on TensorDicts."""

    def test_nothing_aliases_the_environments_arrays(self) -> None:
        env = GymWrapper(ReusingEnv(script=LONG))
        root = env.reset()
        stepped, after = env.step_and_maybe_reset(env.rand_action(root))
        env.step(env.rand_action(after))
        assert stepped["observation"][2] == 0 and stepped["next", "observation"][2] == 1

    def test_a_reset_mask_that_is_false_resets_nothing(self) -> None:
        inner = OracleEnv(script=LONG)
        env = GymWrapper(inner)
        root = env.reset()
        root["_reset"] = torch.tensor([False])
        again = env.reset(root)
        assert len(inner.resets) == 1 and torch.equal(again["observation"], root["observation"])
        assert "_reset" not in again.keys()
        root["_reset"] = torch.tensor([True])
        assert env.reset(root)["observation"].tolist() == [0, 1, 0]

    def test_exceptions_of_the_environment_are_not_changed(self) -> None:
        inner = RaisingEnv(1)
        env = GymWrapper(inner)
        with pytest.raises(type(inner.error)):
            env.step(env.rand_action(env.reset()))

    def test_actions_of_another_shape_or_dtype_raise(self) -> None:
        env = GymWrapper(OracleEnv())
        root = env.reset()
        for action in (torch.zeros(3), torch.zeros(2).double()):
            with pytest.raises(PolicyError, match="action"):
                env.step(root.clone().set("action", action))

    def test_dict_actions_are_passed_as_dictionaries(self) -> None:
        space = spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "hand": spaces.Discrete(3, start=1)})

        class Keeping(OracleEnv):
            def step(self, action: Any) -> Any:
                self.last = action
                return super().step(0)

        inner = Keeping(action_space=space, script=LONG)
        env = GymWrapper(inner)
        assert set(env.action_keys) == {"arm", "hand"}
        row = env.step(env.rand_action(env.reset()))
        assert space.contains(inner.last)
        assert np.array_equal(inner.last["arm"], row["arm"].numpy())
        assert inner.last["hand"] == row["hand"].argmax() + 1

    @pytest.mark.parametrize("name", ["observation", "reward"])
    def test_action_entries_with_reserved_names_are_refused(self, name: str) -> None:
        space = spaces.Dict({name: spaces.Discrete(2), "free": spaces.Discrete(2)})
        with pytest.raises(SpaceError, match=rf"action: the keys \['{name}'\]"):
            GymWrapper(OracleEnv(action_space=space))

    def test_closed_environment_refuses_every_call(self) -> None:
        env = GymWrapper(OracleEnv())
        root = env.rand_action(env.reset())
        env.close()
        env.close()
        for use in (env.reset, lambda: env.step(root), lambda: env.rollout(2), lambda: env.set_seed(0)):
            with pytest.raises(ClosedError):
                use()
        assert env._env.closed == 1

    def test_step_with_four_values_is_refused(self) -> None:
        class Old(OracleEnv):
            def step(self, action: Any) -> Any:
                return super().step(action)[:4]

        env = GymWrapper(Old())
        with pytest.raises(EnvironmentContractError, match="4 values"):
            env.step(env.rand_action(env.reset()))


class TestAttributes:
    """Attributes that the wrapper lacks come from the environment, through gymnasium's wrappers."""

    def test_attributes_are_found_through_wrappers(self) -> None:
        class Tagged(gym.Wrapper):
            tag = "outer"

        env = GymWrapper(Tagged(gym.wrappers.TimeLimit(OracleEnv(stream=4), 10)))
        assert (env.tag, env.stream, env.hello("a")) == ("outer", 4, "hello a from 4")
        assert env.unwrapped.stream == 4 and env.observation_space.shape == (3,)

    def test_private_names_are_not_passed_on(self) -> None:
        inner = OracleEnv()
        inner._hidden = 1
        with pytest.raises(AttributeError, match="_hidden"):
            _ = GymWrapper(inner)._hidden

    def test_missing_attribute_error_omits_the_chain_of_wrappers(self) -> None:
        env = GymWrapper(gym.wrappers.TimeLimit(OracleEnv(), 10))
        expected = "neither GymWrapper nor the OracleEnv that it wraps has an attribute 'speed'"
        with pytest.raises(AttributeError, match=f"^{expected}$") as caught:
            _ = env.speed
        assert caught.value.__suppress_context__

    def test_attributes_of_the_wrapper_take_precedence(self) -> None:
        inner = OracleEnv()
        inner.batch_size = "mine"
        assert GymWrapper(inner).batch_size == torch.Size([])

    def test_copies_and_pickles_have_separate_environments(self) -> None:
        env = GymWrapper(OracleEnv(stream=3, script=LONG))
        env.reset()
        for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
            other.reset()
            assert other.stream == 3 and other.episode == 1 and env.episode == 0
            assert other.rollout(2)["observation"][:, 2].tolist() == [0, 1]

    def test_uninitialised_wrapper_has_no_attributes(self) -> None:
        with pytest.raises(AttributeError):
            _ = GymWrapper.__new__(GymWrapper).stream


class TestKeys:
    @pytest.mark.parametrize("key", ["action", "reward", "done", "truncated", "next", "collector"])
    def test_reserved_names_are_refused_as_keys(self, key: str) -> None:
        with pytest.raises(SpaceError, match=key):
            GymWrapper(DictEnv(key))

    def test_nested_state_key_keeps_its_name(self) -> None:
        class Nested(OracleEnv):
            def __init__(self) -> None:
                super().__init__()
                self.observation_space = spaces.Dict({"a": spaces.Dict({"state": self.observation_space})})

            def _emit(self) -> Any:
                return {"a": {"state": super()._emit()}}

        assert GymWrapper(Nested()).rollout(2)["a", "state"].shape == (2, 3)

    def test_observation_key_renames_the_observation(self) -> None:
        assert (
            list(GymLikeEnv(OracleEnv(), observation_key="pose").rollout(2).exclude("next").keys())[0]
            == "pose"
        )


class TestArguments:
    @pytest.mark.parametrize("env", ["CartPole-v1", None, object(), OracleEnv])
    def test_value_without_environment_interface_is_refused(self, env: Any) -> None:
        with pytest.raises(InvalidTypeError, match="env"):
            GymLikeEnv(env)

    @pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "2"])
    def test_frame_skip_below_one_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="frame_skip"):
            GymLikeEnv(OracleEnv(), frame_skip=value)
        assert GymLikeEnv(OracleEnv(), frame_skip=3).frame_skip == 3

    def test_batch_size_other_than_empty_is_refused(self) -> None:
        for size in ((), [], torch.Size([])):
            assert GymLikeEnv(OracleEnv(), batch_size=size).batch_size == torch.Size([])
        for bad in ((1,), 1, [2, 3]):
            with pytest.raises(UnsupportedError, match="batch_size"):
                GymLikeEnv(OracleEnv(), batch_size=bad)

    def test_discrete_reward_space_is_refused(self) -> None:
        inner = OracleEnv()
        inner.reward_space = spaces.Discrete(3)
        with pytest.raises(SpaceError, match="Discrete"):
            GymLikeEnv(inner)

    def test_scalar_reward_space_keeps_its_dtype(self) -> None:
        inner = OracleEnv(script=LONG)
        inner.reward_space = spaces.Box(-9, 9, (), np.float64)
        env = GymLikeEnv(inner)
        assert env.reward_spec.shape == (1,) and env.rollout(2)["next", "reward"].dtype == torch.float64

    def test_device_argument_moves_the_data(self) -> None:
        env = GymEnv("CartPole-v1", device="cpu")
        root = env.reset()
        assert (
            root.device == torch.device("cpu")
            and env.step(env.rand_action(root))["next"].device == root.device
        )
        assert isinstance(GymEnv("CartPole-v1").reset(), TensorDict)
        assert GymEnv("CartPole-v1").reset().device is None


def test_fast_encoding_changes_nothing() -> None:
    env = GymWrapper(OracleEnv(script=LONG))
    assert env.fast_encoding() is env.fast_encoding(mode=False) is env and env.rollout(2).numel() == 2
