"""`GymEnv` and `GymWrapper` serve gymnasium: spaces, encodings, frame skip, info, pixels, pass-through."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from gleanrl.data import Bounded, Categorical, Composite, OneHot
from gleanrl.envs import EnvBase, GymEnv, GymWrapper
from gleanrl.envs.libs.gym import GymEnv as GymEnvOfOldPath
from gleanrl.envs.libs.gym import default_info_dict_reader
from tests.contract.helpers import leaf_keys
from tests.fakes import (
    ORACLE_ID,
    DictEnv,
    FrameEnv,
    InfoEnv,
    NestedDictEnv,
    OracleEnv,
    ReusingEnv,
    Script,
    SpaceEnv,
    TupleEnv,
)

LONG = Script(lengths=(50,))


class TestCartPoleAndPendulum:
    """Two real environments have the documented layout."""

    def test_cartpole_has_one_hot_actions(self) -> None:
        env = GymEnv("CartPole-v1")
        assert isinstance(env, EnvBase) and GymEnv is GymEnvOfOldPath and env.batch_size == torch.Size([])
        assert isinstance(env.action_spec, OneHot) and env.action_spec.shape == (2,)
        assert isinstance(env.observation_spec, Composite) and isinstance(
            env.observation_spec["observation"], Bounded
        )
        data = env.rollout(10, break_when_any_done=False)
        assert data["action"].dtype == torch.int64 and data["action"].shape == (10, 2)
        assert (data["action"].sum(-1) == 1).all()
        assert data["observation"].dtype == torch.float32 and (data["next", "reward"] == 1).all()

    def test_cartpole_has_categorical_actions_on_request(self) -> None:
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        assert isinstance(env.action_spec, Categorical) and env.action_spec.shape == torch.Size([])
        data = env.rollout(20, break_when_any_done=False)
        assert data["action"].shape == (20,) and set(data["action"].tolist()) == {0, 1}

    def test_pendulum_truncates_at_200(self) -> None:
        data = GymEnv("Pendulum-v1").rollout(300)
        assert data.shape == (200,) and data["next", "truncated"][-1] and not data["next", "terminated"].any()
        assert data["action"].shape == (200, 1) and data["action"].abs().max() <= 2
        assert data["next", "reward"].shape == (200, 1) and data["next", "reward"].dtype == torch.float32

    def test_rollout_data_equals_the_values_of_gymnasium(self) -> None:
        env, bare = GymEnv("CartPole-v1"), gym.make("CartPole-v1")
        env.set_seed(3)
        data = env.rollout(500)
        bare.reset(seed=3)
        bare.unwrapped.state = data["observation"][0].double().numpy()
        for t, action in enumerate(data["action"].argmax(-1).tolist()):
            observation, reward, terminated, truncated, _ = bare.step(action)
            assert np.allclose(data["next", "observation"][t].numpy(), observation, atol=1e-4)
            assert (
                data["next", "reward"][t].item() == reward
                and data["next", "terminated"][t].item() == terminated
            )
        assert terminated

    def test_equal_seeds_equal_rollouts(self) -> None:
        runs = []
        for seed in (5, 5, 6):
            torch.manual_seed(0)
            env = GymEnv("CartPole-v1")
            assert env.set_seed(seed) == seed
            runs.append(env.rollout(10, break_when_any_done=False)["observation"])
        assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])

    def test_keywords_reach_gymnasium(self) -> None:
        env = GymEnv(ORACLE_ID, stream=5, script=LONG)
        assert (env.rollout(4)["observation"][:, 0] == 5).all()
        env.close()

    def test_device_marks_the_data(self) -> None:
        assert GymEnv("CartPole-v1").rollout(2).device is None
        assert GymEnv("CartPole-v1", device="cpu").rollout(2).device == torch.device("cpu")

    def test_an_unknown_name_raises_gymnasiums_error(self) -> None:
        with pytest.raises(gym.error.Error):
            GymEnv("NoSuchEnvironment-v0")


class TestWrapper:
    """The wrapper passes attributes through and keeps the environment's own contract."""

    def test_unknown_attributes_fall_through(self) -> None:
        env = GymWrapper(OracleEnv(stream=4))
        assert env.hello("you") == "hello you from 4" and env.stream == 4
        with pytest.raises(AttributeError, match="no_such_attribute"):
            _ = env.no_such_attribute

    def test_close_reaches_the_wrapped_environment(self) -> None:
        inner = OracleEnv()
        GymWrapper(inner).close()
        assert inner.closed == 1

    def test_seeds_reach_the_wrapped_environment(self) -> None:
        inner = OracleEnv()
        env = GymWrapper(inner)
        assert env.set_seed(12) == 12
        env.reset()
        assert [seed for seed, _ in inner.resets if seed is not None] == [12]

    def test_reset_options_reach_the_wrapped_environment(self) -> None:
        inner = OracleEnv()
        GymWrapper(inner).reset(options={"level": 3})
        assert inner.resets[-1][1] == {"level": 3}

    def test_reset_seed_reaches_the_wrapped_environment(self) -> None:
        inner = OracleEnv()
        GymWrapper(inner).reset(seed=5)
        assert inner.resets[-1][0] == 5

    def test_a_reused_array_is_copied(self) -> None:
        data = GymWrapper(ReusingEnv(script=LONG)).rollout(6)
        assert data["observation"][:, 2].tolist() == [0, 1, 2, 3, 4, 5]
        env = GymWrapper(ReusingEnv(script=LONG))
        root = env.reset()
        stepped = env.step(env.rand_action(root))
        assert stepped["observation"][2] == 0 and stepped["next", "observation"][2] == 1

    def test_something_that_is_no_gymnasium_environment(self) -> None:
        with pytest.raises((TypeError, ValueError)):
            GymWrapper("CartPole-v1")


class TestFrameSkip:
    """`frame_skip` repeats the action, sums the rewards and stops at done."""

    def test_frame_skip_sums_rewards_and_stops_at_done(self) -> None:
        script = Script(lengths=(7,), ending="terminated")
        inner = OracleEnv(script=script)
        data = GymWrapper(inner, frame_skip=3).rollout(10)
        episode = int(data["observation"][0, 1])
        assert data["next", "observation"][:, 2].tolist() == [3, 6, 7]
        sums = [
            sum(script.reward(0, episode, step) for step in steps) for steps in ((1, 2, 3), (4, 5, 6), (7,))
        ]
        assert data["next", "reward"].flatten().tolist() == sums
        assert data["next", "done"].flatten().tolist() == [False, False, True]
        assert inner.steps_taken == 7
        assert all(np.array_equal(inner.actions[i], inner.actions[0]) for i in (1, 2))

    def test_frame_skip_works_with_an_environment_name(self) -> None:
        assert (GymEnv("CartPole-v1", frame_skip=2).rollout(3)["next", "reward"] == 2).all()

    @pytest.mark.parametrize("value", [0, -1, 1.5])
    def test_invalid_frame_skip_is_refused(self, value: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="frame_skip"):
            GymWrapper(OracleEnv(), frame_skip=value)


class TestObservationSpaces:
    """Spaces become specs, and the record holds the emitted values."""

    def test_dict_with_state_is_renamed_if_observation_is_free(self) -> None:
        data = GymWrapper(DictEnv("state", script=LONG)).rollout(4)
        assert {"observation", "goal"} <= set(data.keys()) and "state" not in data.keys()
        assert data["observation"][:, 2].tolist() == [0, 1, 2, 3] and data["next", "goal"].shape == (4, 2, 2)

    def test_dict_with_state_and_observation_keeps_both(self) -> None:
        data = GymWrapper(DictEnv("state", ("observation",), script=LONG)).rollout(4)
        assert torch.equal(data["observation"], data["state"] + 1)

    def test_nested_dict_is_nested_in_the_data(self) -> None:
        data = GymWrapper(NestedDictEnv(script=LONG)).rollout(4)
        assert data["robot", "pose"][:, 2].tolist() == [0, 1, 2, 3]
        assert data["next", "robot", "clock"].tolist() == [[1], [2], [3], [4]]
        assert data["robot", "clock"].dtype == torch.int64 and data["camera"].dtype == torch.uint8

    def test_tuple_is_stacked(self) -> None:
        data = GymWrapper(TupleEnv(script=LONG)).rollout(4)
        assert data["observation"].shape == (4, 2, 3)
        assert torch.equal(data["observation"][:, 0] + 1, data["observation"][:, 1])

    def test_images_stay_uint8(self) -> None:
        data = GymWrapper(FrameEnv(script=LONG)).rollout(4)
        assert data["next", "observation"].dtype == torch.uint8 and data["next", "observation"].shape == (
            4,
            8,
            8,
            4,
        )
        assert data["next", "observation"][:, 0, 0, 2].tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(5),
            spaces.Discrete(5, start=-2),
            spaces.MultiDiscrete([3, 4]),
            spaces.MultiDiscrete([3, 3]),
            spaces.MultiBinary(4),
            spaces.MultiBinary([2, 3]),
            spaces.Box(-1, 1, (2, 3), np.float64),
            spaces.Box(0, 255, (2,), np.uint8),
            spaces.Box(-5, 5, (), np.int32),
        ],
        ids=str,
    )
    def test_categorical_encoding_keeps_the_emitted_values(self, space: spaces.Space[Any]) -> None:
        inner = SpaceEnv(space, script=LONG)
        env = GymWrapper(inner, categorical_action_encoding=True)
        root = env.reset()
        seen = [inner.emitted[-1]]
        rows = [root["observation"]]
        for _ in range(6):
            data = env.step(env.rand_action(root))
            rows.append(data["next", "observation"])
            seen.append(inner.emitted[-1])
            root = data["next"].exclude("reward")
        start = space.start if isinstance(space, spaces.Discrete) else 0
        for row, emitted in zip(rows, seen, strict=True):
            assert np.array_equal(row.numpy(), np.asarray(emitted) - start)
            assert env.observation_spec["observation"].is_in(row)

    @pytest.mark.parametrize(
        "space", [spaces.Discrete(5), spaces.Discrete(5, start=-2), spaces.Discrete(3, start=7)], ids=str
    )
    def test_discrete_is_one_hot_by_default(self, space: Any) -> None:
        inner = SpaceEnv(space, script=LONG)
        env = GymWrapper(inner)
        root = env.reset()
        assert root["observation"].shape == (int(space.n),) and root["observation"].dtype == torch.int64
        assert root["observation"].sum() == 1
        assert int(root["observation"].argmax()) == inner.emitted[-1] - space.start


class TestActionSpaces:
    """The environment receives an action from its action space; the record keeps the encoded action."""

    @pytest.mark.parametrize("categorical", [False, True])
    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(4),
            spaces.Discrete(4, start=3),
            spaces.MultiDiscrete([2, 5, 3]),
            spaces.MultiDiscrete([3, 3]),
            spaces.MultiBinary(4),
            spaces.Box(-1, 1, (2,), np.float32),
            spaces.Box(-3, 3, (2, 2), np.float64),
        ],
        ids=str,
    )
    def test_random_actions_are_valid(self, space: spaces.Space[Any], categorical: bool) -> None:
        inner = OracleEnv(script=LONG, action_space=space)
        env = GymWrapper(inner, categorical_action_encoding=categorical)
        data = env.rollout(30)
        assert data.shape == (30,)
        for row, action in zip(data["action"], inner.actions, strict=True):
            assert space.contains(action.astype(space.dtype)) and env.action_spec.is_in(row)
        assert len({action.tobytes() for action in inner.actions}) > 2

    @pytest.mark.parametrize("start", [0, 3, -2])
    def test_discrete_offset_is_added_to_actions(self, start: int) -> None:
        for categorical in (False, True):
            inner = OracleEnv(script=LONG, action_space=spaces.Discrete(4, start=start))
            data = GymWrapper(inner, categorical_action_encoding=categorical).rollout(20)
            index = data["action"] if categorical else data["action"].argmax(-1)
            assert (index + start).tolist() == [int(action) for action in inner.actions]

    def test_multi_discrete_actions_are_categorical_on_request(self) -> None:
        inner = OracleEnv(script=LONG, action_space=spaces.MultiDiscrete([2, 5, 3]))
        data = GymWrapper(inner, categorical_action_encoding=True).rollout(20)
        assert data["action"].shape == (20, 3)
        assert data["action"].tolist() == [action.tolist() for action in inner.actions]

    def test_multi_discrete_actions_are_one_hot(self) -> None:
        inner = OracleEnv(script=LONG, action_space=spaces.MultiDiscrete([2, 5, 3]))
        data = GymWrapper(inner).rollout(20)
        assert data["action"].shape == (20, 10)
        parts = [part.long().argmax(-1) for part in data["action"].split([2, 5, 3], -1)]
        assert torch.stack(parts, -1).tolist() == [action.tolist() for action in inner.actions]

    def test_multi_binary_actions_reach_the_environment(self) -> None:
        inner = OracleEnv(script=LONG, action_space=spaces.MultiBinary(4))
        data = GymWrapper(inner).rollout(20)
        assert data["action"].shape == (20, 4)
        assert data["action"].long().tolist() == [action.tolist() for action in inner.actions]


class TestInfoReaders:
    """Requested entries of `info` are recorded."""

    def test_reader_records_chosen_keys(self) -> None:
        env = GymWrapper(InfoEnv(script=LONG))
        env.set_info_dict_reader(default_info_dict_reader(["velocity", "count"]))
        data = env.rollout(5)
        episode = float(data["observation"][0, 1])
        assert data["next", "velocity"].reshape(5, 2).tolist() == [[episode, float(t)] for t in range(1, 6)]
        assert data["next", "count"].flatten().tolist() == [1, 2, 3, 4, 5]
        assert not [key for key in leaf_keys(data) if "_secret" in str(key)]

    def test_auto_register_records_all_public_keys(self) -> None:
        env = GymWrapper(InfoEnv(script=LONG)).auto_register_info_dict()
        data = env.rollout(5)
        assert data["next", "count"].flatten().tolist() == [1, 2, 3, 4, 5]
        assert {"velocity", "count"} <= set(env.observation_spec.keys())
        assert not [key for key in leaf_keys(data) if "_secret" in str(key)]

    def test_auto_register_where_reset_gives_no_info(self) -> None:
        env = GymWrapper(InfoEnv(info_at_reset=False, script=LONG)).auto_register_info_dict()
        data = env.rollout(5)
        assert data["next", "count"].flatten().tolist() == [1, 2, 3, 4, 5]
        assert data["count"].flatten()[0] == 0

    def test_without_a_reader_info_is_not_recorded(self) -> None:
        assert {"velocity", "count"}.isdisjoint(GymWrapper(InfoEnv(script=LONG)).rollout(2).keys())


class TestPixels:
    """`from_pixels` records rendered images under `pixels`."""

    def test_from_pixels_replaces_the_observation(self) -> None:
        data = GymWrapper(OracleEnv(script=LONG, render_mode="rgb_array"), from_pixels=True).rollout(4)
        assert data["pixels"].dtype == torch.uint8 and data["pixels"].shape == (4, 6, 8, 3)
        assert (
            data["next", "pixels"][:, 0, 0, 2].tolist() == [1, 2, 3, 4] and "observation" not in data.keys()
        )

    def test_pixels_are_added_to_the_observation(self) -> None:
        env = GymWrapper(OracleEnv(script=LONG, render_mode="rgb_array"), from_pixels=True, pixels_only=False)
        data = env.rollout(4)
        assert torch.equal(data["pixels"][:, 0, 0, 2].float(), data["observation"][:, 2])

    def test_cartpole_renders_pixels(self) -> None:
        pytest.importorskip("pygame")
        data = GymEnv("CartPole-v1", from_pixels=True).rollout(2)
        assert (
            data["pixels"].dtype == torch.uint8 and data["pixels"].shape[-1] == 3 and data["pixels"].ndim == 4
        )
