"""Choice of the library behind `GymEnv`: gymnasium, or gym through shimmy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import ModuleType
from typing import Any, TypeVar

import gymnasium

from gleanrl.errors import UnsupportedError

_Function = TypeVar("_Function", bound=Callable[..., Any])


_program = ["gymnasium"]  # the choice for the rest of the program
_block: ContextVar[str | None] = ContextVar(
    "gym_backend", default=None
)  # the choice of a ``with``, in its thread


class set_gym_backend:
    """Choose the library with which `GymEnv` makes environments: gymnasium, or the older gym.

    Works as a context manager, as a decorator, or by a call of `set`. Programs that select a backend in one of these
    ways run unchanged. Environments of gym need the package shimmy, which gives them gymnasium's interface. With it,
    `GymWrapper` accepts instances of such environments under any choice, too.

    Args:
        backend: ``"gymnasium"`` or ``"gym"``, the module itself, or a function that returns the module.

    Raises:
        UnsupportedError: for any other library, or if a package that the library needs isn't installed.

    Examples:
        >>> with set_gym_backend("gymnasium"):
        ...     gym_backend().__name__
        'gymnasium'
    """

    def __init__(self, backend: str | ModuleType | Callable[[], ModuleType]) -> None:
        made = backend() if callable(backend) else backend
        name = made.__name__ if isinstance(made, ModuleType) else made
        if name not in ("gymnasium", "gym"):
            raise UnsupportedError(f"set_gym_backend: expected 'gymnasium' or 'gym', got {name!r}")
        missing = [package for package in _NEEDED[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise UnsupportedError(
                f"set_gym_backend: {name!r} needs packages that aren't installed: {', '.join(missing)}. Most of its "
                "environments are in gymnasium, too"
            )
        self._name = name
        self._before: list[Token[str | None]] = []

    def set(self) -> None:
        """Choose the library for the rest of the program, except within ``with`` blocks that choose another one."""
        _program[0] = self._name

    def __enter__(self) -> set_gym_backend:
        """Choose the library for the block, in this thread or asynchronous task only."""
        self._before.append(_block.set(self._name))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the earlier choice."""
        _block.reset(self._before.pop())

    def __call__(self, function: _Function) -> _Function:
        """Return `function` wrapped so that it runs under this choice."""

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return chosen  # type: ignore[return-value]


_NEEDED = {"gymnasium": (), "gym": ("gym", "shimmy")}
_GYMNASIUM_ARGUMENTS = ("vectorization_mode", "vector_kwargs", "disable_env_checker")
_LIBRARIES = (
    "gymnasium",
    "gym",
    "dm_control",
    "pettingzoo",
    "vmas",
    "brax",
    "jumanji",
    "envpool",
    "mo_gymnasium",
)


def get_available_libraries() -> dict[str, bool]:
    """Return whether each known library is installed, by its name. gleanrl wraps only gymnasium and gym."""
    return {name: importlib.util.find_spec(name) is not None for name in _LIBRARIES}


def gym_backend(submodule: str | None = None) -> ModuleType:
    """Return the module of the chosen library, or its submodule, for example ``"wrappers"``."""
    name = _block.get() or _program[0]
    return importlib.import_module(name if submodule is None else f"{name}.{submodule}")


def named(env_name: Any, gym_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the name and arguments with which gymnasium makes an environment of the chosen library."""
    gym = gym_backend()
    if gym is gymnasium:
        return env_name, gym_kwargs
    importlib.import_module("shimmy")  # this registers the names below
    outer = {key: gym_kwargs[key] for key in _GYMNASIUM_ARGUMENTS if key in gym_kwargs}
    inner = {key: value for key, value in gym_kwargs.items() if key not in outer}
    if not _has_five(gym):
        return "GymV21Environment-v0", {**outer, "env_id": env_name, "make_kwargs": inner}
    inner["disable_env_checker"] = gym_kwargs.get("disable_env_checker", True)
    return "GymV26Environment-v0", {**outer, "env_id": env_name, "make_kwargs": inner}


def with_gymnasiums_interface(env: Any) -> Any:
    """Return an environment of gym wrapped by shimmy (if installed); return any other object unchanged."""
    gym = sys.modules.get("gym")
    if gym is None or not isinstance(env, gym.Env) or importlib.util.find_spec("shimmy") is None:
        return env
    shimmy = importlib.import_module("shimmy")
    return (shimmy.GymV26CompatibilityV0 if _has_five(gym) else shimmy.GymV21CompatibilityV0)(env=env)


def advice(env: Any) -> str:
    """Return the end of an error message about an environment with an unsupported interface; ``""`` if unknown."""
    if hasattr(env, "possible_agents") or hasattr(env, "agents"):
        return (
            ", an environment of several agents. GymWrapper takes gymnasium environments of one agent; collectors also "
            "take TorchRL's PettingZooEnv, or an EnvBase with a group of entries for each kind of agents"
        )
    if hasattr(env, "step_async"):
        return (
            ", a VecEnv of Stable-Baselines3. Pass the functions that make its environments to SerialEnv or "
            "ParallelEnv, or use GymEnv(name, num_envs=...)"
        )
    return ""


def _has_five(gym: ModuleType) -> bool:
    """Return whether `step` of this gym release returns five values, with separate terminated and truncated."""
    return tuple(int(part) for part in gym.__version__.split(".")[:2]) >= (0, 26)
