"""Data files: arrays there and back, and every damage found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.checkpoint import files as module
from gleanrl.checkpoint.files import Checksums, FileReader, FileWriter
from gleanrl.checkpoint.manifest import BLOCK_BYTES
from gleanrl.checkpoint.values import Attachment
from gleanrl.errors import CheckpointError, CorruptCheckpointError


def arrays(*sizes: int) -> list[Any]:
    return [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("most", [64, 1_000, 1 << 26])
def test_arrays_come_back_from_files_of_a_bounded_size(tmp_path: Path, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", most)
    given, writer = arrays(0, 1, 63, 64, 5_000, 7), FileWriter(tmp_path)
    places = [writer.store(data) for data in given]
    files = writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [entry.name for entry in files]
    assert all(entry.size <= most + 64 for entry in files)
    reader = FileReader(tmp_path, files, verify=True)
    assert all(
        np.array_equal(reader.fetch(place, data.size), data)
        for place, data in zip(places, given, strict=True)
    )


def test_attachments_have_files_of_their_own(tmp_path: Path) -> None:
    first, second, third, fourth = arrays(5, 9, 11, 3)
    given, writer = [first, second, third, fourth], FileWriter(tmp_path)
    places = [
        writer.store(first),
        writer.attach(Attachment("x.h5", second)),
        writer.attach(Attachment("x.h5", third)),
        writer.store(fourth),
    ]
    files = writer.close()
    assert [entry.name for entry in files] == ["000000.bin", "x.h5", "000002-x.h5", "000003.bin"]
    assert (tmp_path / "x.h5").read_bytes() == second.tobytes()
    reader = FileReader(tmp_path, files, verify=True)
    for place, data in zip(places, given, strict=True):
        assert np.array_equal(reader.fetch(place, data.size), data)
    for name in ("../x.h5", "x.bin", ".h5", "a/b.h5", ""):
        with pytest.raises(CheckpointError, match="name of a file"):
            writer.attach(Attachment(name, first))


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5))
def test_checksums_dont_depend_on_the_pieces(sizes: list[int]) -> None:
    whole = np.zeros(sum(sizes), np.uint8)
    one, many = Checksums(), Checksums()
    one.add(whole)
    for size in sizes:
        many.add(whole[:size])
    assert one.end() == many.end()


def written(folder: Path) -> tuple[Any, Any, Any]:
    writer = FileWriter(folder)
    (data,) = arrays(BLOCK_BYTES + 100)
    return writer.store(data), writer.close(), data


@pytest.mark.parametrize("position", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 99])
def test_a_flipped_bit_is_found_where_it_is(tmp_path: Path, position: int) -> None:
    _, files, _ = written(tmp_path)
    path = tmp_path / files[0].name
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    begin = position // BLOCK_BYTES * BLOCK_BYTES
    with pytest.raises(CorruptCheckpointError, match=f"000000.bin: bytes {begin} to"):
        FileReader(tmp_path, files, verify=True)
    FileReader(tmp_path, files, verify=False)


def test_other_sizes_missing_files_and_links_are_found_without_checksums(tmp_path: Path) -> None:
    _, files, _ = written(tmp_path)
    path = tmp_path / files[0].name
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match="bytes instead of"):
            FileReader(tmp_path, files, verify=False)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match="000000.bin"):
        FileReader(tmp_path, files, verify=False)
    (tmp_path / "elsewhere").write_bytes(content)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="000000.bin"):
        FileReader(tmp_path, files, verify=False)


@pytest.mark.parametrize(
    "place",
    [
        None,
        [],
        [[0, 0]],
        [[0, 0, -1]],
        [[1, 0, 5]],
        [[0, BLOCK_BYTES, 1 << 20]],
        [[0, 0, 4], [0, 2, 4]],
        [[0, 0, 0]],
        [[0, True, 4]],
        [[0, 0, 4]],
    ],
)
def test_places_that_arent_there(tmp_path: Path, place: Any) -> None:
    _, files, _ = written(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="an array"):
        FileReader(tmp_path, files, verify=True).fetch(place, 8)


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """A small file can't be said to hold an array that fills the memory."""
    place, files, data = written(tmp_path)
    reader = FileReader(tmp_path, files, verify=True)
    reader.fetch(place, data.size)
    with pytest.raises(CorruptCheckpointError, match="where another one stands"):
        reader.fetch(place, data.size)
