"""Import hook for module paths of other releases, and errors for imports that aren't served.

A module of another release's path is created when it is imported, and only re-exports names of gleanrl's modules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from gleanrl.compat.binding import bind
from gleanrl.compat.moved import MOVED, RENAMED
from gleanrl.compat.names import MODULES
from gleanrl.compat.unserved import unserved_module, unserved_name
from gleanrl.errors import UnservedModuleError, UnservedNameError


def install() -> None:
    """Make the paths in the tables importable; a file with the same path takes precedence.

    The call adds a finder at the end of `sys.meta_path`. Further calls have no effect.
    """
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths())


class _Paths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MODULES or fullname in MOVED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        # `importlib.util.find_spec` only asks whether a module exists, and must get None. A finder gets the same
        # arguments for it as for an import, so only the caller's frame tells them apart. An error in a loader would be
        # too late: returning a spec already says that the module exists.
        if sys._getframe(2).f_code.co_name != "find_spec":
            _refuse_unserved(fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = module.__dict__
        if module.__name__ in MOVED:
            names["__getattr__"] = partial(_moved_name, module.__name__)
            return
        names["__doc__"] = f"The same as {', '.join(MODULES[module.__name__])}."
        names["__all__"] = []
        for source in MODULES[module.__name__]:
            owner, _, single = source.partition(":")
            origin = importlib.import_module(owner)
            for name in [single] if single else origin.__all__:
                names[name] = getattr(origin, name)
                names["__all__"].append(name)
        bind(module.__name__, names)


def _moved_name(path: str, name: str) -> Any:
    """Return the object that a module of gleanrl's old layout had under a name."""
    return getattr(importlib.import_module(MOVED[path]), RENAMED.get(f"{path}.{name}", name))


def not_served(module: str, name: str, message: str) -> UnservedNameError:
    """Return the error for ``from module import name``, with the attributes of Python's own ImportError."""
    error = UnservedNameError(message)
    error.name = module
    if sys.version_info >= (3, 12):
        error.name_from = name
    return error


def _refuse_unserved(path: str) -> None:
    """Raise an error with advice if a module, or a name of a module, isn't served.

    If a module lacks a name, ``from module import name`` asks the finders for the module ``module.name``. Python
    passes their errors on, except a `ModuleNotFoundError` whose attribute ``name`` is this path.
    """
    why = unserved_module(path)
    if why is not None:
        # The error has no ``name``: with it ``from module import name`` would drop the error and its advice.
        raise UnservedModuleError(f"{path} isn't served: {why}")
    module, _, name = path.rpartition(".")
    why = unserved_name(module, name)
    if why is not None:
        raise not_served(module, name, f"{path} isn't served: {why}")
