"""Ray against this process, both seen from the learner: a buffer in an actor, with batches asked for ahead.

Gauges, not cases: the two sides share the machine anyway, since the actor works while the learner does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.clock import now
from benchmarks.harness import Gauge
from benchmarks.workload import IMAGE_CHUNK, as_tensordict, rows
from gleanrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer

BATCH, PREFETCH = 256, 2
SMALL_ROWS, IMAGE_ROWS = 100_000, 5_000
WORK_S, IMAGE_WORK_S = 5e-3, 20e-3
"""How long a learner works between two samples."""
ROUNDS, SAMPLES = 5, 100
CONFIG = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 1_000_000_000}


@contextmanager
def filled(kind: str, count: int, remote: bool) -> Iterator[Any]:
    """Gives a buffer of so many rows, here or in an actor."""
    options = {"storage": LazyTensorStorage(count), "batch_size": BATCH, "prefetch": PREFETCH}
    buffer = RayReplayBuffer(ray_init_config=CONFIG, **options) if remote else ReplayBuffer(**options)
    chunk = as_tensordict(rows(kind, IMAGE_CHUNK if kind == "image" else 10_000))
    for _ in range(count // len(chunk)):
        buffer.extend(chunk)
    yield buffer
    if remote:
        buffer.shutdown()


def _learn(seconds: float = WORK_S) -> None:
    """Works as a learner does: in torch, with one thread."""
    weights = torch.full((64, 64), 0.01)
    end = now() + seconds
    while now() < end:
        weights = (weights @ weights).tanh()


def _seconds(call: Callable[[], Any], count: int, between: Callable[[], Any]) -> float:
    """Returns the median time of a call."""
    times = []
    for _ in range(count):
        between()
        begin = now()
        call()
        times.append(now() - begin)
    return statistics.median(times)


def small_rows() -> float:
    """Returns the time of `sample` of a buffer in an actor over that of one here, both with batches ahead."""
    with filled("cartpole", SMALL_ROWS, False) as local, filled("cartpole", SMALL_ROWS, True) as remote:
        found = []
        for _ in range(ROUNDS + 1):  # the first round warms up
            here, there = (_seconds(buffer.sample, SAMPLES, _learn) for buffer in (local, remote))
            found.append(there / here)
        return statistics.median(found[1:])


def image_rows() -> float:
    """Returns the time of `sample` of images in an actor over that of copying as many bytes."""
    with filled("image", IMAGE_ROWS, True) as remote:
        source = np.ones(remote.sample().bytes(), np.uint8)
        target, found = source.copy(), []
        for _ in range(ROUNDS + 1):
            sampling = _seconds(remote.sample, SAMPLES // 5, lambda: _learn(IMAGE_WORK_S))
            found.append(sampling / _seconds(lambda: np.copyto(target, source), 10, lambda: None))
        return statistics.median(found[1:])


def flat_out() -> float:
    """Returns the time of a batch of images, one after the other without a learner, over that of a copy."""
    with filled("image", IMAGE_ROWS, True) as remote:
        source = np.ones(remote.sample().bytes(), np.uint8)
        target, found = source.copy(), []
        for _ in range(ROUNDS + 1):
            begin = now()
            for _ in range(SAMPLES // 5):
                remote.sample()
            each = (now() - begin) / (SAMPLES // 5)
            found.append(each / _seconds(lambda: np.copyto(target, source), 10, lambda: None))
        return statistics.median(found[1:])


GAUGES = (
    Gauge(
        "ray/sample",
        f"sample({BATCH}) of CartPole-like rows in an actor, fetched ahead of a learner, over that of a buffer here",
        "times",
        small_rows,
        2.0,
    ),
    Gauge(
        "ray/sample-image",
        f"sample({BATCH}) of 84x84x4 uint8 pairs in an actor, fetched ahead of a learner, over a copy of the bytes",
        "times",
        image_rows,
        2.5,
    ),
    Gauge(
        "ray/sample-image-flat-out",
        "the same, one after the other: the actor's gather, the object store and the learner's copy (two cores)",
        "times",
        flat_out,
        8.0,
    ),
)
