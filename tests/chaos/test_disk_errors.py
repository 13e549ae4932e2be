"""If any act of a dump or a load fails, once or permanently, a typed error is raised and the old checkpoint is kept."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl._checkpoint.folder import Folder
from gleanrl._os import files
from gleanrl.data import H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer
from gleanrl.errors import CheckpointError
from tests.chaos.disks import Disk, make_files_small

FOLDER = Path("/home/checkpoints")
CODES = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT)


def state(number: int) -> dict[str, Any]:
    return {"number": number, "tensors": [torch.arange(i, i + 8) * (number if i else 1) for i in range(3)]}


def number_on(disk: Disk) -> int:
    """Return the number of the loaded checkpoint, after checking all of its content."""
    with disk.mounted():
        found = Folder(FOLDER).load().state
    assert all(map(torch.equal, found["tensors"], state(found["number"])["tensors"]))
    return int(found["number"])


def disk_with(dumps: int, keep: int = 1) -> Disk:
    disk = Disk()
    with disk.mounted():
        for number in range(1, dumps + 1):
            Folder(FOLDER).commit("thing", state(number), keep)
    disk.acts = 0
    return disk


def names(disk: Disk) -> list[str]:
    with disk.mounted():
        return sorted(name[:5] for name in files.names(FOLDER))


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    make_files_small(monkeypatch)


def failing(error: Callable[[], BaseException], at: int, for_ever: bool) -> Callable[[int, str], None]:
    def act(number: int, name: str) -> None:
        if number == at or (for_ever and number > at):
            raise error()

    return act


ERRORS = {
    **{errno.errorcode[code]: partial(OSError, code, os.strerror(code)) for code in CODES},
    "an interrupt": KeyboardInterrupt,
}


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_dump_with_a_failing_act_keeps_a_complete_checkpoint(error: str, for_ever: bool) -> None:
    before = disk_with(1)
    disk = deepcopy(before)
    with disk.mounted():
        Folder(FOLDER).commit("thing", state(2))
    acts = disk.acts
    assert acts > 30
    for at in range(1, acts + 1):
        disk = deepcopy(before)
        disk.before = failing(ERRORS[error], at, for_ever)
        with disk.mounted():
            try:
                Folder(FOLDER).commit("thing", state(2))
                raised: BaseException | None = None
            except (OSError, KeyboardInterrupt, UserWarning) as found:
                raised = found
        disk.before = lambda number, name: None
        assert not disk.num_open or isinstance(raised, KeyboardInterrupt)
        # a warning that an older checkpoint couldn't be removed
        if raised is None or isinstance(raised, UserWarning):
            assert number_on(disk) == 2
        elif isinstance(raised, OSError):
            # On a disk that stays broken, a checkpoint that has its name but no sync can't be removed.
            assert number_on(disk) == 1 or for_ever
            assert names(disk) == ["LOCK", "ckpt-"] or for_ever
        else:
            assert number_on(disk) in (1, 2)
        with disk.mounted():
            Folder(FOLDER).commit("thing", state(3))
        assert number_on(disk) == 3 and names(disk) == ["LOCK", "ckpt-"]


@pytest.mark.usefixtures("small_files")
def test_short_writes_and_reads_are_continued() -> None:
    disk = disk_with(1)
    disk.before = lambda number, name: 5 if name in ("write", "read") else None
    with disk.mounted():
        Folder(FOLDER).commit("thing", state(2))
    assert number_on(disk) == 2


@pytest.mark.usefixtures("small_files")
@pytest.mark.filterwarnings("ignore:.*newer ones are damaged")
@pytest.mark.parametrize("error", ["EIO", "EINTR"])
def test_load_with_a_failing_act_finds_a_complete_checkpoint_or_raises(error: str) -> None:
    disk = disk_with(2, keep=2)
    assert number_on(disk) == 2
    acts, found = disk.acts, []
    for at in range(1, acts + 1):
        disk.acts, disk.before = 0, failing(ERRORS[error], at, for_ever=False)
        try:
            found.append(number_on(disk))
        except (CheckpointError, OSError):
            found.append(0)
    assert found.count(1) > acts // 2 and set(found) <= {0, 1, 2}


def test_a_limit_of_file_sizes_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    buffer.extend(torch.arange(100))
    path, before = tmp_path / "checkpoints", resource.getrlimit(resource.RLIMIT_FSIZE)
    export = tmp_path / "records.h5"
    buffer.dumps(path)
    H5StorageCheckpointer().dumps(buffer.storage, export)
    buffer.extend(torch.arange(100, 10_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            buffer.dumps(path)
        with pytest.raises(OSError):
            H5StorageCheckpointer().dumps(buffer.storage, export)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert sorted(name[:5] for name in os.listdir(path)) == ["LOCK", "ckpt-"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "records.h5"]
    for form, place in ((buffer.storage.checkpointer, None), (H5StorageCheckpointer(), export)):
        other = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
        form.loads(other.storage, place) if place else other.loads(path)
        assert torch.equal(other.storage[:], torch.arange(100))
