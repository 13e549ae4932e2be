"""tianshou: Collector over DummyVectorEnv, and ReplayBuffer. No bulk write: `extend` is a loop of `add`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from torch import nn

from benchmarks.workload import FRAMES_ENV, Columns, make_env, make_policy, rows, stored

VERSION = importlib.metadata.version("tianshou")
RING, EXTEND = 100_000, 200
Work = Callable[[], float]


class NetworkPolicy(Policy):
    """The benchmark's network as one of its policies."""

    def __init__(self, net: nn.Module | None, action_space: gym.Space[Any]) -> None:
        super().__init__(action_space)
        self.net = net
        self.discrete = isinstance(action_space, gym.spaces.Discrete)

    def forward(self, batch: Any, state: Any = None, **_: Any) -> Batch:
        """Acts on a batch of observations."""
        assert self.net is not None, "random collection does not ask the policy"
        with torch.no_grad():
            action = self.net(torch.from_numpy(batch.obs)).numpy()
        return Batch(act=action.argmax(-1) if self.discrete else action, state=None)


def collecting(name: str, with_policy: bool, frames: int) -> Callable[[], Work]:
    """Steps of its collector into its vector buffer."""

    def setup() -> Work:
        policy = NetworkPolicy(make_policy(name) if with_policy else None, make_env(name).action_space)
        policy.eval()
        size = 2000 if name == FRAMES_ENV else RING
        collector = Collector(policy, DummyVectorEnv([partial(make_env, name)]), VectorReplayBuffer(size, 1))
        collector.reset()

        def work() -> int:
            collector.collect(n_step=frames, random=not with_policy)
            return frames

        return work

    return setup


def batch_of(columns: Columns, i: int) -> Batch:
    """Cuts row `i` out, under its reserved names."""
    return Batch(
        obs=columns["observation",][i],
        act=columns["action",][i],
        rew=float(columns["next", "reward"][i, 0]),
        terminated=bool(columns["next", "terminated"][i, 0]),
        truncated=bool(columns["next", "truncated"][i, 0]),
        obs_next=columns["next", "observation"][i],
        info=Batch(),
    )


def writing(n: int, calls: int) -> Callable[[], Work]:
    """Adds `n` rows a call, one by one."""

    def setup() -> Work:
        buffer, columns = ReplayBuffer(RING), rows("cartpole", EXTEND)
        singles = [batch_of(columns, i) for i in range(EXTEND)]
        for k in range(EXTEND):
            buffer.add(singles[k])

        def work() -> int:
            for call in range(calls):
                for k in range(n):
                    buffer.add(singles[(call + k) % EXTEND])
            return calls

        return work

    return setup


def sampling(kind: str, calls: int) -> Callable[[], Work]:
    """`sample(256)` of a buffer made from whole columns (its constructor for offline data)."""

    def setup() -> Work:
        columns = stored(kind)
        buffer = ReplayBuffer.from_data(
            obs=columns["observation",],
            act=columns["action",],
            rew=columns["next", "reward"][:, 0],
            terminated=columns["next", "terminated"][:, 0],
            truncated=columns["next", "truncated"][:, 0],
            done=columns["next", "done"][:, 0],
            obs_next=columns["next", "observation"],
        )

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256)
            return calls

        return work

    return setup


SETUPS = {
    "collection/cartpole-random": collecting("CartPole-v1", False, 400),
    "collection/cartpole-mlp": collecting("CartPole-v1", True, 400),
    "collection/pendulum-random": collecting("Pendulum-v1", False, 400),
    "collection/pendulum-mlp": collecting("Pendulum-v1", True, 400),
    "collection/frames-random": collecting(FRAMES_ENV, False, 400),
    "replay/extend": writing(EXTEND, 10),
    "replay/add": writing(1, 500),
    "replay/sample": sampling("cartpole", 200),
    "replay/sample-humanoid": sampling("humanoid", 50),
    "replay/sample-image": sampling("image", 10),
}
