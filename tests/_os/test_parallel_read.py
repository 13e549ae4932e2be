"""Files are read in parallel, and read errors name the file and the problem."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from gleanrl._os import fault_points
from gleanrl._os.parallel_read import Reading, read_files

memory = np.zeros(6, np.uint8)


def reading(path: Path, size: int, *checksums: int) -> Reading:
    return Reading(str(path), 0, size, np.array([[memory.ctypes.data, size]]), checksums)


def test_read_errors_name_file_and_cause(tmp_path: Path) -> None:
    good, path = tmp_path / "good", tmp_path / "ä"
    for file in (good, path):
        file.write_bytes(b"abcde")
    sums = [zlib.crc32(part) for part in (b"abc", b"de")]
    fine = reading(good, 5, *sums)
    assert read_files([fine, reading(path, 5, *sums)], 3, 2) is None
    assert bytes(memory) == b"abcde\0"
    for other, what in [
        (reading(path, 5, sums[0], 0), "bytes 3 to 5 don't match their checksum"),
        (reading(path, 5, 0, sums[1]), "bytes 0 to 3 don't match their checksum"),
        (reading(path, 6), "it became shorter: 5 bytes"),
        (reading(tmp_path, 5), "Invalid argument"),
    ]:
        damage = read_files([fine, other], 3, 1)
        assert damage == (other.path, what)
    part = reading(path, 4, zlib.crc32(b"bcd"), 0)._replace(offset=1)
    damage = read_files([part], 3, 1)
    assert damage == (part.path, "bytes 4 to 5 don't match their checksum")


@pytest.mark.parametrize("name", ["fs.open", "fs.read"])
def test_every_file_passes_the_fault_points(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with (
        fault_points.inject({name: fault_points.At(OSError("broken"), visit=2)}),
        pytest.raises(OSError, match="broken"),
    ):
        read_files([reading(path, 3)] * 2, 3, 1)
