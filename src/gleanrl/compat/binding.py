"""Second names, keywords and errors for names that aren't served, in a public module."""

from __future__ import annotations

import importlib
from typing import Any

from gleanrl.compat.keywords import check_keywords
from gleanrl.compat.members import refuse_members
from gleanrl.compat.names import ALIASES
from gleanrl.compat.unserved import unserved_name
from gleanrl.errors import UnservedMemberError


def bind(module: str, namespace: dict[str, Any]) -> None:
    """Complete a public module by what the table says of it; the last line of its file.

    Second names are bound and added to ``__all__``. The error for a name that isn't served says what to use instead.
    Constructors of the module's classes know keywords of other releases, and the classes the members that they haven't.

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
    bind_unserved(module, namespace)


def bind_unserved(module: str, namespace: dict[str, Any]) -> None:
    """Let a module say of names of other releases what to use instead; the arguments are those of `bind`."""

    def look_up(name: str) -> Any:
        raise absent(module, name)

    namespace["__getattr__"] = look_up
    # Python asks the finders for a name that ``from module import name`` doesn't find in a package only, and only
    # a finder can raise an ImportError that says what to use (see `paths`).
    namespace.setdefault("__path__", [])


def resolve(target: str, namespace: dict[str, Any]) -> Any:
    """Return what a row of the table means: ``"module:name"``, or a name in `namespace`."""
    module, _, name = target.rpartition(":")
    return getattr(importlib.import_module(module), name) if module else namespace[name]


def absent(module: str, name: str) -> AttributeError:
    """Return the error of a module that hasn't an attribute; for a name of another release, it says what to use."""
    why = unserved_name(module, name)
    if why is not None:
        return UnservedMemberError(f"{module}.{name} isn't served: {why}")
    return AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
