"""Every environment has rollouts and helpers on top of its `step` and `reset`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from gleanrl.data import Bounded, Composite, NonTensor, OneHot, Unbounded
from gleanrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from gleanrl.envs import rollout as module
from gleanrl.errors import InvalidArgumentError, MissingKeyError, SpecError, UnsupportedError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(2, 5, 3))


class TestEnds:
    """`break_when_any_done` and `break_when_all_done`."""

    @pytest.mark.parametrize("chunk", [1, 2, 1024])
    def test_rollout_ends_once_all_have_ended(self, monkeypatch: Any, chunk: int) -> None:
        monkeypatch.setattr(module, "_CHUNK", chunk)
        batch = CountingEnv(SCRIPT, (3,)).rollout(20, break_when_all_done=True)
        assert batch.shape == (3, 5) and batch.names == [None, "time"]
        assert batch["next", "observation"][..., 2].tolist() == [
            [1, 2, 2, 2, 2],
            [1, 2, 3, 4, 5],
            [1, 2, 3, 3, 3],
        ]
        assert batch["observation"][..., 2].tolist() == [[0, 1, 1, 1, 1], [0, 1, 2, 3, 4], [0, 1, 2, 2, 2]]
        assert (batch["observation"][..., 1] == 0).all(), "nothing of the following episodes"
        assert batch["next", "done"].squeeze(-1).sum(-1).tolist() == [4, 1, 3]

    def test_rollout_of_max_steps_ends_before_all_have_ended(self) -> None:
        batch = CountingEnv(SCRIPT, (3,)).rollout(4, break_when_all_done=True)
        assert batch["next", "observation"][..., 2].tolist() == [[1, 2, 2, 2], [1, 2, 3, 4], [1, 2, 3, 3]]

    @pytest.mark.parametrize(
        ("ends", "steps"),
        [
            ({}, 2),
            ({"break_when_any_done": True}, 2),
            ({"break_when_all_done": False}, 2),
            ({"break_when_any_done": False}, 9),
            ({"break_when_any_done": False, "break_when_all_done": False}, 9),
            ({"break_when_all_done": True, "break_when_any_done": False}, 5),
        ],
        ids=str,
    )
    def test_break_arguments_choose_the_end(self, ends: dict[str, Any], steps: int) -> None:
        assert CountingEnv(SCRIPT, (3,)).rollout(9, trust_policy=True, **ends).shape == (3, steps)

    def test_any_and_all_are_equal_for_one_environment(self) -> None:
        assert CountingEnv(SCRIPT).rollout(9, break_when_all_done=True).shape == (2,)

    def test_vector_environment_can_break_when_all_done(self) -> None:
        env = GymEnv("CartPole-v1", num_envs=3)
        env.set_seed(0)
        batch = env.rollout(500, break_when_all_done=True)
        assert batch["next", "done"][:, -1].all() and not batch["done"].any()
        env.close()

    def test_both_break_arguments_are_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="got both"):
            CountingEnv(SCRIPT).rollout(2, break_when_any_done=True, break_when_all_done=True)


def test_lazy_rollouts_have_their_dimension_named():
    batch = CountingEnv(SCRIPT, (3,)).rollout(2, return_contiguous=False)
    assert isinstance(batch, LazyStackedTensorDict) and batch.names == [None, "time"]


class TestHelpers:
    def test_any_done_writes_where(self) -> None:
        env = CountingEnv(SCRIPT, (3,))
        root = env.reset()
        assert env.any_done(root) is False and "_reset" not in root.keys()
        root["done"][1] = True
        assert env.any_done(root) is True and root["_reset"].flatten().tolist() == [False, True, False]

    def test_step_mdp_keeps_actions(self) -> None:
        env = CountingEnv(SCRIPT)
        stepped = env.rand_step(env.reset())
        root = env.step_mdp(stepped)
        assert "action" in root.keys() and "reward" not in root.keys() and "next" not in root.keys()
        assert torch.equal(root["observation"], stepped["next", "observation"])

    def test_all_actions_lists_every_action(self) -> None:
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        assert env.all_actions()["action"].tolist() == [0, 1]
        assert env.all_actions(env.reset()).shape == (2,)
        env.close()

    def test_cardinality_counts_the_actions(self) -> None:
        env = GymEnv("CartPole-v1")
        assert env.cardinality() == 2 and CountingEnv(SCRIPT).cardinality() == float("inf")
        env.close()

    def test_fake_tensordict_has_the_keys_of_a_step(self) -> None:
        env = CountingEnv(SCRIPT, (3,))
        fake = env.fake_tensordict()
        assert set(fake.keys(True, True)) == set(env.rollout(2).keys(True, True))

    def test_check_env_specs_method_checks_the_environment(self) -> None:
        env = CountingEnv(SCRIPT)
        env.check_env_specs(seed=4)
        assert env.seeds == [4]


class Bare(EnvBase):
    """Declares no specs."""

    def _reset(self, tensordict=None, **kwargs):
        size = torch.Size() if tensordict is None else tensordict.batch_size
        return TensorDict({"place": torch.zeros(*size, 2), "task": torch.ones(size)}, size)

    def _step(self, tensordict):
        size = tensordict.batch_size
        done = torch.zeros(*size, 1, dtype=torch.bool)
        out = {
            "place": tensordict["place"] + tensordict["move"],
            "reward": torch.ones(*size, 1),
            "done": done,
        }
        return TensorDict(out, size)

    def _set_seed(self, seed):
        pass


class TestAutoSpecs:
    def test_auto_specs_declare_the_keys_of_a_step(self) -> None:
        env = Bare()
        found = env.auto_specs_(
            lambda td: td.set("move", torch.ones(2)), action_key="move", observation_key=["place"]
        )
        assert found is env and env.is_spec_locked
        assert (env.action_keys, env.observation_keys, env.reward_keys) == (["move"], ["place"], ["reward"])
        assert env.state_keys == ["task"] and env.done_keys == ["done", "terminated"]
        assert env.rollout(3).shape == (3,)

    def test_auto_specs_declare_text(self) -> None:
        class Told(Bare):
            """Returns text in addition to its place."""

            def _reset(self, tensordict=None, **kwargs):
                return super()._reset(tensordict, **kwargs).set("note", NonTensorData("first"))

            def _step(self, tensordict):
                return super()._step(tensordict).set("note", NonTensorData("next"))

        env = Told().auto_specs_(
            lambda td: td.set("move", torch.ones(2)), action_key="move", observation_key=["place", "note"]
        )
        assert isinstance(env.observation_spec["note"], NonTensor)
        assert env.rollout(2)["next", "note"] == ["next", "next"]

    def test_auto_specs_refuse_unnamed_keys(self) -> None:
        with pytest.raises(
            MissingKeyError, match=r"a step returned .*'place'.*the arguments name .*'observation'"
        ):
            Bare().auto_specs_(lambda td: td.set("move", torch.ones(2)), action_key="move")


class TestUnlocked:
    """Environments without a fixed batch size step a batch of any size."""

    def make(self) -> Bare:
        class Unlocked(Bare):
            batch_locked = False

        return Unlocked().auto_specs_(
            lambda td: td.set("move", torch.ones(2)), action_key="move", observation_key="place"
        )

    @pytest.mark.parametrize("size", [(10,), (2, 3)])
    @pytest.mark.parametrize("policy", [None, lambda td: td.set("move", torch.ones(*td.batch_size, 2))])
    @pytest.mark.parametrize("auto_reset", [True, False])
    def test_unlocked_environment_rolls_out_any_batch_size(
        self, size: tuple[int, ...], policy: Any, auto_reset: bool
    ) -> None:
        env = self.make()
        root = TensorDict({}, size)
        root = root if auto_reset else env.reset(root)
        batch = env.rollout(3, policy, tensordict=root, auto_reset=auto_reset)
        assert batch.shape == (*size, 3) and batch["move"].shape == (*size, 3, 2)
        assert torch.equal(batch["next", "place"][..., :-1, :], batch["place"][..., 1:, :])
        assert env.batch_size == () and env.rollout(2).shape == (2,)

    def test_unlocked_environment_resets_and_steps_any_batch_size(self) -> None:
        env = self.make()
        many = env.reset(TensorDict({}, [10]))
        assert many.shape == (10,) and many["done"].shape == (10, 1)
        stepped = env.rand_step(many)
        assert stepped["move"].shape == (10, 2) and stepped["next", "reward"].shape == (10, 1)
        assert env.rand_step(env.reset()).shape == ()

    def test_unlocked_environment_is_checked_with_any_batch_size(self) -> None:
        env = self.make()
        check_env_specs(env, tensordict=TensorDict({}, [10]), break_when_any_done=False)
        env.check_env_specs(tensordict=TensorDict({}, [2, 3]))
        env.reward_spec = Bounded(0.0, 0.5, (1,))
        with pytest.raises(SpecError, match="reward"):
            env.check_env_specs(tensordict=TensorDict({}, [10]))


def test_random_actions_are_drawn_from_the_declared_ones():
    env = CountingEnv(SCRIPT)
    env.action_spec = OneHot(3)
    env.observation_spec = Composite(observation=Unbounded(3))
    assert env.rand_action()["action"].sum() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()),
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    ],
)
def test_set_state_is_refused_by_environments_that_ignore_it(make):
    env = make()
    root = env.reset(set_state=False)
    with pytest.raises(UnsupportedError, match="can't begin in a given state"):
        env.reset(root, set_state=True)
    with pytest.raises(UnsupportedError, match=r"reset\(tensordict, set_state=True\)"):
        env.set_state()
    env.close()
