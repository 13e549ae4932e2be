"""Module paths of other releases: modules that hold nothing of their own, made when somebody imports them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from gleanrl.compat.binding import bind
from gleanrl.compat.names import MODULES


def install() -> None:
    """Make the paths of the table importable; files come first."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths())


class _Paths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        is_package = any(other.startswith(f"{fullname}.") for other in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        names = module.__dict__
        names["__doc__"] = f"The same as {', '.join(MODULES[module.__name__])}."
        names["__all__"] = []
        for source in MODULES[module.__name__]:
            owner, _, single = source.partition(":")
            origin = importlib.import_module(owner)
            for name in [single] if single else origin.__all__:
                names[name] = getattr(origin, name)
                names["__all__"].append(name)
        bind(module.__name__, names)
