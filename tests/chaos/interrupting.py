"""A program that receives SIGINT twice in most batches: `python -m tests.chaos.interrupting ROUNDS SEED`.

A thread sends the signals at random moments. The second signal often comes during the clean-up of the first. Every
batch must hold transitions of the environments only; see `tests.chaos.oracle`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from gleanrl.errors import GleanError
from tests.chaos.oracle import EPISODE, STEP, Record, makers

WORKERS = 2
STEPS = 8
NAP_S = 0.002
MOST_S = 0.05
"""Latest time of the first signal, and of the second signal after it."""
KINDS = ("parallel", "serial", "pool", "sync", "async")


class Rows(Record):
    """The delivered rows of trajectories that an interrupt may have cut at any step."""

    def _check_order(self, root: np.ndarray) -> None:
        names = self.column("id")
        for name in np.unique(names):
            steps = root[names == name, STEP]
            assert (steps == np.arange(len(steps))).all(), f"trajectory {name} has a hole: {steps.tolist()}"
            assert len(np.unique(root[names == name, EPISODE])) == 1


def collector_of(kind: str) -> Any:
    """Return a collector over two environments."""
    made = makers(WORKERS, nap_s=NAP_S)
    frames = {"frames_per_batch": WORKERS * STEPS, "total_frames": -1}
    if kind in ("sync", "async"):
        return {"sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}[kind](made, None, **frames)
    if kind == "pool":
        return SyncDataCollector(AsyncEnvPool(made, backend="multiprocessing"), None, **frames)
    batch = {"parallel": ParallelEnv, "serial": SerialEnv}[kind]
    return SyncDataCollector(batch(WORKERS, made), None, **frames)


def two_signals(moments: tuple[float, float], done: threading.Event) -> None:
    """Send SIGINT after `moments[0]` seconds and again after `moments[1]` more, unless the batch comes before."""
    for seconds in moments:
        if done.wait(seconds):
            return
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(kind: str, rounds: int, seed: int) -> dict[str, int]:
    """Collect and return the counts of batches, interrupts and new collectors."""
    draws, record = random.Random(seed), Rows()
    found = {"batches": 0, "interrupted": 0, "renewed": 0}
    collector = collector_of(kind)
    record.add(collector.next())
    for _ in range(rounds):
        done = threading.Event()
        # An asynchronous batch may be ready at once, so some first signals have to come early.
        first = draws.choice((1e-4, 1e-3, 1e-2, MOST_S)) * draws.random()
        moments = (first, draws.choice((0.0, 1e-4, 1e-3, 1e-2)) * draws.random())
        thread = threading.Thread(target=two_signals, args=(moments, done))
        batch = None
        try:
            try:
                thread.start()
                batch = collector.next()
            finally:
                done.set()
        except KeyboardInterrupt:
            found["interrupted"] += 1
        while True:
            try:
                thread.join()  # a signal may still be pending
                time.sleep(0)
                break
            except KeyboardInterrupt:
                continue
        found["batches"] += batch is not None
        if batch is not None:
            record.add(batch)
        try:
            record.add(collector.next())
        except GleanError:  # the batch failed with a clear error, so the collector is replaced
            with suppress(GleanError):
                collector.shutdown()
            record.check()
            record, collector = Rows(), collector_of(kind)
            found["renewed"] += 1
            record.add(collector.next())
        stats = collector.stats()
        assert stats.stepped == stats.delivered + stats.flagged + stats.discarded, stats
    record.check()
    collector.shutdown()
    return found


def main(rounds: int, seed: int) -> dict[str, dict[str, int]]:
    """Interrupt each kind of collector; return the counts of each."""
    found = {}
    for kind in KINDS:
        try:
            found[kind] = interrupted(kind, rounds, seed)
        except BaseException as error:
            error.add_note(kind)
            raise
    return found


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
