"""`Greedy` explores with its probability, by torch and in the core, in each environment on its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.envs import ExplorationType, Greedy, GymEnv, SerialEnv
from gleanrl.errors import InvalidArgumentError

EPSILON, STEPS = 0.3, 4000


def network(epsilon: float | None = EPSILON, one_hot: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), Greedy(one_hot, epsilon))


def differs(batch: Any, policy: nn.Sequential) -> torch.Tensor:
    """Return whether each action isn't the one with the highest score."""
    action = batch["action"]
    index = action.argmax(-1) if action.shape[-1:] == (2,) and action.ndim > batch.ndim else action
    return index != policy[:-1](batch["observation"]).argmax(-1)


def collecting(policy: Any, backend: Any, **options: Any) -> Any:
    env = options.pop("env", partial(GymEnv, "CartPole-v1"))()
    return SyncDataCollector(
        env, policy, frames_per_batch=STEPS, total_frames=-1, policy_backend=backend, **options
    )


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_half_of_the_explored_actions_differ_from_the_best(backend: Any, one_hot: bool) -> None:
    policy = network(one_hot=one_hot)
    env = partial(GymEnv, "CartPole-v1", categorical_action_encoding=not one_hot)
    collector = collecting(policy, backend, env=env)
    rate = differs(collector.next(), policy).float().mean()
    assert abs(rate - EPSILON / 2) < 5 * (0.15 * 0.85 / STEPS) ** 0.5
    policy[-1].epsilon.zero_()
    assert not differs(collector.next(), policy).any()
    policy[-1].epsilon.fill_(1.0)
    assert abs(differs(collector.next(), policy).float().mean() - 0.5) < 5 * 0.5 / STEPS**0.5
    collector.shutdown()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_environments_explore_independently(backend: Any) -> None:
    policy = network()
    collector = collecting(policy, backend, env=lambda: SerialEnv(2, partial(GymEnv, "CartPole-v1")))
    first, second = differs(collector.next(), policy).float()
    both = (first * second).mean()
    assert abs(both - (EPSILON / 2) ** 2) < 5 * (0.0225 / (STEPS / 2)) ** 0.5
    collector.shutdown()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_deterministic_exploration_takes_the_best_action(backend: Any) -> None:
    policy = network(1.0)
    collector = collecting(policy, backend, exploration_type=ExplorationType.DETERMINISTIC)
    assert not differs(collector.next(), policy).any()
    collector.shutdown()


def test_workers_get_epsilon_with_the_weights() -> None:
    policy = network(1.0)
    collector = MultiSyncDataCollector(
        [partial(GymEnv, "CartPole-v1")] * 2, policy, frames_per_batch=200, total_frames=-1
    )
    assert differs(collector.next(), policy).any()
    policy[-1].epsilon.zero_()
    collector.update_policy_weights_()
    collector.next()  # may have been collected before the update
    assert not differs(collector.next(), policy).any()
    assert collector.stats().policy == ("Sequential: native",)
    collector.shutdown()


def test_a_rate_above_one_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"epsilon: expected a number from 0 to 1, got 1.5"):
        Greedy(epsilon=1.5)
