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


class Compact:
    """A buffer with `next_of`, and for stacks with `stack_compress`; see `compact_peers.py`."""

    def __new__(cls, kind: str, size: int, envs: int) -> Any:
        """Return None for several environments: the options expect steps that follow each other."""
        return super().__new__(cls) if envs == 1 else None

    def __init__(self, kind: str, size: int, envs: int) -> None:
        self._stacks = kind == "stacks"
        entries: dict[str, Any] = {
            "observation": {"shape": (84, 84, 4), "dtype": np.uint8} if self._stacks else {"shape": 17},
            "action": {"dtype": np.int64} if self._stacks else {"shape": 6},
            "reward": {},
            "terminated": {"dtype": bool},
            "truncated": {"dtype": bool},
        }
        self._buffer = ReplayBuffer(
            size, entries, next_of="observation", stack_compress="observation" if self._stacks else None
        )

    def writes(self, steps: Any, count: int) -> list[Any]:
        """Return the arguments of `write` for up to `count` steps of an episode."""
        columns = {
            **{name: getattr(steps, name)[:, 0] for name in steps._fields[:-1]},
            "next_observation": steps.following[:, 0],
        }
        del columns["following"]
        if self._stacks:  # the dimension of frames is the last one
            for name in ("observation", "next_observation"):
                columns[name] = np.ascontiguousarray(np.moveaxis(columns[name], 1, -1))
        done = columns["terminated"] | columns["truncated"]
        cuts = np.union1d(np.arange(count, len(done), count), done.nonzero()[0] + 1)
        parts = {name: np.split(column, cuts) for name, column in columns.items()}
        return [
            ({name: part[i] for name, part in parts.items()}, bool(flags[-1]))
            for i, flags in enumerate(np.split(done, cuts))
            if len(flags)
        ]

    def write(self, row: Any) -> int:
        """Write steps of an episode."""
        columns, done = row
        self._buffer.add(**columns)
        if done:
            self._buffer.on_episode_end()
        return len(columns["reward"])

    def sample(self) -> Any:
        """Return a batch."""
        return self._buffer.sample(256)

    def rows(self, batch: Any) -> dict[str, Any]:
        """Return a batch as arrays."""
        rows = {name: column for name, column in batch.items() if name != "next_observation"}
        rows["following"] = batch["next_observation"]
        if self._stacks:
            for name in ("observation", "following"):
                rows[name] = np.moveaxis(rows[name], -1, 1)
        return rows


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
