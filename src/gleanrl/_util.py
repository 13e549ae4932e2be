"""Which methods a user's class replaced: what stands in for a method may be used only where nobody did.

Checks that arguments of several classes share.

The one place of imports that wait: libraries that are installed with an extra, and needed by few programs.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from typing import Any

from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingLibraryError


def positive(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 1 or more; `InvalidArgumentError`, naming the argument, if not."""
    return integer(name, value, 1)


def positive_or_none(name: str, value: Any) -> int | None:
    """Return `value` if it is None, or an integer of 1 or more; see `positive`."""
    return None if value is None else positive(name, value)


def non_negative(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 0 or more; `InvalidArgumentError`, naming the argument, if not."""
    return integer(name, value, 0)


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; `InvalidTypeError`, naming the argument, if not."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name}: expected True or False, got {value!r}")
    return value


def named(name: str, value: str) -> str:
    """Return `value` if it is a path; `InvalidArgumentError`, naming the argument, if it is empty."""
    if not value:
        raise InvalidArgumentError(f"{name}: expected the name of a file or folder, got {value!r}")
    return value


def optional_callable(name: str, value: Any) -> Any:
    """Return `value` if it can be called or is None; `InvalidTypeError`, naming the argument, if not."""
    if value is not None and not callable(value):
        raise InvalidTypeError(f"{name}: expected a callable, got {type(value).__name__}")
    return value


def key_list(keys: Any) -> tuple[NestedKey, ...]:
    """Return the `keys` argument of `sample`, one key or several, as a tuple; they aren't looked at."""
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, Iterable):
        raise InvalidTypeError(f"keys: expected a list of keys, got {keys!r}")
    return tuple(keys)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return `value` if it is an integer, no bool, and not below `least`; `InvalidArgumentError` if not."""
    if type(value) is int and (least is None or value >= least):  # almost always
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of {least} or more"
        raise InvalidArgumentError(f"{name}: expected an integer{bound}, got {value!r}")
    return number


def h5py() -> Any:
    """Return h5py.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    return _imported("h5py", "h5", "HDF5 files need")


def ray() -> Any:
    """Return Ray.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    return _imported("ray", "ray", "collectors and buffers on Ray need")


def _imported(library: str, extra: str, who_needs: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as cause:
        raise MissingLibraryError(
            f"{who_needs} {library}, which can't be imported: pip install 'gleanrl[{extra}]'"
        ) from cause


_MISSING = object()
_HOUSE = __name__.partition(".")[0] + "."


def is_ours(definition: Any) -> bool:
    """Return whether a class or a function is this library's, and no user's."""
    return str(definition.__module__).startswith(_HOUSE)


def overridden(subject: Any, *names: str, of: type[Any]) -> tuple[str, ...]:
    """Return which of the attributes `names` aren't those of the class `of`.

    Methods, properties and class attributes count, whether a subclass replaces them, one of its other bases does, or
    the object itself has another one (``env.step = ...``); so does a name that `of` hasn't got. For construction and
    once a batch, not for every step: a look-up costs about a microsecond.

    Args:
        subject: a class, or an object.
        names: attributes.
        of: whose attributes they are to be.

    Examples:
        >>> class Base:
        ...     def step(self): ...
        ...     def reset(self): ...
        >>> class Derived(Base):
        ...     def step(self): ...
        >>> overridden(Derived, "step", "reset", of=Base), overridden(Base(), "step", of=Base)
        (('step',), ())
    """
    cls = subject if isinstance(subject, type) else type(subject)
    own = {} if subject is cls else getattr(subject, "__dict__", {})
    if cls is of:  # mostly, in policies, which are looked at once a batch
        return tuple(name for name in names if name in own)
    return tuple(name for name in names if name in own or _found(cls, name) is not _found(of, name))


def is_native(subject: Any, *names: str, of: type[Any]) -> bool:
    """Return whether a class, or an object, is one of `of` and has its `names` as they are; see `overridden`."""
    cls = subject if isinstance(subject, type) else type(subject)
    return issubclass(cls, of) and not overridden(subject, *names, of=of)


def _found(cls: type[Any], name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _MISSING
