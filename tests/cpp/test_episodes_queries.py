"""The episode table answers look-ups and lists, and expands slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._arrays.native import Episodes
from tests.cpp.episodes_model import Table, address


def random_table(seed: int) -> Table:
    """Return a table of random size after a history of writes."""
    random = np.random.default_rng(seed)
    table = Table.empty(int(random.integers(1, 30)), int(random.integers(1, 4)))
    for _ in range(random.integers(0, 8)):
        count = int(random.integers(0, table.core.capacity + 1))
        shape = (count, len(table.steps))
        ids = [np.cumsum(random.random(shape) < 0.05, axis=0)] if random.random() < 0.7 else []
        table.write(count, random.random(shape) < random.choice([0.0, 0.1, 0.6]), ids)
    return table


seeds = st.integers(0, 10_000)


def locate(table: Table, slots) -> list[tuple[int, int]]:
    slots = np.ascontiguousarray(slots, dtype=np.int64)
    before, after = np.full(len(slots), -7), np.full(len(slots), -7)
    table.core.locate(address(slots), len(slots), address(before), address(after))
    return list(zip(before.tolist(), after.tolist(), strict=True))


@given(seeds)
def test_every_stored_slot_is_located(seed):
    table = random_table(seed)
    expected = {
        table.slot(run.stream, time): (time - run.start, run.end - time)
        for run in table.runs()
        for time in range(run.start, run.end)
    }
    slots = list(expected)
    assert len(slots) == table.stored * len(table.steps)
    assert locate(table, slots) == [expected[slot] for slot in slots]
    for slot in set(range(-1, table.core.capacity * len(table.steps) + 1)) - set(slots):
        with pytest.raises(IndexError, match=f"locate: slot {slot} at position 0 of 1 isn't stored"):
            locate(table, [slot])


def expand(core: Episodes, first, length, stride: int = 0) -> tuple[list[int], list[int]]:
    first, length = np.array(first, np.int64), np.array(length, np.int64)
    total = stride * len(first) if stride else int(length.sum())
    slots, last = np.full(total + 1, -7), np.full(total + 1, 7, np.uint8)
    core.expand(address(first), address(length), len(first), address(slots), stride, address(last))
    assert slots[-1] == -7 and last[-1] == 7
    alone = np.full(total, -7)
    core.expand(address(first), address(length), len(first), address(alone), stride)
    assert (alone == slots[:-1]).all()
    return slots[:-1].tolist(), last[:-1].tolist()


def test_slices_are_expanded_around_the_end():
    assert expand(Episodes(10), [2, 8, 9], [3, 4, 1]) == ([2, 3, 4, 8, 9, 0, 1, 9], [0, 0, 1, 0, 0, 0, 1, 1])
    # Two streams: consecutive steps are two slots apart.
    assert expand(Episodes(5, 2), [7, 2], [3, 2])[0] == [7, 9, 1, 2, 4]


def test_padding_repeats_the_last_slot():
    slots, last = expand(Episodes(10), [2, 8], [3, 4], 5)
    assert slots == [2, 3, 4, 4, 4, 8, 9, 0, 1, 1]
    assert last == [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]


@given(seeds, st.integers(1, 9))
def test_a_slice_is_consecutive_steps_of_one_trajectory(seed, slice_len):
    table = random_table(seed)
    if not table.stored:
        return
    origin = {
        table.slot(run.stream, time): (number, time)
        for number, run in enumerate(table.runs())
        for time in range(run.start, run.end)
    }
    drawn = table.draw(
        slice_len, np.random.default_rng(seed).random((10, 2)), strict=False, left=slice_len - 1
    )
    slots, last = expand(table.core, *zip(*drawn, strict=True))
    steps = [origin[slot] for slot in slots]
    for i, (number, time) in enumerate(steps[:-1]):
        assert last[i] or steps[i + 1] == (number, time + 1)
    assert sum(last) == len(drawn) and last[-1]


def test_expand_checks_its_arguments():
    core, out = Episodes(10), np.full(50, -7)

    def call(first, length, stride=0):
        first, length = np.array([0, first]), np.array([1, length])
        core.expand(address(first), address(length), 2, address(out), stride)

    for slot in (-1, 10, 2**62):
        with pytest.raises(IndexError, match=f"expand: slot {slot} at position 1 of 2"):
            call(slot, 1)
    for length in (0, -1, 11):
        with pytest.raises(ValueError, match=f"lengths of 1 to 10, got {length} at position 1"):
            call(0, length)
    with pytest.raises(ValueError, match="lengths of 1 to 3, got 4"):
        call(0, 4, 3)
    assert (out == -7).all()


def test_lists_need_exact_room():
    table, out = Table.empty(10), np.full(10, -7)
    table.write(9, np.arange(9) % 3 == 2)
    for n in (2, 4, -1):
        with pytest.raises(ValueError, match=r"room for num_runs\(2\)"):
            table.core.list_runs(2, address(out), address(out), n)
    for call in (table.core.num_runs, lambda n: table.core.list_runs(n, 0, 0, 0)):
        with pytest.raises(ValueError, match="min_len: expected 1 or more, got 0"):
            call(0)
    assert (out == -7).all()
