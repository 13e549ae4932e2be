"""If a process is killed in mid-change, other processes that share the storage undo or complete the change."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from gleanrl._os import fault_points
from gleanrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from gleanrl.data.replay_buffers.storages.shared import SharedTensorStorage, share
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import CapacityError, SchemaError, UnsupportedError
from tests.data.replay_buffers.sharing import check, in_child, killed_at, made, rows

POINTS = ["segment.journal", "segment.begun", "segment.commit", "segment.committed"]
SIZE = 20
STATE = made(SIZE, 13).state_dict()
CHANGES = {
    "ring": lambda buffer: buffer.extend(rows(1, 0, 7)),
    "more than fits": lambda buffer: buffer.extend(rows(1, 0, 45)),
    "one": lambda buffer: buffer.add(rows(1, 0, 1)[0]),
    "by index": lambda buffer: buffer.__setitem__([3, 1, 3], rows(1, 0, 3)),
    "a column": lambda buffer: buffer.__setitem__("key", buffer[:]["key"].clone()),
    "empty": lambda buffer: buffer.empty(),
    "load": lambda buffer: buffer.load_state_dict(STATE),
}


def looks(buffer: ReplayBuffer) -> tuple[object, ...]:
    """Return the stored keys, the next slot and the number of written rows."""
    keys = buffer[:]["key"].tolist() if len(buffer) else []
    return keys, buffer.storage.end, buffer.stats().rows_written


def spoil(buffer: ReplayBuffer) -> None:
    """Overwrite the slots of the next write, as a write does that is killed in the middle."""
    for column in buffer.storage._storage.values(True, True):
        column[: SIZE // 2].zero_()


@pytest.mark.parametrize("stored", [0, 5, 23])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_killed_process_is_whole_or_absent(change, point, stored):
    if not stored and change in ("by index", "a column"):
        pytest.skip("there is nothing to change")
    buffer, expected = made(SIZE, stored), made(SIZE, stored)
    if change == "load" and not stored:
        for one in (buffer, expected):
            one.extend(rows(0, 0, 1))
            one.empty()
    change = CHANGES[change]
    before = looks(buffer)
    change(expected)
    version = buffer.storage.version
    assert killed_at(point, lambda: change(buffer)) == -9
    now = looks(buffer)
    assert now == (looks(expected) if point == "segment.committed" else before)
    if len(buffer):
        check(buffer[:])
        check(buffer.sample())
        assert point == "segment.journal" or buffer.storage.version != version
    buffer.extend(rows(2, 0, 3))
    assert set(buffer[:]["key"].tolist()) >= {200_000, 200_001, 200_002}
    buffer.storage.check_valid()


@pytest.mark.parametrize("change", ["ring", "more than fits", "one", "load"])
def test_half_written_rows_are_restored(change):
    buffer = made(SIZE, 40)
    before = looks(buffer)
    columns = {key: leaf.clone() for key, leaf in buffer[:].items(True, True)}
    if change == "one":
        buffer.storage.end = 3
        before = looks(buffer)
    generations = buffer.generation(range(SIZE))

    def half() -> None:
        start, count = {"ring": (0, 7), "one": (3, 1)}.get(change, (0, SIZE))
        for column in buffer.storage._storage.values(True, True):
            column[start : start + count].zero_()

    assert killed_at("segment.begun", lambda: CHANGES[change](buffer), half) == -9
    assert looks(buffer) == before
    for key, leaf in buffer[:].items(True, True):
        assert torch.equal(leaf, columns[key]), key
    assert (buffer.generation(range(SIZE)) >= generations).all()


def test_rows_are_restored_after_a_second_process_is_killed():
    buffer = made(SIZE, 40)
    before = looks(buffer)
    assert killed_at("segment.begun", lambda: buffer.extend(rows(1, 0, 7)), lambda: spoil_some(buffer)) == -9
    # The next caller restores the rows, and is killed as well.
    assert killed_at("segment.undo", lambda: len(buffer)) == -9
    assert looks(buffer) == before
    check(buffer[:])


def spoil_some(buffer: ReplayBuffer) -> None:
    for column in buffer.storage._storage.values(True, True):
        column[:7].zero_()


def test_failed_write_of_this_process_is_undone(monkeypatch):
    buffer = made(SIZE, 40)
    before = looks(buffer)

    def fail(*arguments: object) -> None:
        spoil_some(buffer)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(buffer.storage, "_copy_span", fail)
        with pytest.raises(MemoryError):
            buffer.extend(rows(1, 0, 7))
    assert looks(buffer) == before
    check(buffer[:])


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_first_write_in_another_process(ndim):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim), batch_size=4, shared=True)
    data = rows(1, 0, 12) if ndim == 1 else rows(1, 0, 12).view(3, 4)
    assert in_child(lambda: buffer.extend(data)) == 0
    assert len(buffer) == 12 and sorted(buffer[:]["key"].flatten().tolist()) == data["key"].flatten().tolist()
    check(buffer.sample())
    with pytest.raises(SchemaError):
        buffer.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    for point in ("memory.create", "segment.journal"):
        other = ReplayBuffer(storage=LazyTensorStorage(20), shared=True)
        in_child(lambda: None)
        if point == "segment.journal":
            assert killed_at(point, lambda other=other: other.extend(rows(1, 0, 3))) == -9
        assert len(other) == 0
        other.extend(rows(1, 0, 3))
        check(other[:])


def test_share_keeps_records_and_cursor():
    storage = LazyTensorStorage(10)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(rows(0, 0, 13))
    held, generations = buffer[:].clone(), buffer.generation(range(10))
    assert buffer.share() is buffer and buffer.storage is storage and isinstance(storage, LazyTensorStorage)
    assert (buffer[:] == held).all() and storage.end == 3 and buffer.stats().rows_written == 10
    assert (buffer.generation(range(10)) >= generations).all()
    assert in_child(lambda: buffer.extend(rows(1, 0, 2))) == 0
    assert buffer[3:5]["key"].tolist() == [100_000, 100_001]
    assert share(storage) is storage


def test_copies_are_of_the_same_records():
    storage = made(10, 4).storage
    for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert type(other) is SharedTensorStorage and other.segment is not storage.segment
    buffer = made(10)
    copies = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    copies[0].extend(rows(1, 0, 3))
    copies.append(copy.deepcopy(copies[1]))
    for one in (buffer, *copies):
        assert len(one) == 3 and one[:]["key"].tolist() == [100_000, 100_001, 100_002]


def test_unshareable_storages_and_records_are_refused():
    for storage in (ListStorage(3), TensorStorage(torch.zeros(3))):
        with pytest.raises(UnsupportedError, match="needs a LazyTensorStorage on the CPU"):
            ReplayBuffer(storage=storage, shared=True)
    buffer = made(4)
    with pytest.raises(UnsupportedError, match="a shared storage holds only tensors"):
        buffer.extend(TensorDict({"x": torch.zeros(2), "name": NonTensorData("a", [2])}, [2]))
    buffer.extend(rows(0, 0, 3))
    assert len(buffer) == 3


def test_a_memory_mapped_storage_is_a_file_without_a_name(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=tmp_path))
    buffer.extend(rows(0, 0, 23))
    before = looks(buffer)
    assert any(tmp_path.iterdir())
    buffer.share()
    assert looks(buffer) == before and buffer.storage.memory.folder == tmp_path
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert killed_at("segment.commit", lambda: buffer.extend(rows(1, 0, 45)), lambda: spoil(buffer)) == -9
    assert looks(buffer) == before
    assert in_child(lambda: buffer.extend(rows(1, 0, 7))) == 0
    check(buffer[:])
    assert buffer.stats().rows_written == 27


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_failed_share_changes_nothing(kind):
    buffer = ReplayBuffer(storage=kind(SIZE))
    buffer.extend(rows(0, 0, 5))
    before = looks(buffer)
    with (
        fault_points.inject({"segment.journal": OSError("no space")}),
        pytest.raises(OSError, match="no space"),
    ):
        buffer.share()
    assert type(buffer.storage) is kind and not buffer.shared and looks(buffer) == before
    buffer.extend(rows(0, 5, 5))
    check(buffer.share()[:])


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=tmp_path), shared=True)
    with monkeypatch.context() as patch:
        patch.setattr("gleanrl._os.files.free_bytes", lambda folder: 100)
        with pytest.raises(CapacityError, match=rf"20 rows need .* of disk at {tmp_path}, 100 are free"):
            buffer.extend(rows(0, 0, 5))
    buffer.extend(rows(0, 0, 5))
    assert len(buffer) == 5


@pytest.mark.parametrize("amended", [False, True])
def test_a_change_that_fails_midway_is_undone(monkeypatch: pytest.MonkeyPatch, amended: bool) -> None:
    """If memory fails while rows are copied, no reader sees the partial write."""
    buffer = made(SIZE, 13)
    before, storage = buffer[:].clone(), buffer.storage

    def copy_some(self: TensorStorage, given: list[torch.Tensor], slots: torch.Tensor) -> None:
        copied(self, [row[:2] for row in given], slots[:2])
        raise MemoryError

    copied = TensorStorage._copy_slots
    monkeypatch.setattr(TensorStorage, "_copy_slots", copy_some)
    slots = torch.arange(5)
    with pytest.raises(MemoryError), storage.guard():
        storage.write_slots(
            storage.prepare_selection(rows(1, 0, 5), slots.shape, "test"), slots, amended=amended
        )
    monkeypatch.undo()
    with storage.guard():
        assert (buffer[:] == before).all()
