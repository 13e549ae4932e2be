"""Buffers against plain gathers and slice writes of the same columns. All sides have the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.climit import Gather
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.workload import IMAGE_CHUNK, STORED, as_tensordict, rows, stored
from gleanrl.data import LazyTensorStorage, ReplayBuffer

RING = 100_000
"""Rows of the buffers in the cases of `extend` and `add`. The buffers are full before the clock starts, so that no turn
touches a page of memory for the first time."""
EXTEND = 200
ABOUT_20_US = 25.0
"""The bound for "about 20 us", in us. Absolute times of one machine vary by more than this margin from hour to hour."""
PEERS = ("torchrl", "sb3", "tianshou", "cpprb")
FASTER_THAN_PEERS = (Target(1.5, against="cpprb"), Target(4.0, against="torchrl"))


def our_buffer(kind: str) -> ReplayBuffer:
    """Return a full buffer that holds `stored(kind)`."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(STORED[kind]))
    if kind == "image":  # in pieces, since a second copy of all columns would take another 1.1 GB
        chunk = as_tensordict(rows(kind, IMAGE_CHUNK))
        for _ in range(STORED[kind] // IMAGE_CHUNK):
            buffer.extend(chunk)
    else:
        buffer.extend(as_tensordict(stored(kind)))
    return buffer


def ours_sampling(kind: str, batch: int, calls: int) -> Setup:
    """Return our set-up of uniform samples. Each returns new tensors in a TensorDict."""

    def setup() -> Work:
        buffer = our_buffer(kind)

        def work() -> int:
            for _ in range(calls):
                buffer.sample(batch)
            return calls

        return work

    return setup


def _gathering(
    kind: str,
    calls: int,
    batch: int,
    make: Callable[[list[NDArray[Any]]], Callable[[NDArray[np.int64]], Any]],
) -> Setup:
    def setup() -> Work:
        columns = list(stored(kind).values())
        gather, rng, n = make(columns), np.random.default_rng(1), STORED[kind]

        def work() -> int:
            for _ in range(calls):
                gather(rng.integers(0, n, batch))
            return calls

        return work

    return setup


def take_floor(kind: str, batch: int, calls: int, mode: str = "raise") -> Setup:
    """Return the set-up of `numpy.take(out=)` of random rows, column by column, into preallocated buffers."""

    def make(columns: list[NDArray[Any]]) -> Callable[[NDArray[np.int64]], Any]:
        pairs = [(column, np.zeros((batch, *column.shape[1:]), column.dtype)) for column in columns]

        def gather(index: NDArray[np.int64]) -> None:
            for column, out in pairs:
                np.take(column, index, axis=0, out=out, mode=mode)  # type: ignore[call-overload]

        return gather

    return _gathering(kind, calls, batch, make)


def c_gather(kind: str, batch: int, calls: int) -> Setup:
    """Return the set-up of the C gather, with prefetch, of random rows into preallocated buffers."""
    return _gathering(kind, calls, batch, lambda columns: Gather(columns, batch))


def ours_extending(calls: int) -> Setup:
    """Return our set-up of `extend` with EXTEND rows."""

    def setup() -> Work:
        buffer, data = ReplayBuffer(storage=LazyTensorStorage(RING)), as_tensordict(rows("cartpole", EXTEND))
        for _ in range(RING // EXTEND):
            buffer.extend(data)

        def work() -> int:
            for _ in range(calls):
                buffer.extend(data)
            return calls

        return work

    return setup


def ours_adding(calls: int) -> Setup:
    """Return our set-up of `add` with one row. The rows are cut out of a batch beforehand."""

    def setup() -> Work:
        buffer, data = ReplayBuffer(storage=LazyTensorStorage(RING)), as_tensordict(rows("cartpole", EXTEND))
        for _ in range(RING // EXTEND):
            buffer.extend(data)
        singles = [data[i] for i in range(EXTEND)]

        def work() -> int:
            for k in range(calls):
                buffer.add(singles[k % EXTEND])
            return calls

        return work

    return setup


def slice_writes(n: int, calls: int) -> Setup:
    """Return the set-up of plain slice writes of `n` rows at a cursor, column by column."""

    def setup() -> Work:
        source = rows("cartpole", n)
        pairs = [(np.resize(column, (RING, *column.shape[1:])), column) for column in source.values()]
        cursor = 0

        def work() -> int:
            nonlocal cursor
            for _ in range(calls):
                for ring, column in pairs:
                    ring[cursor : cursor + n] = column
                cursor = (cursor + n) % RING
            return calls

        return work

    return setup


def _sampling(kind: str, batch: int, calls: int) -> dict[str, Setup]:
    return {
        "numpy.take(out=)": take_floor(kind, batch, calls),
        "numpy.take(out=, mode='clip')": take_floor(kind, batch, calls, "clip"),
        "gleanrl": ours_sampling(kind, batch, calls),
    }


CASES = (
    Case(
        "replay/extend",
        f"extend of {EXTEND} CartPole-like rows (11 leaves), against slice writes of the same columns",
        "call",
        {"slice writes": slice_writes(EXTEND, 5000), "gleanrl": ours_extending(1000)},
        "slice writes",
        targets=(Target(ABOUT_20_US, "us"), Target(6.0, against="torchrl")),
        peers=PEERS,
    ),
    Case(
        "replay/add",
        "add of one CartPole-like row (11 leaves), against slice writes of the same columns",
        "call",
        {"slice writes": slice_writes(1, 5000), "gleanrl": ours_adding(1000)},
        "slice writes",
        targets=(Target(ABOUT_20_US, "us"), Target(4.0, against="torchrl")),
        peers=PEERS,
    ),
    Case(
        "replay/sample-32",
        "sample(32) of CartPole-like rows (11 leaves) out of a million, in new tensors and a TensorDict",
        "call",
        _sampling("cartpole", 32, 1000),
        "numpy.take(out=)",
        targets=(Target(2.0, "time"),),
    ),
    Case(
        "replay/sample",
        "sample(256) of CartPole-like rows (11 leaves) out of a million, in new tensors and a TensorDict",
        "call",
        _sampling("cartpole", 256, 500),
        "numpy.take(out=)",
        targets=(Target(1.0, "time"), *FASTER_THAN_PEERS),
        peers=PEERS,
    ),
    Case(
        "replay/foreign-sampler",
        "sample(256) of CartPole-like rows by torchrl's RandomSampler, in torchrl's buffer and in gleanrl's",
        "call",
        {"gleanrl": ours_sampling("cartpole", 256, 500)},
        "gleanrl",
        targets=(Target(2 / 3, against="torchrl"),),
        peers=("torchrl", "adapted"),
        subject="adapted",
    ),
    Case(
        "replay/sample-1024",
        "sample(1024) of CartPole-like rows (11 leaves) out of a million, in new tensors and a TensorDict",
        "call",
        _sampling("cartpole", 1024, 200),
        "numpy.take(out=)",
        targets=(Target(0.7, "time"), *FASTER_THAN_PEERS),
        peers=("torchrl", "cpprb"),
    ),
    Case(
        "replay/sample-humanoid",
        "sample(256) of Humanoid-like rows (2x376 float32) out of 200,000, against a C gather into preallocated memory",
        "call",
        {"C gather": c_gather("humanoid", 256, 200), "gleanrl": ours_sampling("humanoid", 256, 200)},
        "C gather",
        targets=(Target(0.85),),
        peers=PEERS,
    ),
    Case(
        "replay/sample-image",
        "sample(256) of 84x84x4 uint8 pairs out of 20,000, against a C gather into preallocated memory",
        "call",
        {"C gather": c_gather("image", 256, 20), "gleanrl": ours_sampling("image", 256, 20)},
        "C gather",
        targets=(Target(0.85),),
        peers=PEERS,
    ),
    Case(
        "replay/sample-image-2048",
        "sample(2048) of 84x84x4 uint8 pairs (58 MB per leaf), against a C gather into preallocated memory",
        "call",
        {"C gather": c_gather("image", 2048, 3), "gleanrl": ours_sampling("image", 2048, 3)},
        "C gather",
        targets=(Target(0.5),),
    ),
)
