"""The reader reads each byte of the data files once and finds every damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl._checkpoint.manifest import BLOCK_BYTES
from gleanrl._checkpoint.reader import FileReader, all_read, spread
from gleanrl._checkpoint.row_segments import SegmentLayout, Unread, rows_of
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, Decoder, Encoder
from gleanrl._checkpoint.writer import FileWriter
from gleanrl._os import fault_points
from gleanrl._os.parallel_read import Target
from gleanrl.errors import CorruptCheckpointError
from tests._checkpoint.helpers import Plain, arrays, arrays_from, columns, on_disk

NAME = "000000.bin"


def written(folder: Path) -> tuple[Any, Any, Any]:
    writer = FileWriter(folder)
    (data,) = arrays(LARGE_BYTES - 28)
    return writer.store(data), on_disk(writer), data


def read(folder: Path, place: Any, files: Any, data: Any, verify: bool = True) -> None:
    reader = FileReader(folder, *files, verify)
    (found,) = arrays_from(reader, [place], [data.size])
    reader.finish(rows=True)
    assert not verify or np.array_equal(found, data)


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("position", [0, 1, 70_000, LARGE_BYTES - 29, LARGE_BYTES - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, position: int) -> None:
    place, files, data = written(tmp_path)
    read(tmp_path, place, files, data)
    flip(tmp_path / NAME, position)
    with pytest.raises(CorruptCheckpointError, match=f"000000.bin: bytes 0 to {LARGE_BYTES}"):
        read(tmp_path, place, files, data)
    read(tmp_path, place, files, data, verify=False)


def test_a_block_is_named(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    (data,) = arrays(20 * BLOCK_BYTES)
    place = writer.store(data)
    files, extents = on_disk(writer)
    name = files[extents[3].file].name
    flip(tmp_path / name, 5)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: bytes 0 to {LARGE_BYTES} "):
        arrays_from(FileReader(tmp_path, files, extents, True), [place], [data.size])


def test_unrequested_bytes_are_verified_too(tmp_path: Path) -> None:
    _, files, _ = written(tmp_path)
    flip(tmp_path / NAME, 100)
    reader = FileReader(tmp_path, *files, True)
    with pytest.raises(CorruptCheckpointError, match="000000.bin"):
        reader.finish(rows=True)


def test_wrong_sizes_missing_files_and_links_are_found_without_checksums(tmp_path: Path) -> None:
    _, files, _ = written(tmp_path)
    path = tmp_path / NAME
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match="expected .* bytes, got"):
            FileReader(tmp_path, *files, verify=False)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match="000000.bin"):
        FileReader(tmp_path, *files, verify=False)
    (tmp_path / "elsewhere").write_bytes(content)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="000000.bin"):
        FileReader(tmp_path, *files, verify=False)


@pytest.mark.parametrize(
    "place",
    [
        None,
        [],
        [[0, 0]],
        [[0, 0, -1]],
        [[1, 0, 5]],
        [[0, LARGE_BYTES - 5, 1 << 20]],
        [[0, 0, 4], [0, 2, 4]],
        [[0, 0, 0]],
        [[0, True, 4]],
        [[0, 0, 4]],
    ],
)
def test_places_outside_the_files_are_refused(tmp_path: Path, place: Any) -> None:
    _, files, _ = written(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="an array"):
        arrays_from(FileReader(tmp_path, *files, verify=True), [place], [8])


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """A manifest can't make a small file fill the memory by referring to its bytes many times."""
    place, files, data = written(tmp_path)
    reader = FileReader(tmp_path, *files, verify=True)
    with fault_points.inject({}) as visits:
        arrays_from(reader, [place], [data.size])
        reader.finish(rows=True)
    assert visits.counts["fs.read"] == 1
    with pytest.raises(CorruptCheckpointError, match="another array"):
        arrays_from(reader, [place], [data.size])


def test_matching_columns_are_read_when_they_are_spread(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    large = torch.arange(LARGE_BYTES // 8 + 3).view(-1, 1)
    state = {"form": "any", "packed": {"columns": [large, torch.arange(3)], "beside": large + 1}}
    tree = Encoder(writer.store).tree([state, large + 2])
    files = on_disk(writer)

    def decoded() -> tuple[Any, Any, Any]:
        reader, copied = FileReader(tmp_path, *files, verify=True), json.loads(json.dumps(tree))
        reader.fill(copied, unread=True)
        (found, other) = Decoder(reader.fetch).value(copied)
        reader.finish(rows=False)
        return found["packed"]["columns"], found["packed"]["beside"], other

    left, beside, other = decoded()
    assert torch.equal(beside, large + 1) and torch.equal(other, large + 2)
    assert isinstance(left[0], Unread) and (left[0].shape, left[0].width) == (large.shape, 8)
    assert torch.equal(left[1], torch.arange(3)) and torch.equal(all_read(left)[0], large)
    made, half = torch.zeros_like(large), len(large) // 2
    runs = np.array([0, half]), np.array([len(large) - half, 0])
    spread([(left[0], [Target(rows_of(made), *runs)])])
    assert torch.equal(made, large.roll(-half, 0))
    flip(tmp_path / NAME, 9)
    left, _, _ = decoded()
    with pytest.raises(CorruptCheckpointError, match=NAME):
        all_read(left)
    tree[0]["packed"]["columns"].append(tree[0]["packed"]["columns"][0])
    with pytest.raises(CorruptCheckpointError, match="another array"):
        decoded()


def rows_in(folder: Path) -> tuple[FileWriter, SegmentLayout, list[Any], str, Any]:
    writer = FileWriter(folder)
    writer.store(np.ones(5, np.uint8))
    source = Plain(columns(50), 20, together=3)
    assert writer.segments(source) == 1
    return writer, source.layout, source.columns, source.identity, on_disk(writer)


@pytest.mark.parametrize("room", [50, 64])
def test_rows_are_read_once_to_their_destination(tmp_path: Path, room: int) -> None:
    _, layout, given, identity, files = rows_in(tmp_path)
    reader = FileReader(tmp_path, *files, verify=True)
    stored = reader.rows(1, layout, identity)
    reader.finish(rows=False)
    places = [column.new_zeros(room, *column.shape[1:]) for column in given]
    with fault_points.inject({}) as visits:
        stored.read(places)
    assert visits.counts["fs.open"] == layout.count
    for place, column in zip(places, given, strict=True):
        assert torch.equal(place[:50], column) and not place[50:].any()
    for mine, column in zip(stored.tensors(), given, strict=True):
        assert torch.equal(mine, column)


def test_rows_are_read_into_non_contiguous_columns(tmp_path: Path) -> None:
    _, layout, given, identity, files = rows_in(tmp_path)
    places = [torch.zeros(100, *column.shape[1:], dtype=column.dtype)[::2] for column in given]
    FileReader(tmp_path, *files, verify=True).rows(1, layout, identity).read(places)
    assert all(torch.equal(place, column) for place, column in zip(places, given, strict=True))


@pytest.mark.parametrize("position", [0, 21 * 8, -1])
def test_damaged_rows_are_found(tmp_path: Path, position: int) -> None:
    _, layout, _, identity, files = rows_in(tmp_path)
    second, name = files[1][2], files[0][1].name
    assert second.offset > 0
    flip(tmp_path / name, second.offset + position % second.size)
    bytes_there = f"{second.offset} to {second.offset + second.size}"
    reader = FileReader(tmp_path, *files, verify=True)
    stored = reader.rows(1, layout, identity)
    reader.finish(rows=False)
    for look in (stored.tensors, stored.check, lambda: reader.finish(rows=True)):
        with pytest.raises(CorruptCheckpointError, match=f"{name}: bytes {bytes_there} "):
            look()
    FileReader(tmp_path, *files, verify=False).rows(1, layout, identity).tensors()


def test_missing_rows_are_refused(tmp_path: Path) -> None:
    _, layout, _, identity, files = rows_in(tmp_path)
    reader = FileReader(tmp_path, *files, verify=True)
    for first in (0, 2, 4, 10**12):
        with pytest.raises(CorruptCheckpointError, match="rows in extents"):
            reader.rows(first, layout, identity)
    many = SegmentLayout(layout.fields, 2**62, 1)
    with pytest.raises(CorruptCheckpointError, match="rows in extents"):
        reader.rows(1, many, identity)
    reader.rows(1, layout, identity)
    with pytest.raises(CorruptCheckpointError, match="hold other data"):
        reader.rows(1, layout, identity)
    reader = FileReader(tmp_path, *files, verify=True)
    reader.fill({"$tensor": [[1, 0, 5]]})
    with pytest.raises(CorruptCheckpointError, match="hold other data"):
        reader.rows(1, layout, identity)
    with pytest.raises(CorruptCheckpointError, match="an array"):
        reader.fetch([[1, 0, 5]], 5)  # a place that `fill` was not called with
