"""Data files, written: what is new is written, what an earlier checkpoint has is linked."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.checkpoint import files as module
from gleanrl.checkpoint.earlier import Earlier
from gleanrl.checkpoint.files import Checksums, FileWriter
from gleanrl.checkpoint.manifest import BLOCK_BYTES, Manifest
from gleanrl.checkpoint.reading import FileReader
from gleanrl.checkpoint.values import LARGE_BYTES, Attachment, Encoder
from gleanrl.errors import CheckpointError
from gleanrl.system import faults
from gleanrl.system.faults import At
from tests.checkpoint.helpers import Plain, arrays, columns


@pytest.mark.parametrize("most", [64, 1_000, 1 << 26])
def test_arrays_come_back_from_files_of_a_bounded_size(tmp_path: Path, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", most)
    given, writer = arrays(0, 1, 63, 64, 5_000, 7, 2 * LARGE_BYTES + 5), FileWriter(tmp_path)
    places = [writer.store(data) for data in given]
    files = writer.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == [entry.name for entry in files]
    assert all(entry.size <= max(most, 5_000, BLOCK_BYTES) + 64 for entry in files)
    reader = FileReader(tmp_path, files, verify=True)
    for place, data in zip(places, given, strict=True):
        assert np.array_equal(reader.fetch(place, data.size), data)
    reader.finish(rows=True)


def test_attachments_have_files_of_their_own(tmp_path: Path) -> None:
    first, second, third, fourth = arrays(5, 9, 11, 3)
    given, writer = [first, second, third, fourth], FileWriter(tmp_path)
    places = [
        writer.store(first),
        writer.attach(Attachment("x.h5", second)),
        writer.attach(Attachment("x.h5", third)),
        writer.store(fourth),
    ]
    files = writer.write()
    assert [entry.name for entry in files] == ["000000.bin", "x.h5", "000002-x.h5"]
    assert (tmp_path / "x.h5").read_bytes() == second.tobytes()
    reader = FileReader(tmp_path, files, verify=True)
    for place, data in zip(places, given, strict=True):
        assert np.array_equal(reader.fetch(place, data.size), data)
    for name in ("../x.h5", "x.bin", ".h5", "a/b.h5", ""):
        with pytest.raises(CheckpointError, match="name of a file"):
            writer.attach(Attachment(name, first))


def write(folder: Path, source: Plain, array: Any, earlier: Earlier | None = None) -> Earlier:
    folder.mkdir()
    writer = FileWriter(folder, earlier)
    tree = Encoder(writer.store, None, writer.segments).tree([source])
    tree.append({"$tensor": writer.store(array)})
    assert not source.is_open
    manifest = Manifest("thing", tree, writer.write(), {})
    assert not source.is_open
    return Earlier(folder, manifest)


def links(folder: Path) -> list[int]:
    return [path.stat().st_nlink for path in sorted(folder.iterdir())]


def test_what_is_known_or_found_to_be_the_same_is_linked(tmp_path: Path) -> None:
    (large,) = arrays(3 * LARGE_BYTES // 2)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    assert links(tmp_path / "a") == [1] * 6 and sorted(source.taken) == [0, 1, 2]

    changed = columns(50)
    changed[0][0] = 99  # a lie: it's said not to have changed, and is believed
    changed[0][25] = 99
    large = large.copy()
    large[-1] ^= 1
    source = Plain(changed, 20, {source.identity: [True, False, True]})
    second = write(tmp_path / "b", source, large, first)
    assert links(tmp_path / "b") == [2, 1, 2, 2, 2, 1]
    assert source.taken == [1] and sorted(source.skipped) == [0, 2]
    assert second.manifest.files[0] == first.manifest.files[0]

    # Nothing is known of rows of another name: bytes are compared. The last segment has another length.
    source = Plain([column[:45] for column in changed], 20)
    write(tmp_path / "c", source, large, second)
    assert links(tmp_path / "c") == [1, 2, 1, 3, 3, 2]
    assert sorted(source.taken) == [0, 1, 2]
    # Rows that lie otherwise have nothing in common.
    write(tmp_path / "d", Plain(changed, 10), large[:10], second)
    assert set(links(tmp_path / "d")) == {1}


def test_without_links_everything_is_written(tmp_path: Path) -> None:
    (large,) = arrays(LARGE_BYTES)
    source = Plain(columns(50), 20)
    first = write(tmp_path / "a", source, large)
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    with faults.inject({"fs.link": At(OSError(errno.EMLINK, "no"), repeat=True)}):
        write(tmp_path / "b", again, large, first)
    (tmp_path / "a" / "000001.bin").unlink()
    (tmp_path / "a" / "000002.bin").write_bytes(b"short")
    again = Plain(columns(50), 20, {source.identity: [True] * 3})
    third = write(tmp_path / "c", again, large, first)
    assert links(tmp_path / "b") == [1] * 5 and links(tmp_path / "c") == [2, 1, 1, 2, 2]
    assert [file.checksums for file in third.manifest.files] == [f.checksums for f in first.manifest.files]
    with (
        faults.inject({"fs.link": OSError(errno.EIO, "broken")}),
        pytest.raises(OSError, match="broken"),
    ):
        write(tmp_path / "d", Plain(columns(50), 20), large, third)


def test_an_error_ends_all_threads_and_lets_nobody_wait(tmp_path: Path) -> None:
    source = Plain([column.repeat(1000, *[1] * (column.ndim - 1)) for column in columns(1_000)], 1_000)
    with faults.inject({"fs.sync": At(OSError(errno.ENOSPC, "full"), 5)}) as visits:
        with pytest.raises(OSError, match="full"):
            write(tmp_path / "a", source, np.zeros(1, np.uint8))
        assert visits.counts["fs.sync"] < 12 and not source.is_open


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5))
def test_checksums_dont_depend_on_the_pieces(sizes: list[int]) -> None:
    whole = np.zeros(sum(sizes), np.uint8)
    one, many = Checksums(), Checksums()
    one.add(whole)
    for size in sizes:
        many.add(whole[:size])
    assert one.end() == many.end()
