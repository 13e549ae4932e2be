"""tianshou's sides: Collector over DummyVectorEnv, and ReplayBuffer. Without a bulk write, `extend` repeats `add`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from torch import nn

from benchmarks.workload import (
    FRAMES_ENV,
    Columns,
    Updates,
    first_priorities,
    make_env,
    make_policy,
    rows,
    stored,
)

VERSION = importlib.metadata.version("tianshou")
RING, EXTEND, STORED = 100_000, 200, 1_000_000
Work = Callable[[], float]


class NetworkPolicy(Policy):
    """The benchmark's network as a policy of tianshou."""

    def __init__(self, net: nn.Module | None, action_space: gym.Space[Any]) -> None:
        super().__init__(action_space)
        self.net = net
        self.discrete = isinstance(action_space, gym.spaces.Discrete)

    def forward(self, batch: Any, state: Any = None, **_: Any) -> Batch:
        """Return the actions for a batch of observations."""
        assert self.net is not None, "random collection does not ask the policy"
        with torch.no_grad():
            action = self.net(torch.from_numpy(batch.obs)).numpy()
        return Batch(act=action.argmax(-1) if self.discrete else action, state=None)


def collecting(name: str, with_policy: bool, frames: int) -> Callable[[], Work]:
    """Return the set-up that collects steps into a vector buffer."""

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
    """Return row `i` under tianshou's reserved names."""
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
    """Return the set-up that adds `n` rows per call, one after the other."""

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


def filled(kind: str) -> ReplayBuffer:
    """Return a buffer made from complete columns."""
    columns = stored(kind)
    return ReplayBuffer.from_data(
        obs=columns["observation",],
        act=columns["action",],
        rew=columns["next", "reward"][:, 0],
        terminated=columns["next", "terminated"][:, 0],
        truncated=columns["next", "truncated"][:, 0],
        done=columns["next", "done"][:, 0],
        obs_next=columns["next", "observation"],
    )


def sampling(kind: str, calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(256)` from a buffer that the constructor for offline data made."""

    def setup() -> Work:
        buffer = filled(kind)

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256)
            return calls

        return work

    return setup


def prioritized() -> PrioritizedReplayBuffer:
    """Return a full prioritized buffer of a million rows with different priorities. Its tree is compiled already."""
    buffer = PrioritizedReplayBuffer(STORED, alpha=0.6, beta=0.4)
    buffer.update(filled("cartpole"))
    buffer.update_weight(np.arange(STORED), first_priorities(STORED))
    _, index = buffer.sample(256)
    buffer.update_weight(index, first_priorities(256))
    return buffer


def prioritized_sampling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(256)` with weights."""

    def setup() -> Work:
        buffer = prioritized()

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256)
            return calls

        return work

    return setup


def updating(calls: int) -> Callable[[], Work]:
    """Return the set-up of `update_weight` with 256 rows."""

    def setup() -> Work:
        buffer, updates = prioritized(), Updates(STORED, 256, calls)

        def work() -> int:
            for index, priority in updates.turn():
                buffer.update_weight(index, priority)
            return calls

        return work

    return setup


def cycling(calls: int) -> Callable[[], Work]:
    """Return the set-up of 4 calls of `add`, `sample(256)` and new priorities of the sampled rows."""

    def setup() -> Work:
        buffer, updates, columns = prioritized(), Updates(STORED, 256, calls), rows("cartpole", 4)
        singles = [batch_of(columns, i) for i in range(4)]

        def work() -> int:
            for _, priority in updates.turn():
                for single in singles:
                    buffer.add(single)
                _, index = buffer.sample(256)
                buffer.update_weight(index, priority)
            return calls

        return work

    return setup


class Compact:
    """A buffer without next observations, which stacks frames by itself; see `compact_peers.py`."""

    def __init__(self, kind: str, size: int, envs: int) -> None:
        options: dict[str, Any] = {"ignore_obs_next": True}
        if kind == "stacks":
            options |= {"stack_num": 4, "save_only_last_obs": True}
        self._envs = None if envs == 1 else np.arange(envs)
        self._buffer = (
            ReplayBuffer(size, **options) if envs == 1 else VectorReplayBuffer(size, envs, **options)
        )

    def writes(self, steps: Any, count: int) -> list[Any]:
        """Return the arguments of `write` for each step."""
        names = ("obs", "act", "rew", "obs_next", "terminated", "truncated")
        columns = [column[:, 0] if self._envs is None else column for column in steps[:-1]]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return [Batch(**row, info=Batch()) for row in rows]

    def write(self, row: Any) -> int:
        """Write a step."""
        self._buffer.add(row, buffer_ids=self._envs)
        return 1

    def sample(self) -> Any:
        """Return a batch."""
        return self._buffer.sample(256)[0]

    def rows(self, batch: Any) -> dict[str, Any]:
        """Return a batch as arrays."""
        return {
            "observation": batch.obs,
            "action": batch.act,
            "reward": batch.rew,
            "following": batch.obs_next,
            "terminated": batch.terminated,
            "truncated": batch.truncated,
        }


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
    "prioritized/sample": prioritized_sampling(200),
    "prioritized/update": updating(500),
    "prioritized/cycle": cycling(100),
}
