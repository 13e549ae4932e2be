"""A commit is complete or absent, whichever file operation fails and wherever the process is killed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl._checkpoint import folder as module
from gleanrl._checkpoint.folder import Folder, read
from gleanrl._checkpoint.manifest import Manifest
from gleanrl._checkpoint.tree_codec import LARGE_BYTES
from gleanrl._checkpoint.writer import Earlier
from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl._os.threads import for_each
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    InvalidTypeError,
)


def state(number: int) -> dict[str, Any]:
    return {"number": number, "tensor": torch.full((1_000,), number)}


def checkpoints(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != "LOCK")


def test_newest_checkpoint_is_loaded_and_older_ones_are_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "b")
    with pytest.raises(IncompleteCheckpointError, match="no complete checkpoint"):
        folder.load()
    for number in range(5):
        place = folder.commit("thing", state(number), keep=2)
        found = folder.load()
        assert found.path == place and found.kind == "thing" and found.state["number"] == number
        assert torch.equal(found.state["tensor"], state(number)["tensor"]) and not found.skipped
        assert len(checkpoints(folder.path)) == min(number + 1, 2)
    assert [name[5:13] for name in checkpoints(folder.path)] == ["00000004", "00000005"]
    assert read(place)[1]["number"] == 4


def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in range(3):
        newest = folder.commit("thing", state(number), keep=3)
    with open(newest / "000000.bin", "r+b") as file:
        file.write(b"x")
    with pytest.warns(UserWarning, match="newer ones are damaged: ckpt-00000003.*000000.bin: bytes 0 to"):
        found = folder.load()
    assert found.state["number"] == 1 and list(found.skipped) == [newest.name]
    for path in tmp_path.glob("ckpt-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="manifest.json"):
        folder.load()


def test_folder_holds_one_kind_of_state(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.commit("thing", state(1))
    with pytest.raises(
        CheckpointError, match="expected checkpoints of a matter, got a folder with checkpoints of a thing"
    ):
        folder.commit("matter", state(2))
    assert folder.load().state["number"] == 1 and len(checkpoints(tmp_path)) == 1
    (newest,) = tmp_path.glob("ckpt-*")
    (newest / "manifest.json").write_text("damaged")  # its kind can't be read any more
    folder.commit("matter", state(2))
    assert folder.load().kind == "matter"


LARGE = torch.arange(LARGE_BYTES // 8)


def links(place: Path) -> list[int]:
    """Return the link count of each data file of a checkpoint."""
    return [file.stat().st_nlink for file in sorted(place.glob("*.bin"))]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """List the manifests that are parsed. The cache starts empty."""
    found: list[Manifest] = []
    decoded = Manifest.decoded
    monkeypatch.setattr(module, "_written", {})
    monkeypatch.setattr(Manifest, "decoded", lambda data: (found.append(decoded(data)), found[-1])[1])
    return found


def test_last_commit_of_this_process_is_cached(tmp_path: Path, parsed: list[Manifest]) -> None:
    for number in range(3):
        place = Folder(tmp_path).commit("thing", {"large": LARGE, "number": number}, keep=5)
        assert links(place) == [number + 1] and not parsed
    module._written.clear()  # as in a new process, whose cache is empty
    last = Folder(tmp_path).commit("thing", {"large": LARGE, "number": 3}, keep=5)
    assert links(last) == [4] and [one.state["number"] for one in parsed] == [2]
    found = Folder(tmp_path).load()
    assert found.state["number"] == 3 and torch.equal(found.state["large"], LARGE)


def test_cache_applies_to_the_same_path_only(tmp_path: Path, parsed: list[Manifest]) -> None:
    place = Folder(tmp_path).commit("thing", {"large": LARGE})
    other = tmp_path / f"ckpt-00000009-{'0' * 32}"
    shutil.copytree(place, other)
    last = Folder(tmp_path).commit("thing", {"large": LARGE}, keep=5)
    assert len(parsed) == 1 and links(place) == [1] and links(last) == links(other) == [2]


def test_changed_manifest_invalidates_the_cache(tmp_path: Path, parsed: list[Manifest]) -> None:
    place = Folder(tmp_path).commit("thing", {"large": LARGE})
    manifest = place / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b" ")
    last = Folder(tmp_path).commit("thing", {"large": LARGE}, keep=5)
    assert not parsed and links(place) == links(last) == [1]


@pytest.mark.parametrize("numbers", [[False, True], [0, 0], [-1, 0], [0]])
def test_commit_after_a_forged_checkpoint_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[Any]
) -> None:
    monkeypatch.setattr(module, "_written", {})
    folder, one = Folder(tmp_path), torch.arange(LARGE_BYTES // 4)
    place = folder.commit("thing", {"a": one, "b": one + 1})
    made = Manifest.decoded((place / "manifest.json").read_bytes())
    made.state["a"]["$tensor"] = [[number, 0, LARGE_BYTES] for number in numbers]
    (place / "manifest.json").write_bytes(made.encoded())
    module._written.clear()
    for _ in range(2):
        folder.commit("thing", {"a": one, "b": one + 1})
        found = folder.load().state
        assert torch.equal(found["a"], one) and torch.equal(found["b"], one + 1)


def test_self_referencing_state_is_refused(tmp_path: Path) -> None:
    for value in ([1], {"a": 1}):
        inner: Any = value
        inner.append(inner) if isinstance(inner, list) else inner.update(b=inner)
        with pytest.raises(CheckpointError, match="nested more than"):
            Folder(tmp_path).commit("thing", {"state": inner})
    assert checkpoints(tmp_path) == []


def test_cache_is_bounded_under_concurrent_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_written", {})
    monkeypatch.setattr(module, "_REMEMBERED", 1)
    earlier, paths = Earlier(tmp_path, "thing", (), (), ()), [tmp_path / str(n) for n in range(40)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for_each(lambda number: module._note(paths[number % 40], b"", earlier), range(40_000), 8)
    finally:
        sys.setswitchinterval(switch)
    assert len(module._written) <= 8


def test_cache_holds_a_few_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_written", {})
    folders = [Folder(tmp_path / str(number)) for number in range(module._REMEMBERED + 3)]
    for folder in (*folders, folders[5]):
        folder.commit("thing", state(0))
    assert [*module._written] == [folder.path for folder in (*folders[3:5], *folders[6:], folders[5])]


@pytest.mark.parametrize("point", ["fs.list", "fs.open", "fs.size", "fs.read"])
def test_a_load_finds_the_newer_checkpoint_where_a_dump_removes_the_listed_one(
    tmp_path: Path, point: str
) -> None:
    Folder(tmp_path).commit("thing", state(0))
    with fault_points.inject({}) as visits:
        Folder(tmp_path).load()
    for visit in range(1, visits.counts[point] + 1):
        folder = Folder(tmp_path / str(visit))
        folder.commit("thing", state(0))
        with fault_points.inject({point: At(partial(folder.commit, "thing", state(1)), visit)}):
            found = folder.load()
        assert found.state["number"] == 1 and not found.skipped


def test_load_during_a_dump_reports_a_damaged_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    def replace() -> None:
        (folder.commit("thing", state(1), keep=1) / "manifest.json").write_text("damaged")

    folder.commit("thing", state(0))
    with (
        fault_points.inject({"fs.open": replace}),
        pytest.raises(CorruptCheckpointError, match="manifest: its hash is wrong"),
    ):
        folder.load()
    folder.commit("thing", state(2), keep=3)
    with (
        fault_points.inject({"fs.open": At(lambda: shutil.rmtree(tmp_path))}),
        pytest.raises(IncompleteCheckpointError),
    ):
        folder.load()


@pytest.mark.parametrize("digits", [8, 9, 20])
def test_checkpoints_after_a_number_of_nines_are_loaded_and_kept(tmp_path: Path, digits: int) -> None:
    folder = Folder(tmp_path)
    folder.commit("thing", state(0)).rename(tmp_path / f"ckpt-{'9' * digits}-{'0' * 32}")
    for number in (1, 2):
        place = folder.commit("thing", state(number))
        found = folder.load()
        assert (
            found.path == place and found.state["number"] == number and checkpoints(tmp_path) == [place.name]
        )


def test_names_with_digits_of_other_scripts_are_ignored(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.commit("thing", state(0)).rename(tmp_path / f"ckpt-{chr(0x0669) * 8}-{'0' * 32}")
    with pytest.raises(IncompleteCheckpointError):
        folder.load()


def test_paths_and_choices_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="path: expected the name of a file or folder, got ''"):
        Folder("")
    folder = Folder(tmp_path)
    folder.commit("thing", state(1))
    with pytest.raises(InvalidTypeError, match="verify: expected True or False, got 'no'"):
        folder.load("no")  # type: ignore[arg-type]
    assert Folder(".").path == Path.cwd()


def test_leftovers_are_removed_and_other_files_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / f"tmp-{'0' * 32}").mkdir()
    (tmp_path / f"trash-{'1' * 32}").mkdir()
    (tmp_path / "tmp-mine").mkdir()
    (tmp_path / "ckpt-mine").mkdir()
    folder.commit("thing", state(0))
    assert [name for name in checkpoints(tmp_path) if not name.startswith("ckpt-0")] == [
        "ckpt-mine",
        "tmp-mine",
    ]
    assert folder.load().state["number"] == 0


def special(path: Path, kind: str) -> None:
    """Create an entry that isn't a plain file."""
    if kind == "directory":
        path.mkdir()
        (path / "file").touch()
    elif kind == "link":
        path.symlink_to(path.parent / "nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as bound, bound_in(path.parent):
            bound.bind(path.name)


@contextmanager
def bound_in(path: Path) -> Iterator[None]:
    """Change to the parent folder and back, because the path of a Unix socket is limited to about 100 bytes."""
    here = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(here)


KINDS = ("directory", "link", "pipe", "socket")


@pytest.mark.parametrize("kind", KINDS)
def test_lock_that_is_not_a_plain_file_is_named(tmp_path: Path, kind: str) -> None:
    special(tmp_path / "LOCK", kind)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/LOCK: expected the plain file.*remove it"):
        Folder(tmp_path).commit("thing", state(0))
    assert os.listdir(tmp_path) == ["LOCK"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_files_with_checkpoint_names_stop_neither_dump_nor_load(tmp_path: Path, kind: str) -> None:
    names = [f"records.h5.tmp-{'0' * 32}", f"tmp-{'0' * 32}", f"ckpt-00000007-{'0' * 32}", "manifest.json"]
    for name in names:
        special(tmp_path / name, kind)
    folder = Folder(tmp_path)
    for number in range(2):
        place = folder.commit("thing", state(number))
        found = folder.load()
        assert found.path == place and found.state["number"] == number
    assert checkpoints(tmp_path) == sorted([place.name, names[0], names[3]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "000000.bin"])
def test_special_file_in_a_checkpoint_is_damage(tmp_path: Path, kind: str, name: str) -> None:
    folder = Folder(tmp_path)
    place = folder.commit("thing", {"large": LARGE})
    (place / name).unlink()
    special(place / name, kind)
    with pytest.raises(CorruptCheckpointError, match=name):
        folder.load()
    folder.commit("thing", {"large": LARGE})
    assert torch.equal(folder.load().state["large"], LARGE)


def test_a_file_where_a_folder_is_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "file", tmp_path / "pipe", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"{path}: expected a folder of checkpoints, got a file"):
            Folder(path).load()
        with pytest.raises(CheckpointError, match=f"{path}: expected a folder of checkpoints, got a file"):
            Folder(path).commit("thing", state(0))


def test_a_folder_of_another_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="no complete checkpoint$"):
        Folder(tmp_path).load()
    for name in ("LOCK", "storage_metadata.json", "observation.memmap"):
        (tmp_path / name).touch()
    with pytest.raises(
        IncompleteCheckpointError, match="'observation.memmap', 'storage_metadata.json', which no dump"
    ):
        Folder(tmp_path).load()
    with pytest.raises(
        IncompleteCheckpointError, match="is a checkpoint itself: give the folder that contains it"
    ):
        Folder(Folder(tmp_path).commit("thing", state(0))).load()


def test_links_are_ignored_and_removed_in_their_order(tmp_path: Path) -> None:
    folder, away = Folder(tmp_path / "a"), Folder(tmp_path / "b").commit("thing", state(5))
    folder.commit("thing", state(0))
    (folder.path / f"ckpt-00000007-{'0' * 32}").symlink_to(away)
    (folder.path / f"tmp-{'0' * 32}").symlink_to(away)
    with pytest.warns(UserWarning, match="expected a folder, got a file or a link"):
        assert folder.load().state["number"] == 0
    folder.commit("thing", state(1))
    assert folder.load().state["number"] == 1 and len(checkpoints(folder.path)) == 1
    assert read(away)[1]["number"] == 5


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    def inside() -> None:
        with pytest.raises(CheckpointError, match="this process is writing a checkpoint here already"):
            Folder(tmp_path).commit("thing", state(1))

    with fault_points.inject({"fs.rename": inside}):
        folder.commit("thing", state(0))
    assert folder.load().state["number"] == 0


def acts(tmp_path: Path) -> dict[str, int]:
    """Return how often a commit visits each fault point, including the removal of an older checkpoint."""
    folder = Folder(tmp_path / "counted")
    folder.commit("thing", state(0))
    with fault_points.inject({}) as visits:
        folder.commit("thing", state(1))
    return {name: count for name, count in visits.counts.items() if name.startswith("fs.")}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_operation_leaves_only_the_earlier_checkpoint(tmp_path: Path, code: int) -> None:
    counted = acts(tmp_path)
    assert {
        "fs.make_dir",
        "fs.create",
        "fs.write",
        "fs.sync",
        "fs.sync_dir",
        "fs.rename",
        "fs.remove",
    } <= set(counted)
    # Fails while the earlier manifest is read: the commit then links nothing.
    for name in ("fs.open", "fs.read"):
        with fault_points.inject({name: OSError(code, "on purpose")}):
            Folder(tmp_path / "counted").commit("thing", state(1))
        del counted[name]
    for name, count in counted.items():
        for visit in range(1, count + 1):
            folder = Folder(tmp_path / f"{name}-{visit}")
            folder.commit("thing", state(0))
            with fault_points.inject({name: At(OSError(code, "on purpose"), visit)}):
                try:
                    folder.commit("thing", state(1))
                except OSError as error:
                    assert error.errno == code
                    assert folder.load().state["number"] == 0 and len(checkpoints(folder.path)) == 1
                except UserWarning as warning:
                    assert "older checkpoints are still there" in str(warning)
                    assert folder.load().state["number"] == 1
            folder.commit("thing", state(2))
            assert folder.load().state["number"] == 2
            assert len(checkpoints(folder.path)) == 1


KILLED = """
import os, sys
from pathlib import Path
import torch
from gleanrl._checkpoint.folder import Folder
from gleanrl._os import fault_points as faults
from gleanrl._os.fault_points import At
from gleanrl._os.threads import for_each

root = Path(sys.argv[1])
value = lambda number: {"number": number, "tensor": torch.full((1_000,), number)}
Folder(root / "counted").commit("thing", value(0))
with faults.inject({}) as visits:
    Folder(root / "counted").commit("thing", value(1))
outcomes = []
for name, count in visits.counts.items():
    if not name.startswith("fs."):
        continue
    for visit in range(1, count + 1):
        folder = Folder(root / f"{name}-{visit}")
        folder.commit("thing", value(0))
        child = os.fork()
        if child == 0:
            with faults.inject({name: At(lambda: os._exit(9), visit)}):
                folder.commit("thing", value(1))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        found = folder.load().state
        assert (found["tensor"] == found["number"]).all() and found["number"] in (0, 1)
        outcomes.append(found["number"])
        folder.commit("thing", value(2))
        assert folder.load().state["number"] == 2
        left = [entry for entry in os.listdir(folder.path) if entry != "LOCK"]
        assert len(left) == 1, left
print(len(outcomes), sum(outcomes))
"""


@pytest.mark.slow
def test_kill_at_every_operation_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kills, after = map(int, done.stdout.split())
    assert kills >= 12 and 0 < after < kills


def test_load_of_constantly_replaced_checkpoints_advises_to_keep_more(tmp_path: Path) -> None:
    folder, numbers = Folder(tmp_path), itertools.count(1)
    folder.commit("thing", state(0))

    def slow(kind: str, found: Any) -> None:
        folder.commit("thing", state(next(numbers)), keep=1)
        raise CorruptCheckpointError("its rows are gone")

    with pytest.raises(CheckpointError, match=r"removed the newest checkpoint.*100 times.*keep=3") as caught:
        folder.load(take=slow)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert next(numbers) == 101


def test_refused_lock_is_not_reported_as_a_special_file(tmp_path: Path) -> None:
    refused = OSError(errno.EINVAL, "Invalid argument")
    with (
        fault_points.inject({"fs.lock": refused}),
        pytest.raises(OSError, match="Invalid argument") as caught,
    ):
        Folder(tmp_path).commit("thing", state(0))
    assert caught.value is refused


@pytest.mark.parametrize("name", [f"tmp-{'0' * 32}", f"trash-{'0' * 32}"])
def test_a_leftover_that_cannot_be_removed_is_skipped_with_a_warning(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path)
    (tmp_path / name).mkdir()
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    with (
        fault_points.inject({"fs.remove": At(refused)}),
        pytest.warns(UserWarning, match="can't be removed: .*not permitted"),
    ):
        place = folder.commit("thing", state(3))
    assert checkpoints(tmp_path) == sorted([place.name, name])
    assert folder.load().state["number"] == 3
    folder.commit("thing", state(4))
    assert len(checkpoints(tmp_path)) == 1
