"""Deadlines and sleeps follow the real clock or a fake one."""

from __future__ import annotations

import math
import time
from queue import SimpleQueue

import pytest

from gleanrl._os import clock
from gleanrl._os.clock import Deadline, FakeClock, Pace


def test_the_real_clock_is_monotonic_time():
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()


def test_fake_clock_replaces_the_real_one_in_a_block():
    fake = FakeClock(start=100.0)
    with clock.use(fake):
        assert clock.monotonic() == 100.0
        clock.sleep(5.0)
        fake.advance(2.5)
        assert clock.monotonic() == 107.5
        with clock.use(FakeClock()):
            assert clock.monotonic() == 0.0
        assert clock.monotonic() == 107.5
    assert fake.slept == [5.0]
    assert clock.monotonic() != 107.5


def test_the_real_clock_comes_back_after_an_exception():
    with pytest.raises(RuntimeError), clock.use(FakeClock()):
        raise RuntimeError
    assert clock.monotonic() > 0.0


def test_no_sleep_for_zero_or_less():
    fake = FakeClock()
    with clock.use(fake):
        clock.sleep(0.0)
        clock.sleep(-1.0)
    assert fake.slept == []


def test_a_deadline_runs_down_and_passes():
    fake = FakeClock()
    with clock.use(fake):
        deadline = Deadline(10.0)
        assert (deadline.remaining(), deadline.passed()) == (10.0, False)
        fake.advance(9.0)
        assert (deadline.remaining(), deadline.passed()) == (1.0, False)
        fake.advance(1.0)
        assert (deadline.remaining(), deadline.passed()) == (0.0, True)
        fake.advance(5.0)
        assert (deadline.remaining(), deadline.passed()) == (0.0, True)


def test_no_deadline_never_passes():
    with clock.use(FakeClock()) as _:
        deadline = Deadline(None)
        assert (deadline.remaining(), deadline.passed()) == (None, False)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_negative_seconds_are_refused(bad):
    with pytest.raises(ValueError, match="expected seconds >= 0"):
        Deadline(bad)


def test_time_does_not_go_back():
    with pytest.raises(ValueError, match="expected seconds >= 0, got -1"):
        FakeClock().advance(-1)


def test_await_item_waits_for_an_item_or_the_time_limit():
    queue: SimpleQueue[int] = SimpleQueue()
    queue.put(1)
    clock.await_item(queue, math.inf)
    assert queue.empty()
    clock.await_item(queue, 0.0)
    with clock.use(fake := FakeClock()):
        clock.await_item(queue, 5.0)
        assert fake.slept == [5.0]
        for seconds in (5.0, None):
            queue.put(1)
            clock.await_item(queue, seconds)
        assert fake.slept == [5.0] and queue.empty()


def test_pace_pauses_in_proportion_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 0.0005, 0.002, 7.0, 7.0, 7.001, 9.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    fake = FakeClock()
    with clock.use(fake):
        pace = Pace(0.25)
        pace.keep()  # too little work was done for a pause
        assert fake.slept == []
        for _ in range(3):
            pace.keep()
    assert fake.slept == pytest.approx([3 * 0.002, 3 * 0.001])
