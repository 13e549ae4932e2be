"""A collector's background thread takes turns, pauses for each call of the user, and ends without leaving resources."""

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
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.background import Background
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import (
    ClosedError,
    EnvironmentFailure,
    MissingArgumentError,
    UnsupportedError,
    WorkerTimeoutError,
)
from tests.collectors.helpers import Net, check_names, make
from tests.fakes import Script
from tests.fakes_base import CountingEnv, CrookedEnv

SHORT = Script(lengths=(3, 4))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gleanrl-collector"]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0)  # yields to the other thread


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threads():
        thread.join(10)
    assert not threads()


class Turns:
    """Takes turns; each one waits for `may` and then signals `did`."""

    def __init__(self, count: int = 1_000_000, error: BaseException | None = None) -> None:
        self.may, self.did = threading.Semaphore(0), threading.Semaphore(0)
        self.count, self.taken, self.error = count, 0, error
        self.background = Background(self.turn)

    def turn(self) -> bool:
        self.did.release()
        self.may.acquire()
        self.taken += 1
        if self.error is not None:
            raise self.error
        return self.taken < self.count


class TestTurns:
    def test_turns_run_until_stopped_and_can_restart(self) -> None:
        part = Turns()
        assert not part.background.running and part.background.stop() is False
        for _ in range(2):
            part.background.start()
            part.did.acquire()
            assert part.background.running
            with pytest.raises(UnsupportedError, match="already"):
                part.background.start()
            part.may.release()
            part.did.acquire()  # the second turn has begun
            part.may.release()
            assert part.background.stop() and not part.background.running
        assert part.taken >= 4

    def test_turns_end_when_no_work_is_left(self) -> None:
        part = Turns(count=2)
        part.may.release(2)
        part.background.start()
        for _ in range(2):
            part.did.acquire()
        until(lambda: not (part.background.running))
        assert part.taken == 2 and part.background.stop() is False

    def test_error_is_raised_once_by_the_next_call(self) -> None:
        part = Turns(error=ZeroDivisionError("mine"))
        part.may.release(1)
        part.background.start()
        with pytest.raises(ZeroDivisionError, match="mine"):
            until(lambda: not (part.background.running))
        assert not part.background.running and part.background.stop() is False
        part.did.acquire()
        part.background.start()
        part.did.acquire()
        part.may.release(1)
        with pytest.raises(ZeroDivisionError):
            part.background.stop()

    def test_pause_waits_for_the_running_turn_and_resumes_afterwards(self) -> None:
        part = Turns()
        part.background.start()
        part.did.acquire()
        part.may.release(1)
        threading.Timer(0.01, part.may.release, [3]).start()
        with part.background.paused():
            taken = part.taken
            assert not part.background.running
            with part.background.paused():  # nested pauses
                assert part.taken == taken
            assert not part.background.running
        assert part.background.running
        part.may.release(1_000)
        part.background.stop()

    def test_turn_that_ends_during_the_pause_request_resumes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        part = Turns()
        part.may.release(2)
        part.background.start()
        part.did.acquire()
        running = Background.running.fget
        assert running is not None

        def ends_meanwhile(background: Background) -> bool:
            told = background._signal.stop or background._signal.pause
            if told and background._job is not None:
                background._job.wait(60)  # the property is read before the thread ends
            return bool(running(background))

        monkeypatch.setattr(Background, "running", property(ends_meanwhile))
        part.may.release(2)
        with part.background.paused():
            pass
        monkeypatch.undo()
        assert part.background.running
        part.may.release(1_000)
        part.background.stop()

    def test_turn_runs_between_two_pauses(self) -> None:
        part = Turns()
        part.may.release(1_000)
        part.background.start()
        for count in range(1, 6):
            with part.background.paused():
                assert part.taken >= count
        part.may.release(1_000)
        part.background.stop()

    def test_after_the_last_turn_a_pause_starts_nothing(self) -> None:
        part = Turns(count=1)
        part.background.start()
        part.did.acquire()
        threading.Timer(0.01, part.may.release).start()
        with part.background.paused():
            pass
        assert not part.background.running and part.taken == 1

    def test_an_interrupt_of_the_wait_ends_the_wait_only(self) -> None:
        part = Turns()
        part.background.start()
        part.did.acquire()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
            with part.background.paused():
                pass
        assert part.background.running and part.taken == 0
        part.may.release()
        part.did.acquire()
        assert part.background.running and part.taken == 1
        part.may.release(1_000)
        part.background.stop()

    def test_stop_with_a_timeout_raises(self) -> None:
        part = Turns()
        part.background.start()
        part.did.acquire()
        with pytest.raises(WorkerTimeoutError, match="0.02 s"):
            part.background.stop(0.02)
        part.may.release(1)
        assert part.background.stop() and part.taken == 1

    def test_stop_within_a_pause_lasts(self) -> None:
        part = Turns()
        part.may.release(1_000)
        for _ in range(2):
            part.background.start()
            with part.background.paused(), part.background.paused():
                assert part.background.stop() is False
            assert not part.background.running and part.background._activity.over
            taken = part.taken
            with part.background.paused():
                pass
            assert not part.background.running and part.taken == taken

    def test_a_pause_after_a_stop_that_timed_out_starts_nothing(self) -> None:
        part = Turns()
        part.background.start()
        part.did.acquire()
        with pytest.raises(WorkerTimeoutError):
            part.background.stop(0.0)
        part.may.release(1_000)
        with part.background.paused():
            pass
        assert not part.background.running and part.taken == 1

    def test_turns_end_with_their_owner(self) -> None:
        part = Turns()
        part.background.start()
        part.did.acquire()
        may, background = part.may, part.background
        del part
        may.release()  # the running turn has the last reference to its owner
        while background.running:
            gc.collect()


def buffer(size: int = 1_000) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=4)


class TestCollector:
    def test_the_budget_is_met_while_the_learner_samples(self) -> None:
        rb, env = buffer(), CountingEnv(SHORT, (2,))
        rb = ReplayBuffer(storage=LazyTensorStorage(1_000, ndim=2), batch_size=4)
        collector = make(env, Net(), frames=10, total_frames=304, replay_buffer=rb)
        collector.start()
        sampled = 0
        while collector.is_running():
            if len(rb):
                assert (rb.sample()["action"] == 0.5).all()
                sampled += 1
        assert sampled and len(rb) == 304 == collector.stats().delivered
        assert env.is_closed and collector.closed
        whole = rb[:]
        check_names([whole])
        with pytest.raises(ClosedError):
            collector.start()
        assert collector.state_dict()["frames"] == 304

    def test_calls_of_the_user_pause_the_thread(self) -> None:
        rb, net = buffer(), Net(0.5)
        collector = make(CountingEnv(SHORT), net, replay_buffer=rb)
        collector.start()
        assert collector.is_running()
        with collector.pause():
            count = len(rb)
            assert not collector.is_running()
            for call in (
                collector.state_dict,
                collector.reset,
                lambda: collector.set_seed(1),
                collector.rollout,
            ):
                call()
            assert len(rb) == count
        collector.update_policy_weights_(torch.nn.Module.state_dict(Net(0.75)) | {"calls": net.calls})
        until(lambda: not (not len(rb) or rb[len(rb) - 1]["action"][0] != 0.75))
        for refused in (collector.next, lambda: next(iter(collector)), collector.start):
            with pytest.raises(UnsupportedError, match="background"):
                refused()
        collector.stop()
        assert not collector.is_running()
        count = len(rb)
        assert collector.next() is None and len(rb) == count + 6  # in the foreground again
        collector.start()
        collector.async_shutdown()
        assert collector.closed and not collector.is_running()
        # The rollout of six frames went to the caller instead.
        assert len(rb) == collector.stats().delivered - 6

    def test_error_of_the_thread_is_raised_by_the_users_next_call(self) -> None:
        looks: list[Callable[[SyncDataCollector], Any]] = [
            lambda c: [None for _ in iter(c.is_running, False)],
            lambda c: c.next(),
            lambda c: c.state_dict(),
            lambda c: c.update_policy_weights_(),
            lambda c: c.stop(),
            lambda c: c.shutdown(),
        ]
        for look in looks:
            rb, env = buffer(), CrookedEnv("raise", 10, script=SHORT)
            collector = make(env, Net(), replay_buffer=rb)
            collector.start()
            job: Any = collector._delivery.background._job  # type: ignore[union-attr]
            assert job.wait(60)
            with pytest.raises(EnvironmentFailure, match="environment 0"):
                look(collector)
            assert len(rb) == 6 and collector.stats().reasons == {"environment": 3}
            if collector.closed:
                assert env.is_closed
            else:
                collector.start()
                until(lambda: len(rb) > 6)  # noqa: B023 - it's over before the next buffer
                collector.shutdown()

    def test_hooks_may_read_and_stop_the_collector(self) -> None:
        rb, seen = buffer(), []

        def look(_: Any) -> None:
            collector.update_policy_weights_()
            with collector.pause():
                seen.append(collector.state_dict()["frames"])
            if len(seen) == 3:
                collector.stop()

        collector = make(CountingEnv(SHORT), Net(), replay_buffer=rb, post_collect_hook=look)
        collector.start()
        until(lambda: not collector.is_running())
        assert seen == [0, 6, 12] and len(rb) == 18 and not collector.closed
        collector.shutdown()

    @pytest.mark.parametrize("end", ["stop", "shutdown"])
    def test_a_collector_that_is_stopped_within_a_pause_stays_stopped(self, end: str) -> None:
        rb = buffer()
        collector = make(CountingEnv(SHORT), Net(), replay_buffer=rb)
        collector.start()
        with collector.pause():
            getattr(collector, end)()
            count = len(rb)
        assert not collector.is_running() and len(rb) == count and collector.closed == (end == "shutdown")
        collector.shutdown()

    def test_deleting_the_collector_ends_its_thread(self) -> None:
        rb, env = buffer(), CountingEnv(SHORT)
        collector = make(env, Net(), replay_buffer=rb)
        collector.start()
        del collector
        while not env.is_closed:
            gc.collect()

    def test_start_without_a_buffer_is_refused(self) -> None:
        collector = make()
        with pytest.raises(MissingArgumentError, match="replay_buffer="):
            collector.start()
        assert not collector.is_running()
        with collector.pause():
            pass
        collector.stop()
        collector.async_shutdown()

    def test_an_environment_may_stay_open(self) -> None:
        env = CountingEnv(SHORT)
        collector = make(env, Net(), replay_buffer=buffer())
        collector.start()
        collector.shutdown(timeout=60, close_env=False)
        assert not env.is_closed and env.rollout(3).shape == (3,)
        env.close()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_child_has_nothing_in_the_background(self) -> None:
        collector = make(CountingEnv(SHORT), Net(), replay_buffer=buffer())
        collector.start()
        child = os.fork()
        if child == 0:
            os._exit(collector.is_running() or collector._delivery.background.stop(0))  # type: ignore[union-attr]
        assert os.waitpid(child, 0)[1] == 0
        collector.shutdown()


@pytest.mark.slow
def test_program_ends_while_the_thread_collects() -> None:
    program = """
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv
rb = ReplayBuffer(storage=LazyTensorStorage(100))
collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=10, replay_buffer=rb)
collector.start()
while not len(rb): pass
print("sampled", len(rb.sample(3)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sampled 3\n", "")
