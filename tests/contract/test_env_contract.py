"""The public contract of `EnvBase`: step, reset, partial reset, rollout, random actions, specs, seeds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data import Composite
from gleanrl.envs import EnvBase
from gleanrl.errors import GleanError
from tests.contract.helpers import leaf_keys
from tests.fakes import Script
from tests.fakes_base import CountingEnv, SameObjectEnv, StillDoneEnv, TeamEnv, TwoActionEnv, TwoKeyEnv

FLAGS = ("done", "terminated", "truncated")
LONG = Script(lengths=(50,))


class TestStep:
    """`step` takes a root and returns it with `next`."""

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_next_holds_the_outcome(self, shape: tuple[int, ...]) -> None:
        env = CountingEnv(LONG, shape)
        data = env.step(env.rand_action(env.reset()))
        assert leaf_keys(data["next"]) == {"observation", "reward", *FLAGS}
        assert torch.equal(data["next", "observation"][..., 2], data["observation"][..., 2] + 1)
        assert data["next", "reward"].shape == (*shape, 1) and data.batch_size == torch.Size(shape)
        assert torch.equal(env.actions[-1], data["action"])

    def test_a_shape_other_than_the_batch_size_raises(self) -> None:
        env = CountingEnv(LONG, (3,))
        env.reset()
        with pytest.raises(RuntimeError) as caught:
            env.step(TensorDict({"action": torch.zeros(2, 2)}, [2]))
        assert isinstance(caught.value, GleanError)

    def test_old_next_entries_survive_only_where_the_environment_makes_none(self) -> None:
        env = CountingEnv(LONG)
        data = env.rand_action(env.reset())
        data["next"] = TensorDict({"observation": torch.full((3,), -1.0), "mine": torch.tensor(4.0)}, [])
        out = env.step(data)
        assert out["next", "observation"][2] == 1
        assert out["next", "mine"] == 4

    @pytest.mark.parametrize(
        "flags", [("done",), ("terminated",), ("terminated", "truncated"), ("done", "terminated")]
    )
    @pytest.mark.parametrize("ending", ["terminated", "truncated"])
    def test_missing_flags_are_completed(self, flags: tuple[str, ...], ending: str) -> None:
        env = CountingEnv(Script(lengths=(2,), ending=ending), flags=flags)
        assert {"done", "terminated"} <= set(env.full_done_spec.keys())
        root = env.reset()
        assert not root["done"].any() and not root["terminated"].any()
        for last in (False, True):
            data = env.step(env.rand_action(root))
            terminated = last and ("terminated" not in flags or ending == "terminated")
            done = terminated or (
                last and ("done" in flags or ("truncated" in flags and ending == "truncated"))
            )
            assert data["next", "terminated"].item() == terminated, (last, flags)
            assert data["next", "done"].item() == done, (last, flags)
            root = data["next"].exclude("reward")

    def test_done_and_truncated_without_terminated_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="terminated"):
            env = CountingEnv(flags=("done", "truncated"))
            env.step(env.rand_action(env.reset()))


class TestReset:
    """`reset` with keywords or with a mask, and the masks that it rejects."""

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_reset_returns_a_root_without_flags(self, shape: tuple[int, ...]) -> None:
        env = CountingEnv(LONG, shape)
        root = env.reset()
        assert leaf_keys(root) == {"observation", *FLAGS} and root.batch_size == torch.Size(shape)
        assert not any(root[key].any() for key in FLAGS) and (root["observation"][..., 2] == 0).all()
        assert all(root[key].dtype == torch.bool and root[key].shape == (*shape, 1) for key in FLAGS)

    def test_keywords_reach_the_environment(self) -> None:
        env = CountingEnv(LONG)
        env.reset(options="blue")
        assert env.reset_kwargs[-1] == {"options": "blue"}

    def test_partial_reset_changes_only_masked_rows(self) -> None:
        env = CountingEnv(LONG, (3,))
        data = env.step(env.rand_action(env.reset()))
        root = data["next"].exclude("reward")
        mask = torch.tensor([[False], [True], [False]])
        root["_reset"] = mask.clone()
        out = env.reset(root)
        assert out["observation"][:, 2].tolist() == [1, 0, 1]
        assert torch.equal(env.masks[-1], mask) and "_reset" not in out.keys()

    def test_the_mask_is_not_changed_in_place(self) -> None:
        env = CountingEnv(LONG, (3,))
        root = env.step(env.rand_action(env.reset()))["next"]
        mask = torch.tensor([[False], [True], [False]])
        root["_reset"] = mask
        env.reset(root)
        assert mask.tolist() == [[False], [True], [False]]

    def test_done_after_reset_raises(self) -> None:
        with pytest.raises(RuntimeError, match="(?i)done") as caught:
            StillDoneEnv().reset()
        assert isinstance(caught.value, GleanError)
        assert StillDoneEnv(allow_done_after_reset=True).reset()["done"].all()

    def test_returning_the_input_raises(self) -> None:
        env = SameObjectEnv(LONG, (2,))
        root = env.reset()
        root["_reset"] = torch.ones(2, 1, dtype=torch.bool)
        with pytest.raises(RuntimeError) as caught:
            env.reset(root)
        assert isinstance(caught.value, GleanError)


class TestStepAndMaybeReset:
    """`step_and_maybe_reset(td)` returns the stepped record and the root of the following step."""

    def test_done_step_is_followed_by_a_reset_root(self) -> None:
        env = CountingEnv(Script(lengths=(2,), ending="terminated"))
        root = env.reset()
        episode = int(root["observation"][1])
        data, root = env.step_and_maybe_reset(env.rand_action(root))
        assert torch.equal(root["observation"], data["next", "observation"]) and not root["done"]
        assert {"reward", "next", "action"}.isdisjoint(root.keys())
        data, root = env.step_and_maybe_reset(env.rand_action(root))
        assert data["next", "done"] and data["next", "observation"].tolist() == [0, episode, 2]
        assert root["observation"].tolist() == [0, episode + 1, 0]
        assert not any(root[key].any() for key in FLAGS)

    def test_only_the_done_rows_are_reset(self) -> None:
        env = CountingEnv(Script(lengths=(1, 3)), (4,))
        root = env.reset()
        episodes = root["observation"][:, 1].clone()
        data, after = env.step_and_maybe_reset(env.rand_action(root))
        ended = data["next", "done"][:, 0]
        assert ended.any() and not ended.all()
        assert torch.equal(data["next", "observation"][:, 2], torch.ones(4))
        assert torch.equal(after["observation"][:, 2], (~ended).float())
        assert torch.equal(after["observation"][:, 1], episodes + ended)
        assert not any(after[key].any() for key in FLAGS)

    def test_maybe_reset_without_done_changes_nothing(self) -> None:
        env = CountingEnv(LONG, (2,))
        root = env.reset()
        resets = len(env.masks)
        out = env.maybe_reset(root)
        assert len(env.masks) == resets and torch.equal(out["observation"], root["observation"])


class TestRollout:
    """`rollout(max_steps, policy, …)`."""

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_rollout_has_shape_names_and_consecutive_steps(self, shape: tuple[int, ...]) -> None:
        data = CountingEnv(LONG, shape).rollout(8)
        assert data.batch_size == torch.Size((*shape, 8)) and data.names[-1] == "time"
        assert torch.equal(data["observation"][..., 2], torch.arange(8.0).expand(*shape, 8))
        assert torch.equal(data["next", "observation"][..., 2], data["observation"][..., 2] + 1)
        assert leaf_keys(data) >= {"action", "observation", ("next", "reward")}
        assert not any(str(key).startswith("_") for key in data.keys())

    def test_it_stops_at_the_first_done_of_any_environment(self) -> None:
        data = CountingEnv(Script(lengths=(4, 6, 9)), (3,)).rollout(20)
        ends = data["next", "done"][..., 0]
        assert ends[:, -1].any() and not ends[:, :-1].any() and data.shape[1] < 20

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_rollout_without_break_continues_with_resets(self, shape: tuple[int, ...]) -> None:
        data = CountingEnv(Script(lengths=(2, 3, 5)), shape).rollout(20, break_when_any_done=False)
        assert data.batch_size == torch.Size((*shape, 20))
        for row in data.unsqueeze(0) if not shape else data:
            done, steps = row["next", "done"][:-1, 0], row["observation"][..., 2]
            assert done.any() and torch.equal(steps[1:] == 0, done)
            assert torch.equal(row["next", "observation"][..., 2], steps + 1) and not row["done"].any()

    def test_rollout_calls_policy_and_callback(self) -> None:
        seen: list[Any] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            return td.set("action", td["observation"][..., :2] * 0 + 0.5)

        env = CountingEnv(LONG)
        data = env.rollout(4, policy, callback=lambda e, td: seen.append((e is env, float(td["action"][0]))))
        assert (data["action"] == 0.5).all() and seen == [(True, 0.5)] * 4

    def test_without_a_policy_actions_are_random_and_in_bounds(self) -> None:
        actions = CountingEnv(LONG).rollout(30)["action"]
        assert actions.abs().max() <= 1 and actions.unique().numel() > 40

    def test_auto_reset_false_needs_and_uses_a_tensordict(self) -> None:
        env = CountingEnv(LONG)
        with pytest.raises(RuntimeError, match="tensordict") as caught:
            env.rollout(3, auto_reset=False)
        assert isinstance(caught.value, GleanError)
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        data = env.rollout(3, auto_reset=False, tensordict=root)
        assert data["observation"][:, 2].tolist() == [1, 2, 3]

    def test_set_truncated_marks_the_last_step(self) -> None:
        data = CountingEnv(Script(ending="never"), (2,)).rollout(4, set_truncated=True)
        for key, wanted in (("truncated", True), ("done", True), ("terminated", False)):
            assert data["next", key][:, :, 0].tolist() == [[False, False, False, wanted]] * 2
        with pytest.raises(RuntimeError, match="truncated"):
            CountingEnv(LONG, flags=("done", "terminated")).rollout(4, set_truncated=True)

    def test_a_rollout_does_not_change_when_the_next_is_made(self) -> None:
        env = CountingEnv(LONG)
        first = env.rollout(5)
        frozen = first.clone()
        env.rollout(5)
        assert (first == frozen).all()

    def test_rollout_of_agents_has_their_dimension(self) -> None:
        data = TeamEnv(LONG, (2,), nested_flags=True).rollout(3)
        assert data["agents", "action"].shape == (2, 3, 2, 2) and data["next", "agents", "reward"].shape == (
            2,
            3,
            2,
            1,
        )


class TestRandomActions:
    """`rand_action` and `rand_step`."""

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_rand_action_is_in_the_spec(self, shape: tuple[int, ...]) -> None:
        env = CountingEnv(LONG, shape)
        alone, filled = env.rand_action(), env.rand_action(env.reset())
        for data in (alone, filled):
            assert data.batch_size == torch.Size(shape) and env.action_spec.is_in(data["action"])
        assert "observation" in filled.keys()

    def test_rand_action_sets_every_action_key(self) -> None:
        assert {"arm", "gripper"} <= set(TwoActionEnv().rand_action().keys())

    def test_rand_step_steps_once(self) -> None:
        env = CountingEnv(LONG)
        data = env.rand_step(env.reset())
        assert data["next", "observation"][2] == 1 and torch.equal(env.actions[-1], data["action"])


class TestSpecsAndKeys:
    """Specs, key properties, `fake_tensordict`, shapes, seeds."""

    @pytest.mark.parametrize(
        "env", [CountingEnv(), CountingEnv(batch_size=(3,)), TwoKeyEnv(), TeamEnv(nested_flags=True)]
    )
    def test_fake_tensordict_looks_like_a_step(self, env: EnvBase) -> None:
        fake, real = env.fake_tensordict(), env.step(env.rand_action(env.reset()))
        assert leaf_keys(fake) == leaf_keys(real) and fake.batch_size == real.batch_size
        for key in leaf_keys(real):
            assert fake[key].shape == real[key].shape and fake[key].dtype == real[key].dtype
            assert not fake[key].any()

    def test_singular_specs_and_keys_name_the_only_entry(self) -> None:
        env = CountingEnv()
        assert (env.action_key, env.reward_key) == ("action", "reward")
        assert (
            env.action_keys == ["action"]
            and env.reward_keys == ["reward"]
            and set(env.done_keys) == set(FLAGS)
        )
        assert env.action_spec.shape == (2,) and env.reward_spec.shape == (1,)
        for spec in (env.full_action_spec, env.full_reward_spec, env.full_done_spec, env.observation_spec):
            assert isinstance(spec, Composite)
        assert set(env.full_action_spec.keys()) == {"action"} and set(env.full_done_spec.keys()) == set(FLAGS)

    def test_a_singular_key_with_several_candidates_is_a_key_error(self) -> None:
        with pytest.raises(KeyError) as caught:
            _ = TwoActionEnv().action_key
        assert isinstance(caught.value, GleanError)
        assert set(TwoActionEnv().action_keys) == {"arm", "gripper"}

    def test_nested_keys_are_listed(self) -> None:
        env = TeamEnv(nested_flags=True)
        assert env.action_keys == [("agents", "action")] and env.reward_keys == [("agents", "reward")]
        assert {("agents", "done"), "done"} <= set(env.done_keys)

    def test_environment_has_shape_and_device(self) -> None:
        env = CountingEnv(batch_size=(3,))
        assert env.batch_size == env.shape == torch.Size([3]) and env.numel() == 3 and env.ndim == 1
        assert env.batch_locked and env.device is None
        assert CountingEnv(device="cpu").device == torch.device("cpu")
        assert CountingEnv().to("cpu").device == torch.device("cpu")

    def test_a_device_marks_the_data(self) -> None:
        assert CountingEnv(LONG, device="cpu").rollout(3).device == torch.device("cpu")
        assert CountingEnv(LONG).rollout(3).device is None

    def test_set_seed_returns_the_seed(self) -> None:
        env = CountingEnv()
        assert env.set_seed(7) == 7 and env.seeds == [7]
        assert env.set_seed(9, static_seed=True) == 9 and env.seeds == [7, 9]

    def test_add_truncated_keys_adds_a_false_flag(self) -> None:
        env = CountingEnv(Script(ending="terminated"), flags=("done", "terminated")).add_truncated_keys()
        assert "truncated" in env.full_done_spec.keys()
        data = env.rollout(10, break_when_any_done=False)
        assert (
            not data["next", "truncated"].any() and data["next", "done"].any() and not data["truncated"].any()
        )

    def test_close_and_nothing_warns(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = CountingEnv(LONG)
            env.rollout(3)
            env.close()
