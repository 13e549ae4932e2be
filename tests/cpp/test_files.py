"""Files that are read by the core: each byte at its place, each damage found, whatever the pieces and the threads."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.native import read_files

STEP = 256 << 10  # what the core reads at once
BLOCK = STEP + 1_000


def content_of(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def checksums(content: bytes) -> list[int]:
    return [zlib.crc32(content[begin : begin + BLOCK]) for begin in range(0, len(content), BLOCK)]


def file_of(folder: Path, number: int, content: bytes) -> bytes:
    path = folder / f"{number}.bin"
    path.write_bytes(content)
    return os.fsencode(path)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("verify", [False, True])
def test_pieces_of_any_size_get_their_bytes(tmp_path: Path, verify: bool, threads: int) -> None:
    random = np.random.default_rng(threads)
    files, expected = [], []
    for number, size in enumerate((0, 1, 5_000, STEP, BLOCK, 3 * BLOCK + 77, 20 * STEP)):
        content = content_of(number, size)
        count = 200 if size > 5_000 else 3
        cuts = [0, *sorted(random.integers(0, size + 1, count).tolist()), size]
        pieces: list[Any] = []
        for position, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if position % 3 == 0:
                pieces.append(end - begin)  # nobody wants it
            else:
                pieces.append(memoryview(bytearray(end - begin)))
                expected.append((pieces[-1], content[begin:end]))
        files.append((file_of(tmp_path, number, content), pieces, checksums(content) if verify else ()))
    assert read_files(files, BLOCK, threads) is None
    assert all(bytes(piece) == content for piece, content in expected)


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 50])
def test_the_block_that_was_damaged_is_named(tmp_path: Path, position: int) -> None:
    content = bytearray(content_of(3, 2 * BLOCK + 100))
    sums = checksums(bytes(content))
    content[position] ^= 4
    good, bad = content_of(4, 100), bytes(content)
    for pieces in ([len(bad)], [memoryview(bytearray(7)), 20, memoryview(bytearray(len(bad) - 27))]):
        files = [
            (file_of(tmp_path, 0, good), [memoryview(bytearray(100))], checksums(good)),
            (file_of(tmp_path, 1, bad), pieces, sums),
        ]
        assert read_files(files, BLOCK, 2) == (1, 2, position // BLOCK * BLOCK)
        assert read_files([(path, pieces, ()) for path, pieces, _ in files], BLOCK, 2) is None
    assert read_files([(files[1][0], [len(bad)], sums[:1])], BLOCK, 1) == (
        0,
        2,
        min(position // BLOCK, 1) * BLOCK,
    )


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0, bytes(STEP + 10))
    assert read_files([(path, [memoryview(bytearray(STEP)), 11], ())], BLOCK, 1) == (0, 1, STEP + 10)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0, b"abc")
    (tmp_path / "link").symlink_to(os.fsdecode(path))
    os.mkfifo(tmp_path / "pipe")
    for name, code in {
        str(tmp_path / "link"): errno.ELOOP,
        str(tmp_path / "pipe"): errno.EINVAL,
        str(tmp_path): errno.EINVAL,
        "/dev/zero": errno.EINVAL,
        str(tmp_path / "none"): errno.ENOENT,
    }.items():
        piece = memoryview(bytearray(3))
        assert read_files([(path, [3], ()), (os.fsencode(name), [piece], ())], BLOCK, 1) == (1, 0, code)
        assert bytes(piece) == bytes(3)


def test_the_first_damage_is_told(tmp_path: Path) -> None:
    missing = [(os.fsencode(tmp_path / str(number)), [1], ()) for number in range(50)]
    for threads in (1, 4):
        found = read_files(missing, BLOCK, threads)
        assert found is not None and found[0] < threads and found[1:] == (0, errno.ENOENT)
    assert read_files([], BLOCK, 2) is None


def test_other_arguments(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0, b"abc")
    for file in ((path, [-1], ()), (path, [b"abc"], ()), ("text", [3], ()), (path, 3, ()), (path, [3])):
        with pytest.raises((TypeError, ValueError, BufferError, IndexError)):
            read_files([file], BLOCK, 1)
    with pytest.raises(ValueError):
        read_files([(path, [3], ())], 0, 1)
    assert read_files([(path, [3], ())], 1, -5) is None
