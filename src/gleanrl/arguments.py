"""Checks that arguments of several classes share."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from gleanrl.tree import NestedKey


def positive(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 1 or more; `InvalidArgumentError`, naming the argument, if not."""
    return _integer(name, value, 1)


def non_negative(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 0 or more; `InvalidArgumentError`, naming the argument, if not."""
    return _integer(name, value, 0)


def key_list(keys: Any) -> tuple[NestedKey, ...]:
    """Return the `keys` argument of `sample`, one key or several, as a tuple; they aren't looked at."""
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, Iterable):
        raise InvalidTypeError(f"keys: expected a list of keys, got {keys!r}")
    return tuple(keys)


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InvalidArgumentError(f"{name}: expected an integer of {least} or more, got {value!r}")
    return number
