"""Large buffers that are used again once nothing refers to them: fresh memory costs a page fault every 4 KB.

A batch of image observations is tens of megabytes. Given back to the system and asked for again, that memory
is faulted in anew for every batch, which takes longer than filling it.

Memory that outlives `torch.inference_mode`: a tensor that is made within it can't be written once it's over.

Programs evaluate policies in that mode, with environments and buffers that they go on using.
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

Given = ParamSpec("Given")
Result = TypeVar("Result")


def lasting(make: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return `make`, which allocates, so that what it makes can be written in inference mode and outside of it.

    The mode is left and entered again by calls of C, so that no interrupt leaves it otherwise than it was.
    """

    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch._C._InferenceMode(False):
            return make(*args, **kwargs)

    return made


Array = np.ndarray[Any, Any]

_TRACKED = 8


class BufferPool:
    """Hands out uninitialised byte buffers and takes them back by itself when the last view of one has died.

    Any tensor or array made of a buffer keeps it in use, however it was derived; nobody has to return it. At most
    `spare` idle buffers of a size are kept beyond the one handed out, and none of the other sizes when a new size
    is asked for. Any number of threads may take.

    Args:
        min_bytes: smaller buffers aren't pooled: the allocator is good at those.
        spare: idle buffers kept of each size.
    """

    def __init__(self, min_bytes: int = 1 << 20, spare: int = 2) -> None:
        self.min_bytes = min_bytes
        self.spare = spare
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Array]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array of that shape and dtype that shares memory with nothing alive."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self.min_bytes:
            return np.empty(shape, dtype)
        return self._take(num_bytes).view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> Array:
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
    """Return the positions of the buffers that nothing but this list refers to."""
    return [k for k in range(len(buffers)) if sys.getrefcount(buffers[k]) == _IDLE]


# The references to a buffer that only its list holds; how many that are depends on the Python version.
_IDLE = next(sys.getrefcount(buffers[0]) for buffers in [[np.empty(1)]])
