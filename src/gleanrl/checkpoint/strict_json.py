"""JSON as checkpoints have it: finite numbers, integers of 64 bits, no key twice, no spaces."""

from __future__ import annotations

import json
import math
from typing import Any

from gleanrl.errors import CorruptCheckpointError

_LARGEST = 2**63


def encoded(tree: Any) -> bytes:
    """Return the bytes of a tree of null, booleans, numbers, strings, lists and dictionaries."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()


def decoded(data: bytes, what: str) -> dict[str, Any]:
    """Return the object that stands in bytes.

    Args:
        data: from anybody.
        what: they are, for messages.

    Raises:
        CorruptCheckpointError: they are no object as above.
    """
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_int,
            parse_float=_float,
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as cause:
        raise CorruptCheckpointError(f"{what}: it isn't what was written: {cause}") from cause
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{what}: expected an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.30} isn't finite")
    return number


def _int(text: str) -> int:
    if len(text) > 20 or not -_LARGEST <= (number := int(text)) < _LARGEST:
        raise ValueError(f"{text:.30} doesn't fit into 64 bits")
    return number
