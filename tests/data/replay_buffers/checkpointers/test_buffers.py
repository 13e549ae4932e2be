"""Buffers load only checkpoints of buffers, and dump correctly while threads write and sample."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._checkpoint.folder import Folder
from gleanrl._os import fault_points
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorStorageCheckpointer,
)
from gleanrl.errors import CheckpointError


@pytest.mark.parametrize(
    "state", [None, [], {}, {"_storage": None}, {"_storage": {"form": "whole", "packed": {}}}]
)
def test_checkpoint_without_a_buffer_state_is_refused(tmp_path: Path, state: Any) -> None:
    Folder(tmp_path).commit("ReplayBuffer", state)
    with pytest.raises((CheckpointError, ValueError)):
        ReplayBuffer(storage=LazyTensorStorage(5)).loads(tmp_path)


def test_dump_save_and_load_are_other_names(tmp_path: Path) -> None:
    saved, found = (ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2))
    saved.extend(torch.arange(3))
    for write in (saved.dump, saved.save):
        write(tmp_path)
        found.empty()
        found.load(tmp_path)
        assert found[:].tolist() == [0, 1, 2]


def new_bytes(folder: Path) -> tuple[int, int]:
    """Return the bytes of the newest checkpoint, and the bytes that aren't in linked files."""
    files = [file.stat() for file in max(folder.glob("ckpt-*")).iterdir()]
    return sum(file.st_size for file in files), sum(file.st_size for file in files if file.st_nlink == 1)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_extend_of_one_percent_rewrites_a_twentieth(tmp_path: Path, storage: Any) -> None:
    count, made = 300_000, ReplayBuffer(storage=storage(300_000), batch_size=4)
    made.extend(TensorDict({"x": torch.rand(count, 24), "n": torch.arange(count)}, [count]))
    made.dumps(tmp_path)
    for number in range(3):
        rows = count // 100
        made.extend(TensorDict({"x": torch.rand(rows, 24), "n": torch.arange(rows)}, [rows]))
        made.dumps(tmp_path, keep=2)  # The link count of a file that only this checkpoint has is 1.
        whole, new = new_bytes(tmp_path)
        assert 110 * rows < new < 0.05 * whole, number
    loaded = ReplayBuffer(storage=storage(count), batch_size=4)
    loaded.loads(tmp_path)
    assert (loaded[:] == made[:]).all()


def test_new_priorities_rewrite_no_records(tmp_path: Path) -> None:
    count = 200_000
    made = ReplayBuffer(
        storage=LazyTensorStorage(count), sampler=PrioritizedSampler(count, 0.6, 0.4), batch_size=4
    )
    made.extend(TensorDict({"x": torch.rand(count, 24)}, [count]))
    made.dumps(tmp_path)
    made.update_priority(torch.arange(0, count, 100), torch.rand(count // 100) + 0.5)
    made.dumps(tmp_path, keep=2)
    whole, new = new_bytes(tmp_path)
    assert whole > 100 * count and new < 16 * count


FORMS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


def full(form: Any, **options: Any) -> ReplayBuffer:
    """Return a buffer of ten rows. Once it is full, loaded rows may stay in the memory that they were read into."""
    storage = LazyTensorStorage(10, **({"ndim": options.pop("ndim")} if "ndim" in options else {}))
    storage.checkpointer = form()
    return ReplayBuffer(storage=storage, **options)


def steps(count: int, value: int, batch: tuple[int, ...] = ()) -> TensorDict:
    shape = (*batch, count)
    real = torch.full(shape, value < 90)
    leaves = {"a": torch.full(shape, value), "collector": {"mask": real}}
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    return TensorDict({**leaves, "next": {"a": torch.full(shape, value), "done": done}}, shape)


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_buffer_that_is_loaded_full_stays_shared(tmp_path: Path, form: Any) -> None:
    saved, found = full(form), full(form, shared=True)
    saved.extend(steps(10, 1))
    saved.dumps(tmp_path)
    found.loads(tmp_path)
    assert found[:]["a"].tolist() == [1] * 10
    child = os.fork()
    if child == 0:
        found.extend(steps(3, 7))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert found[:]["a"].tolist() == [7] * 3 + [1] * 7


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_no_steps_are_not_drawn_after_a_full_load(tmp_path: Path, form: Any) -> None:
    saved, found = full(form, ndim=2), full(form, ndim=2)
    saved.extend(steps(5, 1, (2,)))
    saved.dumps(tmp_path)
    found.loads(tmp_path)
    found.extend(steps(2, 99, (2,)))
    assert bool(found.sample(256)["collector", "mask"].all())


@pytest.mark.parametrize("form", FORMS)
def test_buffers_loaded_from_one_state_share_nothing(form: Any) -> None:
    saved, one, other = full(form), full(form), full(form)
    saved.extend(steps(10, 1))
    state = pickle.loads(pickle.dumps(saved.checkpointed_state()))
    for found in (one, other):
        found.load_checkpointed_state(state)
    one.extend(steps(5, 7))
    assert other[:]["a"].tolist() == [1] * 10


ROWS, WIDTH = 12_000, 50


def numbered(start: int, count: int) -> TensorDict:
    """Return rows with their number and with columns that reveal a torn row."""
    rows = torch.arange(start, start + count)
    wide = (rows[:, None] * torch.arange(1, WIDTH + 1)).float()
    return TensorDict({"n": rows, "x": wide, "next": {"x": wide + 1}}, [count])


def check(found: ReplayBuffer, most: int) -> int:
    """Raise unless the buffer holds the last rows, up to some number, and all of them whole; return that number."""
    held = found[:]
    last = found.storage.rows_written
    assert len(found) == min(last, ROWS) and last <= most
    order = held["n"].roll(-found.storage.end if len(found) == ROWS else 0)
    assert torch.equal(order, torch.arange(last - len(found), last))
    wide = (held["n"][:, None] * torch.arange(1, WIDTH + 1)).float()
    assert torch.equal(held["x"], wide) and torch.equal(held["next", "x"], wide + 1)
    return last


def prioritized(storage: Any = LazyTensorStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(ROWS), sampler=PrioritizedSampler(ROWS, 0.7, 0.5), batch_size=32)


FORMS = [
    TensorStorageCheckpointer,
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    H5StorageCheckpointer,
]


@pytest.mark.parametrize(
    ("form", "storage"),
    [*((form, LazyTensorStorage) for form in FORMS), (TensorStorageCheckpointer, LazyMemmapStorage)],
)
def test_background_dump_holds_the_buffer_at_the_call_despite_later_writes(
    tmp_path: Path, form: Any, storage: Any
) -> None:
    made, other = prioritized(storage), prioritized()
    made.storage.checkpointer = form()
    go, one = threading.Event(), threading.Lock()

    def write() -> None:
        """Write between two acts of the dump."""
        assert go.wait(60)
        with one:
            made.extend(numbered(made.storage.rows_written, 1_234))
            made.update_priority(torch.arange(100), torch.rand(100))

    for _ in range(3):
        made.extend(numbered(made.storage.rows_written, 7_000))
        at_call = made.storage.rows_written
        go.clear()
        with fault_points.inject({"fs.write": fault_points.At(write, repeat=True)}):
            dump = made.dumps(tmp_path, wait=False)
            expected = pickle.loads(pickle.dumps(made))
            go.set()
            assert dump is not None and dump.wait()
        assert made.storage.rows_written > at_call
        other.loads(tmp_path)
        assert check(other, at_call) == at_call
        assert (other.sample() == expected.sample()).all()


def test_writers_at_full_speed_leave_no_hole(tmp_path: Path) -> None:
    made, other, stop = prioritized(), prioritized(), threading.Event()
    errors: list[BaseException] = []

    def forever(call: Any) -> None:
        try:
            while not stop.is_set():
                call()
        except BaseException as error:
            errors.append(error)

    made.extend(numbered(0, ROWS))
    calls = (
        lambda: made.extend(numbered(made.storage.rows_written, 777)),
        lambda: made.sample(),
    )
    threads = [threading.Thread(target=forever, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            before = made.storage.rows_written
            dump = made.dumps(tmp_path, wait=False)
            after = made.storage.rows_written
            assert dump is not None and dump.wait()
            other.loads(tmp_path)
            assert before <= check(other, after + 777)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


def test_next_dump_waits_and_raises_the_error_of_the_last_one(tmp_path: Path) -> None:
    made = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    ensemble = ReplayBufferEnsemble(prioritized(), prioritized(), batch_size=4)
    for dumping in (made, ensemble):
        folder = tmp_path / type(dumping).__name__
        with fault_points.inject({"fs.rename": OSError(errno.ENOSPC, "full")}):
            assert dumping.dumps(folder, wait=False) is not None
            with pytest.raises(OSError, match="full"):
                dumping.dumps(folder)
        with pytest.raises(ValueError, match="keep"):
            dumping.dumps(folder, keep=0, wait=False)
        leave = threading.Event()
        with fault_points.inject({"fs.sync": leave.wait}):
            dump = dumping.dumps(folder, keep=2, wait=False)
            threading.Timer(0.05, leave.set).start()
            dumping.dumps(folder, keep=2)
            assert dump is not None and dump.done()
        assert len([*folder.glob("ckpt-*")]) == 2
        dumping.loads(folder)


def test_a_load_waits_for_the_dump_under_way(tmp_path: Path) -> None:
    made, leave = prioritized(), threading.Event()
    made.extend(numbered(0, 100))
    made.dumps(tmp_path)
    made.extend(numbered(100, 100))
    with fault_points.inject({"fs.sync": leave.wait}):
        dump = made.dumps(tmp_path, wait=False)
        made.empty()
        threading.Timer(0.05, leave.set).start()
        made.loads(tmp_path)
        assert dump is not None and dump.done() and len(made) == 200
    with fault_points.inject({"fs.rename": OSError(errno.ENOSPC, "full")}):
        made.dumps(tmp_path, wait=False)
        made.empty()
        made.loads(tmp_path)  # loads the earlier checkpoint; the next dump raises the error
        assert len(made) == 200
    with pytest.raises(OSError, match="full"):
        made.dumps(tmp_path)


def test_a_state_that_goes_to_another_process_goes_in_memory(tmp_path: Path) -> None:
    made, other = prioritized(), prioritized()
    made.extend(numbered(0, 500))
    state = pickle.loads(pickle.dumps(made.checkpointed_state()))
    other.load_checkpointed_state(state)
    assert check(other, 500) == 500


@pytest.mark.parametrize("keep", [1, 3])
def test_keep_limits_the_checkpoints_and_each_is_complete(tmp_path: Path, keep: int) -> None:
    made, other = prioritized(), prioritized()
    for number in range(1, 6):
        made.extend(numbered(made.storage.rows_written, 4_000))
        made.dumps(tmp_path, keep=keep)
        assert len([*tmp_path.glob("ckpt-*")]) == min(number, keep)
    for number in range(5, 5 - keep, -1):
        other.loads(tmp_path)
        assert check(other, 20_000) == 4_000 * number
        for file in (newest := max(tmp_path.glob("ckpt-*"))).iterdir():
            file.unlink()  # its files keep their other names
        newest.rmdir()


def test_only_the_stored_part_is_written(tmp_path: Path) -> None:
    for size in (10_000, 1_000_000):
        made = ReplayBuffer(storage=LazyTensorStorage(size), batch_size=4)
        made.extend(numbered(0, 10_000))
        made.dumps(tmp_path / str(size))
    bytes_of = [
        sum(file.stat().st_size for file in (tmp_path / str(size)).glob("ckpt-*/*.bin"))
        for size in (10_000, 1_000_000)
    ]
    per_row = 8 + 8 + 8 * WIDTH
    assert all(10_000 * per_row <= size <= 10_000 * per_row + 20_000 for size in bytes_of)
