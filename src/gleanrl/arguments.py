"""Checks that arguments of several classes share."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from gleanrl.tree import NestedKey


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
