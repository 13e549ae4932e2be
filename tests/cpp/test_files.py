"""The core reads each byte of a file to its place and finds each damage, for any pieces and number of threads."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl._arrays.native import read_files, spread_rows

STEP = 256 << 10  # bytes that the core reads at once
BLOCK = STEP + 1_000


def content_of(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def checksums(content: bytes) -> list[int]:
    return [zlib.crc32(content[begin : begin + BLOCK]) for begin in range(0, len(content), BLOCK)]


def file_of(folder: Path, number: int, content: bytes) -> bytes:
    path = folder / f"{number}.bin"
    path.write_bytes(content)
    return os.fsencode(path)


def read(files: list[tuple[bytes, list[Any], Any]], block: int, threads: int) -> tuple[int, int, int] | None:
    """Read files into memory. An integer in place of memory skips that many bytes."""
    tables = [
        np.array(
            [(0, p) if isinstance(p, int) else (p.ctypes.data, p.size) for p in pieces], np.int64
        ).reshape(-1, 2)
        for _, pieces, _ in files
    ]
    return read_files(
        [(f[0], 0, table, f[2]) for f, table in zip(files, tables, strict=True)], block, threads
    )


def room(size: int) -> Any:
    return np.zeros(size, np.uint8)


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
                pieces.append(end - begin)  # these bytes are skipped
            else:
                pieces.append(room(end - begin))
                expected.append((pieces[-1], content[begin:end]))
        files.append((file_of(tmp_path, number, content), pieces, checksums(content) if verify else ()))
    assert read(files, BLOCK, threads) is None
    assert all(bytes(piece) == content for piece, content in expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_a_file_are_read_from_where_they_begin(tmp_path: Path, threads: int) -> None:
    content = content_of(7, 3 * BLOCK + 500)
    path = file_of(tmp_path, 0, content)
    spans = [(5, BLOCK + 70), (0, 5), (BLOCK + 75, 2 * BLOCK), (3 * BLOCK + 75, 0), (3 * BLOCK + 100, 400)]
    parts = [content[offset : offset + size] for offset, size in spans]
    memory = [room(len(part)) for part in parts]

    def files(of: list[bytes]) -> list[Any]:
        return [
            (path, offset, np.array([[place.ctypes.data, place.size]]), checksums(part))
            for (offset, _), place, part in zip(spans, memory, of, strict=True)
        ]

    assert read_files(files(parts), BLOCK, threads) is None
    assert [bytes(place) for place in memory] == parts
    zero = np.zeros(1, np.int64)
    for (offset, size), part, width in zip(spans, parts, (1, 3, 4, 1, 16), strict=True):
        place = room(size)
        target = (place.ctypes.data, 1, zero.ctypes.data, zero.ctypes.data, 1)
        one = (path, offset, (width, 0, size, [target]), checksums(part))
        assert read_files([one], BLOCK, threads) is None and bytes(place) == part
    # Damage is reported by its position in the file.
    wrong = [*parts]
    wrong[2] = wrong[2][: BLOCK + 1] + bytes([wrong[2][BLOCK + 1] ^ 1]) + wrong[2][BLOCK + 2 :]
    assert read_files(files(wrong), BLOCK, threads) == (2, 2, BLOCK + 75 + BLOCK)
    os.truncate(path, 3 * BLOCK + 300)
    assert read_files(files(parts), BLOCK, threads) == (4, 1, 3 * BLOCK + 300)


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 50])
def test_the_block_that_was_damaged_is_named(tmp_path: Path, position: int) -> None:
    content = bytearray(content_of(3, 2 * BLOCK + 100))
    sums = checksums(bytes(content))
    content[position] ^= 4
    good, bad = content_of(4, 100), bytes(content)
    for pieces in ([len(bad)], [room(7), 20, room(len(bad) - 27)]):
        files = [
            (file_of(tmp_path, 0, good), [room(100)], checksums(good)),
            (file_of(tmp_path, 1, bad), pieces, sums),
        ]
        assert read(files, BLOCK, 2) == (1, 2, position // BLOCK * BLOCK)
        assert read([(path, pieces, ()) for path, pieces, _ in files], BLOCK, 2) is None
    assert read([(files[1][0], [len(bad)], sums[:1])], BLOCK, 1) == (
        0,
        2,
        min(position // BLOCK, 1) * BLOCK,
    )


def test_short_file_is_reported(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0, bytes(STEP + 10))
    assert read([(path, [room(STEP), 11], ())], BLOCK, 1) == (0, 1, STEP + 10)


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
        piece = room(3)
        assert read([(path, [3], ()), (os.fsencode(name), [piece], ())], BLOCK, 1) == (1, 0, code)
        assert bytes(piece) == bytes(3)


def test_first_damage_is_reported(tmp_path: Path) -> None:
    missing = [(os.fsencode(tmp_path / str(number)), [1], ()) for number in range(50)]
    for threads in (1, 4):
        assert read(missing, BLOCK, threads) == (0, 0, errno.ENOENT)
    assert read([], BLOCK, 2) is None


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    path, table = file_of(tmp_path, 0, b"abc"), np.array([0, 3, 0, -1], np.int64)
    place, uneven = table.ctypes.data, table.view(np.uint8)[1:17]
    for path_, *rest in (
        *(
            (path, table, ()),
            (path, table[:3], ()),
            (path, table[::2], ()),
            (path, table[:2].view(np.uint8), ()),
        ),
        *((path, uneven, ()), (path, np.frombuffer(uneven, np.int64), ()), (path, (place, 1), ())),
        *(
            (path, [], ()),
            (path + b"\0", table[:2], ()),
            (3, table[:2], ()),
            (path, 3, ()),
            (path, table[:2]),
        ),
        *((path, (0, 0, 3, []), ()), (path, (1, -1, 3, []), ()), (path, (1, 0, -3, []), ())),
        *((path, (1, 0, 3, [(place, 0, place, place, 1)]), ()), (path, (1, 0, 3, [(place, 1)]), ())),
        (path, (1, 0, 3, [(place, 1, place + 8, place, 1)]), ()),
    ):
        with pytest.raises((TypeError, ValueError, IndexError, RuntimeError, BufferError)):
            read_files([(path_, 0, *rest)], BLOCK, 1)  # type: ignore[list-item]
    for offset in (-1, 2**63, None, 1.0):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            read_files([(path, offset, table[:2], ())], BLOCK, 1)  # type: ignore[list-item]
    with pytest.raises(ValueError):
        read([(path, [3], ())], 0, 1)
    assert read([(path, [3], ())], 1, -5) is None


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("width, count", [(1, 2_000), (24, 60_000), (28_000, 60)])
def test_rows_go_to_all_targets_from_files_and_from_memory(
    tmp_path: Path, width: int, count: int, stride: int, threads: int
) -> None:
    random = np.random.default_rng(width)
    rows = random.integers(0, 256, (count, width), np.uint8)
    cuts = [0, *sorted(random.integers(0, rows.size, 3).tolist()), rows.size]  # files end within rows
    parts = [rows.reshape(-1)[begin:end].tobytes() for begin, end in zip(cuts, cuts[1:], strict=False)]
    paths = [file_of(tmp_path, number, part) for number, part in enumerate(parts)]
    for runs in (1, 2, count // 7):
        starts = np.unique(np.append(0, random.integers(0, count, runs - 1)))
        lengths = np.diff(np.append(starts, count))
        order = random.permutation(len(starts))
        to = np.empty(len(starts), np.int64)
        to[order] = (np.cumsum(lengths[order]) - lengths[order]) * stride  # not adjacent, and in any order
        to[1::4] = -1
        expected = np.zeros((count * stride, width), np.uint8)
        for begin, length, place in zip(starts, lengths, to, strict=True):
            if place >= 0:
                expected[place : place + length * stride : stride] = rows[begin : begin + length]
        made = [np.zeros_like(expected) for _ in range(4)]

        runs_of = starts.ctypes.data, to.ctypes.data, len(starts)
        one, other = ([(m.ctypes.data, stride, *runs_of) for m in made[k : k + 2]] for k in (0, 2))
        files = [
            (path, 0, (width, begin, len(part), one), checksums(part))
            for path, part, begin in zip(paths, parts, cuts, strict=False)
        ]
        assert read_files(files, BLOCK, threads) is None
        spread_rows([(rows.ctypes.data, (width, 0, rows.size, [target])) for target in other], threads)
        assert all(np.array_equal(memory, expected) for memory in made)
        with open(paths[-1], "r+b") as file:
            file.write(bytes([parts[-1][0] ^ 1]))
        assert read_files(files, BLOCK, threads) == (3, 2, 0)
        file_of(tmp_path, 3, parts[3])


def test_invalid_rows_are_refused() -> None:
    zero = np.zeros(1, np.int64)
    target = (zero.ctypes.data, 1, zero.ctypes.data, zero.ctypes.data, 1)
    spread_rows([], 2)
    spread_rows([(zero.ctypes.data, (8, 0, 0, [target]))], 2)
    for columns in (
        [(zero.ctypes.data,)],
        [(zero.ctypes.data, (0, 0, 8, [target]))],
        [(zero.ctypes.data, (8, 0, -8, [target]))],
        [(zero.ctypes.data, (8, 0, 8, [target[:4]]))],
        [(0, (8, 0, 8, [target]))],
    ):
        with pytest.raises(ValueError):
            spread_rows(columns, 2)  # type: ignore[arg-type]
