"""Second names, stand-ins and keywords in a public module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from gleanrl.compat.keywords import check_keywords
from gleanrl.compat.members import refuse_members
from gleanrl.compat.names import ALIASES, UNSERVED, Unserved
from gleanrl.errors import UnsupportedError


def bind(module: str, namespace: dict[str, Any]) -> None:
    """Complete a public module by what the table says of it; the last line of its file.

    Second names are bound and added to ``__all__``. Names that aren't served can be imported and raise when they are
    used; `dir` and ``import *`` leave them out. Constructors of the module's classes know keywords of
    other releases, and the classes the members that they haven't.

    Args:
        module: its ``__name__``.
        namespace: its ``globals()``.
    """
    names = namespace["__all__"]
    for name in names:
        check_keywords(namespace[name])
        refuse_members(namespace[name])
    for row in ALIASES:
        if row.module == module:
            namespace[row.name] = resolve(row.target, namespace)
            if not row.name.startswith("_"):
                names.append(row.name)
    names[:] = sorted(set(names))
    namespace["__getattr__"] = _unserved_names(module)


def resolve(target: str, namespace: dict[str, Any]) -> Any:
    """Return what a row of the table means: ``"module:name"``, or a name in `namespace`."""
    module, _, name = target.rpartition(":")
    return getattr(importlib.import_module(module), name) if module else namespace[name]


def _unserved_names(module: str) -> Callable[[str], Any]:
    rows = {row.name: row for row in UNSERVED if row.module == module}

    def look_up(name: str) -> Any:
        if name in rows:
            return _stand_in(rows[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up


@functools.cache
def _stand_in(row: Unserved) -> type[Any]:
    """Return a class that can't be made, nor derived from: programs import many names and use a few."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(f"{row.module}.{row.name}: {row.why}")

    body = {"__doc__": row.why, "__module__": row.module, "__new__": refuse}
    cls = type(row.name, (), body)
    cls.__init_subclass__ = refuse  # type: ignore[method-assign]
    return cls
