"""Stable-Baselines3's sides: DummyVecEnv and ReplayBuffer with five columns, since it cannot store more."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.workload import FRAMES_ENV, OBSERVATION_SPACES, Columns, make_env, make_policy, rows, stored

VERSION = importlib.metadata.version("stable-baselines3")
RING, EXTEND = 100_000, 200
Work = Callable[[], float]


def collecting(name: str, with_policy: bool, frames: int) -> Callable[[], Work]:
    """Return the set-up that steps a vector of one environment and adds each transition to a buffer."""

    def setup() -> Work:
        envs = DummyVecEnv([partial(make_env, name)])
        discrete = isinstance(envs.action_space, gym.spaces.Discrete)
        policy = make_policy(name) if with_policy else None
        size = 2000 if name == FRAMES_ENV else RING
        buffer = ReplayBuffer(size, envs.observation_space, envs.action_space, "cpu")
        current: Any = envs.reset()

        def act() -> NDArray[Any]:
            if policy is None:
                return np.array([envs.action_space.sample()])
            with torch.no_grad():
                action = policy(torch.from_numpy(current)).numpy()
            return action.argmax(-1) if discrete else action

        def work() -> int:
            nonlocal current
            for _ in range(frames):
                action = act()
                following, reward, done, infos = envs.step(action)
                true_following: Any = following
                if done[0]:  # the vector has reset: `following` is the first observation of the next episode
                    true_following = infos[0]["terminal_observation"][None]
                buffer.add(current, true_following, action, reward, done, infos)
                current = following
            return frames

        return work

    return setup


def buffer_and_data(
    kind: str, size: int, n_envs: int, columns: Columns
) -> tuple[ReplayBuffer, tuple[Any, ...]]:
    """Return a buffer of `size` rows that takes `n_envs` rows per `add`, and the arguments of such an `add`."""
    shape, dtype = OBSERVATION_SPACES[kind]
    high = 255 if dtype is np.uint8 else np.inf
    space = gym.spaces.Box(0 if dtype is np.uint8 else -np.inf, high, shape, dtype)  # type: ignore[arg-type]
    action = columns["action",]
    action_space = gym.spaces.Box(-np.inf, np.inf, action.shape[1:], action.dtype)  # type: ignore[arg-type]
    buffer = ReplayBuffer(size, space, action_space, "cpu", n_envs=n_envs)
    names = (
        ("observation",),
        ("next", "observation"),
        ("action",),
        ("next", "reward"),
        ("next", "done"),
    )
    return buffer, tuple(columns[path] for path in names)


def writing(n: int, calls: int) -> Callable[[], Work]:
    """Return the set-up of `add` with `n` rows, as from `n` environments: SB3 has no other write of several rows."""

    def setup() -> Work:
        columns = rows("cartpole", n)
        buffer, (obs, nxt, action, reward, done) = buffer_and_data("cartpole", RING, n, columns)
        infos: list[dict[str, Any]] = [{}] * n
        reward, done = reward[:, 0], done[:, 0]

        def work() -> int:
            for _ in range(calls):
                buffer.add(obs, nxt, action, reward, done, infos)
            return calls

        for _ in range(RING // n):
            buffer.add(obs, nxt, action, reward, done, infos)
        return work

    return setup


def sampling(kind: str, calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(256)`."""

    def setup() -> Work:
        columns = stored(kind)
        n = len(columns["observation",])
        buffer, (obs, nxt, action, reward, done) = buffer_and_data(kind, n, 1, columns)
        infos: list[dict[str, Any]] = [{}]
        for i in range(n):
            cut = slice(i, i + 1)
            buffer.add(obs[cut], nxt[cut], action[cut], reward[cut, 0], done[cut, 0], infos)

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256)
            return calls

        return work

    return setup


class Compact:
    """A buffer with `optimize_memory_usage`; see `compact_peers.py`."""

    def __init__(self, kind: str, size: int, envs: int) -> None:
        stacks = kind == "stacks"
        space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8) if stacks else gym.spaces.Box(-9e9, 9e9, (17,))
        actions = gym.spaces.Discrete(4) if stacks else gym.spaces.Box(-9, 9, (6,))
        self._buffer = ReplayBuffer(
            size,
            space,
            actions,
            "cpu",
            envs,
            optimize_memory_usage=True,
            handle_timeout_termination=False,
        )

    def writes(self, steps: Any, count: int) -> list[Any]:
        """Return the arguments of `write` for each step."""
        observation, action, reward, following, terminated, truncated, _ = steps
        action = action.reshape(*action.shape[:2], -1)
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(done.shape[1])]
        return [(*row, infos) for row in zip(observation, following, action, reward, done, strict=True)]

    def write(self, row: Any) -> int:
        """Write a step."""
        self._buffer.add(*row)
        return 1

    def sample(self) -> Any:
        """Return a batch."""
        return self._buffer.sample(256)

    def rows(self, batch: Any) -> dict[str, Any]:
        """Return a batch as arrays."""
        return {
            "observation": batch.observations.numpy(),
            "action": batch.actions.numpy(),
            "reward": batch.rewards.numpy(),
            "following": batch.next_observations.numpy(),
            "done": batch.dones.numpy(),
        }


SETUPS = {
    "collection/cartpole-random": collecting("CartPole-v1", False, 2000),
    "collection/cartpole-mlp": collecting("CartPole-v1", True, 1000),
    "native/greedy-forward": collecting("CartPole-v1", True, 1000),
    "collection/pendulum-random": collecting("Pendulum-v1", False, 1000),
    "collection/pendulum-mlp": collecting("Pendulum-v1", True, 1000),
    "collection/frames-random": collecting(FRAMES_ENV, False, 2000),
    "replay/extend": writing(EXTEND, 1000),
    "replay/add": writing(1, 5000),
    "replay/sample": sampling("cartpole", 200),
    "replay/sample-humanoid": sampling("humanoid", 100),
    "replay/sample-image": sampling("image", 10),
}
