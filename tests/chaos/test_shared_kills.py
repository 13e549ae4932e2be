"""If a process is killed in a call of a shared buffer, other processes continue at once, with whole rows."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl.data import ReplayBuffer
from tests.chaos.drills import SLACK, p99, scaled
from tests.data.replay_buffers.sharing import check, die, made, rows

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

KILLS, SIZE, SAMPLE_S = 500, 60, 0.1
POINTS = ("segment.journal", "segment.begun", "segment.commit", "segment.committed")
CALLS: dict[str, Callable[[ReplayBuffer, int], object]] = {
    "extend": lambda buffer, turn: buffer.extend(rows(1, 17 * turn, 17)),
    "extend by more than fits": lambda buffer, turn: buffer.extend(rows(1, 90 * turn, 90)),
    "add": lambda buffer, turn: buffer.add(rows(1, turn, 1)[0]),
    "update": lambda buffer, turn: buffer.__setitem__([turn % SIZE, 7, 3], rows(2, 3 * turn, 3)),
    "sample": lambda buffer, turn: check(buffer.sample()),
}


def started(buffer: ReplayBuffer, calls: list[str], plan: dict[str, At], begun: int) -> int:
    """Start a process that repeats these calls until it is killed, from outside or at a fault point."""
    child = os.fork()
    if child:
        return child
    try:
        with fault_points.inject(plan):
            for turn in range(10**6):
                CALLS[calls[turn % len(calls)]](buffer, turn)
                if not turn:
                    os.write(begun, b"x")
    finally:
        os._exit(1)


def test_sampling_continues_at_once_after_a_kill():
    """Kill a process at fault points of a write, while it undoes a lost write, or at random moments, in rotation."""
    draw, buffer, waits = random.Random(11), made(SIZE, 70), []
    kills, before = scaled(KILLS), buffer.stats().rows_written
    heard, begun = os.pipe()
    for turn in range(kills):
        calls = draw.sample(sorted(CALLS), 3)
        point = (*POINTS, "segment.undo", None)[turn % 6]
        if point is None or calls == ["sample"] * 3:
            child = started(buffer, calls, {}, begun)
            os.read(heard, 1)
            time.sleep(draw.uniform(0.0, 0.003))
            os.kill(child, signal.SIGKILL)
        else:
            first = "segment.begun" if point == "segment.undo" else point
            child = started(buffer, calls, {first: At(die, draw.randint(1, 9))}, begun)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, calls
        if point == "segment.undo":  # the next caller undoes the write and is killed as well
            child = started(buffer, ["sample"], {point: At(die)}, begun)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        begin = time.monotonic()
        batch = buffer.sample()
        waits.append(time.monotonic() - begin)
        check(batch)
        check(buffer[:])
        buffer.storage.check_valid()
        now = buffer.stats().rows_written
        assert now >= before and len(buffer) == SIZE
        before = now
    buffer.extend(rows(3, 0, SIZE))
    assert sorted(buffer[:]["key"].tolist()) == list(range(300_000, 300_000 + SIZE))
    os.close(heard)
    os.close(begun)
    print(
        f"\n{kills} kills: a sample after {p99(waits) * 1e3:.1f} ms (99 of 100), {max(waits) * 1e3:.1f} ms at most"
    )
    assert max(waits) <= SAMPLE_S * SLACK
