"""Packs have one user at a time. Full packs are synced, and an error leaves no file open."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path

import pytest

from gleanrl._checkpoint import incremental as module
from gleanrl._checkpoint.incremental import Earlier, Packs
from gleanrl._checkpoint.manifest import DataFile
from gleanrl._os import fault_points
from gleanrl._os.atomic_files import NewFile
from gleanrl._os.fault_points import At
from tests._checkpoint.helpers import open_in


def put(packs: Packs, data: bytes, room: int = 10) -> int:
    with packs.pack(room) as pack:
        pack.append([data])
        return pack.number


def test_a_pack_is_written_until_it_is_full(tmp_path: Path) -> None:
    packs = Packs(tmp_path, None)
    assert [put(packs, data) for data in (b"abcd", b"efgh", b"ijkl", b"m", b"")] == [0, 0, 0, 1, 1]
    packs.add("manifest.json", b"{}")
    packs.sync(False)
    assert packs.files == (DataFile("000000.bin", 12), DataFile("000001.bin", 1))
    assert (tmp_path / "000000.bin").read_bytes() == b"abcdefghijkl"
    assert (tmp_path / "manifest.json").read_bytes() == b"{}" and not open_in(tmp_path)


def test_pack_has_one_user_at_a_time(tmp_path: Path) -> None:
    packs = Packs(tmp_path, None)
    with ExitStack() as held:
        each = [held.enter_context(packs.pack(10)) for _ in range(3)]
        assert [pack.number for pack in each] == [0, 1, 2]
        for pack in each:
            pack.append([b"abc", b"de"])
            pack.cut(2)
            pack.append([b"xyz"])
    assert {put(packs, b"!") for _ in range(3)} < {0, 1, 2}
    packs.sync(True)
    assert (tmp_path / "000001.bin").read_bytes().startswith(b"abxyz")


def test_named_files_get_unique_names(tmp_path: Path) -> None:
    packs = Packs(tmp_path, None)

    def fill(file: NewFile) -> tuple[int, ...]:
        file.append([b"12345"])
        return (7,)

    put(packs, b"a")
    assert packs.own("x.h5", fill) == (1, 0, 5, (7,)) and packs.own("x.h5", fill) == (2, 0, 5, (7,))
    assert [file.name for file in packs.files] == ["000000.bin", "x.h5", "000002-x.h5"]

    def broken(file: NewFile) -> tuple[int, ...]:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        packs.own("y.h5", broken)
    packs.close()
    assert not open_in(tmp_path)


def test_each_file_is_linked_once_and_refusals_are_known(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for name in ("000000.bin", "000001.bin"):
        (tmp_path / "a" / name).write_bytes(b"abc")
    files = tuple(DataFile(f"00000{n}.bin", size) for n, size in enumerate((3, 4, 5)))
    packs = Packs(tmp_path / "b", Earlier(tmp_path / "a", "thing", files, (), ()))
    put(packs, b"x")
    with fault_points.inject({}) as visits:
        assert not packs.refuses(0) and [packs.link(0), packs.link(0)] == [1, 1] and not packs.refuses(0)
        # File 1 has another size than the manifest says, and file 2 doesn't exist.
        assert [packs.link(1), packs.link(1), packs.link(2)] == [None] * 3 and packs.refuses(1)
    assert visits.counts["fs.link"] == 3
    with (
        fault_points.inject({"fs.link": OSError(errno.EIO, "broken")}),
        pytest.raises(OSError, match="broken"),
    ):
        Packs(tmp_path / "b", Earlier(tmp_path / "a", "thing", files, (), ())).link(0)
    packs.sync(False)
    assert packs.files == (DataFile("000000.bin", 1), DataFile("000001.bin", 3))
    assert Packs(tmp_path, None).link(0) is None


@pytest.mark.parametrize(("limit", "value"), [("_UNSYNCED", 3), ("_UNSYNCED_BYTES", 25)])
def test_full_packs_are_synced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    packs = Packs(tmp_path, None)
    with fault_points.inject({}) as visits:
        synced = []
        for _ in range(7):
            put(packs, b"0123456789")
            packs.sync_some(False)
            synced.append(visits.counts["fs.sync"])
        assert synced == [0, 0, 3, 3, 3, 6, 6] and open_in(tmp_path) == 1
        packs.sync(False)
        assert visits.counts["fs.sync"] == 7 and visits.counts["fs.sync_dir"] == 1


@pytest.mark.parametrize("name", ["fs.create", "fs.write", "fs.sync"])
def test_an_error_leaves_nothing_open(tmp_path: Path, name: str) -> None:
    packs = Packs(tmp_path, None)
    with (
        fault_points.inject({name: At(OSError(errno.ENOSPC, "full"), 2, repeat=True)}),
        pytest.raises(OSError, match="full"),
    ):
        for _ in range(3):
            put(packs, b"0123456789")
        packs.sync(False)
    packs.close()
    assert not open_in(tmp_path)
