"""Observations that are rendered frames."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import AddRenderObservation

from gleanrl.errors import InvalidArgumentError, UnsupportedError

PIXELS = "pixels"


def with_pixels(env: gymnasium.Env[Any, Any], pixels_only: bool) -> gymnasium.Env[Any, Any]:
    """Return `env` with its rendered frame as its observation, or as one more entry of it.

    The frame's shape is found out by a reset and a rendering.

    Args:
        env: made with ``render_mode="rgb_array"``.
        pixels_only: whether the frame takes the place of the observation. If not, the result is a Dict with
            the frame under ``"pixels"``, beside the entries of a Dict observation or, for any other space,
            ``"observation"``.

    Raises:
        UnsupportedError: if the environment doesn't render arrays.
        InvalidArgumentError: if the observation has an entry ``"pixels"`` already.
    """
    mode = getattr(env, "render_mode", None)
    if mode != "rgb_array":
        raise UnsupportedError(
            f"from_pixels: {env} renders in mode {mode!r}, expected 'rgb_array'; "
            "make it with render_mode='rgb_array'"
        )
    space = env.observation_space
    if not pixels_only and isinstance(space, spaces.Dict) and PIXELS in space.spaces:
        raise InvalidArgumentError(
            f"from_pixels: {env} has an observation {PIXELS!r} of its own; "
            "pass pixels_only=True, or leave from_pixels out"
        )
    try:
        return AddRenderObservation(env, render_only=pixels_only, render_key=PIXELS, obs_key="observation")
    except TypeError as cause:
        raise UnsupportedError(f"from_pixels: {env} doesn't render arrays: {cause}") from cause


def observes_frames(env: Any) -> bool:
    """Return whether an environment's observations are frames: ``(H, W, 3)`` from 0 to 255, or a Dict with `PIXELS`.

    Args:
        env: a single one, or a vector of them; of anything else it isn't known.
    """
    space: Any = None
    if isinstance(env, gymnasium.vector.VectorEnv):
        space = env.single_observation_space
    elif isinstance(env, gymnasium.Env):
        space = env.observation_space
    if isinstance(space, spaces.Dict):
        return PIXELS in space.spaces
    if not isinstance(space, spaces.Box) or len(space.shape) != 3 or space.shape[-1] != 3:
        return False
    return bool((space.low == 0).all() and (space.high == 255).all())


def rendering(gym_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `gymnasium.make` with a render mode that gives arrays.

    Raises:
        InvalidArgumentError: if they ask for another render mode.
    """
    mode = gym_kwargs.get("render_mode", "rgb_array")
    if mode != "rgb_array":
        raise InvalidArgumentError(f"render_mode: from_pixels needs 'rgb_array', got {mode!r}")
    return {**gym_kwargs, "render_mode": mode}
