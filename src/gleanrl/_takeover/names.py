"""Which names of TorchRL's data layer are served here, and by what."""

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
    """Return whether a module path of theirs is one of the packages, or within one."""
    return module in PACKAGES or module.startswith(tuple(f"{package}." for package in PACKAGES))


def counterpart(module: str) -> str:
    """Return the path here of a module path of theirs; there needn't be such a module."""
    return f"gleanrl{module[len(ROOT) :]}"


@functools.cache
def served(module: str) -> Mapping[str, Any]:
    """Return what we serve by name in a module of theirs: public names, and second names of other releases.

    Args:
        module: a path of theirs within the data layer.
    """
    ours = _module(counterpart(module))
    if ours is None:
        return {}
    second = [row.name for row in ALIASES if row.module == ours.__name__]
    # Files that theirs has, too, but that aren't meant for users here, have no list of names.
    public = ours.__dict__.get("__all__", ())
    return {name: getattr(ours, name) for name in (*public, *second)}


def explanation(module: str, name: str) -> str | None:
    """Return what to use instead of a name that neither the installed release nor this library has."""
    return unserved_name(counterpart(module), name)


def same_as(value: Any) -> Any:
    """Return what we serve in place of a class or function of theirs, by whatever path it was found; else `value`.

    The same class can be imported from several of their modules, some of which have no counterpart here.
    """
    return _replaced().get(id(value), value)


@functools.cache
def _replaced() -> Mapping[int, Any]:
    found = {}
    for package in PACKAGES:
        for name, ours in served(package).items():
            theirs = getattr(sys.modules[package], name, None)
            if callable(theirs):  # modules are never collected: their identity is good for ever
                found[id(theirs)] = ours
    return found


def _module(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except UnservedModuleError:
        return None
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        return None
