"""A snapshot shows one moment while writers continue."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from gleanrl.data.replay_buffers.storages.table import Table
from tests.data.replay_buffers.oracle import fill


def steps(start: int, count: int) -> TensorDict:
    n = torch.arange(start, start + count)
    return TensorDict({"n": n, "wide": n[:, None].repeat(1, 50), "half": (n % 100).bfloat16()}, [count])


def check(state: dict, written: int) -> None:
    """Check that rows are whole and are the newest rows of a ring, as at a single moment."""
    n, wide, half = state["columns"]
    assert (wide == n[:, None]).all() and (half == (n % 100).bfloat16()).all()
    newest = int(n.max())
    assert sorted(n.tolist()) == list(range(newest + 1 - len(n), newest + 1)) and newest < written
    assert state["rows_written"] == newest + 1 and len(n) == state["num_steps"] == len(state["generations"])
    assert n[(state["end"] - 1) % len(n)] == newest
    size = state["max_size"]
    assert state["generations"].tolist() == [-(-(newest + 1 - slot) // size) for slot in range(len(n))]


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_snapshots_during_writes_show_one_moment(kind):
    buffer = ReplayBuffer(storage=kind(2000), batch_size=2)
    written, stop = [0], threading.Event()
    buffer.extend(steps(0, 50))
    written[0] = 50

    def write() -> None:
        while not stop.is_set():
            start = written[0]
            written[0] += 50
            buffer.extend(steps(start, 50))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            state = buffer.storage.state_dict()
            check(state, written[0])
            for column in state["columns"]:
                assert column.untyped_storage().nbytes() == column.nbytes
    finally:
        stop.set()
        writer.join()
    again = kind(2000)
    again.load_state_dict(buffer.storage.state_dict())
    assert (again.get(slice(None)) == buffer[:]).all()


@pytest.mark.parametrize("filled", [100, 1000])
def test_writers_dont_wait_while_a_snapshot_is_copied(filled, monkeypatch):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=2)
    buffer.extend(steps(0, filled))
    copy_rows, copying, wrote = Table.copy_rows, threading.Event(), threading.Event()

    def slow(table: Table, *arguments: object) -> None:
        if not copying.is_set():
            copying.set()
            assert wrote.wait(20), "the writer waited for the copy"
        copy_rows(table, *arguments)

    monkeypatch.setattr(Table, "copy_rows", slow)
    found = []
    snapshot = threading.Thread(target=lambda: found.append(buffer.storage.state_dict()))
    snapshot.start()
    assert copying.wait(20)
    buffer.extend(steps(filled, 30))
    wrote.set()
    snapshot.join()
    check(found[0], filled + 30)
    assert found[0]["rows_written"] == filled + 30


def test_a_snapshot_that_was_copied_ahead_is_of_the_moment_when_it_is_taken(monkeypatch):
    storage = LazyTensorStorage(10_000)
    fill(storage, steps(0, 8000))
    ahead = storage.copy_ahead()
    fill(storage, steps(8000, 2000), 8000)
    fill(storage, steps(5, 1), 5)
    copied = []
    copy_rows = Table.copy_rows
    monkeypatch.setattr(
        Table, "copy_rows", lambda table, to, a, b: (copied.append((a, b)), copy_rows(table, to, a, b))
    )
    n = storage.snapshot(ahead).content.columns[0]
    assert n.tolist() == list(range(10_000)) and copied == [(0, 10_000)]
    ahead = storage.copy_ahead()
    del copied[:]
    fill(storage, steps(70, 5), 70)
    assert storage.snapshot(ahead).content.columns[0].tolist() == list(range(10_000)) and copied == [(70, 75)]
    ahead = storage.copy_ahead()
    storage.clear()
    fill(storage, steps(3, 2))
    assert storage.snapshot(ahead).content.columns[0].tolist() == [3, 4]


def test_a_copy_that_began_before_the_first_write():
    for storage, data in ((LazyTensorStorage(5), torch.arange(3)), (ListStorage(5), [0, 1, 2])):
        ahead = storage.copy_ahead()
        fill(storage, data)
        fresh = type(storage)(5)
        fresh.adopt(storage.snapshot(ahead))
        assert [int(row) for row in fresh] == [0, 1, 2]
        fresh.check_valid()


def test_objects_are_copied_and_keep_their_references_to_each_other():
    storage = ListStorage(5)
    shared = [1]
    fill(storage, [shared, shared, 3])
    ahead = storage.copy_ahead()
    fill(storage, ["new", "more"], 2)
    items = storage.snapshot(ahead).content
    assert items == [[1], [1], "new", "more"] and items[0] is items[1] is not shared


def test_files_of_a_state_that_was_parsed_and_not_adopted_go(tmp_path):
    other = LazyTensorStorage(5)
    fill(other, torch.arange(3))
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "files")
    value = storage.parse(other.state_dict())
    assert list((tmp_path / "files").iterdir())
    del value
    assert not list((tmp_path / "files").iterdir())
    storage.load_state_dict(other.state_dict())
    assert storage.get(slice(None)).tolist() == [0, 1, 2] and list((tmp_path / "files").iterdir())
