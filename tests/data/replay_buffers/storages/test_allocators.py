"""Memory of columns is checked for space before it is taken, and a failure leaves nothing allocated."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from gleanrl._arrays.schema import Field
from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl.data.replay_buffers.storages import allocators
from gleanrl.data.replay_buffers.storages.allocators import FileAllocator, HeapAllocator, file_of
from gleanrl.errors import CapacityError, UnsupportedError

PATHS = [("a",), ("next", "a"), ("next", "b")]
FIELDS = [
    Field(torch.Size([3]), torch.float32),
    Field(torch.Size([]), torch.bfloat16),
    Field(torch.Size([0]), torch.float32),
]


def check(columns: list[torch.Tensor]) -> None:
    for column, field in zip(columns, FIELDS, strict=True):
        assert column.shape == (7, *field.shape) and column.dtype == field.dtype
        assert not bool(column.any())
        column.fill_(1)


def test_heap_columns_are_zero():
    check(HeapAllocator(torch.device("cpu"))(PATHS, FIELDS, 7))


@pytest.mark.parametrize("num_rows", [7, 100_000, 1_000_001])
def test_heap_columns_are_separate_and_aligned(num_rows):
    columns = HeapAllocator(torch.device("cpu"))(PATHS, FIELDS, num_rows)
    columns[0].fill_(1)
    assert not bool(columns[1].any())
    columns[1].fill_(2)
    assert bool((columns[0] == 1).all())
    for column in columns:
        assert column.shape[0] == num_rows and column.is_contiguous()
        assert column.untyped_storage().nbytes() == column.nbytes
        assert not column.numel() or column.data_ptr() % 64 == 0


def test_untouched_rows_cost_no_memory():
    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

    before = resident()
    columns = HeapAllocator(torch.device("cpu"))(PATHS, FIELDS, 30_000_000)
    columns[0][:1000] = 1
    assert resident() - before < 30 << 20
    assert columns[0].nbytes == 360_000_000


def test_file_columns_are_zero_and_written_through(tmp_path):
    columns = FileAllocator(tmp_path / "new")(PATHS, FIELDS, 7)
    check(columns)
    assert (tmp_path / "new" / "a.memmap").stat().st_size == 84
    assert torch.from_file(str(tmp_path / "new" / "a.memmap"), size=21).tolist() == [1.0] * 21
    assert (tmp_path / "new" / "next" / "b.memmap").stat().st_size == 0


def test_nameless_files_are_gone_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    columns = FileAllocator(None)(PATHS, FIELDS, 7)
    assert list(tmp_path.iterdir()) == []
    check(columns)


def test_existing_files_are_refused(tmp_path):
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "a.memmap").write_bytes(b"mine")
    with pytest.raises(UnsupportedError, match=r"next/a.memmap exists already"):
        FileAllocator(tmp_path)(PATHS, FIELDS, 7)
    assert (tmp_path / "next" / "a.memmap").read_bytes() == b"mine"
    assert not (tmp_path / "a.memmap").exists()


def test_existing_files_are_replaced_if_asked_for(tmp_path):
    old = FileAllocator(tmp_path)(PATHS, FIELDS, 7)
    check(old)
    other = tmp_path / "other.memmap"
    other.write_bytes(b"mine")
    new = FileAllocator(tmp_path, replace=True)(PATHS, FIELDS, 9)
    assert (tmp_path / "a.memmap").stat().st_size == 108
    assert not new[0].any() and (old[0] == 1).all(), "who has the old file keeps it"
    check(FileAllocator(tmp_path, replace=True)(PATHS, FIELDS, 7))
    assert other.read_bytes() == b"mine"


def test_replaced_files_make_room_for_the_new_ones(tmp_path, monkeypatch):
    FileAllocator(tmp_path)(PATHS, FIELDS, 7)
    needed = allocators._total(FIELDS, 7) - sum(path.stat().st_size for path in tmp_path.rglob("*.memmap"))
    monkeypatch.setattr("gleanrl._os.files.free_bytes", lambda path: needed)
    check(FileAllocator(tmp_path, replace=True)(PATHS, FIELDS, 7))
    monkeypatch.setattr("gleanrl._os.files.free_bytes", lambda path: needed - 1)
    with pytest.raises(CapacityError):
        FileAllocator(tmp_path, replace=True)(PATHS, FIELDS, 7)
    assert (tmp_path / "a.memmap").exists(), "refused before anything is removed"


@pytest.mark.parametrize("point", ["fs.create", "fs.allocate", "fs.map"])
@pytest.mark.parametrize("visit", [1, 2])
def test_a_failure_leaves_no_file(tmp_path, point, visit):
    full = At(OSError(errno.ENOSPC, "No space left on device"), visit)
    with fault_points.inject({point: full}), pytest.raises(CapacityError, match="No space left"):
        FileAllocator(tmp_path)(PATHS, FIELDS, 7)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_room_is_checked_before_anything_is_made(tmp_path):
    with pytest.raises(CapacityError, match="lower max_size, or use LazyMemmapStorage"):
        HeapAllocator(torch.device("cpu"))(PATHS, FIELDS, 10**13)
    with pytest.raises(CapacityError, match=r"bytes of disk at .*choose another scratch_dir"):
        FileAllocator(tmp_path)(PATHS, FIELDS, 10**13)
    assert list(tmp_path.iterdir()) == []


def test_no_key_leaves_the_directory_or_meets_another():
    root = Path("/root/columns")
    keys = [("..", "x"), ("a/b",), ("a", "b"), ("a.memmap", "b"), ("a",), (".",), ("%2E",)]
    keys += [("x" * 300,), ("x" * 299 + "y",), ("x" * 300, "a"), ("\u00fc" * 80,), ("x" * 240,)]
    files = [file_of(root, key) for key in keys]
    assert len(set(files)) == len(files)
    assert all(file.is_relative_to(root) and ".." not in file.parts for file in files)
    assert all(len(name.encode()) <= 255 for file in files for name in file.parts)
    assert file_of(root, ("next", "reward")) == root / "next" / "reward.memmap"


def test_devices_allocate_there():
    columns = HeapAllocator(torch.device("meta"))(PATHS, FIELDS, 7)
    assert all(column.device.type == "meta" for column in columns)
