"""Reward dtypes, mismatching weights and states, and smaller arguments follow the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.data.postprocs import MultiStep
from gleanrl.envs import GymEnv, GymWrapper
from gleanrl.errors import GleanError
from tests.contract.helpers import Constant, check_stream, tensors_below
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv, PayingEnv

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=71)
LONG = Script(lengths=(100,))


class TestRewards:
    """Rewards are cast to the dtype of the spec, under any key."""

    @pytest.mark.parametrize("key", ["reward", "pay"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
    @pytest.mark.parametrize("shape", [(), (2,)])
    def test_rewards_are_cast_to_the_dtype_of_the_spec(
        self, make_collector: Make, key: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        env = PayingEnv(key, dtype, script=LONG, batch_size=shape)
        width = env.batch_size.numel()
        (batch,) = make_collector(env, frames_per_batch=6 * width, total_frames=6 * width)
        pay = batch["next", key]
        assert pay.dtype == torch.float32 and pay.shape == (*shape, 6, 1)
        expected = torch.arange(1.0, 7.0).to(dtype).float()
        assert torch.equal(pay[..., 0], expected.expand(*shape, 6))


class TestMisfits:
    """A mismatching state or weight raises and changes nothing."""

    @pytest.mark.parametrize(
        "other",
        [
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)),
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)),
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        ],
        ids=["missing", "extra", "shape"],
    )
    def test_state_of_another_policy_raises_and_changes_nothing(
        self, make_collector: Make, other: nn.Module
    ) -> None:
        policy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        collector = make_collector(CountingEnv(LONG), policy, frames_per_batch=4, total_frames=12)
        next(iter(collector))
        before = [leaf.clone() for leaf in policy.parameters()]
        state = collector.state_dict()
        weights = {key: value.clone() for key, value in state["policy_state_dict"].items()}
        prefix = next(iter(weights)).removesuffix("0.weight")
        foreign = {f"{prefix}{key}": value + 1 for key, value in other.state_dict().items()}
        state["policy_state_dict"] = foreign
        state["frames"] = 8
        with pytest.raises((RuntimeError, KeyError, ValueError)):
            collector.load_state_dict(state)
        assert all(map(torch.equal, before, policy.parameters())), "half of the weights were loaded"
        assert collector.state_dict()["frames"] == 4

    def test_weights_of_another_policy_raise_and_change_nothing(self, make_collector: Make) -> None:
        policy = nn.Linear(3, 2)
        collector = make_collector(
            CountingEnv(LONG), policy, frames_per_batch=4, total_frames=8, policy_device="cpu"
        )
        good = TensorDict.from_module(policy).data
        for weights in (
            TensorDict({"weight": good["weight"] + 1}),
            TensorDict({"weight": good["weight"] + 1, "bias": torch.zeros(3)}),
            TensorDict({"weight": good["weight"] + 1, "bias": torch.zeros(2), "more": torch.zeros(2)}),
        ):
            with pytest.raises(GleanError):
                collector.update_policy_weights_(weights)
        batch = collector.next()
        with torch.no_grad():
            assert torch.allclose(batch["action"], policy(batch["observation"]), atol=1e-4)

    def test_the_policy_state_holds_every_weight(self, make_collector: Make) -> None:
        policy = Constant(0.75)
        collector = make_collector(CountingEnv(LONG), policy, frames_per_batch=4, total_frames=8)
        assert [float(leaf[0]) for leaf in tensors_below(collector.state_dict()["policy_state_dict"])] == [
            0.75
        ]


class TestArguments:
    """Smaller arguments have the documented effect."""

    def test_reset_passes_keywords_to_the_environment(self, make_collector: Make) -> None:
        inner = OracleEnv(script=LONG)
        collector = make_collector(GymWrapper(inner), frames_per_batch=4, total_frames=8)
        first = collector.next()
        collector.reset(options={"level": 2})
        assert inner.resets[-1][1] == {"level": 2}
        check_stream([first, collector.next()], LONG, fresh_batches=True)

    def test_reset_passes_keywords_to_an_envbase(self, make_collector: Make) -> None:
        env = CountingEnv(LONG, (2,))
        collector = make_collector(env, frames_per_batch=8, total_frames=16, max_frames_per_traj=6)
        first = collector.next()
        collector.reset(level=2)
        assert env.reset_kwargs[-1] == {"level": 2}
        check_stream([first, collector.next()], LONG, fresh_batches=True, limit=6)

    def test_progress_shows_and_changes_nothing(self, make_collector: Make) -> None:
        batches = list(
            make_collector(CountingEnv(SCRIPT), frames_per_batch=5, total_frames=20, progress=True)
        )
        check_stream(batches, SCRIPT)

    def test_multi_step_works_as_a_postproc(self, make_collector: Make) -> None:
        env = CountingEnv(Script(lengths=(4,), ending="terminated"))
        (batch,) = make_collector(
            env, frames_per_batch=8, total_frames=8, postproc=MultiStep(gamma=0.5, n_steps=2)
        )
        assert batch["steps_to_next_obs"].flatten().tolist() == [2, 2, 2, 1] * 2
        steps = batch["observation"][:, 2] + batch["steps_to_next_obs"].flatten()
        assert torch.equal(batch["next", "observation"][:, 2], steps)

    def test_num_envs_works_or_is_refused(self) -> None:
        try:
            env = GymEnv("CartPole-v1", num_envs=2)
        except GleanError as error:
            assert "num_envs" in str(error)
        else:
            assert env.batch_size == torch.Size([2])
            assert env.rollout(3)["observation"].shape == (2, 3, 4)

    def test_a_short_last_batch_of_return_same_td(self, make_collector: Make) -> None:
        copies = [
            batch.clone()
            for batch in make_collector(
                CountingEnv(SCRIPT), frames_per_batch=5, total_frames=13, return_same_td=True
            )
        ]
        assert [copy.numel() for copy in copies] == [5, 5, 3]
        check_stream(copies, SCRIPT)

    @pytest.mark.parametrize("kwargs", [{"storing_device": "cpu"}, {"device": "cpu"}, {}])
    def test_set_truncated_does_not_disturb_the_following_batch(
        self, make_collector: Make, kwargs: dict[str, Any]
    ) -> None:
        batches = list(
            make_collector(
                CountingEnv(LONG), frames_per_batch=5, total_frames=20, set_truncated=True, **kwargs
            )
        )
        for batch in batches:
            assert not batch["done"].any() and not batch["truncated"].any()
            assert batch["next", "done"].flatten().tolist() == [False] * 4 + [True]
