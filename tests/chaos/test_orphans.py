"""A killed program leaves no process, no shared memory and no temporary file."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gleanrl._os.proc import state_of
from gleanrl.envs import GymWrapper
from tests.chaos.drills import KINDS, SHARE, SLACK, collector_of, scaled, wait_for
from tests.chaos.oracle import SelfCheckingEnv, makers
from tests.leaks import shared_memory

pytestmark = pytest.mark.timeout(1800)

PARENTS, TOGETHER = scaled(200 if SHARE >= 1 else 100), 10  # each program imports torch, which takes seconds
GONE_S = 2.0
MARK = "GLEANRL_TESTS_ORPHAN"


class Hung(SelfCheckingEnv):
    """Hangs in its 30th step."""

    def step(self, action):
        if self._calls["step"] == 30:
            threading.Event().wait()
        return super().step(action)


def hung(stream: int) -> GymWrapper:
    return GymWrapper(Hung(stream))


def be_a_program(kind: str, hangs: bool, folder: Path, mark: str) -> None:
    """Collect until this process is killed."""
    os.environ |= {MARK: mark, "TMPDIR": str(folder)}
    envs = [*makers(1), partial(hung, 1)] if hangs else makers(2)
    collector = collector_of(kind, envs, steps=25)
    (folder.parent / f"{folder.name}.ready").touch()
    for _ in collector:
        pass


def marked(mark: str) -> list[int]:
    """Return the processes whose environment variables have the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    return state_of(pid) in ("", "Z")


def started(number: int, folder: Path) -> tuple[Any, str, Path]:
    """Start a program; return its process, the mark of its processes and its folder for temporary files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gleanrl.envs", "gleanrl.collectors"])
    mark = f"{os.getpid()}-{number}"
    folder.mkdir()
    process = context.Process(target=be_a_program, args=(KINDS[number % 2], number % 4 == 3, folder, mark))
    process.start()
    return process, mark, folder


def end(process: Any, mark: str, folder: Path) -> float:
    """Kill a program and check that nothing of it is left; return the seconds that its end took."""
    members = marked(mark)
    assert len(members) >= 3, "launcher and two workers"
    os.kill(process.pid, signal.SIGKILL)
    seconds = wait_for(lambda: all(map(ended, members)), f"the ends of {members}")
    process.join()
    process.close()
    assert not marked(mark) and list(folder.iterdir()) == []
    assert not shared_memory(members)
    return seconds


def test_nothing_is_left_of_a_killed_program(tmp_path):
    rng, seconds = random.Random(5), []
    numbers = range(PARENTS)
    for first in numbers[::TOGETHER]:
        programs = [started(n, tmp_path / str(n)) for n in numbers[first : first + TOGETHER]]
        for _, _, folder in programs:
            wait_for((tmp_path / f"{folder.name}.ready").exists, "a program", 60.0)
        for program in programs:
            time.sleep(rng.uniform(0.0, 0.1))
            seconds.append(end(*program))
    print(f"{len(seconds)} programs, the slowest end took {max(seconds):.3f} s")
    assert max(seconds) < GONE_S * SLACK
