"""After two interrupts of a collector with workers, every frame is counted and no trajectory has a gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from tests.chaos.oracle import makers
from tests.collectors.workers.crews import KINDS as KIND
from tests.collectors.workers.test_interrupts import KINDS, check_goes_on, drilled, told
from tests.interrupts import double_interruptions
from tests.leaks import Holdings

pytestmark = pytest.mark.timeout(1800)


@KINDS
@pytest.mark.parametrize("name", ["next", "update of one", "reset", "state_dict", "load_state_dict"])
def test_collector_continues_trajectories_after_two_interrupts(kind: str, name: str, tmp_path: Path) -> None:
    check_goes_on(kind, name, tmp_path, double_interruptions, 60)


@KINDS
def test_frames_after_two_interrupts_are_in_the_buffer_and_counted_or_neither(
    kind: str, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    with drilled(kind, tmp_path, replay_buffer=buffer) as subject:
        collector = subject.collector
        for _, place in double_interruptions(lambda: collector, lambda collector: collector.next(), 80):
            with told(place):
                for _ in range(2):
                    assert collector.stats().delivered == buffer.stats().rows_written
                    collector.next()
        subject.record.add(buffer[:])


@KINDS
def test_a_start_that_is_interrupted_twice_leaves_nothing(kind: str) -> None:
    def start(made: list[Any]) -> None:
        made.append(KIND[kind](makers(2), None, frames_per_batch=12, total_frames=-1))

    def close(made: list[Any]) -> None:
        for collector in made:
            collector.shutdown()
        made.clear()

    first: list[Any] = []
    start(first)
    close(first)
    before = Holdings.now()
    for made, place in double_interruptions(list, start, 8, close=close):
        with told(place):
            close(made)
            before.check()
