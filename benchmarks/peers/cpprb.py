"""cpprb: its ReplayBuffer, all 11 columns."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from cpprb import ReplayBuffer
from numpy.typing import NDArray

from benchmarks.workload import Columns, rows, stored

VERSION = importlib.metadata.version("cpprb")
RING, EXTEND = 100_000, 200
Work = Callable[[], float]


def flat(columns: Columns) -> dict[str, NDArray[Any]]:
    """Names the columns as its keyword arguments."""
    return {"_".join(path): column for path, column in columns.items()}


def make(columns: dict[str, NDArray[Any]], size: int) -> ReplayBuffer:
    """Makes a buffer of `size` rows of these columns."""
    return ReplayBuffer(
        size,
        {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in columns.items()},
    )


def writing(n: int, calls: int) -> Callable[[], Work]:
    """Adds `n` rows a call into a full ring."""

    def setup() -> Work:
        columns = flat(rows("cartpole", n))
        buffer = make(columns, RING)

        def work() -> int:
            for _ in range(calls):
                buffer.add(**columns)
            return calls

        for _ in range(RING // n):
            buffer.add(**columns)
        return work

    return setup


def sampling(kind: str, calls: int, batch: int = 256) -> Callable[[], Work]:
    """`sample(batch)`."""

    def setup() -> Work:
        columns = flat(stored(kind))
        n = len(columns["observation"])
        buffer = make(columns, n)
        for i in range(0, n, 1000):
            buffer.add(**{name: column[i : i + 1000] for name, column in columns.items()})
        columns.clear()

        def work() -> int:
            for _ in range(calls):
                buffer.sample(batch)
            return calls

        return work

    return setup


SETUPS = {
    "replay/extend": writing(EXTEND, 200),
    "replay/add": writing(1, 500),
    "replay/sample": sampling("cartpole", 200),
    "replay/sample-1024": sampling("cartpole", 60, 1024),
    "replay/sample-humanoid": sampling("humanoid", 50),
    "replay/sample-image": sampling("image", 10),
}
