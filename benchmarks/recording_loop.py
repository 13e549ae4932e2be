"""Reference for collectors: a hand-written loop that stores the same fields as a collector's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.workload import make_env

Batch = dict[str, NDArray[Any]]
FLAGS = ("done", "terminated", "truncated", "next.done", "next.terminated", "next.truncated")


def recording_loop(
    name: str,
    policy: Callable[[Tensor], Any] | None = None,
    *,
    num_envs: int = 1,
    steps: int = 200,
    indices: bool = False,
    outputs: Sequence[str] = (),
) -> Iterator[Batch]:
    """Yield batches without end from a plain loop over environments. Each batch has new arrays.

    Args:
        name: the environment's id.
        policy: observation tensor -> action tensor. Both are (num_envs, ...) for several environments, and a single
            observation and action for one. Discrete actions are one-hot. None draws each action from the action space.
            With `outputs`, the policy returns a tuple of the action and these tensors.
        num_envs: number of environments. They are stepped one after the other.
        steps: steps of a batch.
        indices: whether discrete actions are indices instead of one-hot vectors.
        outputs: names of further fields, which the policy computes.

    Yields:
        Field -> array (num_envs, steps, *leaf).
    """
    envs = [make_env(name) for _ in range(num_envs)]
    current = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    ids = np.arange(num_envs)
    space = envs[0].action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    one_hot = discrete and not indices
    action_shape = space.shape or ()
    if isinstance(space, gym.spaces.Discrete) and one_hot:
        action_shape = (int(space.n),)
    action_dtype = np.int64 if discrete else space.dtype
    with torch.no_grad():
        made = policy(_input(current))[1:] if policy is not None and outputs else ()
    forms = [(one.numpy().dtype, one.shape if num_envs == 1 else one.shape[1:]) for one in made]
    while True:
        obs = np.empty((num_envs, steps, *current.shape[1:]), current.dtype)
        nxt = np.empty_like(obs)
        action = np.zeros((num_envs, steps, *action_shape), action_dtype)
        reward = np.empty((num_envs, steps, 1), np.float32)
        flags = np.zeros((6, num_envs, steps, 1), bool)
        traj = np.empty((num_envs, steps), np.int64)
        others = [np.empty((num_envs, steps, *shape), dtype) for dtype, shape in forms]
        with torch.no_grad():
            for t in range(steps):
                obs[:, t], traj[:, t] = current, ids
                if policy is not None:
                    found = policy(_input(current))
                    if outputs:
                        found, *made = found
                        for column, value in zip(others, made, strict=True):
                            column[:, t] = value.numpy()
                    a = found.numpy().reshape(num_envs, *action_shape)
                    action[:, t] = a
                    choices = a.argmax(-1).tolist() if one_hot else a.tolist() if discrete else a
                for i, env in enumerate(envs):
                    if policy is not None:
                        choice = choices[i]
                    else:
                        choice = env.action_space.sample()
                        if one_hot:
                            action[i, t, choice] = 1
                        else:
                            action[i, t] = choice
                    o, r, terminated, truncated, _ = env.step(choice)
                    nxt[i, t], reward[i, t] = o, r
                    flags[3, i, t], flags[4, i, t], flags[5, i, t] = (
                        terminated or truncated,
                        terminated,
                        truncated,
                    )
                    if terminated or truncated:
                        o, _ = env.reset()
                        ids[i] = ids.max() + 1
                    current[i] = o
        yield {
            "observation": obs,
            "action": action,
            "next.observation": nxt,
            "next.reward": reward,
            "traj_ids": traj,
            **dict(zip(outputs, others, strict=True)),
            **dict(zip(FLAGS, flags, strict=True)),
        }


def _input(current: NDArray[Any]) -> Tensor:
    return torch.from_numpy(current if len(current) > 1 else current[0])
