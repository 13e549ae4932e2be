"""`GymEnv` and `GymWrapper`: gymnasium environments by name or by instance, single or as vector environments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from types import GeneratorType, ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AddRenderObservation

from gleanrl._util import non_negative
from gleanrl.compat import bind
from gleanrl.envs.base import EnvBase
from gleanrl.envs.libs.gym_backend import (
    advice,
    gym_backend,
    named,
    set_gym_backend,
    with_gymnasiums_interface,
)
from gleanrl.envs.libs.gym_info import BaseInfoDictReader, default_info_dict_reader
from gleanrl.envs.libs.gym_like import GymLikeEnv
from gleanrl.envs.libs.gym_simulator import Simulator, StepResult
from gleanrl.envs.libs.gym_spaces import register_gym_spec_conversion
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingLibraryError, UnsupportedError

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
    """Wrap `env` so that its rendered image is its observation, or an additional entry of it; return the wrapper.

    This resets `env` and renders it once, to determine the image's shape.

    Args:
        env: made with ``render_mode="rgb_array"``.
        pixels_only: whether the image replaces the observation. If False, the observation is a Dict: the image is under
            ``"pixels"``, and a Dict observation keeps its entries. Any other observation is under ``"observation"``.

    Raises:
        UnsupportedError: if the environment doesn't render arrays.
        InvalidArgumentError: if the observation already has an entry ``"pixels"``.
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
            f"from_pixels: {env} already has an observation {PIXELS!r}; "
            "pass pixels_only=True, or leave from_pixels out"
        )
    try:
        return AddRenderObservation(env, render_only=pixels_only, render_key=PIXELS, obs_key="observation")
    except (TypeError, AssertionError) as cause:  # gymnasium 1.1 asserts
        raise UnsupportedError(f"from_pixels: {env} doesn't render arrays: {cause}") from cause


def observes_frames(env: Any) -> bool:
    """Return whether `env` observes images: a Dict with `PIXELS`, or arrays ``(H, W, 3)`` with values from 0 to 255.

    Args:
        env: a gymnasium environment or vector environment. For any other object the result is False.
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
    """Return `gym_kwargs` with the render mode ``"rgb_array"``, which renders arrays.

    Raises:
        InvalidArgumentError: if `gym_kwargs` ask for another render mode.
    """
    mode = gym_kwargs.get("render_mode", "rgb_array")
    if mode != "rgb_array":
        raise InvalidArgumentError(f"render_mode: from_pixels needs 'rgb_array', got {mode!r}")
    return {**gym_kwargs, "render_mode": mode}


MODES = ("sync", "async", "vector_entry_point")


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action and sums the rewards. The end of an episode ends the step early.

    Args:
        env: the environment.
        num_frames: number of repetitions, at least 1.
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
    """Return a vector environment of `num_envs` environments with the id `env_name`.

    Args:
        env_name: the id of a registered environment.
        num_envs: number of environments.
        pixels_only: None for the environment's own observations. True replaces them by rendered images; False adds the
            images.
        frame_skip: number of times that each environment repeats an action.
        gym_kwargs: keyword arguments of `gymnasium.make`. `vectorization_mode` (default ``"sync"``) and `vector_kwargs`
            are passed to `gymnasium.make_vec`.

    Raises:
        InvalidArgumentError: for another `vectorization_mode`.
        UnsupportedError: for pixels or frame skip with ``"vector_entry_point"``, which has no single environments to
            wrap.
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
                "from_pixels, frame_skip: vectorization_mode='vector_entry_point' makes no single environments that "
                "could render or skip; leave vectorization_mode out"
            )
        kwargs.pop("disable_env_checker", None)  # gymnasium checks single environments only
        return gymnasium.make_vec(env_name, num_envs, mode, **kwargs)
    # The steppers copy every observation into a block. A copy in the vector environment would only cost time.
    vector_kwargs = {
        "autoreset_mode": AutoresetMode.DISABLED,
        "copy": False,
        **(kwargs.pop("vector_kwargs", None) or {}),
    }
    made = gymnasium.make_vec(env_name, num_envs, mode, vector_kwargs, wrappers, **kwargs)
    attributes = vars(made.unwrapped)
    # Gymnasium 1.1 keeps a generator of functions that has ended. It can't be saved or copied.
    if isinstance(attributes.get("env_fns"), GeneratorType):
        attributes["env_fns"] = ()
    return made


def _wrappers(pixels_only: bool | None, frame_skip: int) -> list[Callable[..., Any]]:
    """Return the wrappers of each single environment. The frame skip is inside, so skipped steps aren't rendered."""
    found: list[Callable[..., Any]] = []
    if frame_skip > 1:
        found.append(functools.partial(FrameSkip, num_frames=frame_skip))
    if pixels_only is not None:
        found.append(functools.partial(with_pixels, pixels_only=pixels_only))
    return found


def _require_name(env_name: Any) -> None:
    """Raise `InvalidTypeError` if `env_name` is an environment or a function, not the name of an environment."""
    if isinstance(env_name, EnvBase):
        write = "; pass that object without GymEnv"
    elif hasattr(env_name, "step"):
        write = advice(env_name) or "; wrap it: GymWrapper(env)"
    elif callable(env_name):
        write = "; call it and wrap its result: GymWrapper(make())"
    else:
        return
    raise InvalidTypeError(
        f"env_name: expected the name of an environment, got {type(env_name).__name__}{write}"
    )


def _found(make: Callable[[], Any]) -> Any:
    """Return the environment that `make` makes. An error about an unknown name tells which package registers it."""
    try:
        return make()
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as cause:
        if "Did you mean" in str(cause):
            raise
        atari = "ALE" in str(cause)
        raise type(cause)(
            f"{cause} The package that registers a name must be imported first, in each worker process, too: write "
            f"'{'ale_py:ALE/Pong-v5' if atari else 'package:Name-v0'}', or let a function import it and make the "
            f"environment{'. The extra gleanrl[atari] installs ale_py' if atari else ''}"
        ) from cause
    except ModuleNotFoundError as cause:
        if "'ale_py'" not in str(cause):
            raise
        raise MissingLibraryError(
            "Atari environments need ale_py, which can't be imported: pip install 'gleanrl[atari]'"
        ) from cause


class _AvailableEnvs:
    """Descriptor with the ids that gymnasium has registered at the time of access, for the class and its instances."""

    def __get__(self, env: Any, owner: type[Any]) -> list[str]:
        return sorted(gymnasium.registry)


class GymWrapper(GymLikeEnv):
    """Wraps an existing gymnasium environment or vector environment.

    For keys, encodings, seeds, hooks and attributes see `GymLikeEnv`. A vector environment may have any autoreset mode.
    With NEXT_STEP, collectors mark the rows of resets as no frames: ``("collector", "mask")`` is False there.

    Args:
        env: the environment; `close` closes it.
        categorical_action_encoding: whether Discrete and MultiDiscrete spaces (also of observations) give integers. If
            False, they give one-hot vectors (int64).
        from_pixels: whether to observe rendered images, ``(H, W, 3)`` uint8 under ``"pixels"``. The environment must
            have been made with ``render_mode="rgb_array"``; one reset determines the images' shape. Not for vector
            environments.
        pixels_only: with `from_pixels`, whether the image is the only observation.
        frame_skip: number of times that a step repeats an action. Rewards are summed, and the end of an episode ends
            the step. Not for vector environments.
        device: device of the TensorDicts; None for TensorDicts without a device.
        batch_size: ``()`` for one environment, ``[P]`` for a vector environment; None accepts either.
        allow_done_after_reset: see `EnvBase`; gymnasium's resets never return done.

    Attributes:
        available_envs: the ids of all registered environments; also an attribute of the class.
        from_pixels: whether observations are images, either by the argument or by the environment itself.
        pixels_only: see the argument.

    Raises:
        InvalidTypeError: if `env` isn't a gymnasium environment.
        SpaceError: if a space has no spec.
        UnsupportedError: for `from_pixels` or `frame_skip` with a vector environment, or `from_pixels` without
            rendering. Also for a `batch_size` other than the environment's.
        InvalidArgumentError: for a `frame_skip` below 1, or if ``"pixels"`` is taken. Also if two members of a
            SyncVectorEnv step the same object.

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
                f"from_pixels, frame_skip: {env} steps and observes all of its environments at once; wrap its single "
                "environments before you build the vector, or use GymEnv(name, num_envs=...)"
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
        """Record whether images are observed; return the key for an observation that isn't a Dict."""
        self.from_pixels, self.pixels_only = from_pixels or observes_frames(env), pixels_only
        return PIXELS if self.from_pixels and pixels_only else "observation"

    @property
    def lib(self) -> ModuleType:
        """The module of the library that is chosen at present; see `set_gym_backend`."""
        return gym_backend()

    def get_library_name(self, env: Any = None) -> str:
        """Return the name of the chosen library (see `set_gym_backend`), regardless of `env`."""
        return gym_backend().__name__


class GymEnv(GymWrapper):
    """A gymnasium environment by name, or several of them that step together.

    For keys, encodings, seeds, hooks and attributes see `GymLikeEnv`. After `close`, the next `reset` or `rollout`
    makes a new environment. For example, a collector closes the environment at the end of its budget.

    With `num_envs`, the environments run in gymnasium's SyncVectorEnv, or in its AsyncVectorEnv for
    ``vectorization_mode="async"``. Their autoreset mode is DISABLED: the library resets them itself, so that every row
    is a frame. ``vectorization_mode="vector_entry_point"`` uses the vector environment registered with the name
    (CartPole has one). It is faster but resets in its own way.

    The other arguments are described in `GymWrapper`.

    Args:
        env_name: the id of a registered environment.
        num_envs: number of environments that step together, ``batch_size=[num_envs]``; 0 for one without a batch
            dimension.
        disable_env_checker: passed to `gymnasium.make`: whether to skip gymnasium's checks of every step.
        from_pixels: see `GymWrapper`; ``render_mode="rgb_array"`` is added to `gym_kwargs`.
        **gym_kwargs: passed to `gymnasium.make`; with `num_envs`, `vectorization_mode` and `vector_kwargs` are passed
            to `gymnasium.make_vec`.

    Raises:
        InvalidTypeError: if `env_name` is an environment, or a function that makes one.
        InvalidArgumentError: if `num_envs` isn't a non-negative integer. Also for an unknown `vectorization_mode`, or
            another `render_mode` with `from_pixels`.
        UnsupportedError: for `from_pixels` or `frame_skip` with ``vectorization_mode="vector_entry_point"``.
        gymnasium.error.Error: if gymnasium can't make the environment.

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
        _require_name(env_name)
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
            super().__init__(_found(one), **pixels, frame_skip=frame_skip, **options)
        else:
            # The vector's members already render and repeat actions. `GymWrapper.__init__` would reject these options.
            vector = _found(several)
            key = self._key_of(vector, from_pixels, pixels_only)
            GymLikeEnv.__init__(self, vector, observation_key=key, frame_skip=frame_skip, **options)
        self._make, self._pixels_only = several if num_envs else one, None if num_envs else only

    def _made_anew(self) -> Any:
        made: Any = self._make()
        return made if self._pixels_only is None else with_pixels(made, self._pixels_only)


bind(__name__, globals())
