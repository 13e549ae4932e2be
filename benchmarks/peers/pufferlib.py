"""PufferLib's sides: its Serial backend in a loop that stores steps in arrays, since PufferLib has no such storage.

A step that only resets an environment is not counted as a frame. The loop stores fewer fields than a collector: no
trajectory numbers, and only the flags that PufferLib returns.

PufferLib's own package downloads a graphics library while it is built, which needs a connection to GitHub. Without one,
the package pufferlib-core has the same loop. It is a copy of PufferLib 3 that another project maintains.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pufferlib.emulation
import pufferlib.vector
import torch
from torch.distributions import Categorical

from benchmarks.sampled import Sampled
from benchmarks.workload import Greedy, make_env, mlp


def _version() -> str:
    try:
        return importlib.metadata.version("pufferlib")
    except importlib.metadata.PackageNotFoundError:
        return f"core {importlib.metadata.version('pufferlib-core')}"


VERSION = _version()
STEPS = 200
Work = Callable[[], float]


def collecting(make: Callable[[], Callable[[Any], Any]], frames: int, scored: bool) -> Callable[[], Work]:
    """Return the set-up of batches of 200 steps of one CartPole.

    Args:
        make: builds the policy: observations (1, 4) -> a one-hot action (1, 2); or, if `scored`, a tuple of an index
            (1,), its log-probability (1,) and logits (1, 2).
        frames: frames per turn.
        scored: see `make`.
    """

    def setup() -> Work:
        envs = pufferlib.vector.make(
            pufferlib.emulation.GymnasiumPufferEnv,
            env_kwargs={"env_creator": partial(make_env, "CartPole-v1")},
            backend=pufferlib.vector.Serial,
            num_envs=1,
        )
        policy, idle = make(), np.zeros(1, np.int64)
        current = envs.reset(0)[0].copy()

        def batch() -> dict[str, Any]:
            nonlocal current
            obs, following = np.empty((2, STEPS, 4), np.float32)
            actions, flags = np.zeros((STEPS, 1), np.int64), np.zeros((2, STEPS), bool)
            reward, scores = np.empty(STEPS, np.float32), np.empty(STEPS, np.float32)
            logits = np.empty((STEPS, 2), np.float32)
            for t in range(STEPS):
                obs[t] = current[0]
                found = policy(torch.from_numpy(current))
                if scored:
                    chosen, score, values = found
                    action, scores[t], logits[t] = chosen.numpy(), score.numpy()[0], values.numpy()[0]
                else:
                    action = found.numpy().argmax(-1)
                after, r, terminated, truncated, _ = envs.step(action)
                actions[t], following[t], reward[t] = action, after[0], r[0]
                flags[0, t], flags[1, t] = terminated[0], truncated[0]
                if terminated[0] or truncated[0]:
                    after = envs.step(idle)[0]  # this step resets the environment
                current = after.copy()  # the environment writes its observations into the same memory
            fields = {"obs": obs, "next": following, "actions": actions, "reward": reward, "flags": flags}
            return fields | ({"score": scores, "logits": logits} if scored else {})

        def work() -> int:
            with torch.no_grad():
                for _ in range(frames // STEPS):
                    batch()
            return frames

        return work

    return setup


_CATEGORICAL = Sampled(partial(mlp, 4, 2), ("logits",), Categorical, scored=True)
SETUPS = {
    "native/greedy-forward": collecting(Greedy, 1000, scored=False),
    "native/categorical": collecting(_CATEGORICAL.by_hand, 600, scored=True),
}
