"""gymnasium's environments: `GymEnv` by name, `GymWrapper` around one that exists."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch

from gleanrl.envs.base import EnvBase
from gleanrl.envs.libs.gym_backend import gym_backend, set_gym_backend
from gleanrl.envs.libs.gym_info import default_info_dict_reader
from gleanrl.envs.libs.gym_like import GymLikeEnv
from gleanrl.envs.libs.gym_pixels import PIXELS, rendering, with_pixels
from gleanrl.errors import InvalidTypeError, UnsupportedError

__all__ = [
    "GymEnv",
    "GymLikeEnv",
    "GymWrapper",
    "default_info_dict_reader",
    "gym_backend",
    "set_gym_backend",
]


class GymWrapper(GymLikeEnv):
    """A gymnasium environment that exists already.

    Keys, encodings, seeds, hooks and attributes are those of `GymLikeEnv`.

    Args:
        env: the environment; `close` closes it.
        categorical_action_encoding: whether Discrete and MultiDiscrete spaces, those of observations
            included, give integers; if not, they give one-hot vectors (int64).
        from_pixels: whether to observe rendered frames, ``(H, W, 3)`` uint8 under ``"pixels"``; the
            environment must have been made with ``render_mode="rgb_array"``, and is reset once to find out
            the frames' shape.
        pixels_only: with `from_pixels`, whether the frame is the only observation.
        frame_skip: how often an action is repeated in a step; rewards are added up, an episode's end ends the
            step.
        device: where TensorDicts live; None for TensorDicts without a device.
        batch_size: ``()`` or None: one environment.
        allow_done_after_reset: accepted for any environment; gymnasium's resets never return done.

    Raises:
        InvalidTypeError: if `env` isn't a gymnasium environment.
        SpaceError: if columns can't hold the values of one of its spaces.
        UnsupportedError: for a vector environment, or `from_pixels` without rendering.

    Examples:
        >>> env = GymWrapper(gymnasium.make("CartPole-v1"))
        >>> env.set_seed(0)
        0
        >>> env.reset()["observation"].shape
        torch.Size([4])
    """

    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        device: torch.device | str | int | None = None,
        batch_size: Any = None,
        allow_done_after_reset: bool = False,
    ) -> None:
        if isinstance(env, gymnasium.vector.VectorEnv):
            raise UnsupportedError(
                f"env: {env} is a vector environment, which isn't supported yet; wrap single environments"
            )
        if isinstance(env, EnvBase):
            raise InvalidTypeError(
                f"env: expected a gymnasium environment, got the {type(env).__name__} {env}"
            )
        super().__init__(
            with_pixels(env, pixels_only) if from_pixels else env,
            observation_key=PIXELS if from_pixels and pixels_only else "observation",
            categorical_action_encoding=categorical_action_encoding,
            frame_skip=frame_skip,
            device=device,
            batch_size=batch_size,
            allow_done_after_reset=allow_done_after_reset,
        )


class GymEnv(GymWrapper):
    """A gymnasium environment by name.

    Keys, encodings, seeds, hooks and attributes are those of `GymLikeEnv`.

    Args:
        env_name: the id of a registered environment.
        categorical_action_encoding: see `GymWrapper`.
        num_envs: 0: one environment. Vector environments aren't supported yet.
        disable_env_checker: passed to `gymnasium.make`: whether to leave out gymnasium's own checks of every
            step.
        from_pixels: see `GymWrapper`; ``render_mode="rgb_array"`` is added to `gym_kwargs`.
        pixels_only: see `GymWrapper`.
        frame_skip: see `GymWrapper`.
        device: see `GymWrapper`.
        batch_size: see `GymWrapper`.
        allow_done_after_reset: see `GymWrapper`.
        **gym_kwargs: passed to `gymnasium.make`.

    Raises:
        UnsupportedError: if `num_envs` is positive.

    Examples:
        >>> env = GymEnv("Pendulum-v1")
        >>> env.rollout(3).shape
        torch.Size([3])
    """

    def __init__(
        self,
        env_name: Any,
        *,
        categorical_action_encoding: bool = False,
        num_envs: int = 0,
        disable_env_checker: bool = True,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        device: torch.device | str | int | None = None,
        batch_size: Any = None,
        allow_done_after_reset: bool = False,
        **gym_kwargs: Any,
    ) -> None:
        if num_envs != 0:
            raise UnsupportedError(
                f"num_envs: vector environments aren't supported yet, got {num_envs!r}; "
                "leave it out for one environment"
            )
        if from_pixels:
            gym_kwargs = rendering(gym_kwargs)
        env = gymnasium.make(env_name, disable_env_checker=disable_env_checker, **gym_kwargs)
        super().__init__(
            env,
            categorical_action_encoding,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            frame_skip=frame_skip,
            device=device,
            batch_size=batch_size,
            allow_done_after_reset=allow_done_after_reset,
        )
        self.env_name = env_name
