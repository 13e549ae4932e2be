"""Collectors over gymnasium's vector environments, against a bare vector loop that stores the same fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import Tensor

from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.recording_loop import FLAGS, Batch
from benchmarks.workload import Greedy
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper

STEPS = 100
NAME = "CartPole-v1"
Policy = Callable[[Tensor], Tensor]


def vector_loop(env: Any, policy: Policy | None = None, *, steps: int = STEPS) -> Iterator[Batch]:
    """Yield batches without end from a plain loop over a vector environment. Each batch has new arrays.

    Args:
        env: CartPole's native vector environment, which resets itself in the step after an end, or a vector environment
            that the loop resets.
        policy: (num_envs, 4) observation tensor -> (num_envs, 2) one-hot action tensor; None draws random actions.
        steps: steps of a batch.

    Yields:
        Field -> array (num_envs, steps, *leaf).
    """
    masked = env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    num_envs, draws = env.num_envs, np.random.default_rng(0)
    current, _ = env.reset(seed=0)
    ids, next_id, resetting = np.arange(num_envs), num_envs, np.zeros(num_envs, bool)
    everyone = np.arange(num_envs)
    while True:
        obs = np.empty((num_envs, steps, *current.shape[1:]), current.dtype)
        nxt = np.empty_like(obs)
        action = np.zeros((num_envs, steps, 2), np.int64)
        reward = np.empty((num_envs, steps, 1), np.float32)
        flags = np.zeros((6, num_envs, steps, 1), bool)
        traj = np.empty((num_envs, steps), np.int64)
        mask = np.ones((num_envs, steps), bool)
        with torch.no_grad():
            for t in range(steps):
                obs[:, t], traj[:, t] = current, np.where(resetting, -1, ids)
                if masked:
                    mask[:, t] = ~resetting
                if policy is not None:
                    chosen = policy(torch.from_numpy(current)).numpy()
                    action[:, t] = chosen
                    choices = chosen.argmax(-1)
                else:
                    choices = draws.integers(0, 2, num_envs)
                    action[everyone, t, choices] = 1
                after, r, terminated, truncated, _ = env.step(choices)
                done = terminated | truncated
                nxt[:, t], reward[:, t, 0] = after, r
                flags[3, :, t, 0], flags[4, :, t, 0], flags[5, :, t, 0] = done, terminated, truncated
                if done.any():
                    ids[done] = np.arange(next_id, next_id + done.sum())
                    next_id += int(done.sum())
                    if not masked:
                        after, _ = env.reset(options={"reset_mask": done})
                if masked:
                    resetting = done
                current = after
        yield {
            "observation": obs,
            "action": action,
            "next.observation": nxt,
            "next.reward": reward,
            "traj_ids": traj,
            **({"mask": mask} if masked else {}),
            **dict(zip(FLAGS, flags, strict=True)),
        }


def native(num_envs: int) -> Any:
    """Return CartPole's native vector environment."""
    return gym.make_vec(NAME, num_envs, "vector_entry_point")


def wrapped(num_envs: int) -> GymWrapper:
    """Return the same as an environment of ours."""
    return GymWrapper(native(num_envs))


def serial(num_envs: int) -> Any:
    """Return gymnasium's vector of single environments, without automatic resets."""
    kwargs = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    return gym.make_vec(NAME, num_envs, "sync", kwargs, disable_env_checker=True)


def by_hand(
    make: Callable[[int], Any], num_envs: int, policy: Callable[[], Policy] | None, batches: int = 1
) -> Setup:
    """Return the set-up of the loop's side, with `batches` batches per turn."""

    def setup() -> Work:
        source = vector_loop(make(num_envs), policy() if policy else None)

        def work() -> int:
            for _ in islice(source, batches):
                pass
            return batches * num_envs * STEPS

        return work

    return setup


def ours(
    make: Callable[[int], Any],
    num_envs: int,
    policy: Callable[[], Any] | None,
    batches: int = 1,
    **options: Any,
) -> Setup:
    """Return the set-up of the collector's side, with `batches` batches per turn and further arguments."""

    def setup() -> Work:
        actor = None
        if policy:
            actor = TensorDictModule(policy(), in_keys=["observation"], out_keys=["action"])
        collector = SyncDataCollector(
            make(num_envs), actor, frames_per_batch=num_envs * STEPS, total_frames=-1, **options
        )
        source = iter(collector)

        def work() -> int:
            for _ in islice(source, batches):
                pass
            return batches * num_envs * STEPS

        return work

    return setup


def _case(
    name: str,
    title: str,
    sides: tuple[Callable[[int], Any], Callable[[int], Any]],
    num_envs: int,
    policy: Callable[[], Any] | None = None,
) -> Case:
    bare, made = sides
    both = {"vector loop": by_hand(bare, num_envs, policy), "gleanrl": ours(made, num_envs, policy)}
    return Case(f"vector/{name}", title, "frame", both, "vector loop", targets=(Target(0.8),))


_NATIVE = (native, wrapped)
_SERIAL = (serial, lambda num_envs: GymEnv(NAME, num_envs=num_envs))
CASES = (
    _case("native-random", "CartPole's native vector environment of 64, random actions", _NATIVE, 64),
    _case("native-mlp", "CartPole's native vector environment of 64, 2x64 tanh network", _NATIVE, 64, Greedy),
    _case("sync-mlp", "GymEnv(CartPole-v1, num_envs=8), 2x64 tanh network", _SERIAL, 8, Greedy),
)
