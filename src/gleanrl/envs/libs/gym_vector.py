"""Vector environments by name: gymnasium's environments, put together so that resets are left to us."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from gleanrl.envs.libs.gym_pixels import with_pixels
from gleanrl.envs.libs.gym_simulator import Simulator, StepResult
from gleanrl.errors import InvalidArgumentError, UnsupportedError

MODES = ("sync", "async", "vector_entry_point")


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action; rewards are added up, an episode's end ends the step.

    Args:
        env: the environment.
        num_frames: how often, at least 1.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], num_frames: int) -> None:
        super().__init__(env)
        self._skip = Simulator(env, num_frames).stepping()

    def step(self, action: Any) -> StepResult:
        """Take the action `num_frames` times, or until the episode ends."""
        result: StepResult = self._skip(action)
        return result


def make_vector(
    env_name: Any, num_envs: int, pixels_only: bool | None, frame_skip: int, gym_kwargs: Mapping[str, Any]
) -> VectorEnv[Any, Any, Any]:
    """Return `num_envs` environments of one name in one vector environment.

    Args:
        env_name: the id of a registered environment.
        num_envs: how many.
        pixels_only: None for the environment's own observations; True for rendered frames instead, False for
            frames beside them.
        frame_skip: how often each environment repeats an action.
        gym_kwargs: for `gymnasium.make`; `vectorization_mode` (``"sync"`` unless given) and `vector_kwargs` for
            `gymnasium.make_vec`.

    Raises:
        InvalidArgumentError: for another `vectorization_mode`.
        UnsupportedError: for pixels or frame skip in an environment that isn't made of single ones.
    """
    kwargs = dict(gym_kwargs)
    mode = kwargs.pop("vectorization_mode", None) or "sync"
    mode = mode.value if isinstance(mode, Enum) else mode
    if mode not in MODES:
        raise InvalidArgumentError(f"vectorization_mode: expected one of {MODES}, got {mode!r}")
    wrappers = _wrappers(pixels_only, frame_skip)
    if mode == "vector_entry_point":
        if wrappers:
            raise UnsupportedError(
                "from_pixels, frame_skip: a vector environment that isn't made of single ones has neither; leave "
                "vectorization_mode out"
            )
        kwargs.pop("disable_env_checker", None)  # gymnasium checks single environments only
        return gymnasium.make_vec(env_name, num_envs, mode, **kwargs)
    # What we read we copy: another copy of every observation would only cost time.
    vector_kwargs = {
        "autoreset_mode": AutoresetMode.DISABLED,
        "copy": False,
        **(kwargs.pop("vector_kwargs", None) or {}),
    }
    return gymnasium.make_vec(env_name, num_envs, mode, vector_kwargs, wrappers, **kwargs)


def _wrappers(pixels_only: bool | None, frame_skip: int) -> list[Callable[..., Any]]:
    """Return what each environment is wrapped in; frames that are skipped aren't rendered."""
    found: list[Callable[..., Any]] = []
    if frame_skip > 1:
        found.append(functools.partial(FrameSkip, num_frames=frame_skip))
    if pixels_only is not None:
        found.append(functools.partial(with_pixels, pixels_only=pixels_only))
    return found
