"""Mappings are zeroed and aligned, and an allocation that fails raises a `MemoryError` with its size."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from gleanrl._os import hugepages


@pytest.mark.parametrize("num_bytes", [1, 1000, (4 << 20) - 1, 4 << 20, (6 << 20) + 5])
def test_memory_is_zeroed_and_aligned(num_bytes: int) -> None:
    memory = hugepages.zeroed(num_bytes)
    assert memory.shape == (num_bytes,) and not memory.any() and memory.flags.writeable
    assert memory.ctypes.data % hugepages.ALIGNMENT == 0


def test_mappings_are_released_separately() -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    one, two = hugepages.mapped(64 << 20), hugepages.mapped(64 << 20)
    two[-1] = 1
    assert not one[:10].any() and one.flags.writeable
    before, part = size(), one[5:]
    del one
    assert size() == before
    del part
    assert size() == before - (64 << 20) and two[-1] == 1  # malloc would keep the memory until `two` is freed
    with pytest.raises(MemoryError, match="refuses"):
        hugepages.mapped(1 << 60)
    with pytest.raises(MemoryError, match="refuses"):
        hugepages.zeroed(1 << 60)
