"""The choice of the library behind `GymEnv`: gymnasium, or gym by way of shimmy."""

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
    """Choose the library that `GymEnv` makes environments with: gymnasium, or the older gym.

    A context manager, a decorator, or a plain call of `set`: programs that name their backend work unchanged.
    Environments of gym pass through the package shimmy, which gives them gymnasium's interface; with both installed
    `GymWrapper` takes them, too.

    Args:
        backend: ``"gymnasium"`` or ``"gym"``, the module itself, or a function that returns the module.

    Raises:
        UnsupportedError: for any other library, or one that isn't installed.

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
                f"set_gym_backend: {name!r} takes packages that aren't installed: {', '.join(missing)}. Most of its "
                "environments are in gymnasium, too"
            )
        self._name = name
        self._before: list[Token[str | None]] = []

    def set(self) -> None:
        """Make the choice for the rest of the program."""
        _program[0] = self._name

    def __enter__(self) -> set_gym_backend:
        """Make the choice for the block."""
        self._before.append(_block.set(self._name))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the choice back."""
        _block.reset(self._before.pop())

    def __call__(self, function: _Function) -> _Function:
        """Return `function`, called under this choice."""

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return chosen  # type: ignore[return-value]


_NEEDED = {"gymnasium": (), "gym": ("gym", "shimmy")}
_OF_GYMNASIUM = ("vectorization_mode", "vector_kwargs", "disable_env_checker")
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
    """Return which libraries of environments are installed; this library wraps gymnasium's, TorchRL the others'."""
    return {name: importlib.util.find_spec(name) is not None for name in _LIBRARIES}


def gym_backend(submodule: str | None = None) -> ModuleType:
    """Return the chosen library, or its submodule of that name (``"wrappers"``, say)."""
    name = _block.get() or _program[0]
    return importlib.import_module(name if submodule is None else f"{name}.{submodule}")


def named(env_name: Any, gym_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return by which name and arguments gymnasium makes an environment of the chosen library."""
    gym = gym_backend()
    if gym is gymnasium:
        return env_name, gym_kwargs
    importlib.import_module("shimmy")  # registers the names below
    outer = {key: gym_kwargs[key] for key in _OF_GYMNASIUM if key in gym_kwargs}
    inner = {key: value for key, value in gym_kwargs.items() if key not in outer}
    if not _has_five(gym):
        return "GymV21Environment-v0", {**outer, "env_id": env_name, "make_kwargs": inner}
    inner["disable_env_checker"] = gym_kwargs.get("disable_env_checker", True)
    return "GymV26Environment-v0", {**outer, "env_id": env_name, "make_kwargs": inner}


def with_gymnasiums_interface(env: Any) -> Any:
    """Return an environment of gym behind shimmy, if that is installed; any other one as it is."""
    gym = sys.modules.get("gym")
    if gym is None or not isinstance(env, gym.Env) or importlib.util.find_spec("shimmy") is None:
        return env
    shimmy = importlib.import_module("shimmy")
    return (shimmy.GymV26CompatibilityV0 if _has_five(gym) else shimmy.GymV21CompatibilityV0)(env=env)


def _has_five(gym: ModuleType) -> bool:
    """Return whether a step of this release of gym returns five things, with terminated and truncated apart."""
    return tuple(int(part) for part in gym.__version__.split(".")[:2]) >= (0, 26)
