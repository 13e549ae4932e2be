"""Prioritized buffers of a million rows: against uniform samples, against sum trees in C, and against peers.

Every update has new priorities, since some libraries do nothing for a row whose priority does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.climit import BinaryTree, Gather, OctTree, Tree
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.workload import Columns, Updates, as_tensordict, first_priorities, rows
from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer

STORED, BATCH, NEW = 1_000_000, 256, 4
DRAWS = 1.3
"""C draws that the reference side makes for each uniform sample."""
PEERS = ("torchrl", "tianshou", "cpprb", "flashbax")
# TorchRL's wheel for this torch lacks its C++ tree, so a run has no figures of TorchRL for these targets. A local build
# ran update and cycle at 0.30 and 0.057 of the speed of the C binary tree (and C gather) on a machine of this kind.
TORCHRL_UPDATE, TORCHRL_CYCLE = 3.5 * 0.30, 10 * 0.057


def our_buffer(n: int = STORED, columns: Columns | None = None) -> TensorDictPrioritizedReplayBuffer:
    """Return a full prioritized buffer. Each row has a different priority."""
    buffer = TensorDictPrioritizedReplayBuffer(alpha=Tree.ALPHA, beta=Tree.BETA, storage=LazyTensorStorage(n))
    index = buffer.extend(as_tensordict(rows("cartpole", n) if columns is None else columns))
    buffer.update_priority(index, torch.from_numpy(first_priorities(n)))
    return buffer


def uniform_buffer(n: int = STORED) -> ReplayBuffer:
    """Return a full uniform buffer of the same rows."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(n))
    buffer.extend(as_tensordict(rows("cartpole", n)))
    return buffer


def tree(kind: type[Tree], n: int = STORED) -> Tree:
    """Return a C tree over the same priorities."""
    return kind(first_priorities(n).astype(np.float64), BATCH)


def ours_sampling(calls: int) -> Setup:
    """Return our set-up of samples. Each returns a new TensorDict with index, weights and generations."""

    def setup() -> Work:
        buffer = our_buffer()

        def work() -> int:
            for _ in range(calls):
                buffer.sample(BATCH)
            return calls

        return work

    return setup


def uniform_sampling(calls: int, draws: float, together: bool = False) -> Setup:
    """Return the set-up of uniform samples and, for each of them, `draws` C draws with weights.

    Args:
        calls: samples per turn.
        draws: draws per sample; 0 for samples alone. With 1.3, three samples in ten count two draws, the others one.
        together: whether draws alternate with samples, so that each finds the data of the other in the caches. If not,
            all draws of a turn follow its samples, so that each finds its own data there.
    """

    def setup() -> Work:
        buffer, oct_tree = uniform_buffer(), tree(OctTree)
        total = round(calls * draws)
        after = np.diff(np.arange(calls + 1) * total // calls).tolist()

        def one_by_one() -> int:
            for extra in after:
                buffer.sample(BATCH)
                for _ in range(extra):
                    oct_tree.draw(BATCH)
            return calls

        def one_after_the_other() -> int:
            for _ in range(calls):
                buffer.sample(BATCH)
            for _ in range(total):
                oct_tree.draw(BATCH)
            return calls

        return one_by_one if together else one_after_the_other

    return setup


def c_sampling(calls: int) -> Setup:
    """Return the set-up of C draws with weights, and C gathers into preallocated buffers."""

    def setup() -> Work:
        oct_tree, gather = tree(OctTree), Gather(list(rows("cartpole", STORED).values()), BATCH)

        def work() -> int:
            for _ in range(calls):
                gather(oct_tree.draw(BATCH))
            return calls

        return work

    return setup


def ours_updating(calls: int) -> Setup:
    """Return our set-up of `update_priority`."""

    def setup() -> Work:
        buffer, updates = our_buffer(), Updates(STORED, BATCH, calls, torch.from_numpy)

        def work() -> int:
            for index, priority in updates.turn():
                buffer.update_priority(index, priority)
            return calls

        return work

    return setup


def c_updating(kind: type[Tree], calls: int) -> Setup:
    """Return the set-up of updates of a C tree: powers of the priorities, and the sums above them."""

    def setup() -> Work:
        c_tree, updates = tree(kind), Updates(STORED, BATCH, calls, as_double)

        def work() -> int:
            for index, priority in updates.turn():
                c_tree.update(index, priority)
            return calls

        return work

    return setup


def as_double(array: NDArray[Any]) -> NDArray[Any]:
    """Return a float32 array as float64, and any other array unchanged."""
    return array.astype(np.float64) if array.dtype == np.float32 else array


def ours_cycling(calls: int) -> Setup:
    """Return our set-up of `extend(4)`, `sample(256)` and the priority update of the sampled rows."""

    def setup() -> Work:
        buffer, updates = our_buffer(), Updates(STORED, BATCH, calls, torch.from_numpy)
        data = as_tensordict(rows("cartpole", NEW))

        def work() -> int:
            for _, priority in updates.turn():
                buffer.extend(data)
                batch = buffer.sample(BATCH)
                buffer.update_priority(batch["index"], priority, batch["_generation"])
            return calls

        return work

    return setup


def c_cycling(kind: type[Tree], calls: int) -> Setup:
    """Return the set-up of the same cycle in C, with slice writes by numpy."""

    def setup() -> Work:
        columns = rows("cartpole", STORED)
        c_tree, gather = tree(kind), Gather(list(columns.values()), BATCH)
        updates, write = Updates(STORED, BATCH, calls, as_double), writer(columns, NEW)

        def work() -> int:
            for _, priority in updates.turn():
                c_tree.update(*write())
                index = c_tree.draw(BATCH)
                gather(index)
                c_tree.update(index, priority)
            return calls

        return work

    return setup


def writer(columns: Columns, n: int) -> Callable[[], tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return a function that writes `n` rows at a cursor, and returns their indices and priorities."""
    pairs = list(zip(columns.values(), rows("cartpole", n).values(), strict=True))
    size, priority, steps = len(pairs[0][0]), np.ones(n), np.arange(n)
    cursor = 0

    def write() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        nonlocal cursor
        start, cursor = cursor, (cursor + n) % size
        for column, new in pairs:
            column[start : start + n] = new
        return steps + start, priority

    return write


SAMPLING = f"uniform, then {DRAWS} C draws"
UPDATING = "C 8-ary tree"
CYCLING = "C 8-ary tree and gather"
CASES = (
    Case(
        "prioritized/sample",
        "sample(256) out of a million rows, in new tensors with index and weights, against our uniform sample of the "
        f"same rows and {DRAWS} C draws (8-ary tree, random numbers, weights)",
        "call",
        {
            SAMPLING: uniform_sampling(500, DRAWS),
            "uniform and C draws in one loop": uniform_sampling(500, DRAWS, together=True),
            "uniform": uniform_sampling(500, 0),
            "C draw and gather": c_sampling(1000),
            "gleanrl": ours_sampling(500),
        },
        SAMPLING,
        targets=(
            Target(1.0, "time"),
            Target(2.0, against="tianshou"),
            Target(2.0, against="flashbax"),
            Target(4.0, against="cpprb"),
        ),
        peers=PEERS,
    ),
    Case(
        "prioritized/update",
        "update_priority of 256 random rows out of a million",
        "call",
        {
            UPDATING: c_updating(OctTree, 1000),
            "C binary tree": c_updating(BinaryTree, 1000),
            "gleanrl": ours_updating(1000),
        },
        UPDATING,
        targets=(Target(0.8, against="cpprb"), Target(TORCHRL_UPDATE, against="C binary tree")),
        peers=PEERS,
    ),
    Case(
        "prioritized/cycle",
        f"extend({NEW}), sample(256) out of a million rows and update_priority of the sampled rows",
        "call",
        {
            CYCLING: c_cycling(OctTree, 500),
            "C binary tree and gather": c_cycling(BinaryTree, 500),
            "gleanrl": ours_cycling(500),
        },
        CYCLING,
        targets=(
            Target(3.0, against="tianshou"),
            Target(3.0, against="cpprb"),
            Target(3.0, against="flashbax"),
            Target(TORCHRL_CYCLE, against="C binary tree and gather"),
        ),
        peers=PEERS,
    ),
)
