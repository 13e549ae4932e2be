"""HDF5 checkpoints are part of a folder or one file alone, and other programs can read them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from tensordict import TensorDict

from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl.data import (
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    MissingLibraryError,
)
from tests.data.replay_buffers.checkpointers.test_base_whole import size


def buffer(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(6), checkpointer=H5StorageCheckpointer(**options))


def filled(**options: Any) -> ReplayBuffer:
    made = buffer(**options)
    steps = torch.arange(9)
    after = {"observation": steps + 1, "flag": steps > 4}
    made.extend(TensorDict({"observation": steps, "a.b": {"c": steps.bfloat16()}, "next": after}, [9]))
    return made


def test_a_checkpoint_has_the_file_and_other_programs_read_it(tmp_path: Path) -> None:
    filled(h5_kwargs={"compression": "gzip", "shuffle": True}).dumps(tmp_path)
    (path,) = tmp_path.glob("ckpt-*/checkpoint.h5")
    with h5py.File(path) as file:
        assert file["records/observation"][:].tolist() == [3, 4, 5, 6, 7, 8, 9]
        assert file["records/next/flag"][:].tolist() == [False, False, True, True, True, True]
        assert file["records/observation"].compression == "gzip" and file["records/observation"].shuffle
        assert "next/observation" not in file["records"]
    other = buffer()
    other.storage.checkpointer.loads(other.storage, path)  # the file alone is complete
    assert (other[:] == filled()[:]).all()


def test_a_file_alone_replaces_an_older_one(tmp_path: Path) -> None:
    path, other = tmp_path / "new" / "x.h5", buffer()
    with pytest.raises(IncompleteCheckpointError, match=r"x\.h5"):
        other.storage.checkpointer.loads(other.storage, path)
    for made in (buffer(), filled()):
        made.storage.checkpointer.dumps(made.storage, path)
        other.storage.checkpointer.loads(other.storage, path)
        assert len(other) == len(made)
    assert (other[:] == made[:]).all() and [file.name for file in path.parent.iterdir()] == ["x.h5"]
    with pytest.raises(InvalidArgumentError, match="keep"):
        made.storage.checkpointer.dumps(made.storage, path, keep=2)


@pytest.mark.parametrize("place", [0, 30, 511, 512, 700, -1])
def test_damage_is_found_before_hdf5_sees_it(tmp_path: Path, place: int) -> None:
    path, made, other = tmp_path / "x.h5", filled(), buffer()
    made.storage.checkpointer.dumps(made.storage, path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"x\.h5.*hash"):
        other.storage.checkpointer.loads(other.storage, path)
    made.dumps(tmp_path / "folder")
    (file,) = (tmp_path / "folder").glob("ckpt-*/checkpoint.h5")
    file.write_bytes(data)
    for verify in (True, False):
        with pytest.raises(CorruptCheckpointError):
            other.loads(tmp_path / "folder", verify)
    assert not len(other)


def test_a_failing_disk_leaves_the_older_file(tmp_path: Path) -> None:
    path, made, other = tmp_path / "x.h5", filled(), buffer()
    made.storage.checkpointer.dumps(made.storage, path)
    for point in ("fs.create", "fs.write", "fs.sync", "fs.rename"):
        with fault_points.inject({point: At(OSError("full"))}), pytest.raises(OSError, match="full"):
            made.storage.checkpointer.dumps(made.storage, path)
        other.storage.checkpointer.loads(other.storage, path)
        assert [file.name for file in tmp_path.iterdir()] == ["x.h5"]


def test_compression_saves_bytes(tmp_path: Path) -> None:
    rows = TensorDict({"a": torch.zeros(5_000, 10), "next": {"a": torch.zeros(5_000, 10)}}, [5_000])
    sizes = {}
    for compression in (None, "gzip", "lzf", 1):
        checkpointer = H5StorageCheckpointer(h5_kwargs={"compression": compression})
        made = ReplayBuffer(storage=LazyTensorStorage(5_000), checkpointer=checkpointer)
        made.extend(rows)
        made.dumps(tmp_path)
        sizes[compression] = size(tmp_path)
    assert all(10 * (sizes[kind] - 60_000) < sizes[None] for kind in ("gzip", "lzf", 1))


def test_an_ensemble_has_a_file_for_each_member(tmp_path: Path) -> None:
    first, other = (ReplayBufferEnsemble(filled(), filled()) for _ in range(2))
    other[1].empty()
    first.dumps(tmp_path)
    other.loads(tmp_path)
    assert (other[1][:] == first[1][:]).all()
    assert len(list(tmp_path.glob("ckpt-*/*checkpoint.h5"))) == 2


def test_lists_are_kept_in_addition_to_columns(tmp_path: Path) -> None:
    first, other = (
        ReplayBuffer(storage=ListStorage(4), collate_fn=list, checkpointer=H5StorageCheckpointer())
        for _ in range(2)
    )
    first.extend([{"a": 1}, torch.ones(2)])
    first.dumps(tmp_path)
    other.loads(tmp_path)
    assert other[0] == {"a": 1} and torch.equal(other[1], torch.ones(2))


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_file": "../x.h5"},
        {"checkpoint_file": "x.bin"},
        {"h5_kwargs": {"compression": 32001}},
        {"h5_kwargs": {"scaleoffset": 2}},
    ],
)
def test_inexact_or_unsafe_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        H5StorageCheckpointer(**options)


def test_options_that_h5py_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="h5_kwargs.*compression_opts"):
        filled(h5_kwargs={"compression": "gzip", "compression_opts": 77}).dumps(tmp_path)


def test_without_h5py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingLibraryError, match=r"gleanrl\[h5\]"):
        H5StorageCheckpointer()


def test_next_export_removes_the_file_of_a_killed_export(tmp_path: Path) -> None:
    storage, form = filled().storage, H5StorageCheckpointer()
    for act in (lambda: form.dumps(storage, tmp_path / "b.h5"), lambda: form.dumps(storage, tmp_path)):
        child = os.fork()
        if child == 0:
            with fault_points.inject({"fs.rename": lambda: os._exit(7)}):
                form.dumps(storage, tmp_path / "a.h5")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        (left,) = tmp_path.glob("a.h5.tmp-*")
        with left.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as if another process was writing it
            act()
            assert left.exists()
        act()
        assert not left.exists() and not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("userblock", [0, 1024])
def test_a_file_of_another_program_is_foreign_and_not_damaged(tmp_path: Path, userblock: int) -> None:
    path, made = tmp_path / "x.h5", filled()
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file["observation"] = torch.arange(9.0)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"x\.h5: another program wrote it; expected a file that H5"
    ):
        made.storage.checkpointer.loads(made.storage, path)
    path.write_text("step,reward\n1,2\n")
    with pytest.raises(IncompatibleCheckpointError, match="another program wrote it"):
        made.storage.checkpointer.loads(made.storage, path)
    for damaged in (b"", bytes(2_000)):
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match="hash"):
            made.storage.checkpointer.loads(made.storage, path)
    assert len(made) == 6


def test_dump_onto_a_directory_raises(tmp_path: Path) -> None:
    place = tmp_path / "x.h5"
    place.mkdir()
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"x\.h5: expected a file.*got a directory"):
        H5StorageCheckpointer().dumps(buffer.storage, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.h5"]
