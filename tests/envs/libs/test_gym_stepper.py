"""The stepper equals bare gymnasium and the TensorDict path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from gleanrl._arrays import tensordicts
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.envs.libs.gym import GymEnv, GymWrapper
from gleanrl.errors import PolicyError, SchemaError
from tests.envs.libs.stepping import full_schema, run, same, stepper_of
from tests.fakes import (
    DISCRETE_HAS_DTYPE,
    TAXI_ID,
    DictEnv,
    FrameEnv,
    InfoEnv,
    MutatingEnv,
    NestedDictEnv,
    OracleEnv,
    RaisingEnv,
    ReusingEnv,
    Script,
    SpaceEnv,
    TupleEnv,
)

SCRIPT = Script(seed=3, low=1, high=5)
NEVER = Script(ending="never")
Make = Callable[[], GymWrapper]


ENVIRONMENTS: dict[str, Make] = {
    "CartPole": lambda: GymEnv("CartPole-v1"),
    "CartPole-categorical": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "CartPole-skip": lambda: GymEnv("CartPole-v1", frame_skip=3),
    "Pendulum": lambda: GymEnv("Pendulum-v1"),
    "FrozenLake": lambda: GymEnv("FrozenLake-v1"),
    "Taxi-categorical": lambda: GymEnv(TAXI_ID, categorical_action_encoding=True),
    "Blackjack": lambda: GymWrapper(
        gym.wrappers.TransformObservation(
            gym.make("Blackjack-v1"), lambda o: np.array(o), spaces.MultiDiscrete([32, 11, 2])
        )
    ),
    "oracle": lambda: GymWrapper(OracleEnv(script=SCRIPT)),
    "reusing": lambda: GymWrapper(ReusingEnv(script=SCRIPT)),
    "dict": lambda: GymWrapper(DictEnv(script=SCRIPT)),
    "nested": lambda: GymWrapper(NestedDictEnv(script=SCRIPT)),
    "tuple": lambda: GymWrapper(TupleEnv(script=SCRIPT)),
    "frames": lambda: GymWrapper(FrameEnv(script=SCRIPT)),
    "pixels": lambda: GymWrapper(
        OracleEnv(script=SCRIPT, render_mode="rgb_array"), from_pixels=True, pixels_only=False
    ),
    "info": lambda: GymWrapper(InfoEnv(script=SCRIPT)).auto_register_info_dict(),
    "discrete": lambda: GymWrapper(SpaceEnv(spaces.Discrete(4, start=2), script=SCRIPT)),
    "multi-actions": lambda: GymWrapper(
        OracleEnv(script=SCRIPT, action_space=spaces.MultiDiscrete([3, 4], start=[1, 0]))
    ),
    "binary-actions": lambda: GymWrapper(OracleEnv(script=SCRIPT, action_space=spaces.MultiBinary(3))),
    "dict-actions": lambda: GymWrapper(
        OracleEnv(
            script=SCRIPT,
            action_space=spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "hand": spaces.Discrete(3)}),
        )
    ),
}


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_a_run_that_fails_leaves_the_rows_that_single_steps_leave(where: str, at: int) -> None:
    found = []
    for at_once in (True, False):
        env = GymWrapper(RaisingEnv(at, where, script=SCRIPT))
        stepper = stepper_of(env)
        try:
            stepper.reset()
        except StepFault:
            assert where == "reset" and at == 1
            return
        block = Block(full_schema(stepper, env), (), 40)
        for column in block.columns:
            column.fill_(1)
        stepper.bind(block, True)
        t = 0
        with pytest.raises(StepFault) as caught:
            if at_once:
                stepper.run(block)
            else:
                for t in range(40):
                    stepper.step(t)
        whole = caught.value.t + (where == "reset")
        assert caught.value.t == (block.num_complete if at_once else t)
        found.append([block.batch(whole)])
    same(*found)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_both_paths_store_the_same_bits(name: str, ready: bool) -> None:
    results = []
    for make_stepper in (stepper_of, TensorDictStepper):
        env = ENVIRONMENTS[name]()
        env.set_seed(11)
        results.append(run(make_stepper(env), env, [7, 1, 30, 12], ready=ready))
    same(*results)
    assert name in ("Pendulum", "Taxi-categorical") or any(b["next", "done"].any() for b in results[0])


@pytest.mark.parametrize("name", ["CartPole", "dict", "info"])
def test_both_paths_truncate_alike(name: str) -> None:
    results = []
    for make_stepper in (stepper_of, TensorDictStepper):
        env = ENVIRONMENTS[name]()
        env.set_seed(11)
        stepper = make_stepper(env, EpisodeRules(max_steps=3))
        results.append(run(stepper, env, [4, 1, 10, 2, 2]))
    same(*results)
    assert torch.cat(results[0])["next", "truncated"].sum() >= 3


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "MountainCarContinuous-v0"]
)
@pytest.mark.parametrize("ready", [True, False])
def test_stored_values_equal_bare_gymnasium(env_id: str, ready: bool) -> None:
    env, bare = GymEnv(env_id), gym.make(env_id)
    env.set_seed(5)
    data = torch.cat(run(stepper_of(env), env, [13, 40, 27], ready=ready))
    discrete = isinstance(bare.observation_space, spaces.Discrete)
    observation, _ = bare.reset(seed=5)
    for t, row in enumerate(data["action"].numpy()):
        action = row.argmax() if isinstance(bare.action_space, spaces.Discrete) else row
        after, reward, terminated, truncated, _ = bare.step(action)
        step = data[t]
        for key, value in (("observation", observation), (("next", "observation"), after)):
            expected = np.eye(bare.observation_space.n, dtype=np.int64)[value] if discrete else value
            assert np.array_equal(step[key].numpy(), expected), (t, key)
        assert step["next", "reward"].item() == np.float32(reward)
        flags = (terminated or truncated, terminated, truncated)
        assert [step["next", key].item() for key in ("done", "terminated", "truncated")] == list(flags)
        assert not any(step[key].item() for key in ("done", "terminated", "truncated"))
        observation = bare.reset()[0] if flags[0] else after


class TestCarry:
    def test_root_is_the_next_row(self) -> None:
        env = GymWrapper(ReusingEnv(script=SCRIPT))
        stepper = stepper_of(env)
        for size in (1, 4, 3):
            root = stepper.root()
            (batch,) = run(stepper, env, [size])
            assert set(root) == {("observation",), ("done",), ("terminated",), ("truncated",)}
            for (key,), leaf in root.items():
                assert torch.equal(leaf, batch[key][0])

    def test_block_that_ends_early_continues_in_the_next(self) -> None:
        env = GymWrapper(ReusingEnv(script=NEVER))
        data = torch.cat(run(stepper_of(env), env, [5, 5, 5], stop_at=2))
        assert data["observation"][:, 2].tolist() == [0, 1, 2, 3, 4, 5]

    def test_the_limit_counts_across_blocks_that_end_early(self) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        stepper = stepper_of(env, EpisodeRules(max_steps=5))
        data = torch.cat(run(stepper, env, [9] * 4, stop_at=3))
        assert data["next", "truncated"].flatten().nonzero().flatten().tolist() == [4, 9]
        assert torch.equal(data["next", "truncated"], data["next", "done"])
        assert not data["next", "terminated"].any()
        assert data["observation"][:, 2].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]

    def test_loaded_root_is_copied_and_stepped(self) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        root = env.reset()
        root = env.step(env.rand_action(root))["next"].exclude("reward")
        stepper = stepper_of(env, EpisodeRules(max_steps=2))
        stepper.load(root)
        root["observation"].zero_()
        (data,) = run(stepper, env, [4])
        assert data["observation"][:, 2].tolist() == [1, 2, 0, 1]

    @pytest.mark.parametrize(
        "change",
        [
            lambda r: r.pop("observation"),
            lambda r: r.set("observation", torch.zeros(2)),
            lambda r: r.update({"observation": torch.zeros(3).double()}),
        ],
    )
    def test_loading_a_root_checks_shape_and_dtype(self, change: Any) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        root = env.reset()
        change(root)
        with pytest.raises(SchemaError, match=r"observation.*\(3,\) torch.float32"):
            stepper_of(env).load(root)

    def test_partial_reset_follows_its_mask(self) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        stepper = stepper_of(env)
        run(stepper, env, [3])
        stepper.reset(torch.tensor(False))
        assert stepper.root()["observation",].tolist() == [0, 0, 3]
        stepper.reset(torch.tensor(True))
        assert stepper.root()["observation",].tolist() == [0, 1, 0]

    def test_without_reset_when_done_the_root_is_the_last_observation(self) -> None:
        env = GymWrapper(OracleEnv(script=Script(lengths=(3,), ending="truncated")))
        stepper = stepper_of(env, EpisodeRules(reset_when_done=False))
        (batch,) = run(stepper, env, [5], stop_at=3)
        assert batch["next", "done"].flatten().tolist() == [False, False, True]
        root = stepper.root()
        assert root["observation",].tolist() == [0, 0, 3]
        assert [root[key,].item() for key in ("done", "terminated", "truncated")] == [True, False, True]
        stepper.reset()
        assert not stepper.root()["done",].item()


class TestActions:
    def test_environment_that_changes_its_action_does_not_change_the_record(self) -> None:
        for ready in (True, False):
            inner = MutatingEnv(script=SCRIPT)
            env = GymWrapper(inner)
            (data,) = run(stepper_of(env), env, [20], ready=ready)
            assert np.array_equal(data["action"].numpy(), np.stack(inner.actions))
            assert (data["action"] != 0).all()

    @pytest.mark.parametrize("ready", [True, False])
    def test_actions_are_members_of_the_space(self, ready: bool) -> None:
        for space in (
            spaces.Discrete(3, start=4),
            spaces.Box(-1, 1, ()),
            spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (2,)))),
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.MultiBinary(2)})}),
        ):

            class Strict(OracleEnv):
                def step(self, action: Any) -> Any:
                    assert self.action_space.contains(action), action
                    self.step_index += 1
                    return self._emit(), 0.0, False, False, {}

            env = GymWrapper(Strict(action_space=space))
            run(stepper_of(env), env, [10], ready=ready)

    @pytest.mark.skipif(not DISCRETE_HAS_DTYPE, reason="Discrete of this gymnasium release has no dtype")
    @pytest.mark.parametrize("ready", [True, False])
    @pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
    @pytest.mark.parametrize("start", [0, 4])
    def test_choices_are_scalars_of_the_spaces_dtype(self, ready: bool, dtype: Any, start: int) -> None:
        seen: list[Any] = []

        class Noting(OracleEnv):
            def step(self, action: Any) -> Any:
                seen.append(action)
                self.step_index += 1
                return self._emit(), 0.0, False, False, {}

        space = spaces.Discrete(3, start=start, dtype=dtype)
        env = GymWrapper(Noting(action_space=space), categorical_action_encoding=True)
        stepper = stepper_of(env)
        block = Block(full_schema(stepper, env), (), 3)
        block.column(("action",)).copy_(torch.tensor([2, 0, 1]))
        stepper.bind(block, ready)
        for t in range(3):
            stepper.step(t)
        block.column(("action",)).zero_()  # the environment received a copy, not the memory of the column
        assert [int(action) - start for action in seen] == [2, 0, 1]
        assert [type(action) for action in seen] == [dtype] * 3

    @pytest.mark.parametrize("ready", [True, False])
    def test_invalid_action_row_raises(self, ready: bool) -> None:
        env = GymWrapper(OracleEnv(script=NEVER, action_space=spaces.Discrete(3)))
        stepper = stepper_of(env)
        block = Block(full_schema(stepper, env), (), 2)
        block.column(("action",)).fill_(0)
        with pytest.raises(PolicyError, match="one-hot"):
            stepper.bind(block, ready)
            stepper.step(0)

    def test_action_column_of_another_dtype_raises(self) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        stepper = stepper_of(env)
        schema = Schema({**stepper.schema().items(), ("action",): Field(torch.Size((2,)), torch.float64)})
        with pytest.raises(PolicyError, match="float32.*float64"):
            stepper.bind(Block(schema, (), 2), True)


def test_no_episode_flags_survive_from_old_memory() -> None:
    env = GymWrapper(OracleEnv(script=NEVER))
    (data,) = run(stepper_of(env), env, [6])
    for key in ("done", "terminated", "truncated"):
        assert not data[key].any() and not data["next", key].any()


def test_numpy_flags_are_accepted() -> None:
    class Numpy(OracleEnv):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, np.bool_(terminated), np.array(truncated), info

    env, other = GymWrapper(Numpy(script=SCRIPT)), GymWrapper(OracleEnv(script=SCRIPT))
    same(run(stepper_of(env), env, [30]), run(stepper_of(other), other, [30]))


def test_no_tensordict_is_built_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    env = GymWrapper(NestedDictEnv(script=SCRIPT))
    stepper = stepper_of(env)
    block = Block(full_schema(stepper, env), (), 20)
    block.column(("action",)).zero_()
    stepper.bind(block, False)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a TensorDict was built")

    monkeypatch.setattr(TensorDict, "__init__", refuse)
    monkeypatch.setattr(TensorDict, "_new_unsafe", refuse)
    monkeypatch.setattr(tensordicts, "dict_batch", refuse)
    for t in range(20):
        stepper.step(t)
