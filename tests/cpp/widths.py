"""Run the kernels in registers of every width that the processor has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gleanrl._arrays.native import lanes, use_lanes

WIDTHS = (2, 8)


@contextmanager
def of_lanes(n: int) -> Iterator[bool]:
    """Use registers of this width if the processor has them; yield whether it has."""
    before = lanes()
    try:
        yield use_lanes(n)
    finally:
        assert use_lanes(before)


def from_every_width(work: Callable[[], bytes]) -> bytes:
    """Return the result of `work`, after a check that every width gives the same."""
    found = []
    for n in WIDTHS:
        with of_lanes(n) as there:
            if there:
                assert lanes() == n
                found.append(work())
    assert found and len(set(found)) == 1
    return found[0]
