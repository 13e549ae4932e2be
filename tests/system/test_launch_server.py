"""The launcher's side, as a program of its own."""

from __future__ import annotations

import json
import os
import select
import socket
import sys

import pytest

from gleanrl.system import launcher
from gleanrl.system.clock import Deadline
from gleanrl.system.launch_server import dump_stacks_into
from tests.leaks import Holdings
from tests.system.entries import DIE, ENTRY, NEST, RAISE, READ, STAY


@pytest.fixture
def launched():
    """A launcher of the test's own; nothing may be left of it."""
    before = Holdings.now()
    made = launcher._launch(ENTRY, ("json",))
    yield made
    made.close()
    made.close()
    before.check()


def start(launched, order):
    """Start a process that does what `order` says; return its number, its sentinel, and what it wrote."""
    reading, writing = os.pipe()
    mine, theirs = os.pipe()
    pid, sentinel = launched.start([mine, writing])
    os.close(mine)
    os.close(writing)
    os.write(theirs, order)
    return pid, sentinel, reading, theirs


def end(*descriptors):
    for descriptor in descriptors:
        os.close(descriptor)


def test_codes_of_processes_that_ended(launched):
    for order, code in ((b"3", 3), (DIE, -9), (RAISE, 1)):
        pid, sentinel, *rest = start(launched, order)
        assert launched.exit_code(pid, Deadline(10)) == code
        end(sentinel, *rest)
    assert launched.exit_code(12345678, Deadline(0.0)) is None


def test_it_is_told_apart_from_its_parent(launched):
    pid, sentinel, reading, writing = start(launched, READ)
    found = json.loads(os.read(reading, 4096))
    assert (
        found["pid"] == pid and found["parent"] == launched._process.pid and found["session"] != os.getsid(0)
    )
    assert set(found["descriptors"]) <= {0, 1, 2} | set(found["own"]), "it inherits nothing else"
    end(sentinel, reading, writing)


def test_processes_end_with_the_one_that_asked_for_them(launched):
    pid, sentinel, reading, writing = start(launched, NEST)
    inner = int(os.read(reading, 100))
    inner_sentinel = os.pidfd_open(inner)
    os.kill(pid, 9)
    assert gone(sentinel) and gone(inner_sentinel)
    end(sentinel, inner_sentinel, reading, writing)


def test_all_end_with_the_launcher(launched):
    workers = [start(launched, STAY) for _ in range(3)]
    launched._process.kill()
    for _, sentinel, *rest in workers:
        assert gone(sentinel)
        end(sentinel, *rest)
    assert not launched.is_alive or launched._process.wait(5) is not None
    with pytest.raises(launcher.LaunchError, match="has ended"):
        launched.start([])


def test_all_end_with_the_owner():
    """The owner is killed: whatever it started is gone at once, also what doesn't listen."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(reading)
        launched = launcher._launch(ENTRY, ())
        pids = [start(launched, order)[0] for order in (STAY, NEST, STAY)]
        os.write(writing, json.dumps([launched._process.pid, *pids]).encode())
        signal_forever()
    os.close(writing)
    pids = json.loads(os.read(reading, 4096))
    sentinels = [os.pidfd_open(pid) for pid in pids]
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    assert all(gone(sentinel) for sentinel in sentinels)
    end(reading, *sentinels)


def signal_forever():
    while True:
        socket.socketpair()[0].recv(1)


def gone(sentinel):
    """Whether the process of a sentinel ends within two seconds."""

    return bool(select.select([sentinel], [], [], 2.0)[0])


def test_stacks_are_dumped(tmp_path):
    dump = tmp_path / "stack"
    code = (
        "import os, signal, sys; from gleanrl.system.launch_server import dump_stacks_into;"
        f"dump_stacks_into(os.open({str(dump)!r}, os.O_CREAT | os.O_WRONLY));"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
    assert "most recent call first" in dump.read_text() and callable(dump_stacks_into)
