"""Closing a worker pool ends all its workers, including workers that hang or raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from gleanrl.errors import ClosedError
from tests._process.crews import ask
from tests._process.servants import Clerk, Grudging, PrivateError, Stubborn
from tests.takeovers import SOURCE


def test_close_ends_stubborn_workers(doomed):
    crew = doomed(Clerk, Stubborn, Clerk, close_s=0.3)
    crew.close()
    assert all(worker.pid for worker in crew.workers)


def test_exception_of_a_service_close_is_raised_once(doomed):
    crew = doomed(Clerk, Grudging)
    with pytest.raises(PrivateError):
        crew.close()
    crew.close()


def test_closed_pool_raises_with_the_reason(doomed):
    crew = doomed()
    crew.close(because="of the weather")
    for use in (
        partial(crew.signal, b"s"),
        crew.wait_any,
        lambda: crew.post(0, "count"),
        lambda: crew.replace(0, Clerk),
    ):
        with pytest.raises(ClosedError, match="have been ended, because of the weather"):
            use()


def test_fork_of_the_owner_does_not_end_the_workers(doomed):
    crew = doomed()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            crew.close()
            crew.post(0, "echo", 1)
        except ClosedError:
            code = 17
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert ask(crew, "echo", 2) == [2, 2]


class _Closer:
    """Closes a worker pool when it is pickled, as a garbage collection during a call may."""

    def __init__(self, crew):
        self.crew = crew

    def __reduce__(self):
        self.crew.close()
        return int, ()


def test_close_during_a_request_ends_the_workers(doomed):
    crew = doomed()
    with pytest.raises(ClosedError, match="have been ended"):
        crew.post(0, "echo", _Closer(crew))


@pytest.mark.parametrize("hang", [lambda c: c.signal(b"h"), lambda c: c.post(1, "hang")])
def test_close_during_a_wait_ends_the_workers(doomed, hang):
    crew = doomed()
    before = signal.signal(signal.SIGALRM, lambda *_: crew.close(0.0))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(ClosedError, match="have been ended"):
            hang(crew)
            crew.wait_all()
    finally:
        signal.signal(signal.SIGALRM, before)


PROGRAM = """
import os, time
from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.envs import GymEnv, ParallelEnv

main = os.getpid()

def make():
    if os.getpid() != main:
        os.write(1, b"worker\\n")  # one call: workers write at the same time
        time.sleep(600)
    return GymEnv("CartPole-v1")

print("starting", flush=True)
MAKE
"""
STARTS = {
    "collector": "MultiSyncDataCollector([make] * 2, None, frames_per_batch=10)",
    "batch": "SyncDataCollector(ParallelEnv(2, make, num_processes=2), None, frames_per_batch=10)",
    "nested": "MultiSyncDataCollector([ParallelEnv(2, make)] * 2, None, frames_per_batch=10)",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "worker"])
@pytest.mark.parametrize("kind", STARTS)
def test_ctrl_c_while_workers_start_ends_all_processes_quietly(tmp_path, kind, moment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("MAKE", STARTS[kind]))
    process = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    for line in process.stdout:
        if line.strip() == moment:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    # Returns when the last process ends: all of them have inherited these pipes.
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors
