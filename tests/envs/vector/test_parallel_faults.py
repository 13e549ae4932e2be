"""A `ParallelEnv` reports kills, hangs and exceptions of its workers; the faults are real."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

from gleanrl._os import clock, fork_server
from gleanrl._process.remote_errors import RemoteTraceback
from gleanrl._process.worker import Timeouts
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    EnvironmentFailure,
    NonFiniteError,
    WorkerCrashedError,
    WorkerTimeoutError,
)
from tests.contract.helpers import check_ledger, check_stream
from tests.envs.vector.awkward import awkward, interrupt, kill, leave, wait
from tests.envs.vector.makers import SCRIPT, oracle
from tests.fakes import DriftingEnv, FakeFailure, NonFiniteEnv, RaisingEnv
from tests.fakes_base import CountingEnv, StillDoneEnv
from tests.leaks import Holdings


@pytest.fixture
def make():
    """Make three streams, one of them faulty; the test must leave no process or descriptor."""
    ParallelEnv(1, oracle).close()
    warm = ParallelEnv(1, oracle)
    warm.start()
    warm.close()
    before = Holdings.now()
    made = []

    def build(awkward_one, **kwargs):
        made.append(ParallelEnv(3, [partial(oracle, 0), awkward_one, partial(oracle, 2)], **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close()
    before.check()


def collect(env, frames=90, size=30):
    collector = SyncDataCollector(env, None, frames_per_batch=size, total_frames=frames)
    try:
        return list(collector)
    finally:
        check_ledger(collector)


def raising(at, where="step"):
    return GymWrapper(RaisingEnv(at, where, stream=1, script=SCRIPT))


@pytest.mark.parametrize("num_processes", [3, 2, 1])
def test_exception_keeps_its_type_and_names_its_place(make, num_processes):
    env = make(lambda: raising(14), num_processes=num_processes)
    collector = SyncDataCollector(env, None, frames_per_batch=30, total_frames=90)
    batches = iter(collector)
    first = next(batches)
    with pytest.raises(FakeFailure) as caught:
        next(batches)
    error = caught.value
    assert isinstance(error, EnvironmentFailure)
    episode, step = int(first["collector", "traj_ids"][1, -1]), 0
    assert "environment 1 (ParallelEnv), episode " in str(error) and "step raised FakeFailure" in str(error)
    assert "(action [" in str(error) and episode >= step
    assert type(error.__cause__) is FakeFailure and isinstance(error.__cause__.__cause__, RemoteTraceback)
    assert "fakes.py" in str(error.__cause__.__cause__)
    check_ledger(collector)
    assert collector.stats().discarded == {1: 4 + 3 + 3, 2: 4 + 3 + 10, 3: 10 + 3 + 10}[num_processes]
    check_stream([next(iter(collector))], SCRIPT)  # the workers are alive, and all environments were reset


def test_error_messages_equal_serial_env(make):
    words = []
    for kind in (SerialEnv, ParallelEnv):
        env = kind(2, [oracle, partial(raising, 3)])
        torch.manual_seed(0)
        with pytest.raises(FakeFailure) as caught:
            collect(env, 20, 10)
        words.append(str(caught.value).replace(kind.__name__, "Batch"))
        env.close()
    assert words[0] == words[1]


def test_exception_in_a_reset_is_reported(make):
    env = make(lambda: raising(3, "reset"))
    with pytest.raises(FakeFailure, match="environment 1 .*reset raised FakeFailure"):
        collect(env)
    env = make(lambda: raising(1, "reset"))
    with pytest.raises(FakeFailure, match=r"environment 1 \(ParallelEnv\): reset raised"):
        env.reset()
    assert env.reset()["observation"][1].tolist() == [1, 1, 0]


def test_exception_in_a_single_step_is_reported(make):
    env = make(lambda: raising(1))
    td = env.rand_action(env.reset())
    with pytest.raises(FakeFailure, match=r"environment 1 \(ParallelEnv\): step raised .* \(action \["):
        env.step(td)


def test_exception_in_the_constructor_is_reported(make):
    built = []

    def fails_in_the_worker():
        if built:
            raise FakeFailure("only once")
        built.append(1)
        return oracle()

    env = make(fails_in_the_worker)
    with pytest.raises(FakeFailure, match="environment 1 .*construction raised FakeFailure: only once"):
        env.reset()
    assert not env.is_started


def test_keyboard_interrupt_of_an_environment_is_raised(make):
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        collect(make(lambda: awkward(interrupt, 4)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
@pytest.mark.parametrize("at", [1, 2, 10, 11])
def test_killed_worker_is_reported_at_once(make, number, at):
    env = make(lambda: awkward(partial(kill, number), at, stream=1))
    begin = clock.monotonic()
    with pytest.raises(WorkerCrashedError) as caught:
        collect(env)
    assert clock.monotonic() - begin < 30, "noticed by its end: one that hangs has 60 s"
    words = str(caught.value)
    assert f"was killed by {number.name} during the step of environment 1" in words
    assert f"step {(at - 1) % 10} of the batch" in words and "(action [" in words
    with pytest.raises(ClosedError):
        env.reset()


def test_worker_killed_in_a_reset_is_reported(make):
    with pytest.raises(WorkerCrashedError, match="SIGKILL during the reset of environment 1"):
        make(lambda: awkward(kill, 1, "reset")).reset()
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        collect(make(lambda: awkward(kill, 2, "reset")))


def test_exited_worker_is_reported(make):
    env = make(lambda: awkward(leave, 5))
    with pytest.raises(WorkerCrashedError, match="exited with code 5 during the step of environment 1"):
        collect(env)


@pytest.mark.parametrize("where", ["step", "reset"])
def test_hung_worker_is_reported_with_its_stack(make, where):
    env = make(lambda: awkward(wait, 4, where), timeouts=Timeouts(work_s=0.5, close_s=1.0))
    with pytest.raises(WorkerTimeoutError) as caught:
        collect(env)
    assert isinstance(caught.value, TimeoutError)
    words = str(caught.value)
    assert "made no progress for 0.5 s during the step of environment 1" in words
    assert "awkward.py" in words and "in wait" in words
    with pytest.raises(ClosedError):
        env.reset()


def test_hung_constructor_is_reported(make):
    built = []

    def hangs_in_the_worker():
        if built:
            wait()
        built.append(1)
        return oracle()

    env = make(hangs_in_the_worker, timeouts=Timeouts(start_s=0.8, close_s=0.5))
    with pytest.raises(WorkerTimeoutError, match="during the construction of environment 1"):
        env.start()


def test_stopped_worker_that_resumes_too_late_is_reported(make):
    env = make(lambda: awkward(partial(kill, signal.SIGSTOP), 4), timeouts=Timeouts(work_s=0.4, close_s=0.5))
    with pytest.raises(WorkerTimeoutError, match="It is stopped"):
        collect(env)


def test_broken_declarations_name_the_environment(make):
    with pytest.raises(EnvironmentContractError, match="environment 1 .*expected"):
        collect(make(lambda: GymWrapper(DriftingEnv(3, "longer", script=SCRIPT))))
    with pytest.raises(EnvironmentContractError, match="environment 1 .*returned done"):
        make(lambda: StillDoneEnv(SCRIPT)).reset()
    with pytest.raises(NonFiniteError, match="observation"):
        collect(make(lambda: GymWrapper(NonFiniteEnv(3, script=SCRIPT))))


def test_close_that_raises_ends_the_workers(make):
    class Grudging(CountingEnv):
        def close(self, **kwargs):
            super().close()
            if self._episode[0] >= 0:
                raise FakeFailure("at the end")

    env = ParallelEnv(2, [Grudging, CountingEnv])
    env.reset()
    with pytest.raises(FakeFailure, match="at the end"):
        env.close()
    env.close()
    assert env.is_closed


def test_killed_fork_server_is_replaced(make):
    env = make(lambda: oracle(1))
    env.reset()
    os.kill(fork_server._current._process.pid, signal.SIGKILL)
    with pytest.raises(WorkerCrashedError, match="ended"):
        while True:
            env.rand_step(env.reset())
    again = make(lambda: oracle(1))
    assert again.reset().batch_size == (3,)
    again.close()
    fork_server.shut_down()


# An alarm between the opening of a file and its `with` block leaves the file to its finalizer, which warns. Python
# offers no way to avoid that, and the file is closed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("policy", [None, nn.Linear(3, 2)], ids=["random", "policy"])
def test_interrupted_collector_continues(make, policy):
    class Alarm(Exception):
        """Not an `OSError`, because system calls raise that too."""

    def interrupt(*_):
        raise Alarm

    env = make(lambda: oracle(1))
    collector = SyncDataCollector(env, policy, frames_per_batch=60, total_frames=-1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.001, 0.003, 0.005, 0.02):
            with pytest.raises(Alarm):
                # Repeated, in case garbage collection drops the exception.
                signal.setitimer(signal.ITIMER_REAL, delay, 20.0)
                for _ in collector:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            check_ledger(collector)
            batches = iter(collector)
            check_stream([next(batches), next(batches)], SCRIPT, first_step=None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    collector.shutdown()


def test_a_death_is_noticed_at_once(make):
    env = make(lambda: awkward(kill, 1, stream=1))
    td = env.rand_action(env.reset())
    begin = clock.monotonic()
    with pytest.raises(WorkerCrashedError):
        env.step(td)
    assert clock.monotonic() - begin < 30, "noticed by its end, and the others were ended in that time"
