"""Shared memory and its lock are one for all copies and processes."""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from gleanrl._os import fault_points
from gleanrl._os.shared_memory import SharedMemory
from tests.interrupts import double_interruptions

HOLDER = """
import os, pickle, signal, sys
memory = pickle.loads(bytes.fromhex(sys.argv[1]))
memory.map[0] = 7
memory.alone(lambda: (print("held", flush=True), os.kill(os.getpid(), signal.SIGKILL)))
"""


def test_copies_see_one_memory():
    memory = SharedMemory(64)
    others = [copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))]
    memory.map[3] = 5
    assert [other.map[3] for other in others] == [5, 5]
    again = pickle.loads(pickle.dumps(others[0]))
    again.map[4] = 6
    assert memory.map[4] == 6


def test_the_lock_of_a_process_that_dies_is_free():
    memory = SharedMemory(64)
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, pickle.dumps(memory).hex()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "held", done.stderr
    assert done.returncode == -signal.SIGKILL
    assert memory.map[0] == 7
    memory.alone(lambda: memory.map.__setitem__(0, 8))
    assert memory.map[0] == 8


def test_copies_exclude_each_other():
    memory = SharedMemory(64)
    other = copy.deepcopy(memory)

    def attempt():
        with pytest.raises(BlockingIOError):
            fcntl.flock(other._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 3

    assert memory.alone(attempt) == 3
    with pytest.raises(ZeroDivisionError):
        memory.alone(lambda: 1 // 0)
    assert other.alone(list) == []


def test_the_lock_is_free_while_the_traceback_of_two_interrupts_lives():
    memory = SharedMemory(64)
    other = copy.deepcopy(memory)
    kept = []
    for _, place in double_interruptions(lambda: memory, lambda it: it.alone(lambda: time.sleep(0)), 60):
        kept.append(sys.exc_info())
        try:
            fcntl.flock(other._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AssertionError(f"interrupted at {place}: the lock is held") from error
        fcntl.flock(other._descriptor, fcntl.LOCK_UN)


@pytest.mark.parametrize("in_file", [False, True])
def test_descriptors_are_closed(in_file, tmp_path):
    gc.collect()  # free objects of other tests now, so that they close no descriptor during the test
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(64, tmp_path if in_file else None)
    twin = copy.deepcopy(memory)
    del memory, twin
    assert len(os.listdir("/proc/self/fd")) == before and not any(tmp_path.iterdir())


def test_failing_creation_leaves_no_descriptor():
    gc.collect()  # free objects of other tests now, so that they close no descriptor during the test
    before = len(os.listdir("/proc/self/fd"))
    with (
        fault_points.inject({"memory.create": OSError("no memory")}),
        pytest.raises(OSError, match="no memory"),
    ):
        SharedMemory(64)
    with pytest.raises(ValueError, match="empty"):
        SharedMemory(0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("in_file", [False, True])
def test_growth_is_seen_after_a_resize(in_file, tmp_path):
    memory = SharedMemory(64, tmp_path if in_file else None)
    assert memory.free_bytes() > 1 << 16
    other = pickle.loads(pickle.dumps(memory))
    earlier = memory.map
    memory.resize(1 << 16)
    memory.map[5], memory.map[60_000] = 1, 2
    assert earlier[5] == 1 and other.map[5] == 1
    other.resize(1 << 16)
    assert other.map[60_000] == 2


def test_forked_child_has_a_separate_lock_at_once():
    memory = SharedMemory(64)
    read, write = os.pipe()

    def fork():
        pid = os.fork()
        if not pid:
            try:
                fcntl.flock(memory._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(write, b"taken")
            except BlockingIOError:
                os.write(write, b"held")
            os._exit(0)
        assert os.read(read, 5) == b"held"
        return pid

    os.waitpid(memory.alone(fork), 0)
    for end in (read, write):
        os.close(end)
