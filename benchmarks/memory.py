"""Gauges of the memory that a buffer and a collector keep, each read in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Gauge
from benchmarks.workload import as_tensordict, resident, rows
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1000
ROWS = 1_000_000
BATCHES, WARM_UP_BATCHES = 4000, 1000


def bytes_beyond_columns() -> float:
    """Fill a buffer with a million CartPole-like rows, sample once, and return the bytes per row beyond its columns."""
    columns = rows("cartpole", CHUNK)
    data = as_tensordict(columns)
    width = sum(column.nbytes for column in columns.values()) / CHUNK

    def fill(size: int) -> ReplayBuffer:
        buffer = ReplayBuffer(storage=LazyTensorStorage(size))
        for _ in range(size // CHUNK):
            buffer.extend(data)
        buffer.sample(256)
        return buffer

    fill(CHUNK)  # loads everything that only the first use of a buffer loads, so that it is not counted below
    before = resident()
    buffer = fill(ROWS)
    return (resident() - before) / len(buffer) - width


def bytes_per_frame() -> float:
    """Collect CartPole frames, drop them, and return the slope of the resident memory in bytes per frame."""
    collector = SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=200, total_frames=-1)
    seen = np.zeros(BATCHES)  # allocated beforehand, since the growth of a list would be part of the reading
    for number, _ in enumerate(collector):
        if number >= WARM_UP_BATCHES:
            seen[number - WARM_UP_BATCHES] = resident()
        if number == WARM_UP_BATCHES + BATCHES - 1:
            break
    slope = np.polyfit(np.arange(BATCHES) * 200.0, seen, 1)[0]
    return max(0.0, float(slope))


READINGS = {"rows": bytes_beyond_columns, "collecting": bytes_per_frame}


def in_fresh_process(what: str, module: str = "benchmarks.memory") -> float:
    """Return one of a module's READINGS, taken in a new process.

    Raises:
        RuntimeError: the process failed. The message has its last lines on stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {what}: " + " | ".join(done.stderr.strip().split("\n")[-3:]))
    return float(json.loads(done.stdout))


GAUGES = (
    Gauge(
        "memory/rows",
        "memory of a full buffer of a million CartPole-like rows, beyond its columns",
        "bytes/row",
        lambda: in_fresh_process("rows"),
        16.0,
    ),
    Gauge(
        "memory/collecting",
        "growth of the resident memory over 800,000 collected frames (0.1 is 36 MB per hour at 100,000 frames/s)",
        "bytes/frame",
        lambda: in_fresh_process("collecting"),
        0.1,
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(READINGS[sys.argv[1]]()))
