"""New files are complete or absent, and failed writes leave no file behind."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from gleanrl._os import atomic_files, fault_points, files
from gleanrl._os.atomic_files import NewFile, remove_abandoned, replace_file
from gleanrl._os.fault_points import At


def write(path: Path) -> None:
    file = NewFile(path, [b"abc", memoryview(b""), memoryview(b"defg"), np.arange(3, dtype=np.int16)])
    try:
        file.sync()
    finally:
        file.close()


def test_pieces_are_written_one_after_the_other(tmp_path: Path) -> None:
    write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"abcdefg" + np.arange(3, dtype=np.int16).tobytes()
    with pytest.raises(FileExistsError):
        write(tmp_path / "file")
    many = [bytes([number % 251]) * (number % 3) for number in range(5_000)]
    NewFile(tmp_path / "many", many).close()
    assert (tmp_path / "many").read_bytes() == b"".join(many)


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("fs.create", write),
        ("fs.write", write),
        ("fs.sync", write),
        ("fs.rename", lambda path: replace_file(path, lambda file: file.write(b"x"))),
    ],
)
def test_failing_operation_leaves_no_file(tmp_path: Path, name: str, act: Callable[[Path], None]) -> None:
    with fault_points.inject({name: OSError(errno.EIO, "broken")}), pytest.raises(OSError, match="broken"):
        act(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_file_in_progress_is_not_removed_as_abandoned(tmp_path: Path) -> None:
    path = tmp_path / f"a.h5.tmp-{0:032x}"
    with fault_points.inject({"fs.sync": lambda: remove_abandoned(tmp_path, files.names(tmp_path), ".h5")}):
        file = NewFile(path, [b"x"], locked=True)
        file.sync()
    assert path.exists()
    file.close()
    (tmp_path / f"a.h4.tmp-{0:032x}").touch()
    remove_abandoned(tmp_path, files.names(tmp_path), ".h5")
    assert [one.name for one in tmp_path.iterdir()] == [f"a.h4.tmp-{0:032x}"]


def test_file_removed_before_its_lock_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / f"a.h5.tmp-{0:032x}", atomic_files.fcntl.flock
    removals = iter([path.unlink, lambda: None])
    monkeypatch.setattr(atomic_files.fcntl, "flock", lambda *given: (next(removals)(), lock(*given)))
    file = NewFile(path, [b"x"], locked=True)
    file.close()
    assert path.read_bytes() == b"x"


def test_callback_may_seek_and_truncate(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        file.seek(4)
        file.write(b"behind")
        file.seek(0)
        file.write(b"abcd")
        file.seek(-2, io.SEEK_END)
        assert file.tell() == 8 and file.read() == b"nd" and file.read(1) == b""
        file.truncate(9)

    file = NewFile(tmp_path / "a", ())
    file.fill(fill)
    assert file.size == 9 and [*file.parts(5)] == [b"abcdb", b"ehin"]
    file.close()
    assert (tmp_path / "a").read_bytes() == b"abcdbehin"


def test_interrupted_callback_cannot_write_into_another_file(tmp_path: Path) -> None:
    kept: list[BinaryIO] = []

    def fill(file: BinaryIO) -> None:
        kept.append(file)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NewFile(tmp_path / "a", ()).fill(fill)
    with (tmp_path / "b").open("w+b") as other:  # this file gets the descriptor number that was freed
        other.write(b"mine")
        other.flush()
        late = kept[0]
        late.seek(0, io.SEEK_END)
        late.write(b"late")
        late.truncate(1)
        late.flush()
        assert late.read() == b""
    assert (tmp_path / "b").read_bytes() == b"mine" and len([*tmp_path.iterdir()]) == 1


def test_disk_error_is_raised_even_if_the_callback_wraps_it(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        try:
            file.write(b"x")
        except OSError as cause:
            raise ValueError("can't write") from cause

    for fault, kind in ((OSError("full"), OSError), (KeyError("else"), KeyError)):
        with (
            fault_points.inject({"fs.write": At(fault, visit=2)}),
            pytest.raises(kind, match=str(fault.args[0])),
        ):
            NewFile(tmp_path / "a", ()).fill(fill)
        assert not [*tmp_path.iterdir()]
