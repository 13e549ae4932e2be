"""Processes for workers, asked for."""

from __future__ import annotations

import os
import select

import pytest

from gleanrl.system import launcher
from gleanrl.system.descriptors import Descriptors, pipe
from gleanrl.system.launch_server import REQUEST
from tests.interrupts import interruptions
from tests.leaks import Holdings
from tests.system.entries import ENTRY


@pytest.fixture(autouse=True)
def another_launcher():
    """The tests' own launcher in the place of the program's; nothing may be left of it."""
    program, launcher._current = launcher._current, None
    before = Holdings.now()
    yield
    launcher.shut_down()
    launcher.shut_down()
    before.check()
    launcher._current = program


def test_there_is_one_until_it_is_shut_down_or_ends():
    first = launcher.current(ENTRY, ())
    assert launcher.current(ENTRY, ()) is first and first.is_alive
    first._process.kill()
    first._process.wait()
    second = launcher.current(ENTRY, ())
    assert second is not first
    launcher.shut_down()
    assert not second.is_alive


def test_an_import_that_fails_is_no_secret():
    with pytest.raises(launcher.LaunchError, match="No module named 'gleanrl_is_not_called_that'"):
        launcher.current(ENTRY, ("gleanrl_is_not_called_that",))
    with pytest.raises(launcher.LaunchError, match="has no attribute 'nothing'"):
        launcher.current("tests.system.entries:nothing", ())


def test_what_every_launcher_imports(monkeypatch):
    monkeypatch.setattr(launcher, "_preloaded", [])
    launcher.preload("gleanrl_is_not_called_that")
    with pytest.raises(launcher.LaunchError, match="No module named 'gleanrl_is_not_called_that'"):
        launcher.current(ENTRY, ())


def test_codes_are_told_whenever_they_are_asked_for():
    launched, held, started = launcher.current(ENTRY, ()), Descriptors(), []
    for code in (b"3", b"4", b"5"):
        mine, theirs = held.take(pipe())
        started.append(launched.start([mine, theirs], held))
        os.write(theirs, code)
    for _, sentinel in started:
        select.select([sentinel], [], [], 10)
    assert [launched.exit_code(pid) for pid, _ in reversed(started)] == [5, 4, 3]
    held.close()


def test_a_late_answer_without_descriptors_closes_none():
    launched, held = launcher.current(ENTRY, ()), Descriptors()
    mine, theirs = held.take(pipe())
    launched._link.send(REQUEST.pack(1 << 40, 12345678))  # for an exit code, and nobody waits for it
    launched.start([mine, theirs], held)
    os.write(theirs, b"3")
    held.close()


def test_an_interrupted_start_leaves_nothing_and_the_next_one_gets_its_own_process():
    launched = launcher.current(ENTRY, ())

    def start(held):
        mine, theirs = held.take(pipe())
        pid, sentinel = launched.start([mine, theirs], held)
        held.close(mine)
        os.write(theirs, b"3")
        select.select([sentinel], [], [], 10)
        return pid

    for held, place in interruptions(Descriptors, start):
        held.close()
        again = Descriptors()
        assert launched.exit_code(start(again)) == 3, place
        again.close()


def test_an_interrupted_launch_leaves_nothing():
    for _, place in interruptions(lambda: None, lambda _: launcher.current(ENTRY, ()), 30):
        assert launcher.current(ENTRY, ()).is_alive, place
        launcher.shut_down()


def test_a_fork_has_its_own():
    first = launcher.current(ENTRY, ())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            second = launcher.current(ENTRY, ())
            code = 0 if second is not first and second.is_alive else 2
            launcher.shut_down()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.is_alive and launcher.current(ENTRY, ()) is first
