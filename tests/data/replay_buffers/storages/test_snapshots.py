"""A snapshot shows one moment while writers continue."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gleanrl._checkpoint import copy_on_write
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_snapshots_during_writes_show_one_moment(kind, shared):
    buffer = ReplayBuffer(storage=kind(2000), batch_size=2, shared=shared)
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
    copy_of, copying, wrote = copy_on_write.copy_of, threading.Event(), threading.Event()

    def slow(column: torch.Tensor, rows: int) -> torch.Tensor:
        copying.set()
        assert wrote.wait(20), "the writer waited for the copy"
        return copy_of(column, rows)

    monkeypatch.setattr(copy_on_write, "copy_of", slow)
    found = []
    snapshot = threading.Thread(target=lambda: found.append(buffer.storage.state_dict()))
    snapshot.start()
    assert copying.wait(20)
    buffer.extend(steps(filled, 30))
    wrote.set()
    snapshot.join()
    check(found[0], filled)
    assert found[0]["rows_written"] == filled


def texts(start: int) -> TensorDict:
    return steps(start, 3).set("text", NonTensorStack(*(f"row {n}" for n in range(start, start + 3))))


@pytest.mark.parametrize("change", ["write", "write slots", "clear", "load"])
@pytest.mark.parametrize(
    ("kind", "records"),
    [
        (LazyTensorStorage, lambda start: steps(start, 3)),
        (LazyTensorStorage, texts),
        (ListStorage, lambda start: [{"n": n} for n in range(start, start + 3)]),
    ],
)
def test_snapshot_is_of_the_moment_when_it_was_taken(kind, records, change):
    storage, other = kind(5), kind(5)
    fill(storage, records(0))
    fill(other, records(20))
    loaded = other.state_dict()
    value = storage.snapshot()
    {
        "write": lambda: fill(storage, records(7), 2),
        "write slots": lambda: storage.set([2, 0, 1], records(7)),
        "clear": lambda: (storage.clear(), fill(storage, records(7))),
        "load": lambda: storage.load_state_dict(loaded),
    }[change]()
    again = kind(5)
    again.load_state_dict(storage.plain_state(value))
    expected = kind(5)
    fill(expected, records(0))
    found, wanted = again.get(slice(None)), expected.get(slice(None))
    assert found == wanted if kind is ListStorage else (found == wanted).all()
    again.check_valid()


def test_snapshot_before_the_first_write_is_empty():
    for storage, data in ((LazyTensorStorage(5), torch.arange(3)), (ListStorage(5), [0, 1, 2])):
        value = storage.snapshot()
        fill(storage, data)
        fresh = type(storage)(5)
        fresh.load_state_dict(storage.plain_state(value))
        assert len(fresh) == 0
        fresh.check_valid()


def test_objects_are_copied_and_keep_their_references_to_each_other():
    storage = ListStorage(5)
    shared = [1]
    fill(storage, [shared, shared, 3])
    value = storage.snapshot()
    fill(storage, ["new", "more"], 2)
    items = storage.copied(value).content
    assert items == [[1], [1], 3] and items[0] is items[1] is not shared


def test_saving_a_state_keeps_the_marks_of_earlier_checkpoints():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=2)
    buffer.extend(steps(0, 100))
    first = buffer.storage.checkpoint_dict()["columns"]
    for _ in range(20):
        buffer.state_dict()
    assert buffer.storage.checkpoint_dict()["columns"].unchanged(first.identity).all()


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
