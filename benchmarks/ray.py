"""Ray against this process and its workers, as seen by the learner: a buffer and collectors in Ray actors.

These are gauges, not cases. An actor works while the learner does, so the two sides share the machine anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule

from benchmarks.clock import now
from benchmarks.harness import Gauge
from benchmarks.multiprocess import KINDS, Kind, cartpole_module, collector_of, gym_env
from benchmarks.multiprocess_gauges import Large
from benchmarks.workload import FRAMES_ENV, IMAGE_CHUNK, as_tensordict, rows
from gleanrl import _util
from gleanrl.collectors.distributed import RayCollector
from gleanrl.collectors.distributed.actor import NodeMaker
from gleanrl.collectors.distributed.local_transport import NodeShare
from gleanrl.collectors.source import Budget
from gleanrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer

BATCH = 256
PREFETCH = {"cartpole": 16, "image": 2}
"""Batches to prefetch, in this process and in an actor. A message costs a tenth of a millisecond, so that each carries
half of the small batches."""
SMALL_ROWS, IMAGE_ROWS = 100_000, 5_000
COPIES = 8
"""Number of sources to copy, used one after the other, so that the caches hold none of them."""
WORK_S, SHORT_WORK_S, IMAGE_WORK_S = 5e-3, 1e-3, 20e-3
"""Times that a learner works between two samples."""
ROUNDS, SAMPLES = 5, 100
CONFIG = {
    "address": "local",
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 1_000_000_000,
}


@contextmanager
def filled(kind: str, count: int, remote: bool) -> Iterator[Any]:
    """Yield a buffer of `count` rows, in this process or in an actor.

    Meanwhile torch has one thread, so that the learner leaves the other core to the actor.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = {"storage": LazyTensorStorage(count), "batch_size": BATCH, "prefetch": PREFETCH[kind]}
    buffer = RayReplayBuffer(ray_init_config=CONFIG, **options) if remote else ReplayBuffer(**options)
    chunk = as_tensordict(rows(kind, IMAGE_CHUNK if kind == "image" else 10_000))
    for _ in range(count // len(chunk)):
        buffer.extend(chunk)
    yield buffer
    if remote:
        buffer.shutdown()
    torch.set_num_threads(threads)


def _learn(seconds: float = WORK_S) -> None:
    """Compute in torch for `seconds`, as a learner does."""
    weights = torch.full((64, 64), 0.01)
    end = now() + seconds
    while now() < end:
        weights = (weights @ weights).tanh()


def _nothing() -> None:
    """Do no work between two samples."""


def _seconds(call: Callable[[], Any], count: int, between: Callable[[], Any]) -> float:
    """Return the mean time of `count` calls, each after a call of `between`.

    It is not a median: if a message carries several batches, the first of them takes the time of all.
    """
    total = 0.0
    for _ in range(count):
        between()
        begin = now()
        call()
        total += now() - begin
    return total / count


def small_rows(work_s: float) -> float:
    """Return the time of `sample` from a buffer in an actor over that from a local buffer; both prefetch."""
    work = partial(_learn, work_s) if work_s else _nothing
    with filled("cartpole", SMALL_ROWS, False) as local, filled("cartpole", SMALL_ROWS, True) as remote:
        found = []
        for _ in range(ROUNDS + 1):  # the first round warms up
            here, there = (_seconds(buffer.sample, SAMPLES, work) for buffer in (local, remote))
            found.append(there / here)
        return statistics.median(found[1:])


def image_rows(work_s: float) -> float:
    """Return the time of `sample` of images from an actor over that of copying as many bytes in memory."""
    work = partial(_learn, work_s) if work_s else _nothing
    with filled("image", IMAGE_ROWS, True) as remote:
        sources = [np.ones(remote.sample().bytes(), np.uint8) for _ in range(COPIES)]
        pairs, found = cycle([(source.copy(), source) for source in sources]), []
        for _ in range(ROUNDS + 1):
            sampling = _seconds(remote.sample, SAMPLES // 5, work)
            found.append(sampling / _seconds(lambda: np.copyto(*next(pairs)), 2 * COPIES, _nothing))
        return statistics.median(found[1:])


NODES, STEPS, TURNS = 2, 500, 10
WEIGHTS_NODES = 8
BOUNDS: dict[Kind, float] = {"sync": 1 / 0.7, "async": 1 / 0.8}


def _collectors(kind: Kind, name: str) -> Iterator[Any]:
    """Yield a collector with nodes, then one with as many workers, which make the same batches."""
    policy = cartpole_module if name == "CartPole-v1" else lambda: None
    frames = NODES * STEPS if kind == "sync" else STEPS
    yield RayCollector(
        partial(gym_env, name),
        policy(),
        num_collectors=NODES,
        frames_per_batch=frames,
        sync=kind == "sync",
        ray_init_config=CONFIG,
        remote_configs={"num_cpus": 0},
    )
    yield collector_of(kind, NODES, name, policy(), STEPS)


def collecting(kind: Kind, name: str) -> float:
    """Return the time of batches from nodes over that of batches from workers; both collectors alternate."""
    nodes, workers = _collectors(kind, name)
    parts = TURNS * (1 if kind == "sync" else NODES)
    found = []
    for _ in range(ROUNDS + 1):  # the first round warms up
        times = []
        for collector in (nodes, workers):
            collector.reset()  # discards frames that were collected during the other collector's turn
            begin = now()
            for _ in range(parts):
                collector.next()
            times.append(now() - begin)
        found.append(times[0] / times[1])
    nodes.shutdown()
    workers.shutdown()
    return statistics.median(found[1:])


class Stored(RayCollector):
    """A collector whose nodes lend no memory, as if they were on other machines."""

    def _makers(self, *args: Any) -> list[NodeMaker]:
        return [replace(maker, num_shared_blocks=0) for maker in super()._makers(*args)]


def copies(kind: type[RayCollector]) -> float:
    """Return the bytes that are written to deliver a batch of images to the learner, over the bytes of the batch.

    The result has three digits. More would count the padding that aligns small tensors to 16 bytes.
    """
    nodes = kind(
        partial(gym_env, FRAMES_ENV),
        num_collectors=NODES,
        frames_per_batch=STEPS,
        ray_init_config=CONFIG,
        remote_configs={"num_cpus": 0},
    )
    source, ray = nodes.source, _util.ray()
    source.next(Budget(1, STEPS))
    while not any(node.ready for node in source.controller.now.nodes):
        source.controller.wait()
    arrival = next(node.ready[0] for node in source.controller.now.nodes if node.ready)
    into_the_store = 0 if isinstance(arrival.batch, NodeShare) else ray.get(arrival.batch).num_bytes
    batch = nodes.next()
    found = (into_the_store + batch.bytes()) / batch.bytes()
    nodes.shutdown()
    return round(float(found), 3)


def puts() -> float:
    """Return how often new weights are put into the object store until eight nodes have used them."""
    policy = TensorDictModule(Large(), ["observation"], ["action"])
    nodes = RayCollector(
        partial(gym_env, "CartPole-v1"),
        policy,
        num_collectors=WEIGHTS_NODES,
        sync=True,
        frames_per_batch=WEIGHTS_NODES,
        ray_init_config=CONFIG,
        remote_configs={"num_cpus": 0},
        track_policy_version=True,
    )
    nodes.next()
    before = nodes.source.weights.puts
    nodes.update_policy_weights_()
    assert nodes.next()["policy_version"].unique().tolist() == [1]
    found = nodes.source.weights.puts - before
    nodes.shutdown()
    return float(found)


_SMALL, _IMAGES = "CartPole-like rows from an actor", "84x84x4 uint8 pairs from an actor"
_AHEAD, _IN_TURN = "prefetched while the learner works for", "back to back (two cores)"
_LOCAL, _COPY = "sample from a local buffer", "a copy of the bytes in memory"

GAUGES = (
    *(
        Gauge(f"ray/{name}", f"time of sample({BATCH}) of {what}", "x", partial(measure, seconds), bound)
        for measure, seconds, bound, name, what in (
            (small_rows, WORK_S, 2.0, "sample", f"{_SMALL}, {_AHEAD} 5 ms, over {_LOCAL}"),
            (small_rows, SHORT_WORK_S, 2.0, "sample-short-work", f"{_SMALL}, {_AHEAD} 1 ms, over {_LOCAL}"),
            (small_rows, 0.0, 10.0, "sample-flat-out", f"{_SMALL}, {_IN_TURN}, over {_LOCAL}"),
            (image_rows, IMAGE_WORK_S, 2.5, "sample-image", f"{_IMAGES}, {_AHEAD} 20 ms, over {_COPY}"),
            (image_rows, 0.0, 8.0, "sample-image-flat-out", f"{_IMAGES}, {_IN_TURN}, over {_COPY}"),
        )
    ),
    *(
        Gauge(
            f"ray/collect-{label}-{kind}",
            f"time of batches of RayCollector with {NODES} nodes ({kind}), {label}, over batches of {NODES} workers",
            "x",
            partial(collecting, kind, name),
            BOUNDS[kind],
        )
        for kind in KINDS
        for label, name in (("cartpole", "CartPole-v1"), ("images", FRAMES_ENV))
    ),
    *(
        Gauge(
            f"ray/copies{name}",
            f"bytes written to deliver a batch of images {way}, over the batch's bytes",
            "x",
            partial(copies, kind),
            bound,
        )
        for name, way, kind, bound in (
            ("", "through the object store", Stored, 2.0),
            ("-lent", "from memory that the node lends", RayCollector, 1.0),
        )
    ),
    Gauge(
        "ray/weights",
        f"puts of one version of a million parameters into the object store until {WEIGHTS_NODES} nodes have used it",
        "puts",
        puts,
        1.0,
    ),
)
