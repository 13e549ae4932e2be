"""The checks for files that tests leave in shared memory count files of this run only."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory

import pytest

from gleanrl._os import fork_server
from gleanrl.envs import ParallelEnv, PendulumEnv
from tests import leaks
from tests.leaks import SHARED_MEMORY, Holdings, shared_memory

OTHER_PROGRAM = """
import os, select, sys
from pathlib import Path

if os.fork():
    os._exit(0)  # the other program has no parent among the tests
kept = Path(f"/dev/shm/torch_{os.getpid()}_0_0")
kept.touch()
own, count = os.getpid(), 0
while count == 0 or not select.select([sys.stdin], [], [], 0)[0]:
    count += 1
    for name in (f"torch_{own}_{count}_0", f"psm_{own << 12 | count & 4095:08x}", f"other-{own}-{count}"):
        file = Path("/dev/shm", name)
        file.touch()
        file.unlink()
    if count == 1:
        print(os.getpid(), flush=True)
kept.unlink()
print(count, flush=True)
"""


@pytest.fixture
def other_program() -> Iterator[int]:
    """Yield the number of a process of another program, which creates and deletes files at full speed."""
    command = [sys.executable, "-c", OTHER_PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.wait()  # now the other program is no descendant of this run
        yield pid
        process.stdin.close()
        assert int(process.stdout.readline()) > 0


def left_since(before: Holdings) -> list[str]:
    """Return the names of the files in the check's error."""
    with pytest.raises(AssertionError, match=r"files were left in /dev/shm") as error:
        before.check()
    return re.findall("'(.*?)'", str(error.value).splitlines()[0])


def leak(name: str) -> None:
    (SHARED_MEMORY / name.format(pid=os.getpid())).touch()


def leak_shared_memory() -> str:
    memory = SharedMemory(create=True, size=8)
    unregister(memory._name, "shared_memory")  # otherwise Python's resource tracker removes the file
    memory.close()
    return memory.name


def test_files_of_another_program_do_not_count(other_program):
    before = Holdings.now()
    # `check` would collect garbage each time, which takes a second after thousands of tests
    for _ in range(50):
        assert Holdings.now().shared_memory <= before.shared_memory
    before.check()
    # Short-lived files, and files that an earlier process with this number left, may be among the found ones.
    assert f"torch_{other_program}_0_0" in shared_memory([other_program])


def test_files_of_another_program_with_the_number_of_an_ended_process_do_not_count(
    other_program, monkeypatch
):
    monkeypatch.setattr(leaks, "OF_THIS_RUN", {os.getpid(), other_program})
    assert f"torch_{other_program}_0_0" not in Holdings.now().shared_memory


@pytest.mark.parametrize("name", ["torch_{pid}_12_0", "pym-{pid}-abc", "gleanrl-tests-leak"])
def test_a_file_left_by_this_process_is_found(other_program, name):
    before = Holdings.now()
    leak(name)
    file = SHARED_MEMORY / name.format(pid=os.getpid())
    try:
        assert left_since(before) == [file.name]
    finally:
        file.unlink()
    before.check()


def test_shared_memory_left_by_this_process_is_found(other_program):
    before = Holdings.now()
    name = leak_shared_memory()
    try:
        assert left_since(before) == [name]
    finally:
        (SHARED_MEMORY / name).unlink()
    before.check()


def left_by(start: Callable[[], int], other_program: int) -> None:
    before = Holdings.now()
    pid = start()
    name = f"torch_{pid}_12_0"
    try:
        assert left_since(before) == [name]
    finally:
        (SHARED_MEMORY / name).unlink()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_file_left_by_an_ended_child_is_found(other_program, method):
    def start() -> int:
        process = multiprocessing.get_context(method).Process(target=leak, args=("torch_{pid}_12_0",))
        process.start()
        process.join()
        return process.pid

    left_by(start, other_program)


def test_a_file_left_by_an_ended_command_is_found(other_program):
    script = "import os; open(f'/dev/shm/torch_{os.getpid()}_12_0', 'w'); print(os.getpid())"
    left_by(
        lambda: int(subprocess.run([sys.executable, "-c", script], capture_output=True).stdout), other_program
    )


def test_a_file_left_by_an_ended_fork_is_found(other_program):
    def start() -> int:
        if (pid := os.fork()) == 0:
            leak("torch_{pid}_12_0")
            os._exit(0)
        os.waitpid(pid, 0)
        return pid

    left_by(start, other_program)


class LeakingEnv(PendulumEnv):
    """Leaves a file in shared memory, in the process that creates it."""

    def __init__(self) -> None:
        super().__init__()
        leak("torch_{pid}_12_0")


def test_a_file_left_by_an_ended_worker_is_found(other_program):
    before = Holdings.now()
    env = ParallelEnv(1, LeakingEnv)
    env.reset()
    env.close()
    fork_server.shut_down()
    names = left_since(before)
    for name in names:
        (SHARED_MEMORY / name).unlink()
    assert set(names) - {f"torch_{os.getpid()}_12_0"}
    before.check()
