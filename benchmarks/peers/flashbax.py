"""flashbax's sides: prioritised item buffer and trajectory buffer, jitted, with all 11 columns (integers in 32 bits).

flashbax knows no episodes, so a slice may cross the end of one. Each call waits for its result.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import flashbax
import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Columns, Updates, episode_rows, first_priorities, rows

VERSION = importlib.metadata.version("flashbax")
STORED, BATCH, NEW, EXTEND = 1_000_000, 256, 4, 200
SLICES, LENGTH = 16, 64
CHUNK = 1000
Work = Callable[[], float]


def flat(columns: Columns) -> dict[str, NDArray[Any]]:
    """Return the columns under names that are single strings."""
    return {"_".join(path): column for path, column in columns.items()}


def chunks(columns: dict[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the columns in pieces of CHUNK rows."""
    for i in range(0, STORED, CHUNK):
        yield {name: column[i : i + CHUNK] for name, column in columns.items()}


class Buffer:
    """A buffer and its state. Writes and updates donate the state's memory to the new state.

    Args:
        pure: flashbax's buffer, a set of pure functions.
        columns: the first STORED rows of the buffer.
        batched: whether `add` needs a leading dimension of 1.
    """

    def __init__(self, pure: Any, columns: dict[str, NDArray[Any]], batched: bool) -> None:
        self._state = pure.init({name: jax.numpy.asarray(column[0]) for name, column in columns.items()})
        self._add = jax.jit(pure.add, donate_argnums=0)
        self._sample = jax.jit(pure.sample)
        self._set = (
            jax.jit(pure.set_priorities, donate_argnums=0) if hasattr(pure, "set_priorities") else None
        )
        self._key = jax.random.PRNGKey(0)
        self._split = jax.jit(jax.random.split)
        self._batched = batched
        for chunk in chunks(columns):
            self.add(chunk)

    def add(self, columns: dict[str, NDArray[Any]]) -> None:
        """Add rows."""
        if self._batched:
            columns = {name: column[None] for name, column in columns.items()}
        self._state = jax.block_until_ready(self._add(self._state, columns))

    def sample(self) -> Any:
        """Return a sample."""
        self._key, key = self._split(self._key)
        return jax.block_until_ready(self._sample(self._state, key))

    def update(self, index: Any, priority: Any) -> None:
        """Set the priorities of rows."""
        assert self._set is not None
        self._state = jax.block_until_ready(self._set(self._state, index, priority))


def prioritised() -> Buffer:
    """Return a full prioritised buffer. Each row has a different priority."""
    pure = flashbax.make_prioritised_item_buffer(
        max_length=STORED,
        min_length=BATCH,
        sample_batch_size=BATCH,
        add_sequences=True,
        add_batches=False,
        priority_exponent=0.6,
    )
    buffer = Buffer(pure, flat(rows("cartpole", STORED)), batched=False)
    priorities, index = first_priorities(STORED), np.arange(STORED, dtype=np.int32)
    for i in range(0, STORED, CHUNK):
        buffer.update(index[i : i + CHUNK], priorities[i : i + CHUNK])
    return buffer


def prioritised_sampling(calls: int) -> Callable[[], Work]:
    """Return the set-up of samples of 256 rows. They hold probabilities, from which no weights are computed."""

    def setup() -> Work:
        buffer = prioritised()

        def work() -> int:
            for _ in range(calls):
                buffer.sample()
            return calls

        return work

    return setup


def updating(calls: int) -> Callable[[], Work]:
    """Return the set-up of new priorities for 256 rows."""

    def setup() -> Work:
        buffer, updates = prioritised(), Updates(STORED, BATCH, calls, as_32_bits)

        def work() -> int:
            for index, priority in updates.turn():
                buffer.update(index, priority)
            return calls

        return work

    return setup


def as_32_bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return an int64 array as int32, which flashbax works on, and any other array unchanged."""
    return array.astype(np.int32) if array.dtype == np.int64 else array


def cycling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `add` with 4 rows, a sample of 256 and new priorities of the sampled rows."""

    def setup() -> Work:
        buffer, updates = prioritised(), Updates(STORED, BATCH, calls)
        data = flat(rows("cartpole", NEW))

        def work() -> int:
            for _, priority in updates.turn():
                buffer.add(data)
                buffer.update(buffer.sample().indices, priority)
            return calls

        return work

    return setup


def slicing(calls: int, extend: bool) -> Callable[[], Work]:
    """Return the set-up of samples of 16 runs of 64 rows. With `extend`, 200 rows are added before each sample."""

    def setup() -> Work:
        pure = flashbax.make_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=SLICES,
            sample_sequence_length=LENGTH,
            period=1,
            min_length_time_axis=LENGTH,
            max_length_time_axis=STORED,
        )
        buffer, data = Buffer(pure, flat(episode_rows(STORED)), batched=True), flat(rows("cartpole", EXTEND))

        def work() -> int:
            for _ in range(calls):
                if extend:
                    buffer.add(data)
                buffer.sample()
            return calls

        return work

    return setup


SETUPS = {
    "prioritized/sample": prioritised_sampling(100),
    "prioritized/update": updating(200),
    "prioritized/cycle": cycling(100),
    "slices/sample": slicing(100, extend=False),
    "slices/extend-sample": slicing(100, extend=True),
}
