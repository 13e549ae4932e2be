"""A collector uses a policy directly, wraps it or rejects it, and acts with the documented weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from gleanrl.collectors import RandomPolicy, SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper
from gleanrl.envs.utils import RandomPolicy as RandomPolicyOfUtils
from gleanrl.errors import GleanError
from tests.contract.helpers import Constant, check_stream, leaf_keys, on_td
from tests.fakes import DictEnv, OracleEnv, Script
from tests.fakes_base import CountingEnv, TeamEnv, TwoActionEnv, TwoKeyEnv

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=21)


def env() -> GymWrapper:
    return GymWrapper(OracleEnv(script=SCRIPT))


def one_batch(
    make_collector: Make, environment: Any, policy: Any, frames: int = 8, **kwargs: Any
) -> TensorDictBase:
    (batch,) = make_collector(environment, policy, frames_per_batch=frames, total_frames=frames, **kwargs)
    return batch


def refused(environment: Any, policy: Any, error: type[BaseException], match: str) -> None:
    """Check that the constructor or the first batch raises a library error derived from `error`, with this message."""
    with pytest.raises(error, match=match) as caught:
        next(iter(SyncDataCollector(environment, policy, frames_per_batch=4, total_frames=4)))
    assert isinstance(caught.value, GleanError)


class Reader(TensorDictModuleBase):
    """A tensordict module written by hand."""

    in_keys = ["observation"]
    out_keys = ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["observation"][..., :2] * 0 + 0.25)


class Typed(nn.Module):
    """Has one parameter of any name, annotated as a tensordict."""

    def forward(self, anything: TensorDictBase) -> TensorDictBase:
        return anything.set("action", anything["observation"][..., :2] * 0 + 0.25)


def typed_string(anything: TensorDict) -> TensorDict:
    return anything.set("action", anything["observation"][..., :2] * 0 + 0.25)


def fresh_output(td: TensorDictBase) -> TensorDictBase:
    action = td["observation"][..., :2] * 0 + 0.25
    return TensorDict({"action": action}, td.batch_size)


class TestTaken:
    """All ways to write the same policy give the same actions."""

    @pytest.mark.parametrize(
        "policy",
        [
            TensorDictModule(lambda x: x[..., :2] * 0 + 0.25, in_keys=["observation"], out_keys=["action"]),
            TensorDictSequential(
                TensorDictModule(lambda x: x * 0, in_keys=["observation"], out_keys=["hidden"]),
                TensorDictModule(lambda h: h[..., :2] + 0.25, in_keys=["hidden"], out_keys=["action"]),
            ),
            Reader(),
            Typed(),
            typed_string,
            fresh_output,
            lambda tensordict: tensordict.set("action", tensordict["observation"][..., :2] * 0 + 0.25),
            lambda td: td.set("action", td["observation"][..., :2] * 0 + 0.25),
            lambda observation: observation[..., :2] * 0 + 0.25,
            lambda anything: anything[..., :2] * 0 + 0.25,
            lambda observation, scale=0.25: observation[..., :2] * 0 + scale,
            Constant(0.25),
        ],
        ids=[
            "module", "sequential", "module-by-hand", "annotated-module", "annotated-function",
            "fresh-output", "tensordict", "td", "by-name", "one-parameter", "default-argument", "nn.Module",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("batch_size", [None, (3,)])
    def test_policies_of_all_forms_give_the_same_actions(
        self, make_collector: Make, policy: Any, batch_size: tuple[int, ...] | None
    ) -> None:
        environment = env() if batch_size is None else CountingEnv(SCRIPT, batch_size)
        batch = one_batch(make_collector, environment, policy, 12)
        assert batch["action"].shape == (*batch.shape, 2) and (batch["action"] == 0.25).all()
        check_stream([batch], SCRIPT)

    @pytest.mark.parametrize(
        "policy", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))]
    )
    def test_modules_of_one_parameter_go_with_the_one_observation_key(
        self, make_collector: Make, policy: Any
    ) -> None:
        batch = one_batch(make_collector, env(), policy)
        with torch.no_grad():
            assert torch.allclose(batch["action"], policy(batch["observation"]), atol=1e-5)

    def test_parameter_names_pick_the_observation_keys(self, make_collector: Make) -> None:
        def policy(clock: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            return torch.cat([clock, place[..., 1:]], -1)

        batch = one_batch(make_collector, TwoKeyEnv(SCRIPT), policy)
        assert torch.equal(batch["action"], torch.cat([batch["clock"], batch["place"][..., 1:]], -1))

    def test_one_of_several_observation_keys_by_name(self, make_collector: Make) -> None:
        batch = one_batch(make_collector, TwoKeyEnv(SCRIPT), lambda place: place * 2)
        assert torch.equal(batch["action"], batch["place"] * 2)

    def test_further_outputs_of_a_tuple_are_called_output1_and_so_on(self, make_collector: Make) -> None:
        def policy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return observation[..., :2] * 0, observation[..., 2:], observation[..., 1:2] + 1

        batch = one_batch(make_collector, env(), policy)
        assert torch.equal(batch["output1"], batch["observation"][..., 2:])
        assert torch.equal(batch["output2"], batch["observation"][..., 1:2] + 1)

    def test_policy_writes_a_nested_action(self, make_collector: Make) -> None:
        policy = TensorDictModule(
            lambda x: x[..., :2], in_keys=[("agents", "observation")], out_keys=[("agents", "action")]
        )
        batch = one_batch(make_collector, TeamEnv(SCRIPT), policy)
        assert torch.equal(batch["agents", "action"], batch["agents", "observation"][..., :2])

    def test_policy_writes_several_actions(self, make_collector: Make) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            clock = td["observation"][..., 2]
            return td.update({"arm": td["observation"][..., :2] * 0, "gripper": clock.long() % 3})

        batch = one_batch(make_collector, TwoActionEnv(SCRIPT, (2,)), policy)
        assert torch.equal(batch["gripper"], batch["observation"][..., 2].long() % 3)

    def test_a_probabilistic_policy_obeys_the_exploration_type(self, make_collector: Make) -> None:
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(
                lambda x: (x[..., :2] * 0 + 0.5, x[..., :2] * 0 + 1), ["observation"], ["loc", "scale"]
            ),
            ProbabilisticTensorDictModule(
                ["loc", "scale"],
                ["action"],
                distribution_class=torch.distributions.Normal,
                return_log_prob=True,
            ),
        )
        sampled = one_batch(make_collector, env(), policy, 32)
        assert sampled["action"].unique().numel() > 32 and any(
            "log_prob" in str(key) for key in leaf_keys(sampled)
        )
        calm = one_batch(make_collector, env(), policy, 32, exploration_type=InteractionType.DETERMINISTIC)
        assert (calm["action"] == 0.5).all()

    def test_policy_extras_are_recorded_and_private_ones_dropped(self, make_collector: Make) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            triple = td["observation"]
            td.update({"value": triple[..., 2:] * 2, "_secret": triple, "action": triple[..., :2] * 0})
            return td.set(("stats", "_inner"), triple).set(("stats", "twice"), triple * 2)

        batch = one_batch(make_collector, env(), policy)
        assert torch.equal(batch["value"], batch["observation"][..., 2:] * 2)
        assert torch.equal(batch["stats", "twice"], batch["observation"] * 2)
        parts = [part for key in batch.keys(True) for part in (key if isinstance(key, tuple) else (key,))]
        assert not [part for part in parts if part.startswith("_")]


class TestRandom:
    """Random actions come from no policy, from a RandomPolicy, or from the environment's own methods."""

    def test_random_policy_is_one_class(self) -> None:
        assert RandomPolicy is RandomPolicyOfUtils

    def test_none_draws_from_the_full_action_spec(self, make_collector: Make) -> None:
        batch = one_batch(make_collector, TwoActionEnv(SCRIPT, (2,)), None, 40)
        assert batch["arm"].abs().max() <= 1 and batch["arm"].unique().numel() > 40
        assert set(batch["gripper"].unique().tolist()) == {0, 1, 2}

    @pytest.mark.parametrize("name", ["rand_step", "rand_action"])
    def test_the_environments_random_methods_make_one_step_per_frame(
        self, make_collector: Make, name: str
    ) -> None:
        environment = env()
        batch = one_batch(make_collector, environment, getattr(environment, name), 20)
        check_stream([batch], SCRIPT)
        assert batch["action"].unique().numel() > 20
        assert environment.unwrapped.steps_taken == 20

    def test_global_seed_determines_random_actions(self, make_collector: Make) -> None:
        actions = []
        for _ in range(2):
            torch.manual_seed(5)
            actions.append(one_batch(make_collector, env(), None)["action"])
        assert torch.equal(*actions)


class TestRefused:
    """A policy that can't work is rejected with a message that names the reason."""

    def test_output_below_next_raises(self) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            return td.set("action", td["observation"][..., :2]).set(
                ("next", "observation"), td["observation"]
            )

        refused(env(), policy, Exception, "next")

    def test_stepping_the_environment_in_the_policy(self) -> None:
        environment = env()
        refused(environment, lambda td: environment.step(environment.rand_action(td)), Exception, "next")

    def test_unknown_required_argument_raises(self) -> None:
        refused(env(), lambda observation, mystery: observation[..., :2], TypeError, "mystery")

    def test_one_unknown_argument_with_several_observation_keys(self) -> None:
        refused(TwoKeyEnv(), lambda mystery: mystery, TypeError, "mystery")

    def test_in_and_out_keys_without_being_a_tensordict_module(self) -> None:
        class One(Constant):
            in_keys, out_keys = ["observation"], ["action"]

        class Two(One):
            def forward(self, observation: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return super().forward(observation)

        refused(env(), One(), RuntimeError, "TensorDictModuleBase")
        refused(env(), Two(), TypeError, "TensorDictModuleBase")

    def test_value_that_is_not_callable_raises(self) -> None:
        refused(env(), 3, Exception, "policy")

    def test_policy_without_an_action_raises(self) -> None:
        refused(env(), lambda td: td.set("act", td["observation"]), Exception, "action")
        module = TensorDictModule(lambda x: x[..., :2], in_keys=["observation"], out_keys=["logits"])
        refused(env(), module, Exception, "action")

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda x: x,
            lambda x: x[..., :1],
            lambda x: x[..., 0],
            lambda x: x[..., :2].double() / 3 + 0.1,
            lambda x: x[..., :2].long() + 2**24 + 1,
        ],
        ids=["longer", "broadcastable", "scalar", "float64", "int64"],
    )
    @pytest.mark.parametrize(
        "wrap",
        [lambda f: lambda observation: f(observation), lambda f: on_td(lambda td: f(td["observation"]))],
    )
    @pytest.mark.parametrize("batch_size", [None, (2,)])
    def test_action_of_wrong_shape_or_dtype_raises(self, wrong: Any, wrap: Any, batch_size: Any) -> None:
        environment = env() if batch_size is None else CountingEnv(SCRIPT, batch_size)
        refused(environment, wrap(wrong), Exception, "action")

    def test_a_shape_that_changes_in_mid_rollout(self, make_collector: Make) -> None:
        calls = []

        def policy(observation: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return observation[..., : 1 if len(calls) == 6 else 2] * 0

        collector = make_collector(env(), policy, frames_per_batch=10, total_frames=20)
        with pytest.raises(GleanError, match="action"):
            next(iter(collector))
        assert sum(batch.numel() for batch in collector) == 20

    @pytest.mark.parametrize("value", [float("nan")])
    def test_nan_actions_raise(self, make_collector: Make, value: float) -> None:
        collector = make_collector(
            env(), on_td(lambda td: td["observation"][..., :2] * value), frames_per_batch=5
        )
        with pytest.raises(GleanError, match="action"):
            next(iter(collector))

    def test_actions_out_of_bounds_are_passed_on(self, make_collector: Make) -> None:
        environment = env()
        batch = one_batch(make_collector, environment, on_td(lambda td: td["observation"][..., :2] * 0 + 99))
        assert (batch["action"] == 99).all() and environment.unwrapped.actions[-1].tolist() == [99, 99]


class TestWeights:
    """Without a policy device the live module acts; with one, a copy acts that receives weights."""

    def test_without_policy_device_the_live_module_acts(self, make_collector: Make) -> None:
        policy = Constant(0.5)
        stream = iter(make_collector(env(), policy, frames_per_batch=4, total_frames=-1))
        assert (next(stream)["action"] == 0.5).all()
        with torch.no_grad():
            policy.value.fill_(-1)
        assert (next(stream)["action"] == -1).all()

    @pytest.mark.parametrize("kwargs", [{"device": "cpu"}, {"policy_device": "cpu"}])
    def test_a_policy_that_need_not_move_acts_itself(
        self, make_collector: Make, kwargs: dict[str, str]
    ) -> None:
        policy = Constant(0.5)
        collector = make_collector(env(), policy, frames_per_batch=4, total_frames=-1, **kwargs)
        stream = iter(collector)
        with torch.no_grad():
            policy.value.fill_(0)
        assert (next(stream)["action"] == 0).all(), "nothing has to be pushed"
        collector.update_policy_weights_()
        with torch.no_grad():
            policy.value.fill_(0.25)
        assert (next(stream)["action"] == 0.25).all()

    def test_given_weights_are_copied_in(self, make_collector: Make) -> None:
        policy = Constant(0.5)
        collector = make_collector(env(), policy, frames_per_batch=4, total_frames=-1, policy_device="cpu")
        stream = iter(collector)
        weights = TensorDict.from_module(Constant(0.125)).data.clone()
        collector.update_policy_weights_(weights)
        weights.zero_()
        assert (next(stream)["action"] == 0.125).all()
        assert (policy.value == 0.125).all(), "the very policy acts"

    def test_a_policy_with_buffers_is_copied_whole(self, make_collector: Make) -> None:
        net = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).eval()
        net[0].running_mean.fill_(2.0)
        policy = TensorDictModule(net, ["observation"], ["action"])
        environment = CountingEnv(Script(ending="never"), (1,))
        batch = one_batch(make_collector, environment, policy, 4, policy_device="cpu")
        with torch.no_grad():
            assert torch.allclose(batch["action"][0], net(batch["observation"][0]), atol=1e-6)

    def test_update_without_weights_does_nothing(self, make_collector: Make) -> None:
        collector = make_collector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=8)
        collector.update_policy_weights_()
        assert sum(batch.numel() for batch in collector) == 8

    def test_dict_observations_need_names(self, make_collector: Make) -> None:
        batch = one_batch(
            make_collector, GymWrapper(DictEnv("pose", script=SCRIPT)), lambda pose: pose[..., :2] * 0
        )
        assert (batch["action"] == 0).all()
