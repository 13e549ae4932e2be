"""`step_mdp`, `check_env_specs`, exploration types and `RandomPolicy` of `gleanrl.envs.utils` follow the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Bounded, Categorical, Composite
from gleanrl.envs import GymEnv, GymWrapper
from gleanrl.envs.utils import (
    ExplorationType,
    RandomPolicy,
    check_env_specs,
    exploration_type,
    set_exploration_type,
    step_mdp,
)
from tests.contract.helpers import leaf_keys, snapshot
from tests.fakes import DictEnv, FrameEnv, NestedDictEnv, OracleEnv, TupleEnv
from tests.fakes_base import CountingEnv, CrookedEnv, StepCountEnv, TeamEnv, TwoActionEnv, TwoKeyEnv

FLAGS = ("done", "terminated", "truncated")


def stepped() -> TensorDict:
    """Return the result of `env.step`, with an entry that only the root has."""
    flags = {key: torch.zeros(2, 1, dtype=torch.bool) for key in FLAGS}
    after = {key: torch.ones(2, 1, dtype=torch.bool) for key in FLAGS}
    root = {
        "observation": torch.zeros(2, 3),
        "action": torch.full((2, 1), 5.0),
        "memory": torch.full((2, 1), 7.0),
    }
    nested = {("agents", "observation"): torch.zeros(2, 4), ("agents", "action"): torch.zeros(2, 4)}
    then = {
        "observation": torch.ones(2, 3),
        "reward": torch.full((2, 1), 9.0),
        ("agents", "observation"): torch.ones(2, 4),
    }
    data = TensorDict({**root, **flags}, [2])
    for key, value in nested.items():
        data.set(key, value)
    for key, value in {**then, **after}.items():
        data.set(("next", *key) if isinstance(key, tuple) else ("next", key), value)
    return data


class TestStepMdp:
    """`step_mdp(td)` returns the root of the following step."""

    def test_step_mdp_returns_the_next_root(self) -> None:
        out = step_mdp(stepped(), action_keys=["action", ("agents", "action")])
        assert leaf_keys(out) == {"observation", "memory", ("agents", "observation"), *FLAGS}
        assert (out["observation"] == 1).all() and (out["agents", "observation"] == 1).all()
        assert (out["memory"] == 7).all() and all(out[key].all() for key in FLAGS)
        assert out.batch_size == torch.Size([2])

    def test_keep_other_false_drops_root_entries(self) -> None:
        assert "memory" not in step_mdp(stepped(), keep_other=False).keys()

    def test_reward_is_excluded_by_default(self) -> None:
        assert "reward" not in step_mdp(stepped()).keys()
        assert (step_mdp(stepped(), exclude_reward=False)["reward"] == 9).all()

    def test_action_is_excluded_by_default(self) -> None:
        assert "action" not in step_mdp(stepped()).keys()
        assert (step_mdp(stepped(), exclude_action=False)["action"] == 5).all()

    def test_flags_are_excluded_on_request(self) -> None:
        out = step_mdp(stepped(), exclude_done=True, done_keys=list(FLAGS))
        assert not set(FLAGS) & set(out.keys())
        assert all(key in step_mdp(stepped(), exclude_done=False).keys() for key in FLAGS)

    def test_next_tensordict_is_filled_and_returned(self) -> None:
        target = TensorDict({}, [2])
        assert step_mdp(stepped(), target) is target
        assert (target["observation"] == 1).all()

    def test_the_input_is_left_alone(self) -> None:
        data = stepped()
        frozen = snapshot(data)
        step_mdp(data)
        assert leaf_keys(data) == set(frozen) and all(torch.equal(data[key], frozen[key]) for key in frozen)

    def test_other_reward_and_action_keys_are_excluded(self) -> None:
        data = stepped().rename_key_("action", "act")
        data["next"].rename_key_("reward", "pay")
        out = step_mdp(data, reward_keys="pay", action_keys="act")
        assert not {"act", "pay"} & set(out.keys())

    def test_step_mdp_of_a_step_has_the_next_observation(self) -> None:
        env = CountingEnv()
        data = env.step(env.rand_action(env.reset()))
        after = step_mdp(data)
        assert torch.equal(after["observation"], data["next", "observation"])
        assert {"action", "reward", "next"}.isdisjoint(after.keys())


class TestCheckEnvSpecs:
    """`check_env_specs` compares a short rollout with `fake_tensordict`; a wrong spec raises AssertionError."""

    @pytest.mark.parametrize(
        "make",
        [
            CountingEnv,
            lambda: CountingEnv(batch_size=(3,)),
            lambda: CountingEnv(flags=("done", "terminated")),
            StepCountEnv,
            TwoKeyEnv,
            lambda: TwoActionEnv(batch_size=(2,)),
            lambda: TeamEnv(nested_flags=True),
            lambda: GymEnv("CartPole-v1"),
            lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
            lambda: GymEnv("Pendulum-v1", device="cpu"),
            lambda: GymWrapper(OracleEnv()),
            lambda: GymWrapper(DictEnv()),
            lambda: GymWrapper(NestedDictEnv()),
            lambda: GymWrapper(TupleEnv()),
            lambda: GymWrapper(FrameEnv()),
        ],
    )
    def test_honest_environments_pass(self, make: Any) -> None:
        check_env_specs(make())

    @pytest.mark.parametrize("fault", ["missing", "dtype", "shape"])
    def test_liars_fail(self, fault: str) -> None:
        with pytest.raises((AssertionError, RuntimeError)):
            check_env_specs(CrookedEnv(fault, at=0))

    def test_a_value_outside_its_spec_fails(self) -> None:
        class Outside(CountingEnv):
            def _declare(self) -> None:
                super()._declare()
                spec = self.observation_spec
                spec["observation"] = Bounded(low=0.0, high=0.5, shape=(3,), dtype=torch.float32)
                self.observation_spec = spec

        with pytest.raises(AssertionError):
            check_env_specs(Outside())

    def test_seed_isolates_the_global_generator(self) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        check_env_specs(CountingEnv(), seed=3)
        assert torch.equal(torch.get_rng_state(), before)


class TestExploration:
    """`set_exploration_type` is a context manager and a decorator, and it nests."""

    def test_exploration_types_nest(self) -> None:
        outer = exploration_type()
        with set_exploration_type(ExplorationType.MODE):
            with set_exploration_type(ExplorationType.MEAN):
                assert exploration_type() == ExplorationType.MEAN
            assert exploration_type() == ExplorationType.MODE
        assert exploration_type() == outer

    def test_it_is_undone_after_an_error(self) -> None:
        outer = exploration_type()
        with pytest.raises(KeyError), set_exploration_type(ExplorationType.MODE):
            raise KeyError
        assert exploration_type() == outer

    def test_exploration_type_has_the_documented_members(self) -> None:
        assert {"MODE", "MEDIAN", "MEAN", "RANDOM", "DETERMINISTIC"} <= set(ExplorationType.__members__)


class TestRandomPolicy:
    """`RandomPolicy(action_spec, action_key="action")`."""

    def test_a_leaf_spec_sets_the_action_key(self) -> None:
        spec = Bounded(low=-1.0, high=1.0, shape=(4, 2), dtype=torch.float32)
        out = RandomPolicy(spec)(TensorDict({}, [4]))
        assert out["action"].shape == (4, 2) and spec.is_in(out["action"])
        assert "act" in RandomPolicy(spec, action_key="act")(TensorDict({}, [4])).keys()

    def test_a_composite_spec_updates_all_its_keys(self) -> None:
        spec = Composite(arm=Bounded(low=-1.0, high=1.0, shape=(2,)), gripper=Categorical(3))
        out = RandomPolicy(spec)(TensorDict({"other": torch.zeros(1)}, []))
        assert {"arm", "gripper", "other"} == set(out.keys()) and spec["gripper"].is_in(out["gripper"])

    def test_draws_differ(self) -> None:
        policy = RandomPolicy(Bounded(low=-1.0, high=1.0, shape=(1,), dtype=torch.float32))
        assert len({float(policy(TensorDict({}, []))["action"]) for _ in range(20)}) == 20
