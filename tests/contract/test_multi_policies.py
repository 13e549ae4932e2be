"""Collectors with workers accept lazy policies, policies without a device, factories, and policies with a state."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from gleanrl.collectors import RandomPolicy
from gleanrl.data import Unbounded
from gleanrl.envs import TransformedEnv
from gleanrl.envs.transforms import TensorDictPrimer
from gleanrl.errors import GleanError
from tests.collectors.workers.crews import KINDS, collecting
from tests.contract.helpers import Constant
from tests.contract.multi import NEVER, makers, settled, shares, take
from tests.fakes import Script
from tests.fakes_base import CountingEnv, TeamEnv, TwoActionEnv

ONE_KIND = pytest.mark.parametrize("kind", KINDS)
CAT: dict[str, Any] = {"sync": "stack", "async": "whole"}


@pytest.mark.parametrize(
    "policy",
    [
        lambda: TensorDictModule(lambda x: x[..., :2] * 0 + 0.25, ["observation"], ["action"]),
        lambda: lambda observation: observation[..., :2] * 0 + 0.25,
        lambda: lambda td: td.set("action", td["observation"][..., :2] * 0 + 0.25),
        lambda: Constant(0.25),
        lambda: TensorDictSequential(
            TensorDictModule(nn.Identity(), ["observation"], ["hidden"]),
            TensorDictModule(lambda x: x[..., :2] * 0 + 0.25, ["hidden"], ["action"]),
        ),
    ],
    ids=["module", "function", "td", "nn.Module", "sequence"],
)
def test_policies_of_all_forms_act(policy: Any) -> None:
    with collecting("sync", 2, policy()) as collector:
        assert (collector.next()["action"] == 0.25).all()


@pytest.mark.parametrize("kind", ["sync"])
def test_workers_draw_different_random_actions(kind: str) -> None:
    spec = CountingEnv().action_spec
    for policy in (None, RandomPolicy(spec)):
        with collecting(kind, 2, policy) as collector:
            actions = torch.cat([batch["action"].reshape(-1, 2) for batch in take(collector, 3)])
        assert actions.abs().max() <= 1 and len(actions.unique(dim=0)) == len(actions), (
            "no worker draws alike"
        )


@pytest.mark.parametrize("kind", ["async"])
def test_env_rand_step_is_a_random_policy_of_one_step_a_frame(kind: str) -> None:
    env = CountingEnv()
    with collecting(kind, 2, env.rand_step, total_frames=24) as collector:
        batches = list(collector)
        assert collector.stats().stepped == 24
    for batch in batches:
        assert torch.equal(batch["next", "observation"][..., 2], batch["observation"][..., 2] + 1)


@pytest.mark.parametrize("kind", ["async"])
def test_several_and_nested_actions_are_recorded(kind: str) -> None:
    with collecting(kind, [TwoActionEnv] * 2) as collector:
        batch = collector.next()
    assert batch["arm"].shape == (*batch.shape, 2) and batch["gripper"].dtype == torch.int64
    with collecting(kind, [lambda: TeamEnv(nested_flags=True)] * 2, set_truncated=True) as collector:
        batch = collector.next()
    assert batch["agents"].batch_size == (*batch.shape, 2)
    after = batch["next"]
    assert after["agents", "truncated"][..., -1, :, :].all() and after["agents", "done"][..., -1, :, :].all()


@pytest.mark.parametrize("kind", ["sync"])
def test_parameters_made_at_the_first_call(kind: str) -> None:
    policy = nn.Sequential(nn.LazyLinear(2))
    with collecting(kind, 2, policy) as collector:
        batch = collector.next()
        assert policy[0].weight.shape == (2, 3), "the learner's own are made, too"
        with torch.no_grad():
            assert torch.allclose(batch["action"], policy(batch["observation"]), atol=1e-4)
            policy[0].weight.zero_()
            policy[0].bias.fill_(0.5)
        settled(collector, kind)
        assert (collector.next()["action"] == 0.5).all()


@pytest.mark.parametrize("kind", ["async"])
def test_a_policy_on_the_meta_device_runs_once_it_has_values(kind: str) -> None:
    with torch.device("meta"):
        policy = nn.Sequential(nn.Linear(3, 2, bias=False))
    values = nn.Sequential(nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        values[0].weight.zero_()
        values[0].weight[:, 2] = 0.125
    with collecting(kind, makers(2, NEVER), policy) as collector:
        collector.update_policy_weights_(TensorDict.from_module(values))
        batch = collector.next()
    assert torch.equal(batch["action"], batch["observation"][..., 2:].expand(*batch.shape, 2) / 8)
    assert policy[0].weight.is_meta


@ONE_KIND
def test_a_factory_makes_the_policy_where_it_runs(kind: str) -> None:
    here = os.getpid()

    class Mine(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.full((*observation.shape[:-1], 2), float(os.getpid() == here))

    with collecting(kind, 2, policy_factory=Mine) as collector:
        assert (collector.next()["action"] == 0).all()
    with collecting(kind, 2, policy_factory=[lambda: Constant(0.25), lambda: Constant(-0.25)]) as collector:
        for batch in take(collector, 4):
            for owner, share in shares(batch, 2, CAT[kind]).items():
                assert (share["action"] == (0.25, -0.25)[owner]).all()


@pytest.mark.parametrize("kind", ["async"])
def test_factories_take_given_weights(kind: str) -> None:
    with collecting(kind, 2, policy_factory=lambda: Constant(0.25)) as collector:
        assert (collector.next()["action"] == 0.25).all()
        collector.update_policy_weights_(TensorDict.from_module(Constant(0.75)))
        settled(collector, kind)
        assert (collector.next()["action"] == 0.75).all()


@pytest.mark.parametrize("kind", ["async"])
def test_a_list_of_factories_needs_one_for_each_worker_and_no_policy(kind: str) -> None:
    with (
        pytest.raises(RuntimeError, match="policy_factory") as caught,
        collecting(kind, 3, policy_factory=[lambda: Constant()] * 2),
    ):
        pass
    assert isinstance(caught.value, GleanError)
    with (
        pytest.raises((TypeError, ValueError), match="policy"),
        collecting(kind, 2, Constant(), policy_factory=lambda: Constant()),
    ):
        pass


class Counter(nn.Module):
    """A recurrent cell whose state counts the steps since the reset."""

    def forward(self, observation: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return action and next state."""
        return (state / 64).expand(*state.shape[:-1], 2), state + 1


@pytest.mark.parametrize(("kind", "env"), [("sync", "batched"), ("async", "single")])
def test_a_recurrent_policy_that_writes_below_next(kind: str, env: str) -> None:
    """The state is the step's number: zero after each reset, and carried over from batch to batch."""
    policy = TensorDictModule(Counter(), ["observation", "state"], ["action", ("next", "state")])

    def primed(make: Any) -> Any:
        def made() -> Any:
            env = make()
            return TransformedEnv(env, TensorDictPrimer({"state": Unbounded((1,))}))

        return made

    script = Script(seed=65, low=2, high=9)
    with collecting(kind, [primed(make) for make in makers(2, script, env)], policy, 20) as collector:
        for batch in take(collector, 6):
            steps = batch["observation"][..., 2:]
            assert torch.equal(batch["state"], steps)
            assert torch.equal(batch["next", "state"], steps + 1)
            assert torch.equal(batch["action"][..., :1], steps / 64)


def test_recurrent_policy_without_an_initial_state_names_the_primer() -> None:
    policy = TensorDictModule(Counter(), ["observation", "state"], ["action", ("next", "state")])
    with pytest.raises(RuntimeError, match="TensorDictPrimer") as caught, collecting("sync", 2, policy):
        pass
    assert isinstance(caught.value, GleanError)


@pytest.mark.parametrize("kind", ["sync"])
def test_exploration_type_holds_in_the_workers(kind: str) -> None:
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda x: (x[..., :2] * 0, x[..., :2] * 0 + 0.1), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal
        ),
    )
    with collecting(kind, 2, policy, exploration_type=InteractionType.MEAN) as collector:
        assert (collector.next()["action"] == 0).all()
    with collecting(kind, 2, policy, exploration_type="random") as collector:
        actions = torch.cat([batch["action"].reshape(-1) for batch in take(collector, 2)])
        assert len(actions.unique()) == len(actions), "workers draw each from a sequence of their own"


@pytest.mark.parametrize("kind", ["sync"])
def test_a_policy_that_steps_the_environment_or_misses_the_action_is_refused(kind: str) -> None:
    def stepping(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = torch.zeros(*tensordict.batch_size, 2)
        tensordict["next", "observation"] = tensordict["observation"] + 1
        return tensordict

    def silent(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("value", tensordict["observation"])

    for policy, match in ((stepping, "next"), (silent, "action"), (lambda a, b: a, "b")):
        with (
            pytest.raises((RuntimeError, TypeError, ValueError, KeyError), match=match) as caught,
            collecting(kind, 2, policy) as collector,
        ):
            collector.next()
        assert isinstance(caught.value, GleanError)


@pytest.mark.parametrize("kind", ["async"])
def test_nan_actions_raise(kind: str) -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?i)nan") as caught,
        collecting(kind, 2, lambda observation: observation[..., :2] * float("nan")) as collector,
    ):
        collector.next()
    assert isinstance(caught.value, GleanError)
