"""The writer writes changed data and links files that an earlier checkpoint has with the same bytes."""

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
from gleanrl._checkpoint.manifest import BLOCK_BYTES, DataFile, Extent, Manifest
from gleanrl._checkpoint.reader import FileReader
from gleanrl._checkpoint.row_segments import MOST_FILES, SegmentLayout
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, ArrayPieces, Attachment, Encoder
from gleanrl._checkpoint.writer import Earlier, FileWriter, checksums
from gleanrl._os import fault_points
from gleanrl._os.fault_points import At
from gleanrl.errors import CheckpointError
from tests._checkpoint.helpers import Plain, arrays, arrays_from, columns, open_in


@pytest.mark.parametrize("most", [64, 1_000, 1 << 26])
def test_arrays_come_back_from_files_of_a_bounded_size(tmp_path: Path, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", most)
    given = arrays(0, 1, 63, 64, 5_000, 7, 2 * LARGE_BYTES + 5)
    with FileWriter(tmp_path) as writer:
        places = [writer.store(data) for data in given]
        files, extents = writer.write()
        writer.sync()
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name for file in files]
    assert [extent.file for extent in extents] == [*range(len(files))]
    assert [file.size for file in files] == [extent.size for extent in extents]
    assert len(files) == {64: 8, 1_000: 5, 1 << 26: 4}[most]
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
    assert [file.name for file in files] == ["000000.bin", "x.h5", "000002-x.h5"]
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
    return [
        data[extent.file][extent.offset : extent.offset + extent.size] for extent in found.manifest.extents
    ]


def test_unchanged_segments_are_linked(tmp_path: Path) -> None:
    (large,) = arrays(5 * LARGE_BYTES // 2)
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


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("position", [None, 0, 2, 3, 4])
def test_file_of_several_segments_is_linked_if_all_are_unchanged(
    tmp_path: Path, known: bool, position: int | None
) -> None:
    """Three files hold eight segments. Segments before the changed one are copied from the earlier file."""
    small = np.zeros(1, np.uint8)
    before = Plain(columns(150), 20, together=3)
    first = write(tmp_path / "a", before, small)
    assert [extent.file for extent in first.manifest.extents] == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    changed = columns(150)
    if position is not None:
        changed[0][position * 20] = 99
    after = Plain(changed, 20, {before.identity: [n != position for n in range(8)]} if known else {}, 0, 3)
    second = write(tmp_path / "b", after, small, first)
    rewritten = range(0) if position is None else range(position // 3 * 3, position // 3 * 3 + 3)
    assert links(second) == [1 if n in rewritten else 2 for n in range(8)] + [1]
    assert content(second) == content(write(tmp_path / "c", Plain(changed, 20, together=3), small))
    assert [zlib.crc32(data) for data in content(second)] == [one for (one,) in sums(second)]
    # With another number of segments in a file, only the last file is the same.
    other = Plain(changed, 20, {after.identity: [True] * 8} if known else {}, 0, 2)
    assert links(write(tmp_path / "d", other, small, second)) == [1] * 6 + [3] * 2 + [1]


def test_earlier_file_that_changes_after_its_comparison_is_an_error(tmp_path: Path) -> None:
    small, changed = np.zeros(1, np.uint8), columns(50)
    first = write(tmp_path / "a", Plain(columns(50), 20, together=3), small)
    changed[0][-1] = 99

    def damage() -> None:
        with open(first.path / "000000.bin", "r+b") as file:
            file.write(b"xxxx")

    with (
        fault_points.inject({"fs.create": At(damage, 2)}),
        pytest.raises(OSError, match=r"changed during a dump: .*a/000000.bin"),
    ):
        write(tmp_path / "b", Plain(changed, 20, together=3), small, first)
    assert not open_in(tmp_path / "b")


def test_equal_data_with_forged_checksums_are_rewritten(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    first = write(tmp_path / "a", Plain(columns(50), 20), large)
    sevens = tuple(extent._replace(checksums=(7,)) for extent in first.manifest.extents)
    forged = replace(first.manifest, extents=sevens)
    second = write(tmp_path / "b", Plain(columns(50), 20), large, Written(first.path, forged))
    assert sums(second) == sums(first) and links(second) == [1] * 4


def test_without_links_everything_is_written(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    with fault_points.inject({"fs.link": At(OSError(errno.EMLINK, "no"), repeat=True)}) as visits:
        second = write(tmp_path / "b", again, large, first)
    # Rows that are known to be unchanged aren't compared. The compared array is copied from the earlier file.
    assert visits.counts["fs.read"] == (LARGE_BYTES >> 18) + 1 and again.taken == [0, 1, 2]
    names = [first.path / first.manifest.files[extent.file].name for extent in first.manifest.extents]
    names[1].unlink()
    names[2].write_bytes(b"short")
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    third = write(tmp_path / "c", again, large, first)
    assert links(second) == [1] * 4 and links(third) == [2, 1, 1, 2]
    assert sums(third) == sums(first) and content(third) == content(second)
    with (
        fault_points.inject({"fs.link": OSError(errno.EIO, "broken")}),
        pytest.raises(OSError, match="broken"),
    ):
        write(tmp_path / "d", Plain(columns(50), 20), large, third)


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


def test_rows_and_large_arrays_are_found_in_nested_containers(tmp_path: Path) -> None:
    """Attachments and small arrays are never linked."""
    large, other = arrays(3 * LARGE_BYTES, LARGE_BYTES)
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
        assert len(before.rows) == 2 and [len(array) for array in before.arrays] == [3, 1, 1]
        assert links(Written(folder, manifest)) == [
            *[number + 1] * 3,
            1,
            *[number + 1] * 3,
            1,
            *[number + 1] * 4,
        ]


def test_large_array_is_cut_into_a_bounded_number_of_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 64)
    monkeypatch.setattr(module, "BLOCK_BYTES", 96)
    sizes = (64, 1_000, 64 * MOST_FILES, 64 * MOST_FILES + 1, 300 * MOST_FILES + 5)
    given = arrays(*sizes)
    spans: list[int] = []

    def make(start: int, stop: int) -> Any:
        spans.append(stop - start)
        return given[-1][start:stop].reshape(-1, 1)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with FileWriter(tmp_path / name) as writer:
            places = [writer.store(data) for data in given]
            places.append(writer.pieces(ArrayPieces(torch.uint8, (sizes[-1],), make)))
            files, extents = writer.write()
            writer.sync()
        counts = [len({extents[number].file for number, _, _ in place}) for place in places]
        assert counts == [1, 16, MOST_FILES, 127, 101, 101] and max(spans) == 96
        assert max(extent.size for extent in extents) == 96 and max(file.size for file in files) == 4 * 96
        data = [(tmp_path / name / file.name).read_bytes() for file in files]
        for place, array in zip(places, [*given, given[-1]], strict=True):
            parts = [data[e.file][e.offset : e.offset + e.size] for e in (extents[n] for n, _, _ in place)]
            assert b"".join(parts) == array.tobytes()


LAYOUT = Plain(columns(50), 20).layout
SIZES = [384, 384, 256, LARGE_BYTES // 2, LARGE_BYTES // 2]
FILES = (DataFile("000000.bin", 1024), DataFile("000001.bin", 2 * LARGE_BYTES))
EXTENTS = (
    *(Extent(0, sum(SIZES[:n]), SIZES[n], (0,)) for n in range(3)),
    *(Extent(1, sum(SIZES[3:n]), SIZES[n], (0,)) for n in range(3, 5)),
)
ROWS = {
    "$rows": 0,
    "id": "0" * 32,
    "rows": 50,
    "step": 20,
    "fields": [["int64", []], ["bfloat16", [3]], ["float32", [0]], ["bool", []]],
}
ARRAY = {"$tensor": [[3, 0, LARGE_BYTES // 2], [4, 0, LARGE_BYTES // 2]], "dtype": "uint8", "shape": []}
SMALL = {"$tensor": [[3, 0, 5]], "dtype": "uint8", "shape": [5]}


def earlier(*trees: Any) -> Earlier:
    return Earlier.of(Path("nowhere"), Manifest("thing", {"a": [*trees]}, FILES, EXTENTS))


def test_rows_and_large_arrays_are_found_in_order() -> None:
    found = earlier(SMALL, ROWS, {"b": ARRAY})
    rows = found.rows_like(LAYOUT, 0)
    assert rows is not None and rows.identity == "0" * 32 and rows.extents == EXTENTS[:3]
    assert rows.layout == LAYOUT
    assert [tuple(array) for array in found.arrays] == [EXTENTS[3:]]
    assert found.rows_like(LAYOUT, 1) is None
    assert found.rows_like(SegmentLayout(LAYOUT.fields, 50, 10), 0) is None
    assert found.rows_like(SegmentLayout(LAYOUT.fields[:1], 50, 20), 0) is None
    assert found.rows_like(SegmentLayout(LAYOUT.fields, 70, 20), 0) is not None


def test_only_extents_that_fill_a_file_are_linked() -> None:
    """In checkpoints of earlier releases, a file may hold extents of several arrays, and bytes of none."""
    found = earlier()
    assert found.file_of(EXTENTS[:3], SIZES[:3]) == "nowhere/000000.bin"
    for extents, sizes in (
        (EXTENTS[:2], SIZES[:2]),
        (EXTENTS[1:3], SIZES[1:3]),
        (EXTENTS[:3], [384, 256, 384]),
        (EXTENTS[:3], SIZES[:2]),
        (EXTENTS[:4], SIZES[:4]),
        (EXTENTS[2::-1], SIZES[2::-1]),
        (EXTENTS[3:], SIZES[3:]),
    ):
        assert not found.file_of(extents, sizes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"$rows": "x"},
        {"id": 5},
        {"rows": -1},
        {"step": 0},
        {"fields": [["object", []]]},
        {"fields": [5]},
    ],
)
def test_invalid_rows_provide_nothing_to_link(wrong: Any) -> None:
    assert earlier({**ROWS, **wrong}).rows_like(LAYOUT, 0) is None


@pytest.mark.parametrize("wrong", [{"$rows": 3}, {"$rows": 2**62}, {"rows": 2**62}])
def test_rows_without_extents_fill_no_file(wrong: Any) -> None:
    found = earlier({**ROWS, **wrong})
    rows = found.rows_like(LAYOUT, 0)
    assert rows is not None and not found.file_of(rows.extents[:3], SIZES[:3]) or "rows" in wrong


@pytest.mark.parametrize(
    "pieces", [None, [[]], [[0, 0, "x"]], [[9, 0, LARGE_BYTES]], [["3", 0, LARGE_BYTES]]]
)
def test_invalid_places_provide_no_array(pieces: Any) -> None:
    assert earlier({"$tensor": pieces}).arrays == []


def test_empty_attachment_is_written_and_read(tmp_path: Path) -> None:
    with FileWriter(tmp_path) as writer:
        assert writer.attach(Attachment("x.h5", np.empty(0, np.uint8))) == []
        files, extents = writer.write()
        writer.sync()
    assert [*files] == [("x.h5", 0)] and len(extents) == 0
    FileReader(tmp_path, files, extents, verify=True).finish(rows=True)


def test_error_ends_all_threads_without_a_wait(tmp_path: Path) -> None:
    source = Plain([column.repeat(1000, *[1] * (column.ndim - 1)) for column in columns(1_000)], 1_000)
    with fault_points.inject({"fs.sync": At(OSError(errno.ENOSPC, "full"), 5)}) as visits:
        with pytest.raises(OSError, match="full"):
            write(tmp_path / "a", source, np.zeros(1, np.uint8))
        assert visits.counts["fs.sync"] < 200 and visits.counts["fs.create"] < 200 and not source.is_open
    assert not open_in(tmp_path / "a")


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
    assert links(third) == [2, 1, 2, 2] and content(third) == content(first) and sums(third) == sums(first)


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5))
def test_checksums_dont_depend_on_the_pieces(sizes: list[int]) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint8)
    begins = np.cumsum([0, *sizes])
    pieces = [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
    blocks = range(0, whole.size, BLOCK_BYTES)
    assert checksums(pieces) == tuple(zlib.crc32(whole[begin : begin + BLOCK_BYTES]) for begin in blocks)
