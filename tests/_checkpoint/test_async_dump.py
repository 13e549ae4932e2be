"""Background dumps report their end, pause between pieces of work, and raise their errors once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from gleanrl._checkpoint import writer
from gleanrl._checkpoint.async_dump import Dump
from gleanrl._checkpoint.folder import Folder
from gleanrl._checkpoint.tree_codec import Attachment
from gleanrl._os import clock, fault_points
from gleanrl._os.clock import FakeClock
from gleanrl._os.threads import Job
from gleanrl.errors import CheckpointError, UnsupportedError


def test_dump_reports_its_end(tmp_path: Path) -> None:
    leave = threading.Event()
    with fault_points.inject({"fs.rename": leave.wait}):
        dump = Dump(Folder(tmp_path), "thing", {"a": 1}, 1)
        assert not dump.done() and not dump.wait(0.01) and "done=False" in repr(dump)
        leave.set()
        assert dump.wait() and dump.wait(0) and dump.done()
    dump.settle()
    assert Folder(tmp_path).load().state == {"a": 1}


def test_relative_folder_is_resolved_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    begin = threading.Event()
    with fault_points.inject({"fs.make_dir": begin.wait}):
        dump = Dump(Folder("folder"), "thing", {"a": 1}, 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        begin.set()
        dump.wait()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert Folder(tmp_path / "there" / "folder").load().state == {"a": 1}


def test_end_waits_for_success_and_failure(tmp_path: Path) -> None:
    dump = Dump(Folder(tmp_path / "a"), "thing", {"a": 1}, 1)
    dump.end()
    assert dump.done()
    (tmp_path / "b").touch()
    failing = Dump(Folder(tmp_path / "b"), "thing", {"a": 1}, 1)
    failing.end()
    assert failing.done()
    with pytest.raises(CheckpointError, match="expected a folder of checkpoints, got a file"):
        failing.settle()


def rests(tmp_path: Path, state: Any) -> list[float]:
    """Return the pauses of a background dump of `state` to "b"; a foreground dump to "a" makes no pause."""
    fake = FakeClock()
    with clock.use(fake):
        begin = time.process_time()
        Folder(tmp_path / "a").commit("thing", state)
        assert fake.slept == []
        dump = Dump(Folder(tmp_path / "b"), "thing", state, 1)
        while not dump.done():
            os.sched_yield()
        assert 0.01 < sum(fake.slept) < 10 * (time.process_time() - begin)
    return fake.slept


def test_background_dump_pauses_most_of_the_time(tmp_path: Path) -> None:
    rests(tmp_path, {"a": torch.ones(10 << 20)})


def test_background_dump_pauses_while_a_callback_writes(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        data = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
        for _ in range(20):
            hashlib.sha256(data)
            file.write(data)
            file.flush()

    assert len(rests(tmp_path, {"a": Attachment("a.h5", write)})) >= 10
    written, again = (next((tmp_path / name).glob("ckpt-*/a.h5")) for name in "ab")
    assert written.read_bytes() == again.read_bytes()


def test_background_dump_writes_in_small_pieces(tmp_path: Path) -> None:
    state = {"a": torch.ones(1 << 20)}
    with fault_points.inject({}) as visits:
        assert Dump(Folder(tmp_path), "thing", state, 1).wait(60)
    assert visits.counts["fs.write"] >= (4 << 20) // writer._STINT_BYTES
    assert torch.equal(Folder(tmp_path).load().state["a"], state["a"])


def test_waiting_caller_ends_the_pauses(tmp_path: Path) -> None:
    state, fake, leave = {"a": torch.ones(10 << 20)}, FakeClock(), threading.Event()
    with clock.use(fake), fault_points.inject({"fs.lock": leave.wait}):
        dump = Dump(Folder(tmp_path), "thing", state, 1)
        waiting = threading.Thread(target=dump.wait)
        waiting.start()
        while not any(frame.f_code is Job.result.__code__ for frame in frames_of(waiting)):
            os.sched_yield()
        leave.set()
        waiting.join()
        assert fake.slept == []


def frames_of(thread: threading.Thread) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost call first."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_error_is_raised_once_by_settle_and_always_by_wait(tmp_path: Path) -> None:
    for first in ("wait", "settle"):
        dump = Dump(Folder(tmp_path), "thing", object(), 1)
        for _ in range(2 if first == "wait" else 1):
            with pytest.raises(CheckpointError, match="a object can't be saved"):
                getattr(dump, first)()
        dump.settle()
        assert dump.done()


def test_forked_child_does_not_wait_for_the_dump(tmp_path: Path) -> None:
    leave = threading.Event()
    with fault_points.inject({"fs.rename": leave.wait}):
        dump = Dump(Folder(tmp_path), "thing", {"a": 1}, 1)
        child = os.fork()
        if child == 0:
            dump.settle()
            try:
                dump.done()
            except UnsupportedError:
                os._exit(0)
            os._exit(1)
        leave.set()
        assert dump.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


AT_THE_END = """
import sys, torch
from gleanrl.data import LazyTensorStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
buffer.extend(torch.zeros(100_000, 4))
buffer.dumps(sys.argv[1], wait=False)
"""


def test_program_waits_for_the_dump_at_exit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    Folder(tmp_path).load()
    assert [name[:5] for name in sorted(os.listdir(tmp_path))] == ["LOCK", "ckpt-"]
