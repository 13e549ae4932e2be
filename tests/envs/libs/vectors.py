"""Vector environments for tests: the oracle in every autoreset mode, and one that resets without a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from tests.fakes import OracleEnv, Script

MODES = (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
SCRIPT = Script(seed=3, low=1, high=5)


def vector(
    mode: AutoresetMode = AutoresetMode.DISABLED,
    num_envs: int = 3,
    script: Script = SCRIPT,
    kind: Callable[..., Any] = OracleEnv,
    asynchronous: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a vector environment of oracle streams 0 to P-1; `kwargs` other than copy go to each stream."""
    options = {"copy": kwargs.pop("copy", True), "autoreset_mode": mode}
    if "shared_memory" in kwargs:
        options["shared_memory"] = kwargs.pop("shared_memory")
    makers = [lambda i=i: kind(stream=i, script=script, **kwargs) for i in range(num_envs)]
    return (AsyncVectorEnv if asynchronous else SyncVectorEnv)(makers, **options)


class NativeOracle(VectorEnv[Any, Any, Any]):
    """The oracle as a vector environment. It resets in the step after an end and ignores options.

    With `reuse`, every call returns the same array.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 3, script: Script = SCRIPT, reuse: bool = False) -> None:
        self.num_envs, self.script, self.reuse = num_envs, script, reuse
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episodes, self.clocks = np.full(num_envs, -1), np.zeros(num_envs, int)
        self.ended = np.zeros(num_envs, bool)
        self._array = np.zeros((num_envs, 3), np.float32)
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in all environments."""
        self.seeds.append(seed)
        self.episodes += 1
        self.clocks[:], self.ended[:] = 0, False
        return self._emit(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the running environments and reset the ended ones."""
        self.clocks = np.where(self.ended, 0, self.clocks + 1)
        self.episodes = self.episodes + self.ended
        triples = list(zip(range(self.num_envs), self.episodes.tolist(), self.clocks.tolist(), strict=True))
        flags = np.array([(False, False) if t[2] == 0 else self.script.flags(*t) for t in triples])
        reward = np.array([self.script.reward(*t) for t in triples], np.float32)
        self.ended = flags.any(-1)
        return self._emit(), reward, flags[:, 0], flags[:, 1], {}

    def _emit(self) -> Any:
        array = self._array if self.reuse else np.empty_like(self._array)
        array[:] = np.stack([np.arange(self.num_envs), self.episodes, self.clocks], -1)
        return array


class MaskedOracle(NativeOracle):
    """A `NativeOracle` with masked resets. A reset returns garbage in the rows outside the mask."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode where the mask is True."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.episodes[mask] += 1
        self.clocks[mask] = 0
        out = self._emit()
        out[~mask] = -77
        return out, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments, ended or not."""
        self.ended[:] = False
        return super().step(actions)


def record_statistics(env: Any) -> Any:
    """Return `env` with gymnasium's episode statistics in its info."""
    return gym.wrappers.vector.RecordEpisodeStatistics(env)
