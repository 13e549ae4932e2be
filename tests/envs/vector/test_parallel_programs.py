"""Scripts with a `ParallelEnv` run and end correctly when written as users write them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from gleanrl._os import clock

HEAD = """
import os, sys, signal, threading
import gymnasium, numpy, torch
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, Timeouts
"""

# The script has no main guard, and its environment class exists only in the main module.
PLAIN = """
print("started", flush=True)

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        if action == 7:
            raise MyError("seven")
        return numpy.ones(1, numpy.float32), float(os.getpid()), False, False, {}

class MyError(Exception):
    pass

env = ParallelEnv(2, lambda: GymWrapper(Mine(), categorical_action_encoding=True))
"""

END_WITHOUT_CLOSE = """
# here
batches = list(SyncDataCollector(env, None, frames_per_batch=20, total_frames=40))
pids = set(batches[1]["next", "reward"].int().flatten().tolist())
print(len(pids), os.getpid() in pids, flush=True)
other = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
other.reset()
"""

OWN_ERROR = """
root = env.reset().set("action", torch.full((2,), 7))
try:
    env.step(root)
except MyError as error:
    print(type(error.__cause__) is MyError, flush=True)
"""

FOR_EVER = """
env = ParallelEnv(2, lambda: GymWrapper(Mine()), timeouts=Timeouts(close_s=100.0))
env.reset()
print(*env.processes, flush=True)
for batch in SyncDataCollector(env, None, frames_per_batch=200, total_frames=-1):
    pass
"""

HUNG = """
class Stuck(Mine):
    def step(self, action):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"stuck\\n")
        threading.Event().wait()

env = ParallelEnv(2, lambda: GymWrapper(Stuck()))
env.reset()
print(*env.processes, flush=True)
env.rand_step()
"""


@pytest.fixture
def start(tmp_path):
    """Start scripts, each in its own session, and end them."""
    started = []

    def run(*parts: str) -> subprocess.Popen[str]:
        script = tmp_path / f"script{len(started)}.py"
        script.write_text(HEAD + "".join(parts))
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def all_gone(pids: list[int], seconds: float) -> bool:
    """Return whether the processes end in time."""
    deadline = clock.Deadline(seconds)
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([descriptor], [], [], deadline.remaining())[0]
        os.close(descriptor)
        if not ended:
            return False
    return True


def test_script_without_guard_and_close_runs_and_ends(start):
    """Workers never run the main module, still find its classes, and end with the program."""
    process = start(PLAIN, END_WITHOUT_CLOSE.replace("# here", OWN_ERROR))
    out, err = process.communicate(timeout=100)
    assert (out, err, process.returncode) == ("started\nTrue\n2 False\n", "", 0)


def test_ctrl_c_is_one_clean_end(start):
    process = start(PLAIN, FOR_EVER)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    pids = [int(pid) for pid in process.stdout.readline().split()]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)  # workers that don't react to the interrupt would have 100 s
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")
    assert len(pids) == 2 and all_gone(pids, 30.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_workers_end_with_a_killed_owner(start, number):
    process = start(PLAIN, HUNG)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(number)
    process.wait(10)
    assert len(pids) == 2 and all_gone(pids, 30.0)
    assert process.communicate(timeout=10)[1] == ""  # the workers print nothing
