"""The order of the worst records agrees with a plain sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.replay_buffers.writers import max_value as module
from gleanrl.data.replay_buffers.writers.max_value import Ranking


@pytest.fixture(autouse=True, params=[2, 1024])
def tail(request, monkeypatch):
    monkeypatch.setattr(module, "_TAIL", request.param)


def empty(capacity: int) -> Ranking:
    return Ranking(capacity, np.empty(0), np.empty(0, np.int64))


@pytest.mark.parametrize("short", [2, 1024])
@given(
    first=st.lists(st.integers(-3, 3), max_size=12),
    rounds=st.lists(st.lists(st.integers(-4, 4), min_size=1, max_size=6), max_size=12),
)
def test_the_worst_ones_come_in_order(short, first, rounds):
    module._TAIL = short
    order = Ranking(50, np.array(first, np.float64), np.arange(len(first)))
    stored = {slot: (rank, -slot) for slot, rank in enumerate(first)}  # the worst record is the smallest
    clock = len(first)
    for ranks in rounds:
        count = min(len(ranks), len(stored))
        expected = sorted(stored, key=stored.__getitem__)[:count]
        evicted = order.worst(count)
        assert evicted.tolist() == expected
        # The other ranks are appended to the stored ones.
        slots = np.array([*expected, *range(order.size, order.size + len(ranks) - count)], np.int64)
        if slots.max() >= 50:
            return
        order.put(slots, np.array(ranks, np.float64))
        for slot, rank in zip(slots.tolist(), ranks, strict=True):
            stored[slot] = (rank, -clock)
            clock += 1
        order.check_valid()


def test_infinite_ranks_have_a_place():
    order = empty(4)
    order.put(np.arange(4), np.array([np.inf, 0.0, -np.inf, 1.0]))
    assert order.worst(4).tolist() == [2, 1, 3, 0]
    order.check_valid()


def test_empty_put_changes_nothing():
    order = empty(4)
    order.put(np.empty(0, np.int64), np.empty(0))
    assert order.size == 0 and len(order.worst(0)) == 0


def test_check_valid_finds_errors():
    order = empty(4)
    order.put(np.arange(4), np.array([3.0, 0.0, 2.0, 1.0]))
    order.worst(3)
    order.ranks[1] = 10
    with pytest.raises(AssertionError):
        order.check_valid()
