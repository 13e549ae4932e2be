"""A placement reports the spans and the cursor of a ring write."""

from __future__ import annotations

from gleanrl._arrays.results import Placement


def test_a_write_that_fits_has_one_span():
    placement = Placement(start=3, num_steps=4, skipped=0, evicted=0, length=7, capacity=10)
    assert placement.spans() == ((3, 7),)
    assert not placement.wraps
    assert placement.cursor == 7


def test_write_that_ends_with_the_ring_has_one_span():
    placement = Placement(start=6, num_steps=4, skipped=0, evicted=0, length=10, capacity=10)
    assert placement.spans() == ((6, 10),)
    assert not placement.wraps
    assert placement.cursor == 0


def test_a_write_past_the_end_has_two_spans():
    placement = Placement(start=8, num_steps=5, skipped=0, evicted=3, length=10, capacity=10)
    assert placement.wraps
    assert placement.spans() == ((8, 10), (0, 3))
    assert placement.cursor == 3
