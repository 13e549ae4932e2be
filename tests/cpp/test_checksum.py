"""The checksum of bytes equals zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gleanrl._arrays.native import crc32

BYTES = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)


@pytest.mark.parametrize("before", [0, 1, 0xDEADBEEF, 2**32 - 1])
def test_every_length_and_alignment_equals_zlib(before: int) -> None:
    for count in (*range(300), 1000, 4096, 65_537):
        for start in (0, 1, 7):
            data = BYTES[start : start + count]
            assert crc32([data], before) == zlib.crc32(data, before)


@pytest.mark.parametrize("byte", [0, 255])
def test_repeated_bytes_equal_zlib(byte: int) -> None:
    data = bytes([byte]) * 1000
    assert crc32([data]) == zlib.crc32(data)


def test_pieces_count_as_one() -> None:
    cuts = [0, 0, 3, 100, 101, 20_000, 70_000]
    view = memoryview(BYTES)
    pieces = [view[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]
    assert crc32(pieces) == crc32(tuple(pieces)) == zlib.crc32(BYTES)
    assert crc32([]) == 0 and crc32([], 17) == 17


def test_values_without_contiguous_bytes_are_refused() -> None:
    with pytest.raises(ValueError):
        crc32([b"abc", BYTES[::2]])
    with pytest.raises(TypeError):
        crc32([b"abc", "abc"])
    with pytest.raises(TypeError):
        crc32([b"abc"], -1)
