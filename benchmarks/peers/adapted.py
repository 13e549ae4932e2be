"""TorchRL's sampler in gleanrl's buffer, to measure the cost of the adapter.

gleanrl is imported from `src`, with the native core that was built there.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

from torchrl.data import RandomSampler

from benchmarks.workload import as_tensordict, stored

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))

from gleanrl.data import LazyTensorStorage, ReplayBuffer

VERSION = f"torchrl {importlib.metadata.version('torchrl')} in gleanrl"


def sampling(kind: str, calls: int, batch: int = 256) -> Callable[[], Callable[[], float]]:
    """Return the set-up of `sample(batch)` with TorchRL's sampler."""

    def setup() -> Callable[[], float]:
        columns = stored(kind)
        storage = LazyTensorStorage(len(columns["observation",]))
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler())
        buffer.extend(as_tensordict(columns))
        del columns

        def work() -> int:
            for _ in range(calls):
                buffer.sample(batch)
            return calls

        return work

    return setup


SETUPS = {"replay/foreign-sampler": sampling("cartpole", 500)}
