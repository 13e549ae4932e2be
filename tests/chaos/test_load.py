"""Collectors work with many workers on few cores, and with a learner that pauses."""

from __future__ import annotations

import os
import time

import pytest

from gleanrl._os import clock
from gleanrl.collectors.workers.shared_counters import GRANTED, SERVED
from tests.chaos.drills import KINDS, SLACK, patience, running, scaled, wait_for
from tests.chaos.oracle import Record, Tally, makers

pytestmark = pytest.mark.timeout(600)

WORKERS, START_S, DESCRIPTORS = 256, 10.0, 4
BLOCKS = 2


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", KINDS)
def test_many_workers_deliver_right_rows(kind):
    workers, record = scaled(WORKERS), Record()
    with running(kind, makers(1), steps=5) as collector:  # starts the fork server
        collector.next()
    before, begin = open_files(), time.monotonic()
    with running(kind, makers(workers), steps=5) as collector:
        started = time.monotonic() - begin
        record.add(collector.next())
        first = time.monotonic() - begin
        opened = open_files() - before
        for _ in range(3 if kind == "sync" else 3 * workers):
            record.add(collector.next())
    print(f"{kind}: {workers} workers in {started:.2f} s, first batch after {first:.2f} s, {opened} files")
    record.check()
    assert open_files() <= before
    assert first < START_S * SLACK * max(workers / WORKERS, 0.1)
    assert opened <= DESCRIPTORS * workers + 8


@pytest.mark.parametrize("kind", KINDS)
def test_pausing_learner_loses_no_frame(kind, tmp_path):
    """Workers fill their blocks and wait. The collector doesn't report this as a hang, and no frame is lost."""
    workers, steps, time_of_learner = 4, 50, clock.FakeClock()
    tally, record = Tally(tmp_path / "tally", workers), Record()
    with (
        clock.use(time_of_learner),
        running(kind, makers(workers, tally=tally.path), steps=steps, timeouts=patience(0.3)) as collector,
    ):
        for _ in range(4):
            record.add(collector.next())

        def at_rest() -> bool:
            words = [view.words for view in collector._worker_source.controller.counters]
            return all(word[SERVED] == word[GRANTED] for word in words)

        wait_for(at_rest, "workers that wait")
        made = tally.steps
        time_of_learner.advance(600.0)
        assert at_rest() and tally.steps == made  # no worker steps without a grant
        assert made - record.frames <= workers * steps * (BLOCKS + 1)
        for _ in range(4 * workers):
            record.add(collector.next())
    record.check()
