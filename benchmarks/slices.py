"""Samples of 16 slices of 64 steps, against an episode table in numpy with C copies, and against peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.climit import GatherRuns
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.workload import Columns, as_tensordict, chunks_of_episodes, episode_rows
from gleanrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

STORED, LARGE = 1_000_000, 10_000_000
SLICES, LENGTH = 16, 64
EXTEND = 200
TORCHRL = ("torchrl end_key", "torchrl traj_key")
TORCHRL_CACHED = tuple(f"{side},cached" for side in TORCHRL)


def our_buffer(n: int, columns: Columns) -> TensorDictReplayBuffer:
    """Return a full buffer of `n` rows of episodes."""
    sampler = SliceSampler(num_slices=SLICES, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=SLICES * LENGTH)
    buffer.extend(as_tensordict(columns))
    return buffer


def ours(calls: int, n: int = STORED, extend: bool = False) -> Setup:
    """Return our set-up of samples. With `extend`, a write of an episode of 200 steps precedes each sample."""

    def setup() -> Work:
        buffer = our_buffer(n, episode_rows(n))
        chunks = [as_tensordict(columns) for columns in chunks_of_episodes(EXTEND)]

        def work() -> int:
            for k in range(calls):
                if extend:
                    buffer.extend(chunks[k % len(chunks)])
                buffer.sample()
            return calls

        return work

    return setup


class Table:
    """An episode table: the first rows of all episodes that are long enough, and in how many rows a slice may begin.

    Args:
        columns: rows in order. The first row begins an episode.
    """

    def __init__(self, columns: Columns) -> None:
        ends = np.flatnonzero(columns["next", "done"][:, 0]) + 1
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts
        enough = lengths >= LENGTH
        self.starts, self.choices = starts[enough], (lengths - LENGTH + 1)[enough]
        self._rng = np.random.default_rng(6)

    def draw(self) -> NDArray[np.int64]:
        """Return the first rows of SLICES slices. Each has a random episode and a random first step within it."""
        episode = self._rng.integers(0, len(self.starts), SLICES)
        first: NDArray[np.int64] = self.starts[episode] + self._rng.integers(0, self.choices[episode])
        return first


def by_table(
    calls: int, make: Callable[[list[NDArray[Any]]], Callable[[NDArray[np.int64]], Any]], n: int = STORED
) -> Setup:
    """Return the set-up of slices that an episode table in numpy draws, copied into preallocated buffers."""

    def setup() -> Work:
        columns = episode_rows(n)
        table, gather = Table(columns), make(list(columns.values()))

        def work() -> int:
            for _ in range(calls):
                gather(table.draw())
            return calls

        return work

    return setup


def c_runs(columns: list[NDArray[Any]]) -> GatherRuns:
    """Return the C copy of consecutive rows."""
    return GatherRuns(columns, LENGTH, SLICES)


def take_runs(columns: list[NDArray[Any]]) -> Callable[[NDArray[np.int64]], Any]:
    """Return the same copy by `numpy.take(out=)`, column by column."""
    pairs = [(column, np.zeros((SLICES * LENGTH, *column.shape[1:]), column.dtype)) for column in columns]
    steps = np.arange(LENGTH)

    def gather(first: NDArray[np.int64]) -> None:
        index = (first[:, None] + steps).ravel()
        for column, out in pairs:
            np.take(column, index, axis=0, out=out)

    return gather


def writing_by_table(calls: int) -> Setup:
    """Return the set-up of slice writes of 200 rows, each followed by a sample.

    All episodes have 200 steps, so that writes never change the table.
    """

    def setup() -> Work:
        columns, chunks = episode_rows(STORED), chunks_of_episodes(EXTEND)
        done = np.arange(STORED) % EXTEND == EXTEND - 1
        table = Table({**columns, ("next", "done"): done[:, None]})
        gather, pairs = c_runs(list(columns.values())), list(columns.items())
        cursor = 0

        def work() -> int:
            nonlocal cursor
            for k in range(calls):
                chunk = chunks[k % len(chunks)]
                for path, column in pairs:
                    column[cursor : cursor + EXTEND] = chunk[path]
                cursor = (cursor + EXTEND) % STORED
                gather(table.draw())
            return calls

        return work

    return setup


LIMIT = "numpy table, C copies"
CASES = (
    Case(
        "slices/sample",
        f"{SLICES} slices of {LENGTH} steps out of a million rows (episodes of 200 steps on average, 11 leaves)",
        "call",
        {
            LIMIT: by_table(1000, c_runs),
            "numpy table, numpy.take(out=)": by_table(300, take_runs),
            "gleanrl": ours(300),
        },
        LIMIT,
        targets=(
            Target(2.5, against="flashbax"),
            *(Target(4.0, against=side) for side in TORCHRL_CACHED),
            *(Target(30.0, against=side) for side in TORCHRL),
        ),
        peers=("flashbax", *TORCHRL_CACHED, *TORCHRL),
    ),
    Case(
        "slices/extend-sample",
        f"extend({EXTEND}), then {SLICES} slices of {LENGTH} steps out of a million rows",
        "call",
        {LIMIT: writing_by_table(1000), "gleanrl": ours(300, extend=True)},
        LIMIT,
        targets=(
            Target(2.0, against="flashbax"),
            *(Target(20.0, against=side) for side in (*TORCHRL_CACHED, *TORCHRL)),
        ),
        peers=("flashbax", *TORCHRL_CACHED, *TORCHRL),
    ),
    Case(
        "slices/large",
        f"{SLICES} slices of {LENGTH} steps out of {LARGE:,} rows, against {STORED:,} rows",
        "call",
        {
            "gleanrl, a tenth of the rows": ours(300),
            LIMIT: by_table(1000, c_runs),
            f"{LIMIT}, ten times the rows": by_table(1000, c_runs, LARGE),
            "gleanrl": ours(300, LARGE),
        },
        "gleanrl, a tenth of the rows",
        targets=(Target(1.3, "time"),),
    ),
)
