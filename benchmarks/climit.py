"""Calls of `climit.c` and `limits/actor.c` on numpy arrays; the first call of each compiles it."""

from __future__ import annotations

import ctypes
import functools
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
ACTOR = SOURCE.parent / "limits" / "actor.c"
BUILD = Path(__file__).resolve().parents[1] / "out" / "benchmarks" / "build"
COMPILE = ("-c", "-O3", "-march=native", "-ffast-math", "-fPIC")
LINK = ("-shared",)
"""Flags without -ffast-math: with it, the linker could add code that flushes subnormals in the whole process."""
_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_double
SIGNATURES: dict[Path, dict[str, list[Any]]] = {
    SOURCE: {
        "gather_k": [_P, _P, _P, _I, _P, _L],
        "gather_runs": [_P, _P, _P, _I, _P, _L, _L],
        "powers": [_P, _D, _D, _P, _L],
        "weights": [_P, _D, _D, _P, _L],
        "oct_update": [_P, _P, _I, _P, _P, _L],
        "oct_draw": [_P, _P, _I, _P, _P, _P, _L, _P],
        "bin_update": [_P, _L, _P, _P, _L],
        "bin_draw": [_P, _L, _P, _P, _P, _L, _P],
    },
    ACTOR: {"act": [_P, _P, _P, _P, _P, _L]},
}


def build(source: Path, compile_flags: Sequence[str] = COMPILE, libraries: Sequence[str] = ("-lm",)) -> Path:
    """Return the library of a C source; compile it unless this source was compiled with these flags before.

    Raises:
        RuntimeError: no C compiler was found, or it failed.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError(
            f"{source.stem}: expected a C compiler (`cc`, or the one named by CC), found none; install one"
        )
    flags = " ".join([compiler, *compile_flags, *LINK, *libraries])
    key = hashlib.sha256(source.read_bytes() + flags.encode()).hexdigest()[:16]
    library = BUILD / f"{source.stem}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # The rename at the end publishes a complete file; another process may look for it, or build it, meanwhile.
        scratch, thing = library.with_suffix(f".{os.getpid()}"), library.with_suffix(f".{os.getpid()}.o")
        _run(source, [compiler, *compile_flags, "-o", str(thing), str(source)])
        _run(source, [compiler, *LINK, "-o", str(scratch), str(thing), *libraries])
        thing.unlink()
        scratch.rename(library)
    return library


def _run(source: Path, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.stem}: {command[0]} failed on {source.name}:\n{done.stderr}")


@functools.cache
def load(source: Path = SOURCE) -> ctypes.CDLL:
    """Load the library of a source and declare the types of its functions; see `build`."""
    lib = ctypes.CDLL(str(build(source)))
    for name, arguments in SIGNATURES[source].items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, None
    return lib


class _Columns:
    """Parallel arrays, and buffers for copies of their rows; the constructor allocates the buffers."""

    def __init__(self, columns: Sequence[NDArray[Any]], batch: int) -> None:
        self.out = [np.zeros((batch, *column.shape[1:]), column.dtype) for column in columns]
        self._columns = list(columns)  # keeps alive the memory that `_src` points to
        k = len(self._columns)
        self._src = (ctypes.c_void_p * k)(*[c.ctypes.data for c in columns])
        self._dst = (ctypes.c_void_p * k)(*[c.ctypes.data for c in self.out])
        self._row = (ctypes.c_long * k)(*[c.dtype.itemsize * int(np.prod(c.shape[1:])) for c in columns])
        self._lib = load()


class Gather(_Columns):
    """Gathers rows of parallel arrays into buffers that the constructor allocates.

    Args:
        columns: C-contiguous arrays of equal length.
        batch: largest number of rows per call.
    """

    def __call__(self, index: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Fill the buffers with the rows at `index` (n,) int64, which is not checked, and return the buffers."""
        self._lib.gather_k(self._dst, self._src, self._row, len(self.out), index.ctypes.data, len(index))
        return self.out


class GatherRuns(_Columns):
    """Gathers runs of consecutive rows of parallel arrays into buffers that the constructor allocates.

    Args:
        columns: C-contiguous arrays of equal length.
        length: rows of a run.
        runs: largest number of runs per call.
    """

    def __init__(self, columns: Sequence[NDArray[Any]], length: int, runs: int) -> None:
        super().__init__(columns, length * runs)
        self._length = length

    def __call__(self, start: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Fill the buffers with the runs that begin at rows `start` (n,) int64, unchecked, and return the buffers."""
        k, n = len(self.out), len(start)
        self._lib.gather_runs(self._dst, self._src, self._row, k, start.ctypes.data, n, self._length)
        return self.out


class Tree:
    """A sum tree over priorities, with draws, importance weights and updates.

    It draws as `PrioritizedSampler` does with weights normalised in each batch. numpy makes the random numbers. A row's
    probability is proportional to ``(priority + eps) ** alpha``. Its weight is ``(probability * n) ** -beta``, divided
    by the largest weight of the batch. Alpha is 0.6, and beta is 0.4.

    Args:
        priorities: (n,) float64.
        batch: largest number of rows per call.
    """

    ALPHA, BETA, EPS = 0.6, 0.4, 1e-8

    def __init__(self, priorities: NDArray[np.float64], batch: int) -> None:
        self._lib, self._rng, self._n = load(), np.random.default_rng(2), len(priorities)
        self._uniforms, self._leaves, self._rest = (np.zeros(batch) for _ in range(3))
        self.index, self.weights = np.zeros(batch, np.int64), np.zeros(batch, np.float32)
        self._at = [
            a.ctypes.data for a in (self._uniforms, self.index, self._leaves, self._rest, self.weights)
        ]
        leaves = (priorities + self.EPS) ** self.ALPHA
        self._scale = self._n / float(leaves.sum())
        self._fill(leaves)

    def draw(self, n: int) -> NDArray[np.int64]:
        """Draw `n` rows into `index` and their weights into `weights`, and return `index`."""
        self._rng.random(out=self._uniforms)
        uniforms, index, leaves, rest, weights = self._at
        self._descend(uniforms, index, leaves, n, rest)
        self._lib.weights(leaves, self._scale, self.BETA, weights, n)
        return self.index

    def update(self, index: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Set the priorities (n,) float64 of the rows at `index` (n,) int64."""
        n, leaves = len(index), self._at[2]
        self._lib.powers(priorities.ctypes.data, self.EPS, self.ALPHA, leaves, n)
        self._ascend(index.ctypes.data, leaves, n)

    def _fill(self, leaves: NDArray[np.float64]) -> None:
        raise NotImplementedError

    def _descend(self, uniforms: int, index: int, leaves: int, n: int, rest: int) -> None:
        raise NotImplementedError

    def _ascend(self, index: int, leaves: int, n: int) -> None:
        raise NotImplementedError


class OctTree(Tree):
    """An 8-ary tree whose nodes are one cache line each."""

    def _fill(self, leaves: NDArray[np.float64]) -> None:
        levels = [_padded(leaves)]
        while len(levels[0]) > 8:
            levels.insert(0, _padded(levels[0].reshape(-1, 8).sum(1)))
        starts = np.cumsum([0, *(len(level) for level in levels)])
        room = np.zeros(int(starts[-1]) + 8)
        skip = -room.ctypes.data % 64 // 8  # aligns nodes with cache lines
        self._tree = room[skip : skip + int(starts[-1])]
        np.concatenate(levels, out=self._tree)
        self._starts = starts[:-1].astype(np.int64)
        self._where = (self._tree.ctypes.data, self._starts.ctypes.data, len(levels))

    def _descend(self, uniforms: int, index: int, leaves: int, n: int, rest: int) -> None:
        self._lib.oct_draw(*self._where, uniforms, index, leaves, n, rest)

    def _ascend(self, index: int, leaves: int, n: int) -> None:
        self._lib.oct_update(*self._where, index, leaves, n)


class BinaryTree(Tree):
    """A binary tree in one array."""

    def _fill(self, leaves: NDArray[np.float64]) -> None:
        size = 1 << max(1, (len(leaves) - 1).bit_length())
        self._tree = np.zeros(2 * size)
        self._tree[size : size + len(leaves)] = leaves
        while size > 1:
            size //= 2
            self._tree[size : 2 * size] = self._tree[2 * size : 4 * size].reshape(-1, 2).sum(1)
        self._where = (self._tree.ctypes.data, len(self._tree) // 2)

    def _descend(self, uniforms: int, index: int, leaves: int, n: int, rest: int) -> None:
        self._lib.bin_draw(*self._where, uniforms, index, leaves, n, rest)

    def _ascend(self, index: int, leaves: int, n: int) -> None:
        self._lib.bin_update(*self._where, index, leaves, n)


class _ActorState(ctypes.Structure):
    _fields_ = [*((name, _P) for name in ("w1", "b1", "w2", "b2", "w3", "b3")), ("state", ctypes.c_uint64)]


class Actor:
    """A network 4-64-64-2 with tanh, a Categorical and its log-probability, for all rows of columns.

    Args:
        layers: weight and bias of each of the three layers, as torch has them: (out, in) and (out,) float32.
        observation: (n, 4) float32, the rows to compute.
    """

    def __init__(
        self,
        layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        observation: NDArray[np.float32],
    ) -> None:
        n = len(observation)
        self.action, self.score = np.zeros(n, np.int64), np.zeros(n, np.float32)
        self.logits = np.zeros((n, 2), np.float32)
        # The attributes keep alive the memory that C has addresses of.
        self._weights = [np.ascontiguousarray(one) for weight, bias in layers for one in (weight.T, bias)]
        self._observation = np.ascontiguousarray(observation)
        self._state = _ActorState(*(one.ctypes.data for one in self._weights), 1)
        columns = (self._observation, self.action, self.logits, self.score)
        self._arguments = (ctypes.byref(self._state), *(one.ctypes.data for one in columns), n)
        self._act = load(ACTOR).act

    def __call__(self) -> None:
        """Fill `action` (n,) int64, `logits` (n, 2) float32 and the log-probabilities `score` (n,) float32."""
        self._act(*self._arguments)


def _padded(level: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.pad(level, (0, -len(level) % 8))
