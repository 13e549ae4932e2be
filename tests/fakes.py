"""Fake gymnasium environments: some mark their data with its origin, some misbehave on purpose.

The oracle: an observation is `(stream, episode, step)`. `Script` defines the length, the ending and the rewards of each
episode. So a test can tell from rows alone which data is lost, repeated or stale. Environments built on `EnvBase` are
in `tests/fakes_base.py`.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class FakeFailure(Exception):
    """Raised by environments that fail on purpose. The library doesn't know this class."""


@dataclass(frozen=True)
class Script:
    """Lengths, endings and rewards of all episodes of all streams, as a pure function of the arguments.

    Args:
        seed: seed of the episode lengths.
        low: shortest episode, in steps.
        high: longest episode, in steps (inclusive).
        ending: "terminated", "truncated", "both", "mixed" (alternates by episode) or "never".
        lengths: explicit episode lengths, cycled; overrides `low` and `high`.
    """

    seed: int = 0
    low: int = 1
    high: int = 7
    ending: str = "mixed"
    lengths: tuple[int, ...] = ()

    def length(self, stream: int, episode: int) -> int:
        """Return the number of steps of an episode."""
        if self.lengths:
            return self.lengths[(episode + stream) % len(self.lengths)]
        return random.Random(f"{self.seed}/{stream}/{episode}").randint(self.low, self.high)

    def flags(self, stream: int, episode: int, step: int) -> tuple[bool, bool]:
        """Return (terminated, truncated) after the step that leads to observation `step`."""
        if self.ending == "never" or step < self.length(stream, episode):
            return False, False
        ending = ("terminated", "truncated", "both")[episode % 3] if self.ending == "mixed" else self.ending
        return ending in ("terminated", "both"), ending in ("truncated", "both")

    def reward(self, stream: int, episode: int, step: int) -> float:
        """Return the reward of the step that leads to observation `step`; exact in float32."""
        return stream + episode / 16 + step / 1024


class OracleEnv(gym.Env[Any, Any]):
    """Observes `(stream, episode, step)` and records each action and each reset.

    `episode` counts the resets from 0. Subclasses change the emitted data in `_emit` and `_reward`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        stream: int = 0,
        script: Script | None = None,
        *,
        dtype: Any = np.float32,
        action_space: spaces.Space[Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.stream, self.script, self.render_mode = stream, script or Script(), render_mode
        high = np.inf if np.issubdtype(dtype, np.floating) else 2**31 - 1
        low = -high if np.issubdtype(dtype, np.floating) else 0
        self.observation_space = spaces.Box(low, high, (3,), dtype)
        self.action_space = action_space or spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.dtype, self.episode, self.step_index, self.steps_taken, self.closed = dtype, -1, 0, 0, 0
        self.actions: list[Any] = []
        self.resets: list[tuple[int | None, dict[str, Any] | None]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode."""
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self.episode, self.step_index = self.episode + 1, 0
        return self._emit(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step. The action has no effect."""
        self.actions.append(np.array(action, copy=True))
        self.steps_taken, self.step_index = self.steps_taken + 1, self.step_index + 1
        terminated, truncated = self.script.flags(self.stream, self.episode, self.step_index)
        return self._emit(), self._reward(), terminated, truncated, self._info()

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1

    def render(self) -> np.ndarray:
        """Return a small image whose first pixel is (stream, episode, step)."""
        frame = np.zeros((6, 8, 3), np.uint8)
        frame[0, 0] = (self.stream % 256, self.episode % 256, self.step_index % 256)
        return frame

    def hello(self, name: str) -> str:
        """Return a greeting; tests of attribute pass-through call this method."""
        return f"hello {name} from {self.stream}"

    def _emit(self) -> Any:
        return np.array((self.stream, self.episode, self.step_index), self.dtype)

    def _reward(self) -> Any:
        return self.script.reward(self.stream, self.episode, self.step_index)

    def _info(self) -> dict[str, Any]:
        return {}


class ReusingEnv(OracleEnv):
    """Returns the same array from every call and overwrites it in place."""

    def _emit(self) -> Any:
        if not hasattr(self, "_array"):
            self._array = np.zeros(3, self.dtype)
        self._array[:] = (self.stream, self.episode, self.step_index)
        return self._array


class RaisingEnv(OracleEnv):
    """Raises once: in its `at`-th step or in its `at`-th reset. Both count from 1 over all episodes."""

    def __init__(
        self, at: int, where: str = "step", error: BaseException | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.at, self.where, self.error = at, where, error or FakeFailure("the fake broke on purpose")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or raise."""
        result = super().reset(seed=seed, options=options)
        if self.where == "reset" and len(self.resets) == self.at:
            raise self.error
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step, or raise."""
        result = super().step(action)
        if self.where == "step" and self.steps_taken == self.at:
            raise self.error
        return result


class NonFiniteEnv(OracleEnv):
    """Puts `value` into its observation or reward once, after its `at`-th step. Steps count over all episodes."""

    def __init__(
        self, at: int, value: float = float("nan"), where: str = "observation", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.at, self.value, self.where, self._fired = at, value, where, False

    def _emit(self) -> Any:
        observation = super()._emit()
        if self.where == "observation" and self.steps_taken == self.at and self.step_index:
            observation[1] = self.value
        return observation

    def _reward(self) -> Any:
        return self.value if self.where == "reward" and self.steps_taken == self.at else super()._reward()


class DriftingEnv(OracleEnv):
    """Deviates from its declared dtype or shape once, after its `at`-th step. Steps count over all episodes."""

    def __init__(self, at: int, change: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at, self.change = at, change

    def _emit(self) -> Any:
        observation = super()._emit()
        if self.steps_taken != self.at or not self.step_index:
            return observation
        return {
            "dtype": lambda: observation.astype(np.float64),
            "integer": lambda: observation.astype(np.int64),
            "longer": lambda: np.concatenate([observation, observation[:1]]),
            "shorter": lambda: observation[:1],
            "scalar": lambda: np.float32(0.0),
        }[self.change]()


class MisdeclaredEnv(OracleEnv):
    """Declares float32 but returns float64 from the first reset."""

    def _emit(self) -> Any:
        return super()._emit().astype(np.float64)


class DictEnv(OracleEnv):
    """A Dict observation: the oracle under `key`, and a goal of another shape under "goal"."""

    def __init__(
        self,
        key: str = "state",
        extra: tuple[str, ...] = (),
        *,
        drop_at: int = -1,
        add_at: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.key, self.extra, self.drop_at, self.add_at = key, extra, drop_at, add_at
        box = self.observation_space
        goal = spaces.Box(-1.0, 1.0, (2, 2), np.float32)
        self.observation_space = spaces.Dict({key: box, **dict.fromkeys(extra, box), "goal": goal})

    def _emit(self) -> Any:
        row = super()._emit()
        goal = np.full((2, 2), self.step_index / 1024, np.float32)
        emitted = {self.key: row, **dict.fromkeys(self.extra, row + 1), "goal": goal}
        if self.step_index and self.steps_taken == self.drop_at:
            del emitted["goal"]
        if self.step_index and self.steps_taken == self.add_at:
            emitted["surprise"] = row
        return emitted


class NestedDictEnv(OracleEnv):
    """A Dict in a Dict: ("robot", "pose") is the oracle, ("robot", "clock") its step and "camera" an image."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        clock = spaces.Box(0, 2**31 - 1, (1,), np.int64)
        camera = spaces.Box(0, 255, (4, 4, 1), np.uint8)
        robot = spaces.Dict({"pose": self.observation_space, "clock": clock})
        self.observation_space = spaces.Dict({"robot": robot, "camera": camera})

    def _emit(self) -> Any:
        robot = {"pose": super()._emit(), "clock": np.array([self.step_index], np.int64)}
        return {"robot": robot, "camera": np.full((4, 4, 1), self.step_index % 256, np.uint8)}


class TupleEnv(OracleEnv):
    """A Tuple of two Boxes of one shape: the oracle, and the oracle plus one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Tuple((self.observation_space, self.observation_space))

    def _emit(self) -> Any:
        return super()._emit(), super()._emit() + 1


class SpaceEnv(OracleEnv):
    """Draws observations from any space and keeps them in `emitted`, in the order of emission."""

    def __init__(self, observation_space: spaces.Space[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = observation_space
        self.observation_space.seed(0)
        self.emitted: list[Any] = []

    def _emit(self) -> Any:
        self.emitted.append(self.observation_space.sample())
        return self.emitted[-1]


class MutatingEnv(OracleEnv):
    """Overwrites the action array that it receives, as environments do that clip in place."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step and spoil the action."""
        result = super().step(action)
        action[...] = 0
        return result


class InfoEnv(OracleEnv):
    """Reports `velocity` (2 floats), `count` (an integer) and `_secret` in info."""

    def __init__(self, *, info_at_reset: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.info_at_reset = info_at_reset

    def _info(self) -> dict[str, Any]:
        if self.step_index == 0 and not self.info_at_reset:
            return {}
        velocity = np.array([self.episode, self.step_index], np.float32)
        return {"velocity": velocity, "count": self.step_index, "_secret": 1.0}


class FrameEnv(OracleEnv):
    """Observations are uint8 images (size, size, 4) whose first pixel is (stream, episode, step, 255)."""

    def __init__(self, *, size: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(0, 255, (size, size, 4), np.uint8)

    def _emit(self) -> Any:
        frame = np.zeros(self.observation_space.shape, np.uint8)
        frame[0, 0] = (self.stream, self.episode % 256, self.step_index, 255)
        return frame


DISCRETE_HAS_DTYPE = "dtype" in inspect.signature(spaces.Discrete).parameters
"""Whether this is gymnasium 1.2 or newer."""
TAXI_ID = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"
ORACLE_ID = "gleanrl-tests/Oracle-v0"
if ORACLE_ID not in gym.registry:
    gym.register(ORACLE_ID, entry_point=OracleEnv)
