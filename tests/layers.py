"""Recording of the named functions of the library that a call enters, and of their files."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def entered(call: Callable[[], object]) -> list[CodeType]:
    """Return the functions that a call enters, in order. Comprehensions, generators and lambdas don't count."""
    seen: list[CodeType] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = frame.f_globals.get("__name__", "").partition(".")[0] == "gleanrl"
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            seen.append(code)

    before = sys.getprofile()
    gc.disable()  # finalizers don't belong to the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return seen


def size_of(functions: list[CodeType]) -> tuple[int, int]:
    """Return the number of calls and the number of files that the functions are in."""
    return len(functions), len({code.co_filename for code in functions})


def warm_size_of(call: Callable[[], object], rounds: int = 8) -> tuple[int, int]:
    """Return the least number of functions and of files that a call enters after the first, cold call."""
    call()
    sizes = [size_of(entered(call)) for _ in range(rounds)]
    return min(functions for functions, _ in sizes), min(files for _, files in sizes)
