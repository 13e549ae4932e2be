"""The fork server's process forks on request, passes descriptors and ends with its owner."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gleanrl._os import fork_server, fork_server_main
from gleanrl._os.files import Descriptors, pipe
from gleanrl._os.fork_server_main import dump_stacks_into
from tests._os.entries import DIE, ENTRY, NEST, RAISE, READ, STAY
from tests.leaks import Holdings, open_files


@pytest.fixture(scope="module")
def shared():
    """Start a fork server for all tests that don't end it, because each one imports torch."""
    before = Holdings.now()
    made = fork_server._launch(ENTRY, ("json",))
    yield made
    made.close()
    made.close()
    before.check()


@pytest.fixture
def launched(shared):
    """Return the fork server; the test must leave no process or descriptor."""
    before = Holdings.now()
    yield shared
    before.check()


def start(launched, order, held):
    """Start a process that runs `order`; return its pid, its sentinel and the pipe that it writes to."""
    reading, writing = held.take(pipe())
    mine, theirs = held.take(pipe())
    pid, sentinel = launched.start([mine, writing], held)
    held.close(mine, writing)
    os.write(theirs, order)
    return pid, sentinel, reading


@pytest.fixture
def held():
    """Own the descriptors of one test."""
    owned = Descriptors()
    yield owned
    owned.close()


def test_exit_codes_of_ended_processes_are_reported(launched, held):
    for order, code in ((b"3", 3), (DIE, -9), (RAISE, 1)):
        pid, sentinel, _ = start(launched, order, held)
        assert gone(sentinel) and launched.exit_code(pid) == code
    assert launched.exit_code(12345678) is None


def test_the_latest_codes_are_remembered(monkeypatch):
    monkeypatch.setattr(fork_server_main, "_MOST_CODES", 2)
    client = fork_server_main._Client(None, None)
    for pid in (5, 6, 7):
        client.children.add(pid)
        client.ended(pid, 0)
    assert list(client.codes) == [6, 7] and not client.children


def test_links_are_non_blocking(launched, held):
    """All links are non-blocking: a read would hang on a link whose number was reused within a round."""
    start(launched, READ, held)
    server, flags = launched._process.pid, []
    for descriptor, target in open_files(server).items():
        with suppress(FileNotFoundError):  # the link of a process that an earlier test has started
            if target.startswith("socket:"):
                status = Path(f"/proc/{server}/fdinfo/{descriptor}").read_text()
                flags.append(int(status.split()[3], 8))
    assert len(flags) >= 3 and all(flag & os.O_NONBLOCK for flag in flags)


def test_process_has_its_own_session_and_descriptors(launched, held):
    pid, _, reading = start(launched, READ, held)
    found = json.loads(os.read(reading, 4096))
    assert (
        found["pid"] == pid and found["parent"] == launched._process.pid and found["session"] != os.getsid(0)
    )
    assert set(found["descriptors"]) <= {0, 1, 2} | set(found["own"]), "it inherits nothing else"


def test_processes_end_with_the_one_that_asked_for_them(launched, held):
    pid, sentinel, reading = start(launched, NEST, held)
    inner = int(os.read(reading, 100))
    (inner_sentinel,) = held.take(map(os.pidfd_open, (inner,)))
    os.kill(pid, 9)
    assert gone(sentinel) and gone(inner_sentinel)


def test_processes_end_with_the_fork_server(held):
    launched = fork_server._launch(ENTRY, ())
    workers = [start(launched, STAY, held) for _ in range(3)]
    launched._process.kill()
    assert all(gone(sentinel) for _, sentinel, _ in workers)
    assert not launched.is_alive or launched._process.wait(5) is not None
    with pytest.raises(fork_server.LaunchError, match="no worker can be started"):
        launched.start([], held)
    launched.close()


def test_processes_end_with_the_owner():
    """When the owner is killed, all processes that it started end at once, including one that ignores SIGTERM."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(reading)
        launched = fork_server._launch(ENTRY, ())
        held = Descriptors()
        pids = [start(launched, order, held)[0] for order in (STAY, NEST, STAY)]
        os.write(writing, json.dumps([launched._process.pid, *pids]).encode())
        signal_forever()
    os.close(writing)
    pids = json.loads(os.read(reading, 4096))
    sentinels = [os.pidfd_open(pid) for pid in pids]
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    assert all(gone(sentinel) for sentinel in sentinels)
    for descriptor in (reading, *sentinels):
        os.close(descriptor)


def signal_forever():
    while True:
        socket.socketpair()[0].recv(1)


def gone(sentinel):
    """Return whether the process of a sentinel ends within two seconds."""

    return bool(select.select([sentinel], [], [], 2.0)[0])


def test_stacks_are_dumped(tmp_path):
    dump = tmp_path / "stack"
    code = (
        "import os, signal, sys; from gleanrl._os.fork_server_main import dump_stacks_into;"
        f"dump_stacks_into(os.open({str(dump)!r}, os.O_CREAT | os.O_WRONLY));"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
    assert "most recent call first" in dump.read_text() and callable(dump_stacks_into)


def test_a_launcher_without_an_owner_ends_during_its_imports_and_prints_nothing(tmp_path):
    (tmp_path / "endless.py").write_text("import sys\nprint('begun', flush=True)\nsys.stdin.read()\n")
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = {"control": theirs.fileno(), "owner": os.getpid(), "entry": ENTRY, "preload": ["endless"]}
    path = [str(tmp_path), *fork_server._path([ENTRY, "gleanrl"])]
    command = [sys.executable, "-c", fork_server._CODE, json.dumps(arguments), *path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for closed_before in (False, True):
        if closed_before:
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command[3] = json.dumps({**arguments, "control": theirs.fileno()})
            own.close()
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes)
        theirs.close()
        if not closed_before:
            assert process.stdout.readline() == b"begun\n"
            own.close()  # as an interrupted start does
        assert process.wait(30) == (0 if closed_before else -signal.SIGIO)
        # Standard input was still open: the import itself had not ended.
        assert process.communicate() == (b"", b"")
