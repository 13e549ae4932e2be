"""Invalid parameters of a distribution raise torch's error at the same step, with either backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tensordict.nn.distributions import OneHotCategorical
from torch import Tensor, distributions

from gleanrl._rollout.loop import collect
from gleanrl._rollout.plan import Handling, plan_rollout
from gleanrl.collectors import SyncDataCollector
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests._rollout.test_native_forward import loaded
from tests.fakes import Script
from tests.fakes_base import CountingEnv


@pytest.fixture(autouse=True)
def validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate arguments, although torch.compile of another test turns the default off."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


BAD_AT = 3
"""The step whose parameters are invalid. The third number of an observation is the step of the episode."""

SOURCE = """
class Net(nn.Module):
    def forward(self, observation):
        clock = observation[..., 2:3]
        late = (clock - {before}).clamp(0, 1)
        {lines}
"""

NORMAL = distributions.Normal
CASES: dict[str, tuple[Any, list[str], str]] = {
    "nan logits": (OneHotCategorical, ["logits"], "return torch.cat([clock + 1, 0 / (1 - late)], -1)"),
    "infinite logits": (OneHotCategorical, ["logits"], "return torch.cat([clock * 0, late / (1 - late)], -1)"),
    "no possible logits": (
        OneHotCategorical, ["logits"],
        "bad = late / (late - 1)\n        return torch.cat([bad, bad], -1)",
    ),
    "negative probabilities": (
        OneHotCategorical, ["probs"], "return torch.cat([1 - 2 * late, 1 + 2 * late], -1)",
    ),
    "no probabilities": (OneHotCategorical, ["probs"], "return torch.cat([1 - late, 1 - late], -1)"),
    "nan mean": (NORMAL, ["loc", "scale"], "bad = 0 / (1 - late)\n        return TWO + bad, TWO * 0 + 1"),
    "no scale": (NORMAL, ["loc", "scale"], "return TWO, 1 - LATE"),
    "negative scale": (NORMAL, ["loc", "scale"], "return TWO, 1 - 2 * LATE"),
    "nan scale": (NORMAL, ["loc", "scale"], "return TWO, 1 + 0 / (1 - LATE)"),
}  # fmt: skip


def policy_of(case: str, before: int = BAD_AT - 1) -> ProbabilisticTensorDictSequential:
    cls, names, lines = CASES[case]
    for name, twice in {"TWO": "clock", "LATE": "late"}.items():
        lines = lines.replace(name, f"torch.cat([{twice}, {twice}], -1)")
    net = loaded(SOURCE.format(before=before, lines=lines), False)["Net"]()
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], names),
        ProbabilisticTensorDictModule(
            names, ["action"], distribution_class=cls, default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )  # fmt: skip


def env_of(size: tuple[int, ...] = ()) -> CountingEnv:
    return CountingEnv(Script(ending="never"), size)


def planned(case: str, backend: Any, size: tuple[int, ...] = (), num_steps: int = 6) -> Any:
    """Return the error of a rollout, the number of complete steps, whether the policy failed, and the actions."""
    plan = plan_rollout(env_of(size), policy_of(case), handling=Handling(backend=backend))
    block = plan.block(num_steps)
    with torch.no_grad():
        try:
            collect(plan.actor, plan.stepper, block)
        except Exception as error:
            found = plan.actor.native.said if plan.actor.native else []  # type: ignore[attr-defined]
            assert backend == "torch" or all(one.endswith(": native") for one in found), found
            return type(error), str(error), block.num_complete, block.policy_failed
    raise AssertionError("no error was raised")


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_invalid_parameters_raise_torchs_error_at_their_step(case: str, size: tuple[int, ...]) -> None:
    assert planned(case, "native", size) == planned(case, "torch", size)
    assert planned(case, "native", size)[2:] == (BAD_AT, True)


@pytest.mark.parametrize("case", CASES)
def test_a_collector_raises_the_same_error_with_both_backends(case: str) -> None:
    said = []
    for backend in ("native", "torch"):
        collector: Any = SyncDataCollector(
            env_of(), policy_of(case), frames_per_batch=6, total_frames=60, policy_backend=backend
        )
        with pytest.raises(Exception) as error:
            next(iter(collector))
        said.append((error.type, str(error.value)))
        collector.shutdown()
    assert said[0] == said[1]


def test_an_error_of_the_mode_is_raised_as_well() -> None:
    policy = policy_of("nan logits")
    policy[-1].default_interaction_type = InteractionType.MODE
    for backend in ("native", "torch"):
        plan = plan_rollout(env_of(), policy, handling=Handling(backend=backend))
        block = plan.block(6)
        with torch.no_grad(), pytest.raises(ValueError, match="logits"):
            collect(plan.actor, plan.stepper, block)
        assert block.num_complete == BAD_AT


def test_rows_before_the_invalid_one_are_written_and_later_blocks_continue() -> None:
    plan = plan_rollout(env_of(), policy_of("nan logits"), handling=Handling(backend="native"))
    block = plan.block(6)
    with torch.no_grad(), pytest.raises(ValueError):
        collect(plan.actor, plan.stepper, block)
    actions: Tensor = block.column(("action",))
    assert actions[:BAD_AT].sum(-1).eq(1).all()


@pytest.fixture
def without_validation() -> Iterator[None]:
    distributions.Distribution.set_default_validate_args(False)
    yield
    distributions.Distribution.set_default_validate_args(__debug__)


def outcome(case: str, backend: Any) -> Any:
    """Return what `planned` returns; the number of steps if nothing is raised."""
    plan = plan_rollout(env_of(), policy_of(case), handling=Handling(backend=backend))
    block = plan.block(6)
    with torch.no_grad():
        try:
            return collect(plan.actor, plan.stepper, block)
        except Exception as error:
            return type(error), str(error), block.num_complete, block.policy_failed


@pytest.mark.parametrize("case", CASES)
def test_without_validation_rows_end_as_in_torch(case: str, without_validation: None) -> None:
    assert outcome(case, "native") == outcome(case, "torch")


@pytest.mark.parametrize("case", CASES)
def test_validation_that_is_switched_off_between_blocks_takes_effect(case: str) -> None:
    found = []
    for backend in ("native", "torch"):
        plan = plan_rollout(env_of(), policy_of(case), handling=Handling(backend=backend))
        block = plan.block(2)
        with torch.no_grad():
            collect(plan.actor, plan.stepper, block)
        distributions.Distribution.set_default_validate_args(False)
        try:
            with torch.no_grad():
                found.append(str(collect(plan.actor, plan.stepper, plan.block(4))))
        except Exception as error:
            found.append(repr(error))
        finally:
            distributions.Distribution.set_default_validate_args(__debug__)
    assert found[0] == found[1]


def test_a_sampling_module_that_changes_between_blocks_takes_effect() -> None:
    policy: Any = policy_of("no scale", before=90)
    plan = plan_rollout(env_of(), policy, handling=Handling(backend="native"))
    blocks = []
    for kind in (InteractionType.RANDOM, InteractionType.MEAN, InteractionType.RANDOM):
        policy[-1].default_interaction_type = kind
        block = plan.block(2)
        with torch.no_grad():
            collect(plan.actor, plan.stepper, block)
        loc = block.column(("observation",))[..., 2:3].expand(2, 2)
        blocks.append(torch.equal(block.column(("action",)), loc))
    assert blocks == [False, True, False]
    policy[-1].distribution_class = distributions.Laplace
    with torch.no_grad(), pytest.raises(UnsupportedError, match="Laplace"):
        plan.actor.bind(plan.block(2))


def test_unknown_backends_raise() -> None:
    with pytest.raises(InvalidArgumentError, match="policy_backend"):
        SyncDataCollector(
            env_of(), policy_of("no scale"), frames_per_batch=6, total_frames=60, policy_backend="cpp"
        )  # type: ignore[arg-type]


def test_a_policy_that_cannot_run_natively_is_refused_with_its_reason() -> None:
    net = loaded(
        "class Net(nn.Module):\n    def forward(self, observation):\n        return observation.softmax(-1)[..., :2]\n",
        False,
    )["Net"]()
    policy = TensorDictModule(net, ["observation"], ["action"])
    with pytest.raises(UnsupportedError, match="softmax"):
        collector = SyncDataCollector(
            env_of(), policy, frames_per_batch=6, total_frames=60, policy_backend="native"
        )
        try:
            next(iter(collector))
        finally:
            collector.shutdown()


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_env_rollouts_with_gradients_are_torchs(backend: Any) -> None:
    policy = policy_of("no scale", before=90)
    if backend == "native":
        with pytest.raises(UnsupportedError, match="gradients"):
            env_of().rollout(3, policy, policy_backend=backend)
    else:
        assert env_of().rollout(3, policy, policy_backend=backend)["action"].shape == (3, 2)
    with torch.no_grad():
        assert env_of().rollout(3, policy, policy_backend=backend)["action"].shape == (3, 2)


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
def test_collected_actions_do_not_depend_on_the_frames_of_a_batch(size: tuple[int, ...]) -> None:
    found = []
    for steps in (12, 4, 1):
        torch.manual_seed(3)
        env, rows = CountingEnv(Script(), size), max(torch.Size(size).numel(), 1)
        total: dict[str, Any] = {"frames_per_batch": steps * rows, "total_frames": 12 * rows}
        collector: Any = SyncDataCollector(
            env, policy_of("no scale", before=90), policy_backend="native", **total
        )
        found.append(torch.cat([batch["action"] for batch in collector], len(size)))
        collector.shutdown()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert len(found[0].unique()) == found[0].numel()
