"""Second names, keywords and errors for names that aren't served, in a public module.

Keywords of public constructors: other spellings are translated, those that aren't served say what to use.

Unknown ones raise with the nearest known.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from gleanrl._util import is_ours
from gleanrl.compat.names import ALIASES, KEYWORDS, UNSERVED_KEYWORDS, UnservedKeyword
from gleanrl.compat.unserved import refuse_members, unserved_name
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnservedKeywordError, UnservedMemberError

_Row = TypeVar("_Row", str, UnservedKeyword)


def check_keywords(subject: Any) -> None:
    """Let a class of ours look at the keywords that it is made with; anything else stays as it is.

    Costs about a microsecond a construction, and a frame in its tracebacks, which says what it is. A class without its
    own constructor has that of its base. Rows of the tables are of a class and of those that derive from it.
    """
    if not isinstance(subject, type):
        return
    subject = next(cls for cls in subject.__mro__ if "__init__" in cls.__dict__)
    init = subject.__dict__["__init__"]
    ours = is_ours(subject)
    if not ours or not inspect.isfunction(init) or hasattr(init, "__wrapped__"):
        return
    kinds = inspect.signature(init).parameters.values()
    known = frozenset(kind.name for kind in kinds if kind.kind not in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL))
    takes_any = any(kind.kind == kind.VAR_KEYWORD for kind in kinds)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        __tracebackhide__ = (
            True  # pytest and IPython leave the frame out; other tracebacks show the last line's remark
        )
        if not keywords.keys() <= known:
            name = type(self).__name__
            keywords = _translated(name, keywords, _rows(KEYWORDS, type(self)))
            unserved = _rows(UNSERVED_KEYWORDS, type(self))
            keywords = _served(name, keywords, {key: unserved[key] for key in unserved.keys() - known})
            if not takes_any:
                _refuse_unknown(name, keywords, known)
        init(self, *args, **keywords)  # the constructor itself, whose keywords this frame has looked at

    subject.__init__ = checked


def _rows(table: Mapping[str, Mapping[str, _Row]], cls: type[Any]) -> dict[str, _Row]:
    return {key: row for base in reversed(cls.__mro__) for key, row in table.get(base.__name__, {}).items()}


def _translated(name: str, keywords: dict[str, Any], older: Mapping[str, str]) -> dict[str, Any]:
    for before, now in older.items():
        if before in keywords and now in keywords:
            raise InvalidArgumentError(f"{name}: {before} is another word for {now}; give one of them")
    return {older.get(key, key): value for key, value in keywords.items()}


def _served(name: str, keywords: dict[str, Any], unserved: Mapping[str, UnservedKeyword]) -> dict[str, Any]:
    """Return the keywords without those that aren't served; their values have to ask for nothing."""
    for key in unserved.keys() & keywords.keys():
        if not _asks_for_nothing(keywords[key], unserved[key].off):
            raise UnservedKeywordError(f"{name}: {key} isn't served: {unserved[key].why}")
    return {key: value for key, value in keywords.items() if key not in unserved}


def _asks_for_nothing(given: Any, off: Any) -> bool:
    values = off if isinstance(off, tuple) else (off,)
    return given is None or any(
        given is each or (type(given) is type(each) and given == each) for each in values
    )


def _refuse_unknown(name: str, keywords: dict[str, Any], known: frozenset[str]) -> None:
    for key in keywords:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known - {"self"}), n=1)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; it takes {', '.join(sorted(known - {'self'}))}"
            )
            raise InvalidTypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}{hint}")


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
