"""Keywords of public constructors: other spellings are translated, those that aren't served say what to use.

Unknown ones raise with the nearest known.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from gleanrl.compat.names import KEYWORDS, UNSERVED_KEYWORDS, UnservedKeyword
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnservedKeywordError
from gleanrl.overrides import is_ours

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
