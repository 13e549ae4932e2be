"""Gauges of collectors with workers, each in a new process: the learner's time, copies, weights and memory."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.harness import Gauge
from benchmarks.memory import in_fresh_process
from benchmarks.multiprocess import collector_of
from benchmarks.settle import settle_allocator
from benchmarks.workload import SLOW_FRAMES_ENV, Greedy

WARM_UP, ROUNDS = 5, 40
BATCHES, BATCHES_BEFORE = 1000, 200
CYCLES, CYCLES_BEFORE = 50, 10


class Large(nn.Module):
    """A policy for CartPole with a million parameters in six tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 996), nn.Tanh(), nn.Linear(996, 996), nn.Tanh(), nn.Linear(996, 2)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the one-hot of the largest output."""
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def policy_of(net: nn.Module) -> TensorDictModule:
    """Return a policy that runs a network."""
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def learner_percent() -> float:
    """Return the percentage of time that a learner does not wait, if it only takes batches of images and drops them."""
    collector = collector_of("sync", 2, SLOW_FRAMES_ENV)
    batches = iter(collector)
    for _ in range(WARM_UP):
        next(batches)
    start, own = time.perf_counter(), time.process_time()
    for _ in range(ROUNDS):
        next(batches)
    percent = 100 * (time.process_time() - own) / (time.perf_counter() - start)
    collector.shutdown()
    return percent


def copies() -> float:
    """Return the learner's own time for a batch of images, as a multiple of one copy of its bytes.

    The copy goes into new memory, as a batch does. Its source was last touched by the previous copy.
    """
    collector = collector_of("sync", 2, SLOW_FRAMES_ENV)
    batches = iter(collector)
    size = sum(leaf.nbytes for leaf in next(batches).values(True, True))
    source = np.ones(size, np.uint8)
    ours, theirs = [], []
    for _ in range(WARM_UP + ROUNDS):
        start = time.process_time()
        batch = next(batches)
        middle = time.process_time()
        copy = source.copy()
        theirs.append(time.process_time() - middle)
        ours.append(middle - start)
        del batch, copy
    collector.shutdown()
    return statistics.median(ours[WARM_UP:]) / statistics.median(theirs[WARM_UP:])


def update_per_copy() -> float:
    """Return the time of `update_policy_weights_` with 4 running workers, as a multiple of one copy of the weights."""
    net = Large()
    collector = collector_of("async", 4, "CartPole-v1", policy_of(net))
    batches = iter(collector)
    weights = {name: torch.randn_like(weight) for name, weight in net.state_dict().items()}
    target = {name: torch.empty_like(weight) for name, weight in weights.items()}
    ours, theirs = [], []
    for _ in range(WARM_UP + ROUNDS):
        next(batches)
        start = time.perf_counter()
        collector.update_policy_weights_()
        middle = time.perf_counter()
        for name, weight in weights.items():
            target[name].copy_(weight)
        theirs.append(time.perf_counter() - middle)
        ours.append(middle - start)
    collector.shutdown()
    return statistics.median(ours[WARM_UP:]) / statistics.median(theirs[WARM_UP:])


def resident(pids: list[int]) -> int:
    """Return the resident memory of some processes in bytes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pids: list[int]) -> int:
    """Return the number of files that some processes hold open."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def growth(of: Callable[[list[int]], int], turns: int, before: int, turn: Callable[[], list[int]]) -> float:
    """Return by how much a figure of processes grows over some turns, according to a fitted straight line.

    Args:
        of: returns the figure of the processes with these ids.
        turns: number of turns.
        before: number of earlier turns, which are not counted.
        turn: does some work and returns the ids of the processes.
    """
    seen = np.zeros(turns)  # allocated beforehand, since the growth of a list would be part of the reading
    for number in range(-before, turns):
        pids = turn()
        if number >= 0:
            seen[number] = of(pids)
    return max(0.0, float(np.polyfit(np.arange(turns), seen, 1)[0]) * turns)


def over_batches(of: Callable[[list[int]], int]) -> float:
    """Return the growth of a figure over batches, summed over the learner and two workers."""
    collector = collector_of("sync", 2, "CartPole-v1", policy_of(Greedy()))
    batches = iter(collector)

    def turn() -> list[int]:
        next(batches)
        return [os.getpid(), *collector.processes]

    found = growth(of, BATCHES, BATCHES_BEFORE, turn)
    collector.shutdown()
    return found


def over_cycles(of: Callable[[list[int]], int]) -> float:
    """Return the growth of a figure of the learner, over collectors that are made, used once and shut down."""

    def turn() -> list[int]:
        collector: Any = collector_of("sync", 2, "CartPole-v1", policy_of(Greedy()), steps=20)
        next(iter(collector))
        collector.shutdown()
        return [os.getpid()]

    return growth(of, CYCLES, CYCLES_BEFORE, turn)


READINGS: dict[str, Callable[[], float]] = {
    "learner": learner_percent,
    "copies": copies,
    "update": update_per_copy,
    "memory-batches": lambda: over_batches(resident) / 1024,
    "descriptors-batches": lambda: over_batches(descriptors),
    "memory-cycles": lambda: over_cycles(resident) / 1024,
    "descriptors-cycles": lambda: over_cycles(descriptors),
}


def _gauge(name: str, title: str, unit: str, bound: float) -> Gauge:
    read = partial(in_fresh_process, name, "benchmarks.multiprocess_gauges")
    return Gauge(f"multiprocess/{name}", title, unit, read, bound)


_IMAGES = "2 workers, 84x84x4 images, 500 us a frame"
GAUGES = (
    _gauge("learner", f"{_IMAGES}: share of time that the learner does not wait", "%", 10.0),
    _gauge(
        "copies",
        f"{_IMAGES}: the learner's own time for a batch, as a multiple of one copy of the batch",
        "copies",
        1.5,
    ),
    _gauge(
        "update",
        "update_policy_weights_ of a million parameters to 4 workers, as a multiple of one copy of the parameters",
        "copies",
        2.0,
    ),
    _gauge(
        "memory-batches", "growth of the memory of learner and 2 workers over 1,000 batches", "KiB", 512.0
    ),
    _gauge(
        "descriptors-batches",
        "growth of the open files of learner and 2 workers over 1,000 batches",
        "files",
        0.5,
    ),
    _gauge(
        "memory-cycles", "growth of the memory over 50 collectors that are made and shut down", "KiB", 512.0
    ),
    _gauge(
        "descriptors-cycles",
        "growth of the open files over 50 collectors that are made and shut down",
        "files",
        0.5,
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    settle_allocator()
    print(json.dumps(READINGS[sys.argv[1]]()))
