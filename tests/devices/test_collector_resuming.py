"""Collecting on a device is repeatable, and resumes from a checkpoint bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from gleanrl import Checkpoint
from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from gleanrl.envs import TransformedEnv, check_env_specs
from gleanrl.envs.transforms import CatFrames, Compose, RewardSum, StepCounter
from tests.devices.counting import Counter, leaves_on, linear

D = "the device under test"
CPU = torch.device("cpu")
PLACES = [
    {"device": D},
    {"policy_device": D},
    {"policy_device": D, "storing_device": D},
    {"policy_device": D, "env_device": D, "storing_device": "cpu"},
]


def named(arguments: dict[str, str], device: torch.device) -> dict[str, Any]:
    return {name: device if value == D else value for name, value in arguments.items()}


def gaussian(size: int = 3) -> ProbabilisticTensorDictSequential:
    """Return an actor that learns and draws."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, 2))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["loc"]),
        TensorDictModule(lambda loc: torch.ones_like(loc), ["loc"], ["scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distributions.Normal),
    )


def transformed() -> TransformedEnv:
    frames = CatFrames(2, dim=-1, in_keys=["observation"])
    return TransformedEnv(Counter(None, (2,)), Compose(RewardSum(), StepCounter(), frames))


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Return whether records are equal bit for bit and on the same devices."""
    ours, theirs = flatten(one), flatten(other)
    return ours.keys() == theirs.keys() and all(
        leaf.device == theirs[path].device and torch.equal(leaf, theirs[path]) for path, leaf in ours.items()
    )


class Training:
    """A model on the device, Adam, a collector and a buffer."""

    def __init__(self, device: torch.device, arguments: dict[str, str], storage: torch.device) -> None:
        self.model = gaussian(6).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.collector = SyncDataCollector(
            transformed(), self.model, frames_per_batch=14, **named(arguments, device)
        )
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100, device=storage),
            sampler=PrioritizedSampler(100, 0.7, 0.5),
            batch_size=8,
            priority_key="error",
        )
        self.checkpoint = Checkpoint(
            collector=self.collector, buffer=self.buffer, model=self.model, optimizer=self.optimizer
        )
        self.device = device

    def step(self) -> list[TensorDictBase]:
        """Collect and learn once; return the batch and the sample."""
        batch = self.collector.next()
        assert batch is not None
        self.buffer.extend(batch.reshape(-1))
        sample = self.buffer.sample()
        assert leaves_on(sample.exclude("index", "_weight")) == {self.buffer.storage.device}
        loss = self._loss(sample)
        self.optimizer.zero_grad()
        loss.mean().backward()
        self.optimizer.step()
        sample["error"] = loss.detach().abs().cpu() + 1
        self.buffer.update_tensordict_priority(sample)
        return [batch.clone(), sample.clone()]

    def _loss(self, sample: TensorDictBase) -> torch.Tensor:
        where = sample.select("observation").to(self.device)
        loc = self.model[0](where)["loc"]
        return (loc - sample["next", "observation"][..., :2].to(self.device)).pow(2).sum(-1)


@pytest.mark.parametrize("storage", ["cpu", D])
@pytest.mark.parametrize("arguments", PLACES)
def test_training_continues_from_a_checkpoint(
    device: torch.device, arguments: dict[str, str], storage: str, tmp_path: Path
) -> None:
    home = device if storage == D else CPU
    torch.manual_seed(0)
    first = Training(device, arguments, home)
    first.collector.set_seed(5)
    for _ in range(3):
        first.step()
    first.checkpoint.save(tmp_path)
    expected = [first.step() for _ in range(3)]
    torch.manual_seed(99)
    second = Training(device, arguments, home)
    second.checkpoint.load(tmp_path)
    assert {state["exp_avg"].device for state in second.optimizer.state.values()} == {device}
    for wanted in expected:
        for one, other in zip(wanted, second.step(), strict=True):
            assert same(one, other)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert one.device == other.device == device and torch.equal(one, other)
    for training in (first, second):
        training.collector.shutdown()


@pytest.mark.parametrize("arguments", PLACES)
def test_state_restores_the_random_draws_of_policies(device: torch.device, arguments: dict[str, str]) -> None:
    def build() -> SyncDataCollector:
        return SyncDataCollector(
            transformed(), gaussian(6).to(device), frames_per_batch=14, **named(arguments, device)
        )

    first = build()
    first.next()
    state = first.state_dict()
    expected = [first.next().clone() for _ in range(2)]  # type: ignore[union-attr]
    second = build()
    torch.manual_seed(99)
    second.load_state_dict(state)
    for wanted in expected:
        found = second.next()
        assert found is not None and same(wanted, found)
    first.shutdown()
    second.shutdown()


def test_state_survives_a_file(device: torch.device, tmp_path: Path) -> None:
    first, second = (
        SyncDataCollector(Counter(None, (2,)), gaussian().to(device), frames_per_batch=14, device=device)
        for _ in range(2)
    )
    first.next()
    torch.save(first.state_dict(), tmp_path / "state")
    expected = first.next()
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True, map_location="cpu"))
    found = second.next()
    assert expected is not None and found is not None and same(expected, found)
    first.shutdown()
    second.shutdown()


def test_carry_of_a_policy_continues_from_a_state(device: torch.device) -> None:
    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        seen = tensordict["observation"]
        hidden = tensordict.get("hidden", torch.zeros_like(seen)) + seen
        return tensordict.update({"hidden": hidden, "action": hidden[..., :2]})

    for arguments in ({"device": device}, {"policy_device": device}):
        first, second = (
            SyncDataCollector(Counter(None, (2,)), policy, frames_per_batch=14, **arguments) for _ in range(2)
        )
        first.next()
        second.load_state_dict(first.state_dict())
        expected, found = first.next(), second.next()
        assert expected is not None and found is not None and same(expected, found)
        assert expected["hidden"].any()
        first.shutdown()
        second.shutdown()


@pytest.mark.parametrize("policy", ["drawn", "random"])
@pytest.mark.parametrize("arguments", PLACES)
def test_equal_seeds_give_equal_batches(device: torch.device, arguments: dict[str, str], policy: str) -> None:
    def collected(seed: int) -> list[TensorDictBase]:
        actor = gaussian().to(device) if policy == "drawn" else None
        torch.manual_seed(seed)
        env = Counter(None, (2,))
        return list(
            SyncDataCollector(env, actor, frames_per_batch=14, total_frames=28, **named(arguments, device))
        )

    one, same_seed, other = collected(3), collected(3), collected(4)
    assert all(map(same, one, same_seed))
    assert not torch.equal(one[0]["action"], other[0]["action"])
    assert not torch.equal(one[0]["action"], one[1]["action"])


@pytest.mark.parametrize("arguments", PLACES)
@pytest.mark.parametrize("policy", ["module", "function"])
def test_trial_at_construction_draws_no_random_numbers(
    device: torch.device, arguments: dict[str, str], policy: str
) -> None:
    def function(observation: torch.Tensor) -> torch.Tensor:
        return torch.rand((*observation.shape[:-1], 2), device=observation.device)

    actor = gaussian().to(device) if policy == "module" else function
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    collector = SyncDataCollector(Counter(None, (2,)), actor, frames_per_batch=14, **named(arguments, device))
    assert torch.equal(torch.rand(4, device=device), expected)
    collector.shutdown()


def test_a_check_of_specs_draws_nothing(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    check_env_specs(Counter(device, (2,)))
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.parametrize("arguments", PLACES)
def test_a_collectors_seed_decides_random_actions(device: torch.device, arguments: dict[str, str]) -> None:
    def collected(seed: int) -> TensorDictBase:
        collector = SyncDataCollector(
            Counter(None, (2,)), None, frames_per_batch=14, **named(arguments, device)
        )
        collector.set_seed(seed)
        torch.rand(3, device=device)  # other draws don't matter
        batch = collector.next()
        assert batch is not None
        collector.shutdown()
        return batch

    assert same(collected(1), collected(1))
    assert not torch.equal(collected(1)["action"], collected(2)["action"])


def test_a_checkpoint_from_the_device_loads_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    there = linear().to(device)
    there.weight.data.mul_(3)
    Checkpoint(model=there, optimizer=torch.optim.Adam(there.parameters())).save(tmp_path)
    here = linear()
    Checkpoint(model=here, optimizer=torch.optim.Adam(here.parameters())).load(tmp_path)
    assert here.weight.device == CPU and torch.equal(here.weight, there.weight.cpu())
