"""`Simulator`: steps, resets, seeds and closes the gymnasium environment inside a wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from gleanrl.errors import ClosedError, EnvironmentContractError

StepResult: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""The result of gymnasium's `step`: observation, reward, terminated, truncated, info."""


class OpenEnv:
    """Holds an environment and closes it at most once. Its users call `require_open` before they use the environment.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.closed = False

    def close(self) -> None:
        """Close the environment. A second call does nothing, even if the first one raised."""
        if not self.closed:
            self.closed = True
            self.env.close()

    def require_open(self) -> None:
        """Check that the environment wasn't closed.

        Raises:
            ClosedError: if it was.
        """
        if self.closed:
            raise ClosedError(f"{self.env} was closed; make a new environment")


class Simulator(OpenEnv):
    """One gymnasium environment with a frame skip and a seed for its next reset. Not thread-safe.

    Args:
        env: the environment.
        frame_skip: number of times that one step repeats an action, at least 1.
    """

    def __init__(self, env: Any, frame_skip: int = 1) -> None:
        super().__init__(env)
        self.frame_skip = frame_skip
        self._seed: int | None = None

    def stepping(self) -> Callable[[Any], Any]:
        """Return the function that takes an action; for a `frame_skip` of 1 the environment's `step`, unchecked."""
        return self.env.step if self.frame_skip == 1 else self._skip

    def seed(self, seed: int | None) -> None:
        """Seed the environment at its next reset, and only at that one; None cancels an earlier seed."""
        self._seed = seed

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode. The seed set by `seed` is used up, even if the reset raises.

        Args:
            **kwargs: arguments of the environment's `reset`. A `seed` here takes precedence over the seed set by
                `seed`.

        Returns:
            The first observation and the info.

        Raises:
            ClosedError: if the simulator was closed.
            EnvironmentContractError: if the environment doesn't return a pair.
        """
        self.require_open()
        seed, self._seed = self._seed, None
        if seed is not None and kwargs.get("seed") is None:
            kwargs["seed"] = seed
        return checked_reset(self.env.reset(**kwargs))

    def _skip(self, action: Any) -> StepResult:
        """Repeat `action` at most `frame_skip` times, until the episode ends; sum the rewards."""
        step, spare = self.env.step, not np.isscalar(action)
        total: Any = None
        for _ in range(self.frame_skip):
            # The environment may change its action in place and reuse its reward's array, so both are copied.
            result = checked_step(step(copy.deepcopy(action) if spare else action))
            observation, reward, terminated, truncated, info = result
            total = copy.copy(reward) if total is None else total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def checked_step(result: Any) -> StepResult:
    """Return the result of `step`, after a check that it has five values.

    Raises:
        EnvironmentContractError: if it hasn't.
    """
    if isinstance(result, tuple) and len(result) == 5:
        return result
    got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    raise EnvironmentContractError(
        f"step: expected (observation, reward, terminated, truncated, info), got {got}; an environment of "
        "the old gym interface needs gymnasium's compatibility wrappers"
    )


def checked_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Return the result of `reset`, after a check that it is a pair.

    Raises:
        EnvironmentContractError: if it isn't.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise EnvironmentContractError(
        f"reset: expected (observation, info), got {type(result).__name__}; an environment of the "
        "old gym interface needs gymnasium's compatibility wrappers"
    )
