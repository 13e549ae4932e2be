"""A plan inspects environment and policy, chooses actor and stepper, and reports failures of its trial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl._arrays.schema import Field
from gleanrl._rollout.actors import PolicyActor, RandomActor
from gleanrl._rollout.loop import collect
from gleanrl._rollout.plan import action_fields, plan_rollout
from gleanrl._rollout.policies import RandomPolicy
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import ParallelEnv
from gleanrl.errors import EnvironmentContractError, EnvironmentFailure, PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv, StillDoneEnv, TeamEnv, TwoActionEnv
from tests.fakes_masks import MaskedEnv

LONG = Script(lengths=(50,))
ACTION = {("action",): Field(torch.Size([2]), torch.float32)}
SIZES = [(), (3,)]


class Count:
    """A policy whose action is the number of its call."""

    def __init__(self) -> None:
        self.calls = 0

    def action(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.full((*observation.shape[:-1], 2), float(self.calls))

    def on_td(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", self.action(td["observation"]))

    def plain(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action(observation)

    def plain_two(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.action(observation), observation[..., :1] + self.calls

    def module(self) -> TensorDictModule:
        return TensorDictModule(self.action, ["observation"], ["action"])

    def module_two(self) -> TensorDictModule:
        return TensorDictModule(self.plain_two, ["observation"], ["action", "value"])

    def forms(self) -> dict[str, Any]:
        return {
            "td": self.on_td,
            "plain": self.plain,
            "plain, two outputs": self.plain_two,
            "module": self.module(),
            "module, two outputs": self.module_two(),
        }


FORMS = list(Count().forms())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
class TestCalls:
    def test_act_now_uses_every_call(self, form: str, size: tuple[int, ...]) -> None:
        policy, env = Count(), CountingEnv(LONG, size)
        plan = plan_rollout(env, policy.forms()[form], act_now=True)
        block = plan.block(4)
        with torch.no_grad():
            collect(plan.actor, plan.stepper, block)
        assert policy.calls == 4, "the call that told the columns is the first of the rollout"
        assert block.batch()["action"][..., 0].reshape(-1, 4).tolist() == [[1, 2, 3, 4]] * env.numel()
        assert len(env.masks) == 1

    def test_trial_restores_the_environment_and_the_random_state(
        self, form: str, size: tuple[int, ...]
    ) -> None:
        policy, env = Count(), CountingEnv(LONG, size)
        state = torch.get_rng_state()
        plan = plan_rollout(env, policy.forms()[form])
        assert torch.equal(torch.get_rng_state(), state)
        assert policy.calls <= 1 and getattr(plan.actor, "_first", None) is None
        block = plan.block(4)
        with torch.no_grad():
            collect(plan.actor, plan.stepper, block)
        assert block.batch()["observation"][..., 2].reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * env.numel()
        assert len(env.masks) == 1


class Stateful(nn.Module):
    """A module that changes its state at each call and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += 1
        return torch.rand(*observation.shape[:-1], 2), observation[..., :1]


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: TensorDictModule(m, ["observation"], ["action", "value"])]
)
def test_a_module_is_tried_on_a_copy(wrap: Any) -> None:
    module, state = Stateful(), torch.get_rng_state()
    plan = plan_rollout(CountingEnv(LONG), wrap(module))
    assert module.seen == 0 and torch.equal(torch.get_rng_state(), state)
    assert len(plan.policy_paths) == 2


@pytest.mark.parametrize("act_now", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        lambda observation: observation.mul_(0)[..., :2],
        lambda td: td.set("action", td["observation"].mul_(0)[..., :2]),
    ],
)
def test_a_trial_does_not_touch_the_first_root(policy: Any, act_now: bool) -> None:
    env = CountingEnv(LONG)
    env.reset()
    plan = plan_rollout(env, policy, act_now=act_now)
    assert plan.stepper.root()["observation",].tolist() == [0, 1, 0]


class TestColumns:
    def columns(self, policy: Any, env: Any = None, **kwargs: Any) -> dict[Any, Field]:
        env = env or CountingEnv(LONG, (3,))
        plan = plan_rollout(env, policy, **kwargs)
        own = plan.stepper.schema()
        items = plan.schema.items()
        assert [path for path in items if path in own] == list(own.paths), (
            "the environment's columns come first"
        )
        assert set(items) == set(own.paths) | set(plan.policy_paths)
        return {path: items[path] for path in plan.policy_paths}

    def test_random_policy_has_action_columns_only(self) -> None:
        for act_now in (False, True):
            assert self.columns(None, act_now=act_now) == ACTION

    def test_modules_with_only_action_outputs_are_not_called(self) -> None:
        policy = Count()
        assert self.columns(policy.module()) == ACTION and policy.calls == 0

    def test_extra_outputs_become_columns(self) -> None:
        value = Field(torch.Size([1]), torch.float32)
        for name in ("module, two outputs", "plain, two outputs"):
            key = "value" if name.startswith("module") else "output1"
            for act_now in (False, True):
                found = self.columns(Count().forms()[name], act_now=act_now)
                assert found == {**ACTION, (key,): value} and next(iter(found)) == ("action",)

    def test_private_outputs_have_no_column(self) -> None:
        policy = TensorDictSequential(
            TensorDictModule(lambda x: x, ["observation"], ["_hidden"]),
            TensorDictModule(lambda x: x[..., :2], ["_hidden"], ["action"]),
        )
        assert self.columns(policy) == ACTION

    def test_several_and_nested_actions_have_columns(self) -> None:
        grip = Field(torch.Size([]), torch.int64)
        assert self.columns(None, TwoActionEnv(LONG)) == {("arm",): ACTION["action",], ("gripper",): grip}
        nested = {("agents", "action"): Field(torch.Size([2, 2]), torch.float32)}
        assert self.columns(None, TeamEnv(LONG, (3,))) == nested
        assert action_fields(TeamEnv(LONG, (3,)), 1) == nested

    def test_policy_may_overwrite_a_root_column_of_equal_form(self) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            return td.set("action", td["observation"][..., :2]).set("observation", td["observation"] + 1)

        assert ("observation",) in self.columns(policy)

        def wrong(td: TensorDictBase) -> TensorDictBase:
            return td.set("action", td["observation"][..., :2]).set("observation", td["observation"].double())

        with pytest.raises(
            PolicyError, match=r"overwrites 'observation' with \(3,\) float64.*\(3,\) float32"
        ):
            self.columns(wrong)

    def test_root_done_ends_an_episode_regardless_of_groups(self) -> None:
        plan = plan_rollout(TeamEnv(LONG, nested_flags=True), None)
        assert plan.done_paths == (("next", "done"),)

    def test_block_has_the_plans_schema(self) -> None:
        plan = plan_rollout(CountingEnv(LONG), None)
        assert plan.block(3).schema is plan.schema and plan.block(3).num_steps == 3


class TestChoices:
    @pytest.mark.parametrize(
        ("policy", "modules"),
        [
            (Count().module(), True),
            (Count().plain, True),
            (nn.Linear(3, 2), True),
            (Count().on_td, False),
        ],
    )
    def test_actor_depends_on_the_policy(self, policy: Any, modules: bool) -> None:
        plan = plan_rollout(CountingEnv(LONG), policy)
        assert isinstance(plan.actor, PolicyActor) and plan.actor.by_modules is modules
        assert type(plan.random_actor) is RandomActor and not isinstance(plan.policy, RandomPolicy)

    def test_missing_policy_uses_the_random_actor(self) -> None:
        plan = plan_rollout(CountingEnv(LONG), None)
        assert type(plan.actor) is RandomActor and isinstance(plan.policy, RandomPolicy)

    def test_the_random_actor_writes_the_columns_of_the_policy(self) -> None:
        env = CountingEnv(LONG, (3,))
        plan = plan_rollout(env, Count().module_two())
        block = plan.block(4)
        collect(plan.random_actor, plan.stepper, block)
        batch = block.batch()
        assert not batch["value"].any() and batch["action"].unique().numel() == 24

    def test_plan_starts_from_a_given_root(self) -> None:
        env = CountingEnv(LONG)
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        plan = plan_rollout(env, None, root=root)
        assert plan.stepper.root()["observation",].tolist() == [0, 0, 1] and len(env.masks) == 1


class TestRefused:
    @pytest.mark.parametrize("act_now", [False, True])
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (
                TensorDictModule(nn.Identity(), ["observation"], ["logits"]),
                r"\['logits'\] lack.*\['action'\]",
            ),
            (TensorDictModule(nn.Identity(), ["observation"], ["action", ("next", "x")]), "contain 'next'"),
            (lambda td: td.set("act", td["observation"]), r"no \['action'\]"),
            (lambda td: td.set("action", td["done"]).set(("next", "done"), td["done"]), "contains 'next'"),
        ],
    )
    def test_invalid_policies_are_refused(self, policy: Any, message: str, act_now: bool) -> None:
        with pytest.raises(PolicyError, match=message):
            plan_rollout(CountingEnv(LONG), policy, act_now=act_now)

    @pytest.mark.parametrize("act_now", [False, True])
    @pytest.mark.parametrize(
        ("policy", "name"),
        [
            (nn.Linear(5, 2), "Linear"),
            (nn.Sequential(nn.Linear(5, 2)), "Sequential"),
            (nn.Linear(3, 2).double(), "Linear"),
            (lambda td: td.set("action", td["observation"] @ torch.ones(5, 2)), "<lambda>"),
            (TensorDictModule(nn.Linear(5, 2), ["observation"], ["action"]), "Linear"),
            (TensorDictModule(nn.Linear(5, 2), ["observation"], ["action", "value"]), "Linear"),
        ],
    )
    def test_a_policy_of_the_wrong_width_is_named_with_its_input(
        self, policy: Any, name: str, act_now: bool
    ) -> None:
        with pytest.raises(
            PolicyError, match=rf"policy: {name} raised mat.*'observation' \(3,\) float32"
        ) as caught:
            CountingEnv(LONG).rollout(2, policy) if act_now else next(
                iter(SyncDataCollector(CountingEnv(LONG), policy, frames_per_batch=2))
            )
        assert type(caught.value.__cause__) is RuntimeError

    def test_other_errors_of_a_policy_are_raised_unchanged(self) -> None:
        class Own(RuntimeError):
            pass

        def policy(observation: torch.Tensor) -> torch.Tensor:
            raise Own("mine")

        def stops(observation: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="^out of luck$"):
            CountingEnv(LONG).rollout(2, stops)
        for act in (partial(plan_rollout, CountingEnv(LONG)), partial(CountingEnv(LONG).rollout, 2)):
            with pytest.raises(Own, match="^mine$"):
                act(policy)

    def test_failing_first_reset_is_explained(self) -> None:
        with pytest.raises(EnvironmentContractError, match="environment 0 .StillDoneEnv.*returned done"):
            plan_rollout(StillDoneEnv(), None)

        class Broken(CountingEnv):
            def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
                raise LookupError("no simulator")

        with pytest.raises(
            LookupError, match=r"environment 0 \(Broken\): reset raised LookupError: no simulator"
        ) as caught:
            plan_rollout(Broken(), None)
        assert isinstance(caught.value, EnvironmentFailure) and type(caught.value.__cause__) is LookupError


def test_batch_in_processes_is_not_asked_for_masks_by_a_rollout_with_a_policy(monkeypatch: Any) -> None:
    asked = []
    live = ParallelEnv._live_specs
    monkeypatch.setattr(ParallelEnv, "_live_specs", lambda *args: asked.append(args) or live(*args))
    env = ParallelEnv(2, partial(MaskedEnv, "categorical", "late_spec"))
    env.rollout(3, lambda td: td.set("action", torch.zeros(2, dtype=torch.int64)), break_when_any_done=False)
    assert asked == []
    env.rollout(3, break_when_any_done=False)
    assert asked != []
    env.close()
