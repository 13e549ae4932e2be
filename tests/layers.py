"""How many functions of the library, and in how many files, a call passes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def entered(call: Callable[[], object]) -> list[CodeType]:
    """Return the functions that a call enters, one after the other; comprehensions and properties are some."""
    seen: list[CodeType] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "gleanrl" in frame.f_globals.get("__name__", ""):
            seen.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def size_of(functions: list[CodeType]) -> tuple[int, int]:
    """Return how many they are, and in how many files."""
    return len(functions), len({code.co_filename for code in functions})
