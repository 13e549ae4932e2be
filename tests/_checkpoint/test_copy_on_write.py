"""Snapshots keep a storage's rows unchanged during later writes, and copy as few rows as possible."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from gleanrl._checkpoint import copy_on_write
from gleanrl._os import clock
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests.data.replay_buffers.moments import ROWS, SEGMENTS, buffer, cut_small, data, moment_of
from tests.interrupts import in_another_thread


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


WRITES: dict[str, Callable[[ReplayBuffer], object]] = {
    "extend": lambda made: made.extend(data(90_000, 1_700)),
    "extend around the end": lambda made: made.extend(data(90_000, 2_900)),
    "add": lambda made: made.add(data(90_000, 1)[0]),
    "set": lambda made: made.storage.set([5, 2_499, 700], data(90_000, 3)),
    "setitem": lambda made: made.__setitem__(slice(100, 900), data(90_000, 800)),
    "column": lambda made: made.__setitem__("n", torch.zeros(len(made), dtype=torch.int64)),
    "new column": lambda made: (
        made.__setitem__("y", torch.zeros(len(made))),
        made.extend(data(90_000, 1_500).set("y", torch.ones(1_500))),
    ),
    "empty": lambda made: (made.empty(), made.extend(data(90_000, 1_000))),
    "load": lambda made: made.load_state_dict(other_state()),
}


def other_state() -> dict[str, Any]:
    other = buffer()
    other.extend(data(50_000, 2_500))
    return other.state_dict()


@pytest.mark.parametrize("filled", [2_500, 3_000, 4_100])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_snapshot_does_not_change_after_writes(write: str, filled: int, storage: Any) -> None:
    made = buffer(storage=storage)
    made.extend(data(0, filled))
    before = made.storage.state_dict()
    moment = moment_of(made)
    first = moment.take(moment.order()[0])  # one piece was read already
    moment.give(first)
    moment = moment_of(made)
    WRITES[write](made)
    generations, *columns = moment.tensors()
    assert torch.equal(generations, before["generations"])
    for column, saved in zip(columns, before["columns"], strict=True):
        assert torch.equal(column, saved)
    made.storage.check_valid()
    made.extend(made[:10])
    assert made.storage.open_snapshots == (), "all of it was read"


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
def test_writer_copies_changed_rows_and_little_more(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(copy_on_write, "_PIECE_BYTES", rows * 24)
    made = buffer()
    made.extend(data(0, ROWS))
    before = [column.clone() for column in moment_of(made).tensors()]
    moment = moment_of(made)
    made.extend(data(90_000, 130))
    made.storage.set([1_234, 2_999], data(80_000, 2))
    assert moment._saved_bytes <= 24 * (130 + 2 + 5 * rows)
    for number in (0, 6, 14):
        assert moment.look(number) is None and not moment.settled(number)
    assert moment.look(3) is not None
    made.storage.set([700], data(80_000, 1))  # during a reader's look at the piece
    assert not moment.settled(3)
    assert all(torch.equal(column, saved) for column, saved in zip(moment.tensors(), before, strict=True))
    assert moment._saved_bytes == 0


def test_memory_of_copies_is_used_again() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    made.extend(data(90_000, 200))
    (kept,) = moment._saved[0].values()
    moment.give(moment.take(0))
    made.extend(data(90_200, 200))
    (again,) = moment._saved[1].values()
    assert again.ctypes.data == kept.ctypes.data
    used = len(moment._free)
    moment.skip([1])
    assert len(moment._free) == used + 1
    moment.close()
    assert not moment._free and not moment._spare


def test_memory_of_copies_is_freed_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "_SLAB_BYTES", 200 * 24)  # one piece
    monkeypatch.setattr(copy_on_write, "_REUSABLE_BYTES", 2 * 200 * 24)
    made = buffer()
    made.extend(data(0, ROWS))
    before = made.storage.state_dict()["columns"]
    moment = moment_of(made)
    made.extend(data(90_000, ROWS))
    assert moment._saved_bytes == ROWS * 24
    for taken, number in enumerate(moment.order(), 1):
        copied = moment.take(number)
        _, *columns = moment.layout.columns(number, copied)
        rows = slice(*moment.layout.span(number))
        assert all(torch.equal(column, saved[rows]) for column, saved in zip(columns, before, strict=True))
        moment.give(copied)
        assert len(moment._free) == min(taken, 2) and moment._saved_bytes == (ROWS - 200 * taken) * 24


def test_many_copies_take_few_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    mapped = copy_on_write.mapped
    monkeypatch.setattr(copy_on_write, "mapped", lambda size: (sizes.append(size), mapped(size))[1])
    for name, pieces in {"_PIECE_BYTES": 1, "_SLAB_BYTES": 1, "_MOST_SLAB_BYTES": 200}.items():
        monkeypatch.setattr(copy_on_write, name, pieces * 24)  # a piece is one row
    monkeypatch.setattr(copy_on_write, "_SLABS", 4)
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    made.extend(data(90_000, ROWS))
    assert moment._saved_bytes == ROWS * 24
    assert sizes[0] == 24 and max(sizes) == 200 * 24 and len(sizes) < 80


def test_pieces_already_read_are_not_copied() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    assert moment.look(0) is not None and moment.settled(0)
    made.extend(data(90_000, 150))
    assert moment._saved_bytes == 0


def test_skipped_segments_are_not_copied() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    made.extend(data(90_000, 150))
    held = moment._saved_bytes
    assert held > 0 and moment.open
    moment.skip(range(1, SEGMENTS))
    made.extend(data(90_150, ROWS - 150))
    assert moment._saved_bytes < 2 * held and moment.open, "of the first segment alone"
    moment.skip([0])
    assert moment._saved_bytes == 0 and not moment.open


@pytest.mark.parametrize("more", [0, 150, 450, 2_999])
def test_snapshot_reads_segments_in_the_order_of_the_ring_writer(more: int) -> None:
    made = buffer()
    made.extend(data(0, ROWS + more))
    moment = moment_of(made)
    first = more // 200
    assert moment.first == first and moment.order() == [*range(first, SEGMENTS), *range(first)]


def test_writers_wait_while_much_was_copied_for_them() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    before = made.storage.state_dict()["columns"]
    moment.room = 10_000
    moment.begin()
    writer = threading.Thread(target=made.extend, args=(data(90_000, ROWS),))
    writer.start()
    generations, *columns = moment.tensors()  # releases memory that the writer waits for
    writer.join()
    assert all(torch.equal(column, saved) for column, saved in zip(columns, before, strict=True))
    assert int(made[0]["n"]) == 90_000


@pytest.mark.parametrize("single", [False, True])
def test_sampling_continues_while_a_writer_waits_for_copies(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(copy_on_write, "sleep", lambda seconds: (waits.set(), clock.sleep(seconds)))
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    made.extend(data(80_000, 150))
    moment.room = 0
    moment.begin()
    in_another_thread(lambda: made.extend(data(80_150, 50)))  # this write copies nothing more
    record = data(90_000, 1)[0]
    writer = threading.Thread(
        target=partial(made.add, record) if single else partial(made.extend, data(90_000, 700))
    )
    writer.start()
    try:
        assert waits.wait(10)
        assert len(in_another_thread(made.sample)) == 4
        assert int(made[200]["n"]) == 200
    finally:
        moment.close()
        writer.join()
    assert int(made[200]["n"]) == 90_000


@pytest.mark.parametrize(("guess", "segments"), [(0, 0), (1, 1), (170, 2), (1_000, 6), (10**9, 15)])
def test_wrong_guess_of_the_next_writes_costs_only_copies(guess: int, segments: int) -> None:
    made = buffer()
    made.extend(data(0, ROWS + 1_100))
    before = made.storage.state_dict()["columns"]
    moment = moment_of(made)
    made.storage.preserve_next(guess)
    assert moment._saved_bytes == segments * 200 * 24
    made.storage.set([5, 2_499], data(90_000, 2))
    made.extend(data(91_000, 500))
    _, *columns = moment.tensors()
    assert all(torch.equal(column, saved) for column, saved in zip(columns, before, strict=True))


def test_copies_for_several_writers_keep_the_snapshot() -> None:
    made = buffer()
    for _ in range(5):
        made.extend(data(0, ROWS))
        before, moment = made.storage.state_dict()["columns"], moment_of(made)
        writers = [
            threading.Thread(target=lambda: [made.extend(data(90_000, 130)) for _ in range(9)])
            for _ in range(3)
        ]
        for writer in writers:
            writer.start()
        _, *columns = moment.tensors()
        for writer in writers:
            writer.join()
        assert all(torch.equal(column, saved) for column, saved in zip(columns, before, strict=True))


@pytest.mark.parametrize("moment", range(40))
def test_an_interrupted_dump_ends(tmp_path: Path, moment: int) -> None:
    """The interrupt comes when a function that the snapshot's rows called returns. No lock stays held."""
    made = buffer()
    made.extend(data(0, ROWS))
    left = moment

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_back is None or frame.f_back.f_code.co_filename != copy_on_write.__file__:
            return None
        left -= 1
        return returns if left < 0 else None

    def returns(frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return returns

    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            made.dumps(tmp_path)
    finally:
        sys.settrace(None)
    in_another_thread(lambda: made.extend(data(90_000, 700)))
    made.dumps(tmp_path)
    other = buffer()
    other.loads(tmp_path)
    assert torch.equal(other[:]["n"], made[:]["n"])


def test_closing_lets_writers_go() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    moment.room = 10_000
    moment.begin()
    writer = threading.Thread(target=made.extend, args=(data(90_000, ROWS),))
    writer.start()
    moment.close()
    writer.join()
    assert not moment.open and int(made[0]["n"]) == 90_000


def test_deleted_snapshot_causes_no_copies() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment_of(made)
    made.extend(data(0, 10))
    assert made.storage.open_snapshots == ()
    assert pickle.loads(pickle.dumps(made)).storage.open_snapshots == ()


def test_a_forked_child_copies_nothing() -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    moment = moment_of(made)
    moment.begin()
    child = os.fork()
    if child == 0:
        made.extend(data(0, ROWS))
        os._exit(0 if not moment.open and not moment._saved else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert moment.open
