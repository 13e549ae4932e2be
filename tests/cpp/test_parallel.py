"""Copies shared with the helper thread: same bytes, several callers at once, forks, and the end of the
process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from gleanrl.native import set_helper
from tests.cpp.columns_model import Table


@pytest.fixture(params=[True, False], ids=["shared", "alone"])
def helper(request):
    before = set_helper(request.param)
    yield request.param
    assert set_helper(before) is request.param


# More than the megabyte from which a call is shared, in rows of one byte to rows longer than a chunk.
@pytest.mark.parametrize(
    ("row_bytes", "num_rows", "n"),
    [([1, 4, 16], 1000, 70_000), ([28224, 28224, 8], 50, 70), ([200_000, 1], 9, 13), ([1024], 2000, 1025)],
)
def test_long_gathers_are_complete(helper, row_bytes, num_rows, n):
    table = Table.random(row_bytes, num_rows)
    index = np.random.default_rng(0).integers(0, num_rows, n)
    for got, column in zip(table.gather(index), table.columns, strict=True):
        assert (got == column[index]).all()


@pytest.mark.parametrize("start", [0, 1, 900])
def test_long_writes_are_complete(helper, start):
    table = Table.random([3000, 4, 1], 1000)
    rows, expected = table.random_rows(1000), table.copy()
    for column, source in zip(expected, rows, strict=True):
        column[(start + np.arange(1000)) % 1000] = source
    table.write(start, rows)
    assert all((c == e).all() for c, e in zip(table.columns, expected, strict=True))


def test_several_threads_share_one_helper():
    table = Table.random([28224, 8], 40)
    wrong = []

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(15):
            index = generator.integers(0, 40, 64)
            got = table.gather(index)
            wrong.extend(j for j, column in enumerate(table.columns) if not (got[j] == column[index]).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent("""
        import os, sys, threading
        import numpy as np
        from gleanrl.native import Columns, set_helper
        set_helper(True)
        column = np.random.default_rng(0).integers(0, 256, (50, 28224), dtype=np.uint8)
        core = Columns([column.ctypes.data], [28224], 50)
        index = np.random.default_rng(1).integers(0, 50, 64)

        def is_right():
            out = np.zeros((64, 28224), np.uint8)
            core.gather(index.ctypes.data, 64, [out.ctypes.data])
            return bool((out == column[index]).all())
    """) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_a_child_of_a_fork_has_a_helper_of_its_own():
    done = run_script("""
        assert is_right()
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if is_right() and is_right() and len(os.listdir("/proc/self/task")) == 2 else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert is_right()
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_while_the_helper_is_busy_is_safe():
    done = run_script("""
        stop = threading.Event()
        def work():
            while not stop.is_set():
                assert is_right()
        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        for _ in range(40):
            child = os.fork()
            if child == 0:
                os._exit(0 if is_right() else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        [thread.join() for thread in threads]
    """)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_with_the_helper_asleep():
    done = run_script("assert is_right(); print('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
