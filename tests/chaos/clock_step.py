"""A training whose system clock jumps by a year all the time: `python -m tests.chaos.clock_step FOLDER ROUNDS WORKERS`.

Prints the hash of all collected, drawn and restored data. `clock_step.c` has to be preloaded.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl import Checkpoint
from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from gleanrl.envs import GymEnv
from gleanrl.errors import RateLimiterTimeoutError
from tests.beside import repeated
from tests.chaos.drills import patience, wait_for
from tests.leaks import children

YEAR_S, EVERY_S, WAIT_S = 366 * 86_400, 0.002, 0.2


@contextmanager
def jumping(path: Path) -> Iterator[None]:
    """Set the system clock a year ahead, a year back and right again, in rotation."""
    ahead = cycle((YEAR_S, -YEAR_S, 0))
    with path.open("r+b", buffering=0) as file:

        def jump() -> None:
            file.seek(0)
            file.write(next(ahead).to_bytes(8, sys.byteorder, signed=True))

        jump()
        with repeated(jump, EVERY_S):
            yield


def see_it_jump(begin: float) -> None:
    """Wait until the system clock has shown all three times: a year ahead, a year back and the right one."""
    seen = set[int]()

    def all_seen() -> bool:
        seen.add(round((time.time() - begin) / YEAR_S))
        return seen == {-1, 0, 1}

    wait_for(all_seen, "the time of day to jump")


def wait_in_vain() -> None:
    """Check that a timeout lasts as long as given, although the system clock jumps."""
    rule = SamplesPerInsert(1.0, min_size=1, timeout_s=WAIT_S)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=rule)
    begin = time.monotonic()
    with pytest.raises(RateLimiterTimeoutError):
        buffer.sample()
    assert WAIT_S <= time.monotonic() - begin < 100 * WAIT_S


def collector_of(workers: int) -> Any:
    """Return a collector with this number of workers, or without workers for 0."""
    env, options = partial(GymEnv, "CartPole-v1"), {"frames_per_batch": 20, "total_frames": -1}
    if workers:
        return MultiSyncDataCollector([env] * workers, None, timeouts=patience(20.0), **options)
    return SyncDataCollector(env, None, **options)


def train(folder: Path, rounds: int, workers: int) -> str:
    """Collect, draw, save and restore; return the hash."""
    torch.manual_seed(0)
    digest, collector = hashlib.sha256(), collector_of(workers)
    collector.set_seed(3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=7, prefetch=2)
    checkpoint = Checkpoint(collector=collector, buffer=buffer)
    for _ in range(rounds):
        batch = collector.next()
        buffer.extend(batch.reshape(-1))
        for part in (batch, buffer.sample()):
            for path, value in sorted(flatten(part).items(), key=str):
                digest.update(f"{path}".encode() + value.numpy().tobytes())
        checkpoint.save(folder, keep=2)
        checkpoint.load(folder)
    collector.shutdown()
    return digest.hexdigest()


def main() -> None:
    """Train while the clock jumps, and print the hash."""
    folder, rounds, workers = sys.argv[1:]
    begin = time.time()
    with jumping(Path(os.environ["CLOCK_STEP"])):
        see_it_jump(begin)
        wait_in_vain()
        found = train(Path(folder), int(rounds), int(workers))
    assert all("clock_step" in Path(f"/proc/{pid}/maps").read_text() for pid in children())
    print(found)


if __name__ == "__main__":
    main()
