"""`bind`, which adds names and keywords of other releases to a public module, and errors for unserved ones.

Constructors translate keywords of other releases. For an unserved keyword the error says what to use instead, and for
an unknown keyword it suggests the most similar one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from gleanrl._arrays.tensordicts import did_you_mean
from gleanrl._util import is_ours
from gleanrl.compat.names import ALIASES, ELSEWHERE, KEYWORDS, POSITIONAL, UNSERVED_KEYWORDS, UnservedKeyword
from gleanrl.compat.unserved import refuse_members, unserved_name
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnservedKeywordError, UnservedMemberError

_Row = TypeVar("_Row", str, UnservedKeyword)


def check_keywords(subject: Any) -> None:
    """Wrap the constructor of a gleanrl class so that it accepts keywords of other releases; ignore other objects.

    The wrapper costs about a microsecond per construction, and adds a frame to tracebacks. If a class has no
    constructor, that of its base class is wrapped, if gleanrl defines the base class. No constructor is wrapped twice.
    A row of the tables applies to a class and its subclasses.

    The wrapped constructor raises `InvalidArgumentError` if two names of one keyword are given, `UnservedKeywordError`
    for an unserved keyword, and `InvalidTypeError` for an unknown one or for too many positional arguments.
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
    most = sum(kind.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for kind in kinds) - 1
    limited = all(kind.kind != kind.VAR_POSITIONAL for kind in kinds)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        # pytest and IPython hide this frame. Other tracebacks show the last line of this function with its comment
        __tracebackhide__ = True
        if limited and len(args) > most and (error := _surplus(type(self), args[most], most + 1)):
            raise error
        if not keywords.keys() <= known:
            name = type(self).__name__
            keywords = _translated(name, keywords, _rows(KEYWORDS, type(self)))
            unserved = _rows(UNSERVED_KEYWORDS, type(self))
            keywords = _served(name, keywords, {key: unserved[key] for key in unserved.keys() - known})
            if not takes_any:
                _refuse_unknown(name, keywords, known)
        init(self, *args, **keywords)  # the constructor itself; this frame has only checked its keywords

    subject.__init__ = checked


def _rows(table: Mapping[str, Mapping[str, _Row]], cls: type[Any]) -> dict[str, _Row]:
    return {key: row for base in reversed(cls.__mro__) for key, row in table.get(base.__name__, {}).items()}


def _translated(name: str, keywords: dict[str, Any], older: Mapping[str, str]) -> dict[str, Any]:
    for before, now in older.items():
        if before in keywords and now in keywords:
            raise InvalidArgumentError(f"{name}: {before} is another word for {now}; give one of them")
    return {older.get(key, key): value for key, value in keywords.items()}


def _served(name: str, keywords: dict[str, Any], unserved: Mapping[str, UnservedKeyword]) -> dict[str, Any]:
    """Return the keywords without the unserved ones.

    Raises:
        UnservedKeywordError: an unserved keyword has another value than None and the values that turn it off.
    """
    for key in unserved.keys() & keywords.keys():
        if not _asks_for_nothing(keywords[key], unserved[key].off):
            raise UnservedKeywordError(f"{name}: {key} isn't served: {unserved[key].why}")
    return {key: value for key, value in keywords.items() if key not in unserved}


def _asks_for_nothing(value: Any, off: Any) -> bool:
    values = off if isinstance(off, tuple) else (off,)
    return value is None or any(
        value is each or (type(value) is type(each) and value == each) for each in values
    )


def _refuse_unknown(name: str, keywords: dict[str, Any], known: frozenset[str]) -> None:
    for key in keywords:
        if key not in known:
            names = sorted(known - {"self"})
            hint = f"; write {ELSEWHERE[key]}" if key in ELSEWHERE else did_you_mean(key, names)
            hint = hint or f"; it takes {', '.join(names)}"
            raise InvalidTypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}{hint}")


def _surplus(cls: type[Any], value: Any, number: int) -> InvalidTypeError | None:
    """Return the error for a surplus positional argument, which says how to write it; None without a table row.

    Args:
        cls: the class that is constructed.
        value: the argument.
        number: its position, from 1.
    """
    for keyword, form in _rows(POSITIONAL, cls).items():
        plain = isinstance(value, (int, float))
        got, written = (repr(value), form.format(value)) if plain else (type(value).__name__, "...")
        return InvalidTypeError(
            f"{cls.__name__}: argument {number} is only taken by keyword, got {got} by position; write "
            f"{cls.__name__}({'..., ' if number > 1 else ''}{keyword}={written}, ...)"
        )
    return None


def bind(module: str, namespace: dict[str, Any]) -> None:
    """Add names, keywords and errors from the tables to a public module; call it in the last line of its file.

    Names of other releases are bound and added to ``__all__``, which is then sorted. Private names aren't added. For an
    unserved name the error says what to use instead.
    The constructors of the module's classes accept keywords of other releases. Unserved members of the classes raise
    errors with advice.

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
    """Give a module a `__getattr__` whose errors say what to use instead of unserved names; arguments as in `bind`.

    It replaces an earlier `__getattr__` of the module. A module that isn't a package gets an empty `__path__`.
    """

    def look_up(name: str) -> Any:
        raise absent(module, name)

    namespace["__getattr__"] = look_up
    # For ``from module import name`` Python asks the finders for a missing name only if the module is a package, which
    # has a `__path__`. Only a finder can raise an ImportError with advice (see `paths`).
    namespace.setdefault("__path__", [])


def resolve(target: str, namespace: dict[str, Any]) -> Any:
    """Return the object for the target of a table row: ``"module:name"``, or a name in `namespace`."""
    module, _, name = target.rpartition(":")
    return getattr(importlib.import_module(module), name) if module else namespace[name]


def absent(module: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of a module.

    For an unserved name of another release it is an `UnservedMemberError`, which says what to use.
    """
    why = unserved_name(module, name)
    if why is not None:
        return UnservedMemberError(f"{module}.{name} isn't served: {why}")
    return AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
