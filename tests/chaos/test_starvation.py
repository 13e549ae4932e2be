"""With too few open files or too little memory, collection works or raises a clear error, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gleanrl.errors import GleanError
from tests.chaos.drills import collector_of, scaled
from tests.chaos.oracle import Record, makers
from tests.leaks import SHARED_MEMORY

pytestmark = pytest.mark.timeout(600)

WORKERS, LIMIT_S = 4, 60.0
WORKS, UNNAMED = "works", "unnamed"
_CLONE_NEWNS = 0x20000


def few_files(number: int) -> None:
    """Limit this process to `number` open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def little_memory(megabytes: int) -> None:
    """Limit this process to `megabytes` more memory than it uses now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), hard))


def little_shared_memory(kilobytes: int) -> None:
    """Give this process a private /dev/shm of `kilobytes`."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise PermissionError("this process may not have mounts of its own")
    for command in (
        "mount --make-rprivate /",
        f"mount -t tmpfs -o size={kilobytes}k tmpfs {SHARED_MEMORY}",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)


def collect_after(starve: Callable[[int], None], amount: int, answer: Connection) -> None:
    """Collect with too little of a resource; send the outcome."""
    try:
        starve(amount)
    except (OSError, subprocess.CalledProcessError) as error:
        answer.send(f"can't be tried: {error}")
        return
    try:
        collector, record = collector_of("sync", makers(WORKERS), steps=10), Record()
        try:
            for _ in range(3):
                record.add(collector.next())
        finally:
            collector.shutdown()
        record.check()
        answer.send(WORKS)
    except (GleanError, OSError, MemoryError) as error:
        answer.send(f"{type(error).__name__}: {error}")
    except BaseException as error:
        answer.send(f"{UNNAMED} {type(error).__name__}: {error}")


def outcome(starve: Callable[[int], None], amount: int) -> str:
    """Return the outcome in a separate process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gleanrl.envs", "gleanrl.collectors"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=collect_after, args=(starve, amount, theirs))
    process.start()
    theirs.close()
    with ours:
        try:
            assert ours.poll(LIMIT_S), f"nothing within {LIMIT_S} s at {amount}"
            found: str = ours.recv()
        except EOFError:
            process.join()
            found = f"{UNNAMED} end with {process.exitcode}"
        finally:
            process.kill()
            process.join()
            process.close()
    print(starve.__name__, amount, found)
    return found


@pytest.mark.parametrize("files", range(16, 112, 96 // scaled(48)))
def test_too_few_open_files_raise_a_clear_error(files):
    found = outcome(few_files, files)
    assert not found.startswith(UNNAMED)
    if files >= 64 + 4 * WORKERS:
        assert found == WORKS


@pytest.mark.parametrize("megabytes", range(0, 1200, 1200 // scaled(20)))
def test_too_little_memory_raises_a_clear_error(megabytes):
    assert not outcome(little_memory, megabytes).startswith(UNNAMED)


def test_little_shared_memory_is_no_obstacle():
    found = outcome(little_shared_memory, 64)
    if found.startswith("can't be tried"):
        pytest.skip(found)
    assert found == WORKS
