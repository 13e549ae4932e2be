"""Reusable large buffers, and allocation that is safe in inference mode.

A batch of image observations takes tens of megabytes. Fresh memory from the system costs a page fault every 4 KB. Those
faults take longer than filling the memory, so `BufferPool` reuses large buffers.

Programs evaluate policies inside `torch.inference_mode` and keep using the same environments and buffers afterwards. A
tensor made inside that mode can't be written outside of it, so `lasting` leaves the mode while memory is allocated.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def lasting(make: Callable[Params, Result]) -> Callable[Params, Result]:
    """Wrap the allocating function `make` so that its tensors can be written inside and outside of inference mode.

    The context manager is implemented in C. Python handles no signal inside it, so an interrupt can't leave the mode
    changed.
    """

    @wraps(make)
    def made(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch._C._InferenceMode(False):
            return make(*args, **kwargs)

    return made


Array = np.ndarray[Any, Any]

_TRACKED = 8  # buffers of one size that can be reused: each request looks at all of them


class BufferPool:
    """Hands out uninitialised byte buffers and reuses each one after its last view is gone.

    Every tensor or array over a buffer's memory keeps that buffer in use, so callers never return buffers. The pool
    keeps at most `spare` idle buffers of a size in addition to the one that it hands out. A request for a new size
    drops the idle buffers of all other sizes. Any number of threads may call `empty`.

    Args:
        min_bytes: smaller buffers come from NumPy's allocator, which handles them well.
        spare: the number of idle buffers to keep of each size.
    """

    def __init__(self, min_bytes: int = 1 << 20, spare: int = 2) -> None:
        self.min_bytes = min_bytes
        self.spare = spare
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Array]] = {}

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Take a new lock in a forked child: the thread that held the old one doesn't exist there."""
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array of that shape and dtype, whose memory no live object uses.

        Arrays below `min_bytes` are new. Eight buffers of a size are reused at most; further ones are new each time.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self.min_bytes:
            return np.empty(shape, dtype)
        return self._take(num_bytes).view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> Array:
        # Without the lock two threads could find the same buffer idle and both take it.
        with self._lock:
            if num_bytes not in self._buffers:
                self._forget_idle()
            buffers = self._buffers.setdefault(num_bytes, [])
            idle = _idle(buffers)
            for index in reversed(idle[self.spare + 1 :]):
                del buffers[index]
            if idle:
                return buffers[idle[0]][:]
            buffer = np.empty(num_bytes, np.uint8)
            if len(buffers) < _TRACKED:
                buffers.append(buffer)
            return buffer[:]

    def _forget_idle(self) -> None:
        for size, buffers in list(self._buffers.items()):
            for index in reversed(_idle(buffers)):
                del buffers[index]
            if not buffers:
                del self._buffers[size]


def _idle(buffers: list[Array]) -> list[int]:
    """Return the positions of the buffers that only this list refers to."""
    return [k for k in range(len(buffers)) if sys.getrefcount(buffers[k]) == _IDLE]


# The reference count of a buffer that only its list refers to. It depends on the Python version, so it is measured.
_IDLE = next(sys.getrefcount(buffers[0]) for buffers in [[np.empty(1)]])
