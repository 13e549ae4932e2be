"""The choice of the library behind `GymEnv`: gymnasium, and no other."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import gymnasium

from gleanrl.errors import UnsupportedError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class set_gym_backend:
    """Choose the library that `GymEnv` makes environments with; only gymnasium is supported.

    A context manager, a decorator, or a plain call of `set`: programs that name their backend work unchanged.

    Args:
        backend: ``"gymnasium"``, the module itself, or a function that returns the module.

    Raises:
        UnsupportedError: for any other library.

    Examples:
        >>> with set_gym_backend("gymnasium"):
        ...     gym_backend().__name__
        'gymnasium'
    """

    def __init__(self, backend: str | ModuleType | Callable[[], ModuleType]) -> None:
        made = backend() if callable(backend) else backend
        name = made.__name__ if isinstance(made, ModuleType) else made
        if name != "gymnasium":
            raise UnsupportedError(
                f"set_gym_backend: expected 'gymnasium', got {name!r}; environments of the old gym "
                "interface need gymnasium's compatibility wrappers and GymWrapper"
            )

    def set(self) -> None:
        """Make the choice for the rest of the program."""

    def __enter__(self) -> set_gym_backend:
        """Make the choice for the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Take the choice back."""

    def __call__(self, function: _Function) -> _Function:
        """Return `function`, called under this choice."""

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return chosen  # type: ignore[return-value]


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
    """Return gymnasium, or its submodule of that name (``"wrappers"``, say)."""
    return gymnasium if submodule is None else importlib.import_module(f"gymnasium.{submodule}")
