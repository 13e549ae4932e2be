"""TorchRL's actors run natively, with the actions and log-probabilities that torch gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, SerialEnv
from tests.fakes_masks import MaskedEnv, N

modules = pytest.importorskip("torchrl.modules")
data = pytest.importorskip("torchrl.data")


def network(inner: int, outer: int) -> nn.Module:
    return modules.MLP(in_features=inner, out_features=outer, num_cells=[16, 16])


def q_values(categorical: bool) -> nn.Module:
    spec = data.Categorical(2) if categorical else data.OneHot(2)
    return modules.QValueActor(network(4, 2), in_keys=["observation"], spec=spec)


def exploring(categorical: bool) -> nn.Module:
    spec = data.Categorical(2) if categorical else data.OneHot(2)
    return TensorDictSequential(q_values(categorical), modules.EGreedyModule(spec, eps_init=0.5))


def sampling(cls: Any, inner: int, outer: int, **kwargs: Any) -> nn.Module:
    net: nn.Module = network(inner, outer)
    keys = ["logits"] if outer == 2 and inner == 4 else ["loc", "scale"]
    if len(keys) == 2:
        net = nn.Sequential(net, NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys), in_keys=keys, distribution_class=cls,
        distribution_kwargs=kwargs, return_log_prob=True,
    )  # fmt: skip


def cart_pole(categorical: bool) -> Callable[[], GymEnv]:
    return lambda: GymEnv("CartPole-v1", categorical_action_encoding=categorical)


def collected(env: Any, policy: nn.Module, backend: str, **options: Any) -> tuple[Any, tuple[str, ...]]:
    collector = SyncDataCollector(
        env, policy, frames_per_batch=300, total_frames=-1, policy_backend=backend, **options
    )
    collector.set_seed(1)
    batch, said = collector.next(), collector.stats().policy
    collector.shutdown()
    return batch, said


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_greedy_actors_act_as_by_torch(categorical: bool, many: bool) -> None:
    torch.manual_seed(0)
    policy, make = q_values(categorical), cart_pole(categorical)
    env = (lambda: SerialEnv(3, make)) if many else make
    (mine, said), (theirs, _) = (collected(env(), policy, backend) for backend in ("native", "torch"))
    assert said == ("MLP: native", "QValueModule: native")
    assert torch.equal(mine["action"], theirs["action"])
    assert torch.allclose(mine["chosen_action_value"], theirs["chosen_action_value"], atol=1e-5)


@pytest.mark.parametrize("categorical", [False, True])
def test_epsilon_greedy_actors_explore(categorical: bool) -> None:
    torch.manual_seed(0)
    policy = exploring(categorical)
    batch, said = collected(cart_pole(categorical)(), policy, "native")
    assert said[-1] == "EGreedyModule: native"
    chosen = batch["action"] if categorical else batch["action"].argmax(-1)
    explored = (chosen != batch["action_value"].argmax(-1)).float().mean()
    assert 0.15 < explored < 0.35, "half of the steps are random, and half of these differ"
    policy[-1].eps.fill_(0.0)
    batch, _ = collected(cart_pole(categorical)(), policy, "native")
    chosen = batch["action"] if categorical else batch["action"].argmax(-1)
    assert torch.equal(chosen, batch["action_value"].argmax(-1))


@pytest.mark.parametrize("name", ["OneHotCategorical", "TanhNormal", "IndependentNormal"])
def test_samples_have_torchs_log_probabilities(name: str) -> None:
    torch.manual_seed(0)
    cls = getattr(modules, name)
    discrete = name == "OneHotCategorical"
    kwargs = {"low": -2.0, "high": 2.0} if name == "TanhNormal" else {}
    policy = sampling(cls, 4, 2) if discrete else sampling(cls, 3, 2, **kwargs)
    env = cart_pole(False)() if discrete else GymEnv("Pendulum-v1")
    batch, said = collected(env, policy, "native")
    assert said[-1].endswith(": native")
    names = ["logits"] if discrete else ["loc", "scale"]
    torchs = cls(**{key: batch[key] for key in names}, **kwargs).log_prob(batch["action"])
    assert torch.allclose(batch["action_log_prob"], torchs, atol=1e-3)
    (fixed, _), (theirs, _) = (
        collected(env if backend == "native" else (cart_pole(False)() if discrete else GymEnv("Pendulum-v1")),
                  policy, backend, exploration_type="deterministic")
        for backend in ("native", "torch")
    )  # fmt: skip
    assert torch.allclose(fixed["action"].float(), theirs["action"].float(), atol=1e-4)


@pytest.mark.parametrize("name", ["MaskedCategorical", "MaskedOneHotCategorical"])
def test_masked_choices_are_allowed_and_have_torchs_log_probabilities(name: str) -> None:
    torch.manual_seed(0)
    cls = getattr(modules, name)
    policy = modules.ProbabilisticActor(
        TensorDictModule(nn.Linear(1, N), ["seen"], ["logits"]), in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=cls, return_log_prob=True,
    )  # fmt: skip
    encoding = "categorical" if name == "MaskedCategorical" else "one_hot"
    batch, said = collected(MaskedEnv(encoding, "transform"), policy, "native")
    assert said[-1].endswith(": native")
    chosen = batch["action"] if encoding == "categorical" else batch["action"].long().argmax(-1)
    assert bool(batch["action_mask"].gather(-1, chosen.unsqueeze(-1)).all())
    torchs = cls(logits=batch["logits"], mask=batch["action_mask"]).log_prob(batch["action"].long())
    assert torch.allclose(batch["action_log_prob"], torchs, atol=1e-4)


def test_deterministic_actors_act_as_by_torch() -> None:
    torch.manual_seed(0)
    policy = modules.Actor(network(3, 1), in_keys=["observation"])
    (mine, said), (theirs, _) = (
        collected(GymEnv("Pendulum-v1"), policy, backend) for backend in ("native", "torch")
    )
    assert said == ("MLP: native",)
    assert torch.allclose(mine["action"][:50], theirs["action"][:50], atol=1e-3)


def test_masks_that_the_spec_of_an_exploration_gets_take_effect() -> None:
    torch.manual_seed(0)
    spec = data.Categorical(2)
    policy = TensorDictSequential(q_values(True), modules.EGreedyModule(spec, eps_init=1.0, eps_end=1.0))
    collector = SyncDataCollector(cart_pole(True)(), policy, frames_per_batch=50, policy_backend="auto")
    collector.set_seed(1)
    assert collector.next()["action"].unique().tolist() == [0, 1]
    policy[-1].spec["action"].update_mask(torch.tensor([True, False]))
    assert collector.next()["action"].unique().tolist() == [0]
    collector.shutdown()


def test_bounds_that_change_in_place_take_effect() -> None:
    torch.manual_seed(0)
    high = torch.tensor(1.0)
    policy = sampling(modules.TanhNormal, 3, 2, low=-2.0, high=high)
    collector = SyncDataCollector(GymEnv("Pendulum-v1"), policy, frames_per_batch=100, policy_backend="auto")
    collector.set_seed(1)
    assert collector.next()["action"].max() <= 1.0
    assert collector.stats().policy[-1].endswith(": native")
    high.fill_(1.9)
    assert collector.next()["action"].max() > 1.0
    for bounds in (torch.full((1,), 1.5), torch.full((1,), 1.6)):
        policy[-1].distribution_kwargs = {"low": -bounds, "high": bounds}
        collector.next()
    collector.shutdown()
