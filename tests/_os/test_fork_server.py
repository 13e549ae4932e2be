"""The fork server starts worker processes on request and reports how they end."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import sysconfig

import pytest

from gleanrl._os import fork_server
from gleanrl._os.files import Descriptors, pipe
from gleanrl._os.fork_server_main import REQUEST
from tests._os.entries import ENTRY
from tests.interrupts import interruptions
from tests.leaks import Holdings
from tests.takeovers import SOURCE


@pytest.fixture(scope="module")
def launched():
    """Start a fork server for all tests that don't end it, because each one imports torch."""
    made = fork_server._launch(ENTRY, ())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def another_launcher():
    """Replace the program's fork server by a new one for each test; the test must leave no process or descriptor."""
    program, fork_server._current = fork_server._current, None
    before = Holdings.now()
    yield
    fork_server.shut_down()
    fork_server.shut_down()
    before.check()
    fork_server._current = program


def test_one_fork_server_runs_until_shutdown_or_its_end():
    first = fork_server.current(ENTRY, ())
    assert fork_server.current(ENTRY, ()) is first and first.is_alive
    first._process.kill()
    first._process.wait()
    second = fork_server.current(ENTRY, ())
    assert second is not first
    fork_server.shut_down()
    assert not second.is_alive


def test_failing_import_is_reported():
    with pytest.raises(fork_server.LaunchError, match="No module named 'gleanrl_is_not_called_that'"):
        fork_server.current(ENTRY, ("gleanrl_is_not_called_that",))
    with pytest.raises(fork_server.LaunchError, match="has no attribute 'nothing'"):
        fork_server.current("tests._os.entries:nothing", ())


def test_failing_preload_is_reported(monkeypatch):
    monkeypatch.setattr(fork_server, "_preloaded", [])
    fork_server.preload("gleanrl_is_not_called_that")
    with pytest.raises(fork_server.LaunchError, match="No module named 'gleanrl_is_not_called_that'"):
        fork_server.current(ENTRY, ())


def test_exit_codes_are_reported_at_any_time(launched):
    held, started = Descriptors(), []
    for code in (b"3", b"4", b"5"):
        mine, theirs = held.take(pipe())
        started.append(launched.start([mine, theirs], held))
        os.write(theirs, code)
    for _, sentinel in started:
        select.select([sentinel], [], [], 10)
    assert [launched.exit_code(pid) for pid, _ in reversed(started)] == [5, 4, 3]
    held.close()


def test_a_late_answer_without_descriptors_closes_none(launched):
    held = Descriptors()
    mine, theirs = held.take(pipe())
    # Asks for an exit code; no caller waits for this answer.
    launched._link.send(REQUEST.pack(1 << 40, 12345678))
    launched.start([mine, theirs], held)
    os.write(theirs, b"3")
    held.close()


def test_an_interrupted_start_leaves_nothing_and_the_next_one_gets_its_own_process(launched):
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


def test_interrupted_launch_leaves_no_process():
    for _, place in interruptions(lambda: None, lambda _: fork_server.current(ENTRY, ()), 30):
        assert fork_server.current(ENTRY, ()).is_alive, place
        fork_server.shut_down()


def test_forked_process_has_its_own_fork_server():
    first = fork_server.current(ENTRY, ())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            second = fork_server.current(ENTRY, ())
            code = 0 if second is not first and second.is_alive else 2
            fork_server.shut_down()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.is_alive and fork_server.current(ENTRY, ()) is first


PROGRAM = """
import os, sys
from functools import partial
from pathlib import Path
import gleanrl
from gleanrl.envs import GymEnv, ParallelEnv

make = partial(GymEnv, "CartPole-v1")
if sys.argv[1] == "own":
    from helper import make  # of the script's folder

if __name__ == "__main__":
    mark = Path(sys.argv[2])
    code = f"import os; open({str(mark)!r}, 'a').write(__name__ + ' ' + str(os.getpid()) + chr(10)); raise SystemExit"
    names = {name.partition(".")[0] for name in [*sys.stdlib_module_names, *sys.modules]}
    names |= {"sitecustomize", "usercustomize", "pandas", "cupy"}
    for name in names - {"__main__", "helper", "program", "gleanrl", *sys.builtin_module_names}:
        Path(f"{name}.py").write_text(code)
    env = ParallelEnv(2, make)
    print(env.rollout(3).numel())
    env.close()
"""
HELPER = """
from functools import partial
from gleanrl.envs import GymEnv

class Own(GymEnv):
    pass

make = partial(Own, "CartPole-v1")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "where", "kind"),
    [
        ((), "elsewhere", "own"),
        (("-P",), "elsewhere", "any"),
        (("-I",), "elsewhere", "any"),
        ((), "here", "own"),
    ],
)
def test_nothing_is_imported_from_the_current_directory(tmp_path, flags, where, kind):
    here, elsewhere, mark = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "mark"
    here.mkdir()
    elsewhere.mkdir()
    (tmp_path / where / "program.py").write_text(PROGRAM)
    (tmp_path / where / "helper.py").write_text(HELPER)
    if sys.version_info < (3, 11):
        flags = tuple(flag for flag in flags if flag != "-P")
    command = [sys.executable, *flags, str(tmp_path / where / "program.py"), kind, str(mark)]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, check=False)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6"]


def test_fork_server_has_the_interpreters_flags(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["ignore::UserWarning"])
    process = fork_server.current(ENTRY, ())._process
    flags = subprocess._args_from_interpreter_flags()
    assert "-Wignore::UserWarning" in flags and process.args[1 : 1 + len(flags)] == flags


def test_fork_server_has_the_current_directory_last_in_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "."])
    assert fork_server._path(["json.decoder", "never_imported"]) == ["/a"]
    (tmp_path / "gleanrl_own").mkdir()
    (tmp_path / "gleanrl_own" / "__init__.py").touch()
    importlib.import_module("gleanrl_own")
    assert fork_server._path(["json", "gleanrl_own.part:run"]) == ["/a", str(tmp_path)]
    del sys.modules["gleanrl_own"]


def test_fork_server_keeps_site_packages_that_are_the_current_directory(monkeypatch):
    installed = sysconfig.get_paths()["purelib"]
    monkeypatch.chdir(installed)
    monkeypatch.setattr(sys, "path", ["", "/a", installed])
    assert fork_server._path([]) == ["/a", installed]


@pytest.mark.timeout(25)  # the wait once took 30 s
def test_stopped_fork_server_does_not_delay_the_report_of_a_lost_worker(launched, monkeypatch):
    held = Descriptors()
    process = launched.start(held.take(pipe()), held)  # waits for an order that never comes
    os.kill(launched._process.pid, signal.SIGSTOP)
    try:
        os.kill(process.pid, signal.SIGKILL)
        select.select([process.descriptor], [], [])
        with monkeypatch.context() as short:
            short.setattr(fork_server, "_CODE_S", 0.2)
            assert launched.exit_code(process.pid) is None
    finally:
        os.kill(launched._process.pid, signal.SIGCONT)
    assert launched.exit_code(process.pid) == -signal.SIGKILL
    held.close()
