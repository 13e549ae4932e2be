"""The kernels in registers of every width that the processor has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gleanrl._arrays.native import lanes, use_lanes

WIDTHS = (2, 8)


@contextmanager
def of_lanes(n: int) -> Iterator[bool]:
    """Whether the processor has such registers, which are used if so."""
    before = lanes()
    try:
        yield use_lanes(n)
    finally:
        assert use_lanes(before)


def from_every_width(work: Callable[[], bytes]) -> bytes:
    """What `work` returns, checked to be the same from every width there is."""
    found = []
    for n in WIDTHS:
        with of_lanes(n) as there:
            if there:
                assert lanes() == n
                found.append(work())
    assert found and len(set(found)) == 1
    return found[0]
