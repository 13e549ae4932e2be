"""Lookup of the gleanrl classes that replace names of TorchRL's data layer."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gleanrl.compat.names import ALIASES
from gleanrl.compat.unserved import unserved_name
from gleanrl.errors import UnservedModuleError

ROOT = "torchrl"
PACKAGES = tuple(f"{ROOT}.{part}" for part in ("collectors", "data", "envs"))
"""The packages that make up the data layer."""


def is_data_layer(module: str) -> bool:
    """Return whether a TorchRL module path is one of `PACKAGES`, or is below one."""
    return module in PACKAGES or module.startswith(tuple(f"{package}." for package in PACKAGES))


def counterpart(module: str) -> str:
    """Return the gleanrl path for a TorchRL module path; a module with this path may not exist."""
    return f"gleanrl{module[len(ROOT) :]}"


@functools.cache
def served(module: str) -> Mapping[str, Any]:
    """Return the objects that gleanrl serves in a TorchRL module, by name: public names, and names of other releases.

    The call imports gleanrl's module. The result is empty if gleanrl has no module at this path.

    Args:
        module: a TorchRL path within the data layer.
    """
    ours = _module(counterpart(module))
    if ours is None:
        return {}
    second = [row.name for row in ALIASES if row.module == ours.__name__]
    # A gleanrl module without `__all__` is internal, although TorchRL has a public module at this path.
    public = ours.__dict__.get("__all__", ())
    return {name: getattr(ours, name) for name in (*public, *second)}


def explanation(module: str, name: str) -> str | None:
    """Return advice for a name that neither the installed TorchRL nor gleanrl has; None if there is no advice."""
    return unserved_name(counterpart(module), name)


def same_as(value: Any) -> Any:
    """Return the gleanrl object that replaces a TorchRL class or function; `value` if gleanrl has none.

    The lookup is by identity, because several TorchRL modules export the same class, some without a gleanrl
    counterpart.
    """
    return _replaced().get(id(value), value)


@functools.cache
def _replaced() -> Mapping[int, Any]:
    found = {}
    for package in PACKAGES:
        for name, ours in served(package).items():
            original = getattr(sys.modules[package], name, None)
            if callable(original):  # modules keep their classes alive, so an id isn't reused
                found[id(original)] = ours
    return found


def _module(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except UnservedModuleError:
        return None
    except ModuleNotFoundError as error:
        # Another missing module is an error inside of gleanrl's module, which must not be hidden
        if error.name is None or not path.startswith(error.name):
            raise
        return None
