"""gymnasium's environments, single ones and vectors of them: `GymEnv` by name, `GymWrapper` around one."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import gymnasium
import torch

from gleanrl.arguments import non_negative
from gleanrl.compat import bind
from gleanrl.envs.base import EnvBase
from gleanrl.envs.libs.gym_backend import gym_backend, named, set_gym_backend, with_gymnasiums_interface
from gleanrl.envs.libs.gym_info import BaseInfoDictReader, default_info_dict_reader
from gleanrl.envs.libs.gym_like import GymLikeEnv
from gleanrl.envs.libs.gym_pixels import PIXELS, observes_frames, rendering, with_pixels
from gleanrl.envs.libs.gym_spaces import register_gym_spec_conversion
from gleanrl.envs.libs.gym_vector import make_vector
from gleanrl.errors import InvalidTypeError, UnsupportedError

__all__ = [
    "BaseInfoDictReader",
    "GymEnv",
    "GymLikeEnv",
    "GymWrapper",
    "default_info_dict_reader",
    "gym_backend",
    "register_gym_spec_conversion",
    "set_gym_backend",
]


class _AvailableEnvs:
    """The ids that gymnasium knows when they are asked for, of the class and of its environments."""

    def __get__(self, env: Any, owner: type[Any]) -> list[str]:
        return sorted(gymnasium.registry)


class GymWrapper(GymLikeEnv):
    """A gymnasium environment, or vector environment, that exists already.

    Keys, encodings, seeds, hooks and attributes are those of `GymLikeEnv`. A vector environment may have any
    autoreset mode; with NEXT_STEP, collectors mark the rows of its resets as no frames
    (``("collector", "mask")`` is False).

    Args:
        env: the environment; `close` closes it.
        categorical_action_encoding: whether Discrete and MultiDiscrete spaces, those of observations
            included, give integers; if not, they give one-hot vectors (int64).
        from_pixels: whether to observe rendered frames, ``(H, W, 3)`` uint8 under ``"pixels"``; the
            environment must have been made with ``render_mode="rgb_array"``, and is reset once to find out
            the frames' shape. Not for vector environments.
        pixels_only: with `from_pixels`, whether the frame is the only observation.
        frame_skip: how often an action is repeated in a step; rewards are added up, an episode's end ends the
            step. Not for vector environments.
        device: where TensorDicts live; None for TensorDicts without a device.
        batch_size: ``()`` for one environment, ``[P]`` for a vector environment; None for whichever it is.
        allow_done_after_reset: accepted for any environment; gymnasium's resets never return done.

    Attributes:
        available_envs: the ids that can be made; of the class, too.
        from_pixels: whether frames are observed: by the argument, or because the environment's observations are such.
        pixels_only: see the argument.

    Raises:
        InvalidTypeError: if `env` isn't a gymnasium environment.
        SpaceError: if columns can't hold the values of one of its spaces.
        UnsupportedError: for `from_pixels` or `frame_skip` with a vector environment, or `from_pixels` without
            rendering.

    Examples:
        >>> env = GymWrapper(gymnasium.make("CartPole-v1"))
        >>> env.set_seed(0)
        0
        >>> env.reset()["observation"].shape
        torch.Size([4])
    """

    available_envs = _AvailableEnvs()

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
        if isinstance(env, gymnasium.vector.VectorEnv) and (from_pixels or frame_skip != 1):
            raise UnsupportedError(
                f"from_pixels, frame_skip: {env} steps and observes all of its environments at once; wrap the single "
                "ones before they are put together, or let GymEnv(name, num_envs=...) do so"
            )
        if isinstance(env, EnvBase):
            raise InvalidTypeError(
                f"env: expected a gymnasium environment, got the {type(env).__name__} {env}"
            )
        env = with_gymnasiums_interface(env)
        if from_pixels:
            env = with_pixels(env, pixels_only)
        super().__init__(
            env,
            observation_key=self._key_of(env, from_pixels, pixels_only),
            categorical_action_encoding=categorical_action_encoding,
            frame_skip=frame_skip,
            device=device,
            batch_size=batch_size,
            allow_done_after_reset=allow_done_after_reset,
        )

    def _key_of(self, env: Any, from_pixels: bool, pixels_only: bool) -> str:
        """Note whether frames are observed; return the key of an observation that isn't a Dict."""
        self.from_pixels, self.pixels_only = from_pixels or observes_frames(env), pixels_only
        return PIXELS if self.from_pixels and pixels_only else "observation"

    @property
    def lib(self) -> ModuleType:
        """The library that the environments come from."""
        return gym_backend()

    def get_library_name(self, env: Any = None) -> str:
        """Return the name of the library whose interface the wrapped environment, or `env`, has."""
        return gym_backend().__name__


class GymEnv(GymWrapper):
    """A gymnasium environment by name, or several of them that step at once.

    Keys, encodings, seeds, hooks and attributes are those of `GymLikeEnv`. Once it was closed, by a collector at
    the end of its budget say, the next `reset` or `rollout` makes the environment anew.

    With `num_envs` the environments are put into gymnasium's SyncVectorEnv, or AsyncVectorEnv with
    ``vectorization_mode="async"``, that leaves resets to us (``AutoresetMode.DISABLED``): no row is wasted and none
    is masked. ``vectorization_mode="vector_entry_point"`` takes the vector environment that comes with the name
    (CartPole has one), which is faster but resets as it was written to.

    The other arguments are those of `GymWrapper`.

    Args:
        env_name: the id of a registered environment.
        num_envs: how many environments step at once, ``batch_size=[num_envs]``; 0 for one, without a batch
            dimension.
        disable_env_checker: passed to `gymnasium.make`: whether to leave out gymnasium's own checks of every
            step.
        from_pixels: see `GymWrapper`; ``render_mode="rgb_array"`` is added to `gym_kwargs`.
        **gym_kwargs: passed to `gymnasium.make`; with `num_envs`, `vectorization_mode` and `vector_kwargs` go to
            `gymnasium.make_vec`.

    Raises:
        InvalidArgumentError: if `num_envs` isn't an integer from 0.
        UnsupportedError: for `from_pixels` or `frame_skip` with ``vectorization_mode="vector_entry_point"``.

    Examples:
        >>> env = GymEnv("Pendulum-v1")
        >>> env.rollout(3).shape
        torch.Size([3])
        >>> GymEnv("Pendulum-v1", num_envs=4).rollout(3).shape
        torch.Size([4, 3])
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
        num_envs = non_negative("num_envs", num_envs)
        if from_pixels:
            gym_kwargs = rendering(gym_kwargs)
        gym_kwargs = {**gym_kwargs, "disable_env_checker": disable_env_checker}
        self.env_name = env_name
        env_name, gym_kwargs = named(env_name, gym_kwargs)
        one = functools.partial(gymnasium.make, env_name, **gym_kwargs)
        only = pixels_only if from_pixels else None
        several = functools.partial(make_vector, env_name, num_envs, only, frame_skip, gym_kwargs)
        options: dict[str, Any] = {
            "categorical_action_encoding": categorical_action_encoding,
            "device": device,
            "batch_size": batch_size,
            "allow_done_after_reset": allow_done_after_reset,
        }
        if num_envs == 0:
            pixels = {"from_pixels": from_pixels, "pixels_only": pixels_only}
            super().__init__(one(), **pixels, frame_skip=frame_skip, **options)
        else:
            # Its parts render and repeat actions already, which GymWrapper would refuse to do for a vector.
            vector = several()
            key = self._key_of(vector, from_pixels, pixels_only)
            GymLikeEnv.__init__(self, vector, observation_key=key, frame_skip=frame_skip, **options)
        self._make, self._pixels_only = several if num_envs else one, None if num_envs else only

    def _made_anew(self) -> Any:
        made: Any = self._make()
        return made if self._pixels_only is None else with_pixels(made, self._pixels_only)


bind(__name__, globals())
