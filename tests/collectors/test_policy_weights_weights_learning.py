"""A program that never pushes weights learns, whatever the devices of its policy and environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from tests.collectors.helpers import NEVER, Staying, make, take
from tests.fakes_base import CountingEnv

BATCHES = 12


class Bandit(gymnasium.Env[Any, Any]):
    """Pays 1 for action 1, and never ends."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.ones(1, np.float32), float(action), False, False, {}


def logits(layer: nn.Linear) -> None:
    """Make action 1 rare: one in fifty."""
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([2.0, -2.0]))


def learn(net: nn.Module, default: str | None, devices: dict[str, str]) -> list[float]:
    """Return the mean reward of each batch while `net` learns by REINFORCE from the collector's batches."""
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical
        ),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=8.0)
    env = GymWrapper(Bandit(), categorical_action_encoding=True)
    means = []
    with torch.device(default or "cpu"):
        collector = SyncDataCollector(env, policy, frames_per_batch=40, total_frames=40 * BATCHES, **devices)
        for batch in collector:
            reward = batch["next", "reward"].squeeze(-1)
            means.append(float(reward.mean()))
            chosen = policy.get_dist(batch.select("observation")).log_prob(batch["action"])
            loss = -((reward - 0.25) * chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return means


DEVICES = ["device", "policy_device", "env_device", "storing_device"]


@pytest.mark.parametrize("staying", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("default", [None, "meta"])
@pytest.mark.parametrize(
    "devices",
    [
        {},
        *({name: place} for name in DEVICES for place in ("cpu", "cpu:0")),
        {"device": "cpu", "policy_device": "cpu:0"},
        {"device": "cpu:0", "policy_device": "cpu", "env_device": "cpu", "storing_device": "cpu:0"},
    ],
    ids=lambda devices: " ".join(f"{name}={place}" for name, place in devices.items()) or "none",
)
def test_program_learns_for_every_placement(
    devices: dict[str, str], default: str | None, staying: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1, 2)
    logits(layer)
    net = Staying(layer) if staying else layer
    means = learn(net, default, devices)
    assert len(means) == BATCHES and means[0] < 0.2 and min(means[-5:]) > 0.8, means


class Exploring(nn.Module):
    """Acts with a buffer that its `step` changes, and with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eps", torch.ones(()))
        self.register_buffer("passing", torch.zeros(()), persistent=False)
        self.weight = nn.Parameter(torch.zeros(()))

    def step(self) -> None:
        self.eps -= 0.25
        self.passing += 1

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return ``(eps, passing)``."""
        return torch.stack([self.eps, self.passing]) + self.weight


@pytest.mark.parametrize("staying", [False, True], ids=["in place", "moved"])
class TestExploration:
    """A change of the policy reaches the acting copy."""

    def policy(self, staying: bool) -> tuple[Exploring, nn.Module]:
        inner = Exploring()
        net = Staying(inner) if staying else inner
        return inner, TensorDictModule(net, ["observation"], ["action"])

    def test_steps_of_an_exploration_module(self, staying: bool) -> None:
        inner, policy = self.policy(staying)
        collector = make(CountingEnv(NEVER), policy, policy_device="cpu")
        seen = []
        for batch in collector:
            seen.append(batch["action"].unique(dim=0).tolist())
            inner.step()
            if len(seen) == 3:
                break
        assert seen == [[[1.0, 0.0]], [[0.75, 1.0]], [[0.5, 2.0]]]

    def test_weights_are_the_users_once_pushed(self, staying: bool) -> None:
        inner, policy = self.policy(staying)
        collector = make(CountingEnv(NEVER), policy, policy_device="cpu")
        actions = []
        for _ in range(3):
            inner.step()
            (batch,) = take(collector, 1)
            actions.append(float(batch["action"][0, 0]))
            collector.update_policy_weights_()
        inner.step()
        (batch,) = take(collector, 1)
        assert [*actions, float(batch["action"][0, 0])] == (
            [0.75, 0.75, 0.5, 0.25] if staying else [0.75, 0.5, 0.25, 0.0]
        )

    def test_failing_push_keeps_following_the_user_weights(self, staying: bool) -> None:
        inner, policy = self.policy(staying)
        collector = make(CountingEnv(NEVER), policy, policy_device="cpu")
        with pytest.raises(ValueError, match="missing"):
            collector.update_policy_weights_(TensorDict({}, []))
        inner.step()
        (batch,) = take(collector, 1)
        assert float(batch["action"][0, 0]) == 0.75

    def test_state_holds_current_weights_and_loaded_weights_stay(self, staying: bool) -> None:
        inner, policy = self.policy(staying)
        collector = make(CountingEnv(NEVER), policy, policy_device="cpu")
        take(collector, 1)
        inner.step()
        other, fresh = self.policy(staying)
        restored = make(CountingEnv(NEVER), fresh, policy_device="cpu")
        restored.load_state_dict(collector.state_dict())
        (batch,) = take(restored, 1)
        assert float(batch["action"][0, 0]) == 0.75 == float(other.eps)


def test_hooks_run_on_a_policy_that_is_not_moved() -> None:
    net = nn.Linear(3, 2)
    calls = []
    collector = make(CountingEnv(NEVER), net, device="cpu")
    hook = net.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = take(collector, 1)
    hook.remove()
    assert len(calls) == batch.numel()
