"""The writer writes changed data and links data that an earlier checkpoint already holds."""

from __future__ import annotations

import errno
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._checkpoint import writer as module
from gleanrl._checkpoint.incremental import Earlier
from gleanrl._checkpoint.manifest import BLOCK_BYTES, Extents, Manifest
from gleanrl._checkpoint.reader import FileReader
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, ArrayPieces, Attachment, Encoder
from gleanrl._checkpoint.writer import FileWriter, checksums
from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl.errors import CheckpointError
from tests._checkpoint.helpers import Plain, arrays, arrays_from, columns, give_each_extent_a_file, open_in


@pytest.mark.parametrize("most", [64, 1_000, 1 << 26])
def test_arrays_come_back_from_files_of_a_bounded_size(tmp_path: Path, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", most)
    given = arrays(0, 1, 63, 64, 5_000, 7, 2 * LARGE_BYTES + 5)
    with FileWriter(tmp_path) as writer:
        places = [writer.store(data) for data in given]
        files, extents = writer.write()
        writer.sync()
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name for file in files]
    assert all(extent.size <= max(most, 5_000, BLOCK_BYTES) + 64 for extent in extents)
    assert all(file.size < most + max(extent.size for extent in extents) for file in files)
    reader = FileReader(tmp_path, files, extents, verify=True)
    found = arrays_from(reader, places, [data.size for data in given])
    assert all(map(np.array_equal, found, given))
    reader.finish(rows=True)


def test_attachments_have_separate_files(tmp_path: Path) -> None:
    first, second, third, fourth = arrays(5, 9, 11, 3)
    given = [first, second, third, fourth]
    with FileWriter(tmp_path) as writer:
        places = [
            writer.store(first),
            writer.attach(Attachment("x.h5", second)),
            writer.attach(Attachment("x.h5", lambda file: file.write(third))),
            writer.store(fourth),
        ]
        files, extents = writer.write()
        writer.sync()
    assert [file.name for file in files] == ["x.h5", "000001-x.h5", "000002.bin"]
    assert (tmp_path / "x.h5").read_bytes() == second.tobytes()
    reader = FileReader(tmp_path, files, extents, verify=True)
    found = arrays_from(reader, places, [data.size for data in given])
    assert all(map(np.array_equal, found, given))
    for name in ("../x.h5", "x.bin", ".h5", "a/b.h5", ""):
        with pytest.raises(CheckpointError, match="expected a name that matches"):
            writer.attach(Attachment(name, first))


class Written(NamedTuple):
    path: Path
    manifest: Manifest

    @property
    def earlier(self) -> Earlier:
        return Earlier.of(*self)


def write(folder: Path, source: Plain, array: Any, before: Written | None = None) -> Written:
    folder.mkdir()
    with FileWriter(folder, None if before is None else before.earlier) as writer:
        tree = Encoder(writer.store, None, writer.segments).tree([source])
        tree.append({"$tensor": writer.store(array)})
        assert not source.is_open
        manifest = Manifest("thing", tree, *writer.write(), {})
        assert not source.is_open
        writer.sync()
    written = Written(folder, manifest)
    assert writer.as_earlier(folder, "thing") == written.earlier
    return written


def sums(found: Written) -> list[tuple[int, ...]]:
    return [extent.checksums for extent in found.manifest.extents]


def links(found: Written) -> list[int]:
    """Return the link count of each extent's file. Check that each file has the size that the manifest says."""
    files = [(found.path / file.name).stat() for file in found.manifest.files]
    assert [file.st_size for file in files] == [file.size for file in found.manifest.files]
    assert len([*found.path.iterdir()]) == len(files)
    return [files[extent.file].st_nlink for extent in found.manifest.extents]


def content(found: Written) -> list[bytes]:
    data = [(found.path / file.name).read_bytes() for file in found.manifest.files]
    return [data[extent.file][extent.offset : extent.stop] for extent in found.manifest.extents]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    give_each_extent_a_file(monkeypatch)


@pytest.mark.usefixtures("alone")
def test_unchanged_segments_are_linked(tmp_path: Path) -> None:
    (large,) = arrays(3 * LARGE_BYTES // 2)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    assert links(first) == [1] * 6 and sorted(source.taken) == [0, 1, 2]

    changed = columns(50)
    changed[0][0] = 99  # the source wrongly reports this segment as unchanged, and the writer believes it
    changed[0][25] = 99
    large = large.copy()
    large[-1] ^= 1
    source = Plain(changed, 20, {source.identity: [True, False, True]})
    second = write(tmp_path / "b", source, large, first)
    assert links(second) == [2, 1, 2, 2, 2, 1]
    assert source.taken == [1] and sorted(source.skipped) == [0, 2]
    same = [content(first)[k] == content(second)[k] for k in range(6)]
    assert same == [True, False, True, True, True, False]

    # No changes are known for rows of another identity, so bytes are compared. The last segment has another length.
    source = Plain([column[:45] for column in changed], 20)
    third = write(tmp_path / "c", source, large, second)
    assert links(third) == [1, 2, 1, 3, 3, 2]
    assert sorted(source.taken) == [0, 1, 2]
    # Rows of another segment size share no data.
    assert set(links(write(tmp_path / "d", Plain(changed, 10), large[:10], second))) == {1}


@pytest.mark.usefixtures("alone")
def test_equal_data_with_forged_checksums_are_rewritten(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    first = write(tmp_path / "a", Plain(columns(50), 20), large)
    sevens = Extents.of(extent._replace(checksums=(7,)) for extent in first.manifest.extents)
    forged = replace(first.manifest, extents=sevens)
    second = write(tmp_path / "b", Plain(columns(50), 20), large, Written(first.path, forged))
    assert sums(second) == sums(first) and links(second) == [1] * 5


@pytest.mark.usefixtures("alone")
def test_without_links_everything_is_written(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    with fault_points.inject({"fs.link": At(OSError(errno.EMLINK, "no"), repeat=True)}) as visits:
        second = write(tmp_path / "b", again, large, first)
    # Data that is known to be unchanged isn't compared.
    assert visits.counts["fs.read"] == 2 * LARGE_BYTES // 2 >> 18
    names = [first.path / first.manifest.files[extent.file].name for extent in first.manifest.extents]
    names[1].unlink()
    names[2].write_bytes(b"short")
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    third = write(tmp_path / "c", again, large, first)
    assert links(second) == [1] * 5 and links(third) == [2, 1, 1, 2, 2]
    assert sums(third) == sums(first) and content(third) == content(second)
    with (
        fault_points.inject({"fs.link": OSError(errno.EIO, "broken")}),
        pytest.raises(OSError, match="broken"),
    ):
        write(tmp_path / "d", Plain(columns(50), 20), large, third)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "rows, same", [(50, 3), (45, 2), (40, 2), (41, 2), (60, 2), (61, 2), (20, 1), (19, 0), (90, 2)]
)
@pytest.mark.parametrize("known", [True, False])
def test_only_segments_of_equal_rows_are_linked(tmp_path: Path, rows: int, same: int, known: bool) -> None:
    small = np.zeros(1, np.uint8)
    before = Plain(columns(50), 20)
    first = write(tmp_path / "a", before, small)
    earlier = {before.identity: [True] * (-(-rows // 20))} if known else {}
    second = write(tmp_path / "b", Plain(columns(rows), 20, earlier), small, first)
    others = len(second.manifest.extents) - 1 - same
    assert links(second) == [2] * same + [1] * (others + 1)
    assert content(second)[:same] == content(first)[:same]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_segments_are_taken_in_their_order(tmp_path: Path, first: int) -> None:
    source = Plain(columns(50), 20, first=first)
    write(tmp_path / "a", source, np.zeros(1, np.uint8))
    assert source.taken == source.order() == [(first + n) % 3 for n in range(3)]
    source = Plain(columns(50), 20, first=first)
    assert all(map(torch.equal, source.tensors(), source.columns))
    assert source.taken == [(first + n) % 3 for n in range(3)]


def test_cached_index_equals_the_index_read_from_the_manifest(tmp_path: Path) -> None:
    """`as_earlier` equals the index read from the manifest: arrays, attachments and rows in nested containers."""
    large, other = arrays(3 * LARGE_BYTES // 2, LARGE_BYTES)
    attached = Attachment("x.h5", np.ones(9, np.uint8))
    pieces = ArrayPieces(torch.uint8, (LARGE_BYTES,), lambda start, stop: other[start:stop].reshape(-1, 1))
    before = None
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        state = {
            "a": torch.from_numpy(large),
            "b": {"c": attached, "d": [Plain(columns(50), 20), torch.arange(3), pieces]},
            "e": Plain(columns(30), 20),
            "f": torch.from_numpy(other),
        }
        with FileWriter(folder, before) as writer:
            tree = Encoder(writer.store, writer.attach, writer.segments, writer.pieces).tree(state)
            manifest = Manifest("thing", tree, *writer.write(), {})
            writer.sync()
        before = writer.as_earlier(folder, "thing")
        assert (
            before == Earlier.of(folder, manifest) == Earlier.of(folder, Manifest.decoded(manifest.encoded()))
        )
        assert len(before.tables) == 2 and [len(array) for array in before.arrays] == [3, 2, 2]
        assert np.array_equal(sorted(extent.size for extent in manifest.extents)[-7:], [LARGE_BYTES // 2] * 7)


def test_empty_attachment_is_written_and_read(tmp_path: Path) -> None:
    with FileWriter(tmp_path) as writer:
        assert writer.attach(Attachment("x.h5", np.empty(0, np.uint8))) == []
        files, extents = writer.write()
        writer.sync()
    assert [*files] == [("x.h5", 0)] and len(extents) == 0
    FileReader(tmp_path, files, extents, verify=True).finish(rows=True)


def test_few_files_hold_everything(tmp_path: Path) -> None:
    (large,) = arrays(3 * LARGE_BYTES // 2)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    assert [*first.manifest.files] == [("000000.bin", large.size + 1024)]
    stops = [0]
    for extent in sorted(first.manifest.extents):  # each byte belongs to an extent
        assert extent.offset == stops[-1]
        stops.append(extent.stop)
    assert stops[-1] == first.manifest.files[0].size


def test_garbage_is_dropped_once_it_is_large(tmp_path: Path) -> None:
    """A ring has 40 segments. One of them changes before each dump."""
    rows = torch.arange(40 * 64)
    before, identity, room, written = None, "", [], []
    for number in range(200):
        changed = number % 40
        rows[changed * 64 : changed * 64 + 64] += 10_000
        source = Plain([rows], 64, {identity: [k != changed for k in range(40)]})
        after = write(tmp_path / f"{number}", source, np.zeros(1, np.uint8), before)
        assert content(after)[:40] == [segment.numpy().tobytes() for segment in rows.split(64)]
        files = after.manifest.files
        assert {extent.file for extent in after.manifest.extents} == set(range(len(files))) and len(
            files
        ) <= 33
        new = [file.size for file in files if (after.path / file.name).stat().st_nlink == 1]
        room.append(sum(file.size for file in files) / (40 * 512))
        written.append(sum(new) / (40 * 512))
        before, identity = after, source.identity
    assert 1.4 < max(room) < 1.51
    # Most dumps write the changed segment alone; the average is below two segments. The small array takes an eighth of
    # one.
    assert sorted(written[1:])[170] < 0.029 and sum(written[1:]) / 199 < 0.045


@pytest.mark.usefixtures("alone")
def test_error_ends_all_threads_without_a_wait(tmp_path: Path) -> None:
    source = Plain([column.repeat(1000, *[1] * (column.ndim - 1)) for column in columns(1_000)], 1_000)
    with fault_points.inject({"fs.sync": At(OSError(errno.ENOSPC, "full"), 5)}) as visits:
        with pytest.raises(OSError, match="full"):
            write(tmp_path / "a", source, np.zeros(1, np.uint8))
        assert visits.counts["fs.sync"] < 200 and visits.counts["fs.create"] < 200 and not source.is_open
    assert not open_in(tmp_path / "a")


@pytest.mark.usefixtures("alone")
def test_files_are_synced_many_at_a_time_and_never_many_open(tmp_path: Path) -> None:
    source = Plain([column.repeat(300, *[1] * (column.ndim - 1)) for column in columns(1_000)], 1_000)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, open_in(tmp_path / "a"))

    with fault_points.inject({"fs.sync": At(look, repeat=True)}) as visits:
        earlier = write(tmp_path / "a", source, np.zeros(1, np.uint8))
    assert visits.counts["fs.sync"] == visits.counts["fs.create"] == len(earlier.manifest.files) == 301
    # One batch is synced while another one is written, and each thread may hold one more file.
    assert 64 <= most <= 2 * 64 + 2


def test_segment_written_during_the_dump_is_copied(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    plain, source = Plain(columns(50), 20), Plain(columns(50), 20)
    source.written_on = {0, 2}
    first = write(tmp_path / "a", plain, large)
    second = write(tmp_path / "b", source, large)
    assert sorted(source.taken) == [0, 1, 2] and first.manifest.files == second.manifest.files
    assert first.manifest.extents == second.manifest.extents and content(first) == content(second)
    # A segment that was written meanwhile is written again, even if its bytes look equal.
    source = Plain(columns(50), 20)
    source.look = lambda number: source.layout.pieces(number, source.columns)  # type: ignore[method-assign]
    source.written_on = {1}
    third = write(tmp_path / "c", source, large, second)
    assert links(third) == [2, 1, 2, 2, 2] and content(third) == content(first) and sums(third) == sums(first)


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5))
def test_checksums_dont_depend_on_the_pieces(sizes: list[int]) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint8)
    begins = np.cumsum([0, *sizes])
    pieces = [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
    blocks = range(0, whole.size, BLOCK_BYTES)
    assert checksums(pieces) == tuple(zlib.crc32(whole[begin : begin + BLOCK_BYTES]) for begin in blocks)
