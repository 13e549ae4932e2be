"""Compiles `climit.c` at first use and calls it on numpy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("climit.c")
BUILD = Path(__file__).resolve().parents[1] / "out" / "benchmarks" / "build"
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


def load() -> ctypes.CDLL:
    """Loads the library, compiling it if this source was not compiled with this compiler before.

    Raises:
        RuntimeError: no C compiler, or it failed.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError(
            "climit: expected a C compiler (`cc`, or the one named by CC), found none; install one"
        )
    key = hashlib.sha256(SOURCE.read_bytes() + compiler.encode() + " ".join(FLAGS).encode()).hexdigest()[:16]
    library = BUILD / f"climit-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        scratch = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(scratch), str(SOURCE)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"climit: {compiler} failed on {SOURCE.name}:\n{done.stderr}")
        scratch.rename(library)
    lib = ctypes.CDLL(str(library))
    p = ctypes.c_void_p
    lib.gather_k.argtypes = [p, p, p, ctypes.c_int, p, ctypes.c_long]
    lib.gather_k.restype = None
    return lib


class Gather:
    """Gathers rows of parallel arrays into buffers that are made here, once.

    Args:
        columns: C-contiguous arrays of equal length.
        batch: most rows of one call.
    """

    def __init__(self, columns: Sequence[NDArray[Any]], batch: int) -> None:
        self.out = [np.zeros((batch, *column.shape[1:]), column.dtype) for column in columns]
        self._columns = list(columns)  # keeps the memory behind the pointers alive
        k = len(self._columns)
        self._src = (ctypes.c_void_p * k)(*[c.ctypes.data for c in columns])
        self._dst = (ctypes.c_void_p * k)(*[c.ctypes.data for c in self.out])
        self._row = (ctypes.c_long * k)(*[c.dtype.itemsize * int(np.prod(c.shape[1:])) for c in columns])
        self._gather = load().gather_k

    def __call__(self, index: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Fills the buffers with rows `index` (n,) int64, unchecked; returns them."""
        self._gather(self._dst, self._src, self._row, len(self.out), index.ctypes.data, len(index))
        return self.out
