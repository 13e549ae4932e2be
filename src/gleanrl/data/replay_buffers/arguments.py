"""Checks that arguments of several classes share."""

from __future__ import annotations

import operator
from typing import Any

from gleanrl.errors import InvalidArgumentError


def positive(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 1 or more; `InvalidArgumentError`, naming the argument, if not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise InvalidArgumentError(f"{name}: expected an integer of 1 or more, got {value!r}")
    return number
