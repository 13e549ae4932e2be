"""A small Ray cluster on this machine, shared by all tests of a process that need one.

These tests run one after the other, and `end` follows the last one: Ray's idle processes use a tenth of a core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from gleanrl import _util

CONFIG: dict[str, Any] = {
    "address": "local",
    "num_cpus": 4,
    "include_dashboard": False,
    "object_store_memory": 100_000_000,
    "log_to_driver": False,
    "logging_level": "error",
}
"""Arguments of `ray.init`."""


def prepare() -> Any:
    """Return the Ray module, configured to contact no other machine.

    Call this before the first use of Ray in a process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    return _util.ray()


@contextmanager
def running() -> Iterator[Any]:
    """Start Ray and yield its module; the cluster ends with the block."""
    ray = prepare()
    ray.init(**CONFIG)
    try:
        yield ray
    finally:
        ray.shutdown()


_stack = ExitStack()
_kept: dict[Callable[..., Any], Any] = {}


def kept(make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return the value of a context that all tests share; it is left at `end`."""
    if make not in _kept:
        _kept[make] = _stack.enter_context(make())
    return _kept[make]


def end() -> None:
    """Leave the contexts of `kept`, the latest first."""
    _kept.clear()
    _stack.close()
