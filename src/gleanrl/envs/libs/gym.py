"""gymnasium's environments, single ones and vectors of them: `GymEnv` by name, `GymWrapper` around one.

Observations that are rendered frames.

Vector environments by name: gymnasium's environments, put together so that resets are left to us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AddRenderObservation

from gleanrl._util import non_negative
from gleanrl.compat import bind
from gleanrl.envs.base import EnvBase
from gleanrl.envs.libs.gym_backend import gym_backend, named, set_gym_backend, with_gymnasiums_interface
from gleanrl.envs.libs.gym_info import BaseInfoDictReader, default_info_dict_reader
from gleanrl.envs.libs.gym_like import GymLikeEnv
from gleanrl.envs.libs.gym_simulator import Simulator, StepResult
from gleanrl.envs.libs.gym_spaces import register_gym_spec_conversion
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

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
