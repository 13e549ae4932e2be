"""After a power cut at any moment of a series of dumps, the last complete checkpoint is intact.

The dumps run on a disk in memory. The tests enumerate and load every state in which the disk may be. Disks that `load`
can't distinguish are loaded once: it opens checkpoints only, which the tests check.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl._checkpoint.folder import Folder
from gleanrl._checkpoint.writer import FileWriter
from gleanrl._os import atomic_files, files
from gleanrl.errors import CheckpointError, IncompleteCheckpointError
from tests.chaos.disks import ROOT, Content, Disk, Remains, make_files_small
from tests.chaos.drills import SHARE

FOLDER = Path("/home/checkpoints")
STATES = 1_000_000
DAMAGED, LOST = "damaged", "lost"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    make_files_small(monkeypatch)


def state(number: int, tensors: int) -> dict[str, Any]:
    """Return a state to save. Its first tensor never changes, so the tensor's file is linked from dump to dump.

    Of each further tensor, the first number never changes.
    """
    return {
        "number": number,
        "tensors": [torch.arange(8) * (number if i else 1) + i for i in range(tensors)],
    }


def dumped(disk: Disk, numbers: range, tensors: int, keep: int) -> list[int]:
    """Dump the states in order; return the length of the journal after each."""
    lengths = []
    with disk.mounted():
        for number in numbers:
            Folder(FOLDER).commit("thing", state(number, tensors), keep)
            lengths.append(len(disk.journal))
    return lengths


def seen(content: dict[int, Content]) -> Any:
    """Return the part of a disk that `load` can see: the content under the names of checkpoints."""
    tree: Any = content[ROOT]
    for name in FOLDER.parts[1:]:
        if name not in tree:
            return None
        tree = content[tree[name]]
    found = []
    for name in sorted(tree):
        if name.startswith("ckpt-"):
            inside: Any = content[tree[name]]
            found.append((name, id(inside), *(id(content[number]) for number in inside.values())))
    return tuple(found)


class Judge:
    """Loads the disks of one `Remains`, which yields the same objects for the same contents.

    Args:
        verify: whether checksums are compared.
    """

    def __init__(self, verify: bool = True) -> None:
        self._verify = verify
        self._known: dict[Any, int | str] = {}

    def outcome(self, content: dict[int, Content]) -> int | str:
        """Return the number of the loaded state, 0 for none, or a description of the damage."""
        key = seen(content)
        if key not in self._known:
            self._known[key] = self._loaded(Disk(content))
        return self._known[key]

    def _loaded(self, disk: Disk) -> int | str:
        with disk.mounted():
            try:
                found = Folder(FOLDER).load(self._verify).state
            except IncompleteCheckpointError:
                return 0
            except (CheckpointError, UserWarning):
                return LOST
            finally:
                assert all(path.startswith(f"{FOLDER}/ckpt-") for path in disk.opened)
        expected = state(found["number"], len(found["tensors"]))["tensors"]
        return found["number"] if all(map(torch.equal, found["tensors"], expected)) else DAMAGED

    @property
    def loads(self) -> int:
        """Return the number of loaded disks."""
        return len(self._known)


def cuts(disk: Disk, lengths: list[int], remains: Remains) -> Iterator[tuple[int, dict[int, Content]]]:
    """Yield each disk that a cut may leave, with the number of the dump that it interrupts, from 0.

    Between two syncs the journal only adds possible disks, so the disks before each sync include all earlier ones.
    """
    position = 0
    for dump, length in enumerate(lengths):
        while position < length:
            remains.add(*disk.journal[position])
            position += 1
            if position == length or disk.journal[position][0] == "sync":
                for content in remains.states():
                    yield dump, content
        for content in remains.states():
            yield dump + 1, content


def judged(
    disk: Disk, lengths: list[int], remains: Remains, judge: Judge, most: int | None = None
) -> tuple[int, Counter[int | str]]:
    """Return the number of distinct disks, and the counts of each wrong outcome."""
    different: set[int] = set()
    wrong: Counter[int | str] = Counter()
    for dump, content in islice(cuts(disk, lengths, remains), most):
        different.add(hash((dump, frozenset((number, id(one)) for number, one in content.items()))))
        outcome = judge.outcome(content)
        if outcome not in (dump, dump + 1):
            wrong[outcome if isinstance(outcome, str) else LOST] += 1
    return len(different), wrong


@pytest.mark.timeout(1800)
def test_no_cut_loses_or_damages_a_complete_checkpoint() -> None:
    tensors, more = (4, 3) if SHARE >= 1 else (3, 0)  # the files of a dump are written at the same time
    begin, loads, count = time.monotonic(), 0, 0
    for keep, dumps in ((1, 3), (2, 4)):
        disk, judge = Disk(), Judge()
        lengths = dumped(disk, range(1, dumps + more + 1), tensors, keep)
        states, wrong = judged(disk, lengths, Remains(), judge)
        count, loads = count + states, loads + judge.loads
        assert not wrong, wrong
    print(f"{count} disks after cuts, {loads} that look different, in {time.monotonic() - begin:.0f} s")
    assert count >= STATES * min(SHARE, 1)


def test_files_of_several_extents_survive_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extents before the first changed one are copied from the earlier checkpoint's file."""
    make_files_small(monkeypatch, extent=8)
    copied, copy = [], FileWriter._copy
    monkeypatch.setattr(FileWriter, "_copy", lambda *given: (copied.append(given[2]), copy(*given))[1])
    disk = Disk()
    lengths = dumped(disk, range(1, 4), 2, keep=2)
    assert len(copied) == 2
    with disk.mounted():
        newest = FOLDER / max(name for name in files.names(FOLDER) if name.startswith("ckpt-"))
        assert [files.size_at(newest / f"00000{number}.bin") for number in (0, 1)] == [64, 64]
    _, wrong = judged(disk, lengths, Remains(), Judge(), most=400_000)
    assert not wrong, wrong


def test_dumps_continue_after_any_cut_and_survive_a_second_cut() -> None:
    disk, count = Disk(), 0
    lengths = dumped(disk, range(1, 4), 2, keep=1)
    left = [(dump, dict(content)) for dump, content in cuts(disk, lengths, Remains())]
    for dump, content in left[:: max(1, round(len(left) / (500 * SHARE)))]:
        again = Disk({n: bytearray(c) if isinstance(c, bytes) else dict(c) for n, c in content.items()})
        base = {n: bytes(c) if isinstance(c, bytearray) else dict(c) for n, c in again.content.items()}
        after = dumped(again, range(dump + 2, dump + 3), 2, keep=1)
        with again.mounted():
            assert Folder(FOLDER).load().state["number"] == dump + 2
            assert sorted(name[:5] for name in files.names(FOLDER)) == ["LOCK", "ckpt-"]
        judge = Judge()
        before = judge.outcome(base)
        for _, second in cuts(again, after, Remains(base)):
            count += 1
            assert judge.outcome(second) in (before, dump + 2)
    print(f"{count} disks after second cuts")


def renamed_in_place(rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Return a rename that reuses the earlier checkpoint's name."""

    def in_place(path: Path, to: Path) -> None:
        earlier = [name for name in files.names(to.parent) if name.startswith("ckpt-")]
        if path.name.startswith("tmp-") and earlier:
            to = to.with_name(earlier[0])
            rename(to, to.with_name("trash-" + "0" * 32))
        rename(path, to)

    return in_place


@pytest.mark.parametrize("synced", [lambda is_directory: is_directory, lambda is_directory: not is_directory])
def test_a_protocol_without_syncs_of_files_or_of_directories_is_caught(
    synced: Callable[[bool], bool],
) -> None:
    disk = Disk()
    lengths = dumped(disk, range(1, 3), 2, keep=1)
    _, found = judged(disk, lengths, Remains(is_synced=synced), Judge(), most=20_000)
    assert found[LOST] and not found[DAMAGED]


def test_a_protocol_that_uses_a_name_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "rename", renamed_in_place(files.rename))
    disk = Disk()
    lengths = dumped(disk, range(1, 3), 2, keep=1)
    assert judged(disk, lengths, Remains(), Judge())[1][LOST]


def test_disk_that_ignores_syncs_needs_checksums() -> None:
    """With checksums a damaged checkpoint is never loaded; without them it is."""
    disk = Disk()
    lengths = dumped(disk, range(1, 2), 2, keep=1)
    never = lambda is_directory: False  # noqa: E731
    _, with_them = judged(disk, lengths, Remains(is_synced=never), Judge(), most=20_000)
    _, without = judged(disk, lengths, Remains(is_synced=never), Judge(verify=False), most=20_000)
    assert with_them[LOST] and not with_them[DAMAGED]
    assert without[DAMAGED]


def test_a_file_is_the_older_one_or_the_new_one() -> None:
    path, disk = FOLDER / "records.h5", Disk()
    lengths = []
    with disk.mounted():
        files.make_lasting_dir(FOLDER)
        for number in range(1, 4):
            atomic_files.replace_file(
                path, lambda file, half=bytes([number]) * 64: [file.write(half) for _ in range(2)]
            )
            lengths.append(len(disk.journal))
    for dump, content in cuts(disk, lengths, Remains()):
        found = 0
        with Disk(content).mounted(), suppress(FileNotFoundError), files.reading(path) as file:
            read = bytearray(200)
            assert files.read_into(file, read, 0) == 128 and len(set(read[:128])) == 1
            found = read[0]
        assert found in (dump, dump + 1)
