"""A background collector with a rate-limited buffer never waits for a thread that has ended."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gleanrl._os import clock
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, MinSize, ReplayBuffer, SamplesPerInsert
from gleanrl.errors import RateLimiterTimeoutError
from tests.collectors.helpers import Net, make
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SHORT = Script(lengths=(3, 4))


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "gleanrl-collector":
            thread.join(10)
            assert not thread.is_alive()


def limited(limiter: SamplesPerInsert) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4, rate_limiter=limiter)


def started(buffer: ReplayBuffer, **options: Any) -> SyncDataCollector:
    collector = make(CountingEnv(SHORT), Net(), replay_buffer=buffer, **options)
    collector.start()
    return collector


def waiting(buffer: ReplayBuffer) -> int:
    return len(buffer._gate.waiting)  # type: ignore[attr-defined]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0)


def counts(buffer: ReplayBuffer) -> tuple[int, int]:
    found = buffer.stats().rate_limiter
    assert found is not None
    return found.inserted, found.sampled


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("ratio", [0.5, 4])
def test_learner_and_collector_keep_the_ratio_to_the_end_of_the_budget(ratio: float, whole: bool) -> None:
    buffer = limited(SamplesPerInsert(ratio, 12))
    collector = started(buffer, total_frames=60, extend_buffer=whole)
    while collector.is_running():
        buffer.sample()
        inserted, sampled = counts(buffer)
        due = ratio * max(inserted - 12, 0) - sampled
        assert -4 <= due <= ratio * 6 or inserted == 60
    assert counts(buffer)[0] == len(buffer) == 60
    buffer.sample()  # the writer has ended, so the limiter doesn't wait
    collector.shutdown()


def test_end_of_the_budget_wakes_a_waiting_learner() -> None:
    buffer = limited(MinSize(100))
    collector = started(buffer, total_frames=12)
    assert len(buffer.sample()) == 4 and len(buffer) == 12
    collector.shutdown()


def test_error_in_the_background_wakes_the_learner() -> None:
    buffer = limited(MinSize(100))

    def hook() -> None:
        if len(buffer) == 12:
            raise ZeroDivisionError

    collector = started(buffer, pre_collect_hook=hook)
    assert len(buffer.sample()) == 4
    with pytest.raises(ZeroDivisionError):
        collector.stop()
    collector.shutdown()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("how", ["stop", "pause", "shutdown", "state_dict"])
def test_waiting_batch_bypasses_the_limiter_during_a_stop_or_pause(how: str, whole: bool) -> None:
    buffer = limited(SamplesPerInsert(1))
    collector = started(buffer, extend_buffer=whole)
    until(lambda: waiting(buffer))
    for first in (True, False):  # a turn that begins while the caller waits bypasses the limiter too
        before = counts(buffer)[0]
        if how == "pause":
            with collector.pause():
                assert not collector.is_running() and counts(buffer)[0] > before
                assert counts(buffer)[0] == collector.stats().delivered
        else:
            getattr(collector, how)()
            assert counts(buffer)[0] > before or not first
        if how == "stop":
            collector.start()
    collector.shutdown()
    assert counts(buffer) == (len(buffer), 0) and not waiting(buffer)
    assert collector.stats().delivered == len(buffer) and not collector.stats().discarded


def test_weight_update_does_not_bypass_the_limiter() -> None:
    buffer, net = limited(SamplesPerInsert(1)), Net(0.5)
    collector = make(CountingEnv(SHORT), net, replay_buffer=buffer)
    collector.start()
    until(lambda: waiting(buffer))
    before = counts(buffer)
    for value in (0.25, 0.75):
        collector.update_policy_weights_(Net(value))
        assert counts(buffer) == before and waiting(buffer) and net.value[0] == value
    collector.stop()  # lets in the waiting batch of the old weights
    collector.start()
    until(lambda: waiting(buffer))
    collector.shutdown()
    actions = buffer[: len(buffer)]["action"][:, 0].tolist()
    assert set(actions[: before[0] + 6]) == {0.5} and set(actions[before[0] + 6 :]) == {0.75}


def test_pause_does_not_end_the_learners_wait() -> None:
    buffer, done = limited(MinSize(1_000)), threading.Event()
    collector = started(buffer)

    def sample() -> None:
        buffer.sample()
        done.set()

    learner = threading.Thread(target=sample)
    learner.start()
    until(lambda: waiting(buffer))
    with collector.pause():
        until(lambda: waiting(buffer))
        assert not done.is_set()
    learner.join(60)
    assert done.is_set() and len(buffer) >= 1_000
    collector.shutdown()


def test_an_interrupted_pause_leaves_the_limit_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hook() -> None:
        begun.set()
        assert go_on.wait(60)

    buffer = limited(SamplesPerInsert(1))
    list(make(CountingEnv(SHORT), Net(), replay_buffer=buffer, total_frames=6))
    collector = make(CountingEnv(SHORT), Net(), replay_buffer=buffer, pre_collect_hook=hook)
    threading.Timer(0.01, lambda: (begun.wait(60), os.kill(os.getpid(), signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):
        collector.start()
        with collector.pause():
            pass
    go_on.set()
    until(lambda: waiting(buffer))
    assert counts(buffer) == (6, 0) and collector.is_running()
    collector.shutdown()
    assert counts(buffer)[0] == collector.stats().delivered + 6


def test_timeout_in_the_background_is_raised_by_the_next_call_and_discards_the_batch() -> None:
    buffer = limited(SamplesPerInsert(1, timeout_s=50))
    with clock.use(clock.FakeClock()):
        collector = started(buffer)
        with pytest.raises(RateLimiterTimeoutError, match="extend waited for samples for 50 s: 5 more rows"):
            until(lambda: not collector.is_running())
    stats = collector.stats()
    assert (stats.delivered, stats.reasons, len(buffer)) == (6, {"buffer": 6}, 6)
    collector.start()
    for _ in range(10):
        buffer.sample()
    collector.shutdown()


PROGRAM = """
import time
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from gleanrl.envs import GymEnv
limiter = SamplesPerInsert(1, timeout_s=None)
buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), rate_limiter=limiter)
collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=10, replay_buffer=buffer)
collector.start()
while not buffer._gate.waiting:
    time.sleep(0)
print("end")
"""


@pytest.mark.slow
def test_a_program_ends_while_the_collector_waits() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")
