"""cpprb's sides: ReplayBuffer and PrioritizedReplayBuffer with all 11 columns."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer, ReplayBuffer
from numpy.typing import NDArray

from benchmarks.workload import Columns, Updates, first_priorities, rows, stored

VERSION = importlib.metadata.version("cpprb")
RING, EXTEND, STORED = 100_000, 200, 1_000_000
Work = Callable[[], float]


def flat(columns: Columns) -> dict[str, NDArray[Any]]:
    """Return the columns under names that serve as keyword arguments of cpprb."""
    return {"_".join(path): column for path, column in columns.items()}


def make(
    columns: dict[str, NDArray[Any]], size: int, kind: type[ReplayBuffer] = ReplayBuffer, **options: Any
) -> ReplayBuffer:
    """Return a buffer of `size` rows with these columns."""
    return kind(
        size,
        {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in columns.items()},
        **options,
    )


def writing(n: int, calls: int) -> Callable[[], Work]:
    """Return the set-up of `add` with `n` rows into a full ring."""

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
    """Return the set-up of `sample(batch)`."""

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


def prioritized() -> PrioritizedReplayBuffer:
    """Return a full prioritized buffer of a million rows. Each row has a different priority."""
    columns, priorities = flat(stored("cartpole")), first_priorities(STORED)
    buffer = make(columns, STORED, PrioritizedReplayBuffer, alpha=0.6)
    for i in range(0, STORED, 1000):
        cut = {name: column[i : i + 1000] for name, column in columns.items()}
        buffer.add(**cut, priorities=priorities[i : i + 1000])
    return buffer


def prioritized_sampling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(256)` with weights."""

    def setup() -> Work:
        buffer = prioritized()

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256, beta=0.4)
            return calls

        return work

    return setup


def updating(calls: int) -> Callable[[], Work]:
    """Return the set-up of `update_priorities` with 256 rows."""

    def setup() -> Work:
        buffer, updates = prioritized(), Updates(STORED, 256, calls, as_its_own)

        def work() -> int:
            for index, priority in updates.turn():
                buffer.update_priorities(index, priority)
            return calls

        return work

    return setup


def as_its_own(array: NDArray[Any]) -> NDArray[Any]:
    """Return an int64 array as uint64, the dtype of cpprb's indexes, and any other array unchanged."""
    return array.astype(np.uint64) if array.dtype == np.int64 else array


def cycling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `add` with 4 rows, `sample(256)` and new priorities of the sampled rows."""

    def setup() -> Work:
        buffer, updates, data = prioritized(), Updates(STORED, 256, calls), flat(rows("cartpole", 4))

        def work() -> int:
            for _, priority in updates.turn():
                buffer.add(**data)
                buffer.update_priorities(buffer.sample(256, beta=0.4)["indexes"], priority)
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
    "prioritized/sample": prioritized_sampling(200),
    "prioritized/update": updating(1000),
    "prioritized/cycle": cycling(200),
}
