"""The environment of a collector: the one that the user passed, or the one that the user's callable makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gleanrl.envs.transforms.env import TransformedEnv
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import InvalidTypeError, UnsupportedError
from gleanrl.rollouts.traits import Env


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return the environment that the user passed, or the one that the user's callable makes.

    Args:
        create_env_fn: an environment or a callable.
        kwargs: keyword arguments for the callable; an environment takes them if it has `update_kwargs`.

    Raises:
        InvalidTypeError: if it's neither, or the callable makes none.
        UnsupportedError: for keyword arguments to an environment that doesn't take them.
    """
    if is_environment(create_env_fn):
        if not kwargs:
            return create_env_fn
        if not hasattr(create_env_fn, "update_kwargs"):
            raise UnsupportedError(
                "create_env_kwargs: the environment exists already; pass a callable that makes it"
            )
        create_env_fn.update_kwargs(kwargs)
        return create_env_fn
    made = create_env_fn(**(kwargs or {})) if callable(create_env_fn) else create_env_fn
    if not is_environment(made):
        raise InvalidTypeError(
            f"create_env_fn: expected an environment or a callable that makes one, "
            f"got {type(made).__name__}; wrap a gymnasium environment in GymWrapper"
        )
    return made


@contextmanager
def made_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Iterator[Any]:
    """Give what `make_env` does; should the block raise, close what was made."""
    env = make_env(create_env_fn, kwargs)
    try:
        yield env
    except BaseException:
        if env is not create_env_fn:
            with suppress(Exception):  # the first error is the cause
                env.close()
        raise


def has_truncated(env: Env) -> bool:
    """Return whether any group of flags of `env` has a truncated one."""
    return any((key if isinstance(key, str) else key[-1]) == "truncated" for key in env.done_keys)


def innermost(env: Any) -> Any:
    """Return what stands inside of all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
