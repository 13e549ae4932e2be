"""With workers killed at random moments nothing hangs, and all delivered rows are whole, unique and in order."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from statistics import median

import pytest

from tests.chaos.drills import HANG_S, KINDS, SHARE, SLACK, p99, patience, running, scaled, wait_for
from tests.chaos.oracle import FIRST_STEP_NS, LIFE_STEPS, PROCESS, Record, Tally, makers

pytestmark = pytest.mark.timeout(1800)

WORKERS, STEPS, KILLS, NAP_S = 8, 50, 250, 1e-3
EVERYONE = range(WORKERS)
TOGETHER, EARLY = (1, 1, 1, 2, 3), 0.1
DETECTION_S, FIRST_FRAME_S = 0.1, 0.5
SECONDS, THROUGHPUT = 20, 0.95


class Killer(threading.Thread):
    """Kills one to three random workers of a collector at random moments, until it has killed enough.

    Most victims have finished a share since their start. Other victims are killed during their start. The time to
    replace these isn't counted, because the second loss in a row is followed by a pause.

    Args:
        collector: collector of the workers.
        tally: the counts of their environments.
        kills: number of kills.
    """

    def __init__(self, collector, tally: Tally, kills: int) -> None:
        super().__init__(daemon=True)
        self._collector, self._tally, self._left = collector, tally, kills
        self._rng = random.Random(kills)
        self.detected: list[float] = []
        self.first_frames: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self._left > 0:
                wait_for(lambda: all(map(self._works, EVERYONE)), "shares of all workers")
                time.sleep(self._rng.uniform(0.0, 0.02))
                victims = self._rng.sample(EVERYONE, min(self._left, self._rng.choice(TOGETHER)))
                detected, first_frames = self._kill(victims)
                self.detected += detected
                self.first_frames += first_frames
        except BaseException as error:
            self.error = error

    def _works(self, index: int) -> bool:
        """Return whether a worker has finished a share since its start."""
        count = self._tally.counts[index]
        return bool(count[PROCESS] == self._collector.processes[index] and count[LIFE_STEPS] > STEPS)

    def _kill(self, victims: list[int]) -> tuple[list[float], list[float]]:
        """Kill workers; return the seconds until their successors existed, and until these made a step."""
        self._left -= len(victims)
        former = {index: self._collector.processes[index] for index in victims}
        begin, detected, first_frames = time.monotonic(), [], []
        for pid in former.values():
            os.kill(pid, signal.SIGKILL)
        for index, pid in former.items():
            wait_for(lambda: self._collector.processes[index] != pid, f"a successor of worker {index}")  # noqa: B023
            detected.append(time.monotonic() - begin)
        if self._left and self._rng.random() < EARLY:
            self._kill(victims[: self._left])
            return [], []
        for index in victims:
            wait_for(lambda: self._works(index), f"a share of the successor of worker {index}")  # noqa: B023
            first_frames.append(self._tally.counts[index, FIRST_STEP_NS] / 1e9 - begin)
        return detected, first_frames


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nap_s", [0.0, NAP_S])
def test_killed_workers_are_replaced(kind, nap_s, tmp_path):
    """The times are checked only if the environments leave processors idle, because a dying process needs one, too."""
    kills = scaled(KILLS)
    tally, record = Tally(tmp_path / "tally", WORKERS), Record()
    options = {"on_worker_error": "restart", "max_restarts": kills, "timeouts": patience()}
    with running(kind, makers(WORKERS, tally=tally.path, nap_s=nap_s), steps=STEPS, **options) as collector:
        killer = Killer(collector, tally, kills)
        killer.start()
        longest, after = 0.0, 0
        while after < 2 * WORKERS:  # a few more batches after the last replacement
            begin = time.monotonic()
            record.add(collector.next())
            longest = max(longest, time.monotonic() - begin)
            after += not killer.is_alive()
        if killer.error:
            raise killer.error
    stats = collector.stats()
    figures = {
        "kills": kills,
        "detection_p99_s": round(p99(killer.detected), 4),
        "first_frame_p99_s": round(p99(killer.first_frames), 4),
        "longest_batch_s": round(longest, 3),
        "frames": record.frames,
    }
    print(kind, f"nap {nap_s * 1e3:g} ms", figures)
    record.check()
    assert stats.delivered == record.frames
    # Each killed worker may have made one step that was not yet counted.
    assert 0 <= tally.steps - stats.stepped <= kills
    assert sum(worker.restarts for worker in stats.workers) == kills
    assert record.lives > kills // 2 and longest < HANG_S
    if nap_s:
        assert (
            p99(killer.detected) <= DETECTION_S * SLACK and p99(killer.first_frames) <= FIRST_FRAME_S * SLACK
        )


@pytest.mark.skipif(SHARE < 1, reason="speed is judged in full drills only")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_a_second_costs_little(kind, tmp_path):
    """Seconds with a kill and seconds without one alternate."""
    tally = Tally(tmp_path / "tally", WORKERS)
    rates: dict[bool, list[float]] = {True: [], False: []}
    options = {"on_worker_error": "restart", "max_restarts": SECONDS, "timeouts": patience()}
    with running(kind, makers(WORKERS, tally=tally.path), steps=STEPS, **options) as collector:
        for _ in range(4 * WORKERS):
            collector.next()
        for second in range(2 * SECONDS):
            begin, before = time.monotonic(), tally.steps
            if second % 2:
                os.kill(collector.processes[second // 2 % WORKERS], signal.SIGKILL)
            while time.monotonic() - begin < 1.0:
                collector.next()
            rates[bool(second % 2)].append((tally.steps - before) / (time.monotonic() - begin))
    share = median(rates[True]) / median(rates[False])
    print(f"{kind}: {median(rates[False]):.0f} frames/s, {share:.3f} of them at a kill a second")
    assert share >= THROUGHPUT
