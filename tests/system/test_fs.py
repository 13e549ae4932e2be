"""Files: reserved space, maps, whole replacement, and every act failing once."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from gleanrl.system import faults, fs


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3_000_001])
@pytest.mark.parametrize("can_reserve", [True, False])
def test_create_file_reserves_zeros(tmp_path, num_bytes, can_reserve, monkeypatch):
    if not can_reserve:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "column"
    fs.create_file(path, num_bytes)
    assert path.read_bytes() == bytes(num_bytes)
    assert path.stat().st_blocks * 512 >= num_bytes


def test_create_file_never_touches_what_is_there(tmp_path):
    path = tmp_path / "column"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        fs.create_file(path, 10)
    assert path.read_bytes() == b"mine"
    with pytest.raises(ValueError, match="num_bytes >= 0, got -1"):
        fs.create_file(tmp_path / "other", -1)
    assert not (tmp_path / "other").exists()


def test_more_than_any_disk_holds_is_an_error_that_leaves_nothing(tmp_path):
    # Refused as a whole: a size that nearly fits would fill the disk first.
    with pytest.raises(OSError) as raised:
        fs.create_file(tmp_path / "column", 2**62)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


def test_the_limit_of_a_files_size_is_an_error_that_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            fs.create_file(tmp_path / "column", 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_map_is_the_file(tmp_path):
    path = tmp_path / "column"
    fs.create_file(path, 8192)
    writable, readable = fs.map_file(path), fs.map_file(path, writable=False)
    with writable, readable:
        writable[5000:5003] = b"abc"
        assert readable[5000:5003] == b"abc"
        assert path.read_bytes()[5000:5003] == b"abc"
        with pytest.raises(TypeError):
            readable[0] = 1
        fs.remove_file(path)
        assert writable[5001] == ord("b")


def test_a_map_needs_a_file_with_content(tmp_path):
    with pytest.raises(FileNotFoundError):
        fs.map_file(tmp_path / "none")
    fs.create_file(tmp_path / "empty", 0)
    with pytest.raises(ValueError):
        fs.map_file(tmp_path / "empty")


def test_directories(tmp_path):
    deep = tmp_path / "a" / "b"
    fs.make_dir(deep)
    fs.make_dir(deep)
    with pytest.raises(FileExistsError):
        fs.make_dir(deep, exist_ok=False)
    assert deep.is_dir()


def test_remove_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        fs.remove_file(tmp_path / "f")
    fs.remove_file(tmp_path / "f", missing_ok=True)


def test_a_temporary_directory_ends_with_its_context():
    with fs.temporary_dir("gleanrl-test-") as name:
        path = Path(name)
        assert path.name.startswith("gleanrl-test-")
        fs.create_file(path / "f", 10)
    assert not path.exists()


def test_free_bytes(tmp_path):
    state = os.statvfs(tmp_path)
    assert 0 < fs.free_bytes(tmp_path) <= state.f_blocks * state.f_frsize
    with pytest.raises(FileNotFoundError):
        fs.free_bytes(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("fs.create", lambda d: fs.create_file(d / "new", 10)),
        ("fs.allocate", lambda d: fs.create_file(d / "new", 10)),
        ("fs.map", lambda d: fs.map_file(d / "there")),
        ("fs.make_dir", lambda d: fs.make_dir(d / "new")),
        ("fs.make_dir", lambda d: fs.temporary_dir("x")),
        ("fs.remove", lambda d: fs.remove_file(d / "there")),
    ],
)
def test_every_act_can_be_made_to_fail_and_changes_nothing(tmp_path, name, act):
    (tmp_path / "there").write_bytes(b"content")
    with faults.inject({name: OSError(errno.EIO, "broken")}), pytest.raises(OSError, match="broken"):
        act(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"there": b"content"}
