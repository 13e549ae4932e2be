"""Which names of TorchRL's data layer are served here, and by what."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gleanrl.compat.names import ALIASES, UNSERVED

ROOT = "torchrl"
PACKAGES = tuple(f"{ROOT}.{part}" for part in ("collectors", "data", "envs"))
"""The packages that make up the data layer."""
_STAND_INS = frozenset(row.name for row in UNSERVED)


def is_data_layer(module: str) -> bool:
    """Return whether a module path of theirs is one of the packages, or within one."""
    return module in PACKAGES or module.startswith(tuple(f"{package}." for package in PACKAGES))


def counterpart(module: str) -> str:
    """Return the path here of a module path of theirs; there needn't be such a module."""
    return f"gleanrl{module[len(ROOT) :]}"


@functools.cache
def served(module: str) -> Mapping[str, Any]:
    """Return what we serve by name in a module of theirs: public names, and second names of other releases.

    Names that can be imported here only to say why they aren't served (`compat.names.UNSERVED`) don't count.

    Args:
        module: a path of theirs within the data layer.
    """
    ours = _module(counterpart(module))
    if ours is None:
        return {}
    second = [row.name for row in ALIASES if row.module == ours.__name__]
    # Files that theirs has, too, but that aren't meant for users here, have no list of names.
    public = ours.__dict__.get("__all__", ())
    return {name: getattr(ours, name) for name in (*public, *second) if name not in _STAND_INS}


def explanation(module: str, name: str) -> Any:
    """Return the stand-in for a name of another release, which says why it isn't served when it is used.

    Raises:
        AttributeError: nothing is known of the name.
    """
    ours = counterpart(module)
    if not any(row.module == ours and row.name == name for row in UNSERVED):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(ours), name)


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
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        return None
