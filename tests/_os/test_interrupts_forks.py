"""Locks, random sequences and memory-mapped files work in a forked child. Each test forks a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMON = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
from gleanrl.data.replay_buffers import *

def in_child(work):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read, closefd=True) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said
"""
# A fresh interpreter takes seconds to import torch, so each script runs in a fork of one that has only imported it.
EACH = """
import json
for script in sys.stdin:
    pid = os.fork()
    if not pid:
        exec(json.loads(script))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print("end of script", flush=True)
"""


@pytest.fixture(scope="module")
def program():
    process = subprocess.Popen(
        [sys.executable, "-c", COMMON + EACH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture
def run(program):
    def run(script: str) -> str:
        program.stdin.write(json.dumps(script) + "\n")
        program.stdin.flush()
        return "".join(iter(program.stdout.readline, "end of script\n"))

    return run


def test_child_forked_during_a_write_can_sample(run):
    assert (
        run("""
rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
rb.extend(torch.arange(5))
inside, forked = threading.Event(), threading.Event()
def transform(data):
    inside.set()
    forked.wait()
    return data
class Inverse:
    def inv(self, data):
        return transform(data)
    def __call__(self, data):
        return data
rb.append_transform(Inverse())
writer = threading.Thread(target=lambda: rb.extend(torch.arange(5, 8)))
writer.start()
inside.wait()
print(in_child(lambda: (len(rb), len(rb.sample()))))
forked.set()
writer.join()
print(len(rb))
""")
        == "(5, 4)\n8\n"
    )


@pytest.mark.parametrize(
    "busy",
    [
        """
from gleanrl._os import fork_server
launch = fork_server._launch
fork_server._launch = lambda *_: wait()
in_thread = lambda: fork_server.current("tests._os.entries:run", ())
def in_child_too():
    fork_server._launch = lambda *_: "a launcher"
    return fork_server.current("tests._os.entries:run", ())
""",
        """
make = lambda storage: ReplayBuffer(storage=storage, batch_size=2, delayed_init=True)
def slow():
    wait()
    return LazyTensorStorage(3)
in_thread = lambda: len(make(slow))
in_child_too = lambda: make(lambda: LazyTensorStorage(5)).storage.max_size
""",
    ],
    ids=["fork server", "delayed buffer"],
)
def test_a_child_forked_while_a_thread_holds_a_module_lock_does_not_wait(run, busy):
    out = run(f"""
import signal
inside, forked = threading.Event(), threading.Event()
def wait():
    inside.set()
    forked.wait()
{busy}
thread = threading.Thread(target=in_thread)
thread.start()
inside.wait()
def guarded():
    signal.alarm(20)  # a child that waits for the lost thread would never end
    return in_child_too()
print(in_child(guarded))
forked.set()
thread.join()
""")
    assert out in ("'a launcher'\n", "5\n")


def test_child_draws_a_separate_reproducible_sequence():
    script = """
import copy
draw = lambda: rb.sample().tolist()
for used in (True, False):
    torch.manual_seed(3)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=6)
    rb.extend(torch.arange(1000))
    if used:
        rb.sample()
        rb = copy.deepcopy(rb)
    first, second = in_child(draw), in_child(draw)
    grandchild = in_child(lambda: in_child(draw))
    own = repr(draw())
    assert len({first, second, grandchild, own}) == 4, (first, second, grandchild, own)
    print(first, second, grandchild, own)
"""
    command = [sys.executable, "-c", COMMON + script]
    once, again = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert once.stdout == again.stdout and once.stdout.count("\n") == 2, once.stderr


def test_a_child_reads_its_parents_memory_mapped_files_and_doesnt_write_them(run, tmp_path):
    out = run(f"""
rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir={str(tmp_path / "files")!r}), batch_size=4)
rb.extend(torch.arange(5))
def refused():
    said = []
    def change():
        rb[0] = torch.tensor(7)
    for call in (lambda: rb.extend(torch.arange(3)), lambda: rb.add(torch.tensor(1)), change,
                 lambda: rb.storage.set(0, torch.arange(2)), lambda: rb.load_state_dict(rb.state_dict()),
                 lambda: rb.storage.flatten().set(0, torch.arange(1))):
        try:
            call()
        except NotImplementedError as error:
            said.append("forked process" in str(error))
    view = rb[:]
    view.zero_()
    rb.sample()
    fresh = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    fresh.extend(rb[:])
    return said, rb[:].tolist(), len(fresh)
print(in_child(refused))
rb.extend(torch.arange(5, 7))
print(rb[:].tolist())
""")
    assert out == f"({[True] * 6}, [0, 1, 2, 3, 4], 5)\n{list(range(7))}\n"
    assert len(list((tmp_path / "files").iterdir())) == 1


def test_a_child_writes_its_own_copy_of_memory(run):
    assert (
        run("""
rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
rb.extend(torch.arange(5))
print(in_child(lambda: (rb.extend(torch.arange(7, 9)).tolist(), rb[:].tolist())))
print(rb[:].tolist())
""")
        == "([5, 6], [0, 1, 2, 3, 4, 7, 8])\n[0, 1, 2, 3, 4]\n"
    )
