"""What a collector's keywords mean: the environment, and frozen plans of its frames and its devices."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.devices import as_device, require_device
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def warn(message: str) -> None:
    """Warn the user, unless the environment variable ``RL_WARNINGS`` is 0."""
    if os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false"):
        warnings.warn(message, stacklevel=4)


def integer(name: str, value: Any) -> int:
    """Return `value` as an int.

    Raises:
        InvalidArgumentError: if it isn't an integer (a bool isn't one either).
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as cause:
        raise InvalidArgumentError(f"{name}: expected an integer, got {value!r}") from cause


@dataclass(frozen=True)
class FramePlan:
    """How many frames a collector delivers, and in what portions.

    Attributes:
        num_envs: environments that step at once: every step makes this many frames.
        requested_frames_per_batch: what the user asked for.
        steps_per_batch: steps of a full batch.
        total_frames: frames of the collector's life, rounded up to a multiple of `num_envs`; None for
            endless.
        random_frames: frames at the beginning that are drawn at random, rounded up to whole batches.
    """

    num_envs: int
    requested_frames_per_batch: int
    steps_per_batch: int
    total_frames: int | None
    random_frames: int

    @classmethod
    def of(
        cls, num_envs: int, frames_per_batch: Any, total_frames: Any, init_random_frames: Any
    ) -> FramePlan:
        """Check the user's numbers and round them.

        Raises:
            InvalidArgumentError: for a zero, negative or fractional `frames_per_batch`, a zero or fractional
                `total_frames`, or a fractional `init_random_frames`.
        """
        requested = integer("frames_per_batch", frames_per_batch)
        if requested <= 0:
            raise InvalidArgumentError(f"frames_per_batch: expected a positive integer, got {requested}")
        steps = -(-requested // num_envs)
        frames = steps * num_envs
        if frames != requested:
            warn(
                f"frames_per_batch={requested} isn't a multiple of the {num_envs} environments; "
                f"batches have {frames}"
            )
        total = -1 if total_frames is None else integer("total_frames", total_frames)
        if total == 0:
            raise InvalidArgumentError("total_frames: expected a positive integer, or -1 for endless, got 0")
        if total > 0 and total % frames:
            rounded = -(-total // num_envs) * num_envs
            last = rounded % frames
            tail = f"; the last batch has {last} of {frames} frames" if last else ""
            warn(
                f"total_frames={total} isn't a multiple of the {frames} frames of a batch: "
                f"{rounded} are collected{tail}"
            )
            total = rounded
        random = (
            0 if init_random_frames is None else max(0, integer("init_random_frames", init_random_frames))
        )
        if random % frames:
            rounded = -(-random // frames) * frames
            warn(
                f"init_random_frames={random} isn't a multiple of the {frames} frames of a batch: "
                f"{rounded} are random"
            )
            random = rounded
        return cls(num_envs, requested, steps, total if total > 0 else None, random)

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch."""
        return self.steps_per_batch * self.num_envs

    def steps_after(self, frames: int) -> int:
        """Return the steps of the batch that follows `frames` delivered ones; 0 if the budget is spent.

        Steps that turn out to be no frames don't count: another batch makes up for them.
        """
        if self.total_frames is None:
            return self.steps_per_batch
        return min(self.steps_per_batch, -(-max(0, self.total_frames - frames) // self.num_envs))

    def left_after(self, frames: int) -> int | None:
        """Return the frames that may follow `frames` delivered ones; None for any number."""
        return None if self.total_frames is None else max(0, self.total_frames - frames)


@dataclass(frozen=True)
class DevicePlan:
    """Where the environment, the policy and the batches live; None means: wherever they are."""

    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None

    @classmethod
    def of(cls, device: Any, env: Any, policy: Any, storing: Any, env_own: torch.device | None) -> DevicePlan:
        """Fill the unset devices.

        Args:
            device: fills every unset one.
            env: the environment's; unset, the device that it has.
            policy: the policy's.
            storing: the batches'; unset, the environment's if the policy's agrees with it.
            env_own: the device that the environment has already.
        """
        general = as_device(device)
        env_device = as_device(env) or general or as_device(env_own)
        policy_device = as_device(policy) or general
        storing_device = as_device(storing) or general
        if storing_device is None and policy_device in (None, env_device):
            storing_device = env_device
        return cls(
            require_device("env_device", env_device),
            require_device("policy_device", policy_device),
            require_device("storing_device", storing_device),
        )


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return the environment that the user passed, or the one that the user's callable makes.

    Args:
        create_env_fn: an environment or a callable.
        kwargs: keyword arguments for the callable; an environment takes them if it has `update_kwargs`.

    Raises:
        InvalidTypeError: if it's neither, or the callable makes none.
        UnsupportedError: for keyword arguments to an environment that doesn't take them.
    """
    if _is_env(create_env_fn):
        if not kwargs:
            return create_env_fn
        if not hasattr(create_env_fn, "update_kwargs"):
            raise UnsupportedError(
                "create_env_kwargs: the environment exists already; pass a callable that makes it"
            )
        create_env_fn.update_kwargs(kwargs)
        return create_env_fn
    made = create_env_fn(**(kwargs or {})) if callable(create_env_fn) else create_env_fn
    if not _is_env(made):
        raise InvalidTypeError(
            f"create_env_fn: expected an environment or a callable that makes one, "
            f"got {type(made).__name__}; wrap a gymnasium environment in GymWrapper"
        )
    return made


def _is_env(candidate: Any) -> bool:
    names = ("step", "reset", "batch_size", "full_action_spec")
    return not isinstance(candidate, type) and all(hasattr(candidate, name) for name in names)


def has_truncated(env: Any) -> bool:
    """Return whether any group of flags of `env` has a truncated one."""
    return any((key if isinstance(key, str) else key[-1]) == "truncated" for key in env.done_keys)


def stop_of(interruptor: Any) -> Callable[[], bool] | None:
    """Return what the interruptor is asked."""
    if interruptor is None:
        return None
    stop = getattr(interruptor, "collection_stopped", None)
    if not callable(stop):
        raise InvalidTypeError(
            f"interruptor: expected an object with collection_stopped(), got {type(interruptor).__name__}"
        )
    return stop
