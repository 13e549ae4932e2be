"""A load reads all records into their final memory, or changes nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gleanrl._checkpoint import copy_on_write
from gleanrl._checkpoint.folder import Folder
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from gleanrl.errors import CorruptCheckpointError, SchemaError

ROWS = 3_000


def data(start: int, count: int) -> TensorDict:
    rows = torch.arange(start, start + count)
    return TensorDict({"x": rows.float(), "next": {"b": rows % 2 == 0}}, [count])


def storages(path: Path) -> dict[str, Any]:
    return {
        "memory": LazyTensorStorage(ROWS),
        "mapped": LazyMemmapStorage(ROWS),
        "named": LazyMemmapStorage(ROWS, scratch_dir=path / "scratch"),
        "given": TensorStorage(data(-9_000, ROWS)),
    }


def files_in(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_ino for file in path.rglob("*") if file.is_file()}


def filled(path: Path, kind: str) -> ReplayBuffer:
    made = ReplayBuffer(storage=storages(path)[kind], batch_size=4)
    made.extend(data(-5_000, 2_000))
    return made


@pytest.mark.parametrize("kind", ["memory", "mapped", "named", "given"])
def test_a_filled_storage_is_loaded(tmp_path: Path, kind: str) -> None:
    made, other = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4), filled(tmp_path, kind)
    made.extend(data(0, 4_000))
    made.dumps(tmp_path / "saved")
    for _ in range(2):
        before = files_in(tmp_path / "scratch")
        other.loads(tmp_path / "saved")
        # The comparison uses the load before, because a free inode number is reused.
        after = files_in(tmp_path / "scratch")
        assert after.keys() == before.keys() and all(after[name] != before[name] for name in after)
        assert (other[:] == made[:]).all()
        other.storage.check_valid()
    for one in (made, other):
        one.extend(data(7_000, 10))
    assert (other[:] == made[:]).all()
    other.dumps(tmp_path / "saved")
    made.loads(tmp_path / "saved")
    assert (other[:] == made[:]).all()


@pytest.mark.parametrize("kind", ["memory", "mapped", "named", "given"])
def test_a_load_that_fails_changes_nothing(tmp_path: Path, kind: str) -> None:
    made, other = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4), filled(tmp_path, kind)
    made.extend(data(0, 3_500))
    made.dumps(tmp_path / "saved")
    records = max((tmp_path / "saved").glob("ckpt-*/*.bin"), key=os.path.getsize)
    before, content, names = other[:].clone(), records.read_bytes(), files_in(tmp_path / "scratch")
    for damaged in (content[:-1], content[:-65] + b"\xff" + content[-64:]):
        records.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match=records.name):
            other.loads(tmp_path / "saved")
        assert (other[:] == before).all() and files_in(tmp_path / "scratch") == names
    records.write_bytes(content)
    made.extend(data(0, 100))
    made.dumps(tmp_path / "saved", keep=2)
    newest = max((tmp_path / "saved").glob("ckpt-*"))
    changed = [file for file in newest.glob("*.bin") if file.stat().st_nlink == 1]
    max(changed, key=os.path.getsize).write_bytes(b"")
    with pytest.warns(UserWarning, match="newer ones are damaged"):
        other.loads(tmp_path / "saved")
    assert float(other[0]["x"]) == 3_000
    wide = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4)
    wide.extend(data(0, 5).set("more", torch.zeros(5)))
    with pytest.raises(SchemaError, match="isn't this storage's"):
        wide.loads(tmp_path / "saved")


def test_a_state_that_is_taken_later_is_compared_first(tmp_path: Path) -> None:
    made = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4)
    made.extend(data(0, 3_500))
    made.dumps(tmp_path)
    found = Folder(tmp_path).load()
    other = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4)
    other.load_checkpointed_state(found.state)
    assert (other[:] == made[:]).all()
    records = max(tmp_path.glob("ckpt-*/*.bin"), key=os.path.getsize)
    content = bytearray(records.read_bytes())
    content[100] ^= 1
    records.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=records.name):
        Folder(tmp_path).load()


def test_writers_continue_while_a_dump_copies_records_with_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(first: int) -> TensorDict:
        texts = NonTensorStack(*(f"row {k}" for k in range(first, first + 4)))
        return TensorDict({"x": torch.arange(first, first + 4), "text": texts}, [4])

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(rows(0))
    before, copy_of, written = buffer[:].clone(), copy_on_write.copy_of, list[bool]()

    def write_and_copy(column: torch.Tensor, count: int) -> torch.Tensor:
        if not written:
            written.append(True)
            writer = threading.Thread(target=buffer.extend, args=(rows(4),))
            writer.start()
            writer.join(timeout=30)
            assert not writer.is_alive(), "a writer waited for a dump"
        return copy_of(column, count)

    monkeypatch.setattr(copy_on_write, "copy_of", write_and_copy)
    buffer.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    other.loads(tmp_path)
    assert written == [True] and (other[:] == before).all() and len(buffer) == 8
