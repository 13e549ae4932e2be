"""File operations reserve space, map files and replace files as a whole. Each system call fails once."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from gleanrl._os import fault_points, files
from tests.interrupts import interruptions


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3_000_001])
@pytest.mark.parametrize("can_reserve", [True, False])
def test_create_file_reserves_zeros(tmp_path, num_bytes, can_reserve, monkeypatch):
    if not can_reserve:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "column"
    files.create_file(path, num_bytes)
    assert path.read_bytes() == bytes(num_bytes)
    assert path.stat().st_blocks * 512 >= num_bytes


def test_create_file_never_overwrites(tmp_path):
    path = tmp_path / "column"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        files.create_file(path, 10)
    assert path.read_bytes() == b"mine"
    with pytest.raises(ValueError, match="num_bytes >= 0, got -1"):
        files.create_file(tmp_path / "other", -1)
    assert not (tmp_path / "other").exists()


def test_an_interrupted_create_file_leaves_nothing(tmp_path):
    path = tmp_path / "column"
    for _, place in interruptions(
        lambda: path.unlink(missing_ok=True), lambda _: files.create_file(path, 10)
    ):
        assert not path.exists(), place


def test_size_beyond_any_disk_raises_and_leaves_nothing(tmp_path):
    # The size is refused at once; a size that nearly fits would first fill the disk.
    with pytest.raises(OSError) as raised:
        files.create_file(tmp_path / "column", 2**62)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_raises_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            files.create_file(tmp_path / "column", 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_name_grows_and_leaves_nothing(tmp_path):
    file = files.nameless_file(tmp_path)
    try:
        files.write_all(file, [b"ab"])
        files.reserve(file, 100)
        assert os.pread(file, 200, 0) == b"ab" + bytes(98)
        assert not any(tmp_path.iterdir()) and not os.get_inheritable(file)
    finally:
        os.close(file)


def test_a_map_is_the_file(tmp_path):
    path = tmp_path / "column"
    files.create_file(path, 8192)
    writable, readable = files.map_file(path), files.map_file(path, writable=False)
    with writable, readable:
        writable[5000:5003] = b"abc"
        assert readable[5000:5003] == b"abc"
        assert path.read_bytes()[5000:5003] == b"abc"
        with pytest.raises(TypeError):
            readable[0] = 1
        files.remove_file(path)
        assert writable[5001] == ord("b")


def test_a_map_needs_a_file_with_content(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.map_file(tmp_path / "none")
    files.create_file(tmp_path / "empty", 0)
    with pytest.raises(ValueError):
        files.map_file(tmp_path / "empty")


def test_make_dir_creates_parents_and_respects_exist_ok(tmp_path):
    deep = tmp_path / "a" / "b"
    files.make_dir(deep)
    files.make_dir(deep)
    with pytest.raises(FileExistsError):
        files.make_dir(deep, exist_ok=False)
    assert deep.is_dir()


def test_make_lasting_dir_syncs_the_new_name(tmp_path):
    for _ in range(2):
        with fault_points.inject({}) as visits:
            files.make_lasting_dir(tmp_path / "a" / "b")
    assert visits.counts["fs.sync_dir"] == 1 and (tmp_path / "a" / "b").is_dir()
    assert files.names(tmp_path) == ["a"] and files.names(tmp_path / "none") == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.make_lasting_dir(tmp_path / "file" / "a")
    with pytest.raises(NotADirectoryError):
        files.names(tmp_path / "file")
    with pytest.raises(FileNotFoundError):  # /proc refuses new directories
        files.make_lasting_dir(Path("/proc/none/below"))
    files.make_dir(tmp_path / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "gone")
        files.remove_tree(tmp_path / "gone")
        with pytest.raises(FileNotFoundError):
            files.make_lasting_dir(Path("below"))


def test_files_are_read_at_any_place_and_renamed(tmp_path):
    path, content = tmp_path / "file", bytes(range(13))
    path.write_bytes(content)
    with files.reading(path) as file:
        assert files.size_of(file) == 13
        buffer = bytearray(20)
        assert files.read_into(file, buffer, 2) == 11 and bytes(buffer[:11]) == content[2:]
        assert files.read_into(file, buffer, 13) == 0
    files.sync_dir(tmp_path)
    files.rename(path, tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == content and not path.exists()


def test_only_plain_files_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "none"):
        with pytest.raises(OSError), files.reading(tmp_path / name):
            pass
    with pytest.raises(OSError), files.reading(Path("/dev/zero")):
        pass


def test_a_lock_names_its_owner_and_ends_with_the_block(tmp_path):
    path = tmp_path / "LOCK"

    def second():
        with pytest.raises(BlockingIOError, match="the first"):
            files.while_locked(path, b"the second", list)
        return 3

    assert files.while_locked(path, b"the first", second) == 3
    with pytest.raises(ZeroDivisionError):
        files.while_locked(path, b"the third", lambda: 1 // 0)
    # The file holds no rest of a longer, earlier content.
    assert files.while_locked(path, b"me", lambda: path.read_bytes().rstrip()) == b"me"


def test_remove_tree_keeps_targets_of_links(tmp_path):
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"x")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    files.remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == ["outside"]


def test_remove_file_raises_unless_missing_is_ok(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.remove_file(tmp_path / "f")
    files.remove_file(tmp_path / "f", missing_ok=True)


def test_a_temporary_directory_ends_with_its_context():
    with files.temporary_dir("gleanrl-test-") as name:
        path = Path(name)
        assert path.name.startswith("gleanrl-test-")
        files.create_file(path / "f", 10)
    assert not path.exists()


def test_free_bytes_reports_the_file_system(tmp_path):
    state = os.statvfs(tmp_path)
    assert 0 < files.free_bytes(tmp_path) <= state.f_blocks * state.f_frsize
    with pytest.raises(FileNotFoundError):
        files.free_bytes(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("fs.create", lambda d: files.create_file(d / "new", 10)),
        ("fs.allocate", lambda d: files.create_file(d / "new", 10)),
        ("fs.map", lambda d: files.map_file(d / "there")),
        ("fs.make_dir", lambda d: files.make_dir(d / "new")),
        ("fs.make_dir", lambda d: files.temporary_dir("x")),
        ("fs.remove", lambda d: files.remove_file(d / "there")),
        ("fs.remove", lambda d: files.remove_tree(d)),
        ("fs.sync_dir", files.sync_dir),
        ("fs.rename", lambda d: files.rename(d / "there", d / "new")),
        ("fs.open", lambda d: files.reading(d / "there").__enter__()),
        ("fs.lock", lambda d: files.while_locked(d / "new", b"me", list)),
    ],
)
def test_failing_operation_changes_nothing(tmp_path, name, act):
    (tmp_path / "there").write_bytes(b"content")
    with fault_points.inject({name: OSError(errno.EIO, "broken")}), pytest.raises(OSError, match="broken"):
        act(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"there": b"content"}


def test_a_link_is_another_name_of_a_plain_file_of_that_size(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"abc")
    assert not files.link_file(one, two, 4) and not files.link_file(tmp_path / "none", two, 3)
    (tmp_path / "symbolic").symlink_to(one)
    assert not files.link_file(tmp_path / "symbolic", two, 3) and not files.link_file(tmp_path, two, 0)
    assert files.link_file(one, two, 3)
    one.unlink()
    assert two.read_bytes() == b"abc" and files.size_at(two) == 3
    two.rename(one)
    for wrong in (tmp_path / "symbolic", tmp_path, two):
        with pytest.raises(OSError):
            files.size_at(wrong)
