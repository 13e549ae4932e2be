from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys

import pytest

from gleanrl.system import faults
from gleanrl.system.shared_memory import SharedMemory

HOLDER = """
import os, pickle, signal, sys
memory = pickle.loads(bytes.fromhex(sys.argv[1]))
memory.map[0] = 7
with memory.lock():
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
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
    with memory.lock():
        memory.map[0] = 8
    assert memory.map[0] == 8


def test_a_copy_waits_for_the_lock():
    memory = SharedMemory(64)
    other = copy.deepcopy(memory)
    order = []
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with other.lock():
                os.write(writer, b"x")
        finally:
            os._exit(0)
    with memory.lock():
        order.append("mine")
        os.set_blocking(reader, False)
        # The child may or may not have come to the lock yet; it can't have passed it if it came after this one.
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"x"
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
    assert order == ["mine"]


def test_descriptors_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(64)
    twin = copy.deepcopy(memory)
    del memory, twin
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failure_leaves_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with (
        faults.injected("memory.create", OSError("no memory"))
        if hasattr(faults, "injected")
        else pytest.raises(ValueError)
    ):
        if hasattr(faults, "injected"):
            with pytest.raises(OSError, match="no memory"):
                SharedMemory(64)
        else:
            SharedMemory(-1)
    assert len(os.listdir("/proc/self/fd")) == before
