"""The episode table's writes and draws equal a plain list of the stored steps."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gleanrl._arrays.native import Episodes
from tests.cpp.episodes_model import Table, address

BELOW_ONE = math.nextafter(1.0, 0.0)


def pairs(first, second) -> np.ndarray:
    """Return all pairs of uniforms out of two lists."""
    return np.array([(u, v) for u in first for v in second])


def middles(n: int) -> np.ndarray:
    """Return one uniform in each of n equal parts."""
    return (np.arange(n) + 0.5) / n


class EpisodesMachine(RuleBasedStateMachine):
    """Any history of writes, draws and clearings."""

    @initialize(
        capacity=st.sampled_from([1, 2, 3, 7, 20]),
        streams=st.sampled_from([1, 2, 3]),
        seed=st.integers(0, 99),
    )
    def start(self, capacity, streams, seed):
        self.table = Table.empty(capacity, streams)
        self.random = np.random.default_rng(seed)
        self.id = 0

    @rule(
        share=st.floats(0, 1),
        ends=st.sampled_from([None, 0.0, 0.05, 0.3, 1.0]),
        changes=st.lists(st.sampled_from([0.0, 0.1, 1.0]), max_size=2),
    )
    def write(self, share, ends, changes):
        shape = (round(share * self.table.core.capacity), len(self.table.steps))
        flags = None if ends is None else self.random.random(shape) < ends
        ids = [self.id + np.cumsum(self.random.random(shape) < change, axis=0) for change in changes]
        self.id += int(self.random.integers(0, 2))
        self.table.write(shape[0], flags, ids)

    @rule(start=st.integers(0, 19))
    def replace_everything(self, start):
        capacity = self.table.core.capacity
        self.table.write(
            capacity, self.random.random((capacity, len(self.table.steps))) < 0.2, start=start % capacity
        )

    @rule(start=st.integers(0, 19))
    def clear(self, start):
        self.table.core.clear()
        self.table.steps = [[] for _ in self.table.steps]
        self.table.now = self.table.cursor = 0
        self.table.write(1, start=start % self.table.core.capacity)

    @rule(slice_len=st.integers(1, 9), strict=st.booleans(), room=st.data())
    @precondition(lambda self: self.table.stored)
    def draw(self, slice_len, strict, room):
        options = {"strict": strict}
        options |= {side: room.draw(st.integers(0, slice_len - 1)) for side in ("left", "right")}
        uniforms = np.concatenate([self.random.random((8, 2)), pairs([0.0, BELOW_ONE], [0.0, BELOW_ONE])])
        if strict and not self.table.runs(slice_len):
            with pytest.raises(RuntimeError, match=f"stored trajectories has {slice_len} steps"):
                self.table.draw(slice_len, uniforms, **options)
            return
        assert self.table.draw(slice_len, uniforms, **options) == self.table.expected_draw(
            slice_len, uniforms, **options
        )

    @invariant()
    def agrees(self):
        self.table.check()


TestEpisodesMachine = EpisodesMachine.TestCase
TestEpisodesMachine.settings = settings(max_examples=80, stateful_step_count=25)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_exactly_the_valid_starts_are_drawn(length, streams, chunk):
    # Episodes of 1, n - 1, n, n + 1 and more than the capacity of 10 steps, with slices of n = 4. They are written in
    # chunks, several times around the ring.
    table, time = Table.empty(10, streams), 0
    for _ in range(37 // chunk):
        ends = (np.arange(time, time + chunk)[:, None] + np.arange(streams) + 1) % length == 0
        table.write(chunk, ends)
        time += chunk
        starts = table.valid_starts(4)
        if not starts:
            with pytest.raises(RuntimeError):
                table.draw(4, [0.5, 0.5])
            continue
        # One uniform for each start of each run.
        grid = [
            pairs([(r + 0.5) / len(table.runs(4))], middles(run.length - 3))
            for r, run in enumerate(table.runs(4))
        ]
        assert table.draw(4, np.concatenate(grid)) == [(slot, 4) for slot in starts]


def counts_of(slices, slots) -> np.ndarray:
    place = {slot: i for i, slot in enumerate(slots)}
    return np.bincount([place[slot] for slot, _ in slices], minlength=len(slots))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the deviation of the statistic from its mean, in standard deviations."""
    statistic, k = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return (statistic - k) / math.sqrt(2 * k)


def wrapped_table() -> Table:
    """Two streams, wrapped, the oldest runs cut, the newest open; lengths from 1 to 20."""
    table, random = Table.empty(100, 2), np.random.default_rng(4)
    for _ in range(9):
        table.write(31, random.random((31, 2)) < 0.12)
    assert {1, 2, 3} < {run.length for run in table.runs()}
    return table


def test_runs_are_equally_likely_and_so_are_the_starts_of_a_run():
    table, n = wrapped_table(), 60_000
    slots = table.valid_starts(3)
    drawn = table.draw(3, np.random.default_rng(0).random((n, 2)))
    shares = np.concatenate([np.full(run.length - 2, 1 / (run.length - 2)) for run in table.runs(3)])
    assert abs(chi_square(counts_of(drawn, slots), shares / len(table.runs(3)) * n)) < 5


def test_short_runs_come_whole_if_asked():
    table = Table.empty(20)
    table.write(12, [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0])  # 2, 1 and 6 steps, and 3 of an open run
    drawn = table.draw(4, np.random.default_rng(2).random((400, 2)), strict=False)
    assert set(drawn) == {(0, 2), (2, 1), (3, 4), (4, 4), (5, 4), (9, 3)}
    shares = np.bincount([{0: 0, 2: 1, 9: 3}.get(slot, 2) for slot, _ in drawn])
    assert abs(chi_square(shares, np.full(4, 100))) < 5


@pytest.mark.parametrize(
    ("options", "slices"),
    [
        ({"left": 3}, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4)]),
        ({"right": 3}, [(0, 4), (1, 4), (2, 4), (3, 3), (4, 2), (5, 1)]),
        ({"right": 1}, [(0, 4), (1, 4), (2, 4), (3, 3)]),
        ({"left": 1, "right": 1}, [(0, 3), (0, 4), (1, 4), (2, 4), (3, 3)]),
    ],
)
def test_slices_that_overhang_are_cut_and_never_empty(options, slices):
    table = Table.empty(20)
    table.write(8, [0, 0, 0, 0, 0, 1, 0, 1])  # 6 steps and 2
    assert table.draw(4, pairs([0.5], middles(len(slices))), **options) == slices
    for strict in (True, False):
        drawn = table.draw(4, np.random.default_rng(0).random((500, 2)), strict=strict, **options)
        assert set(drawn) >= set(slices) and min(length for _, length in drawn) >= 1
        # No slice leaves its run.
        assert all((slot < 6) == (slot + length <= 6) for slot, length in drawn)


def test_the_newest_and_the_oldest_step_are_no_neighbours():
    table = Table.empty(10)
    for _ in range(4):
        table.write(7)  # one endless run, bounded by the cursor only
        assert len(table.runs()) == 1
        ages = {(slot - table.cursor) % 10 if table.stored == 10 else slot for slot in table.valid_starts(4)}
        assert ages == set(range(table.stored - 3))
    drawn = table.draw(4, np.random.default_rng(0).random((300, 2)))
    assert {(slot - table.cursor) % 10 for slot, _ in drawn} == set(range(7))


def test_ids_and_ends_both_bound_runs():
    table = Table.empty(20)
    table.write(6, [0, 1, 0, 0, 0, 0], [[7, 7, 7, 7, 8, 8]])
    assert table.listed() == [(0, 2), (2, 2), (4, 2)]
    table.write(2, [0, 0], [[8, 9]])  # continues run 8
    assert table.listed() == [(0, 2), (2, 2), (4, 3), (7, 1)]
    table.write(2, [0, 0])  # without ids the next step begins a new run
    assert table.listed()[-2:] == [(7, 1), (8, 2)]
    table.write(2, [0, 0], [[9, 9], [1, 2]])  # a second column bounds runs too
    assert table.listed()[-3:] == [(8, 2), (10, 1), (11, 1)]


def test_an_id_that_comes_back_names_another_run():
    table = Table.empty(9)
    table.write(6, ids=[[1, 1, 2, 1, 1, 1]])
    assert table.listed() == [(0, 2), (2, 1), (3, 3)]
    table.write(6, ids=[[1, 3, 3, 3, 3, 3]])  # wraps around: slot 3 is the oldest now
    assert table.listed() == [(3, 4), (7, 5)]


def test_an_end_at_the_last_step_of_a_write_bounds():
    table = Table.empty(9)
    table.write(3, [0, 0, 1])
    table.write(3, [0, 0, 0])
    table.write(1)
    assert table.listed() == [(0, 3), (3, 4)]


def test_an_open_run_becomes_long_enough_as_it_grows():
    table = Table.empty(50)
    table.write(2)
    with pytest.raises(RuntimeError, match="none of the 1 stored trajectories has 4 steps"):
        table.draw(4, [0.0, 0.0])
    table.write(1)
    table.write(1)
    assert table.draw(4, [0.9, 0.9]) == [(0, 4)]
    table.write(1)
    assert table.draw(4, [0.9, 0.9]) == [(1, 4)]


def test_more_lengths_than_indexes_are_kept_right():
    table, random = Table.empty(60), np.random.default_rng(0)
    for _ in range(12):
        for slice_len in range(1, 13):
            if table.runs(slice_len):
                uniforms = random.random((6, 2))
                for strict in (True, False):
                    assert table.draw(slice_len, uniforms, strict=strict) == table.expected_draw(
                        slice_len, uniforms, strict
                    )
        table.write(17, random.random(17) < 0.1)
        table.check()


@pytest.mark.parametrize("now", [2**31 - 2, 2**32 - 2, 2**53 - 2, 2**62])
def test_counters_exceed_32_and_53_bits(now):
    table, random = Table.empty(10, now=now), np.random.default_rng(0)
    for _ in range(8):
        table.write(4, random.random(4) < 0.3)
        table.check()
        uniforms = random.random((20, 2))
        for options in ({}, {"strict": False}):
            assert table.draw(1, uniforms, **options) == table.expected_draw(1, uniforms, **options)
    assert table.core.now == now + 32


def test_a_ring_in_use_is_taken_over_in_two_writes():
    table, random = Table.empty(10, 2), np.random.default_rng(3)
    for _ in range(5):
        table.write(7, random.random((7, 2)) < 0.2, [np.repeat(random.integers(0, 2, (1, 2)), 7, axis=0)])
    # The arguments that a scan of the storage would find: columns by slot.
    ends, ids = np.empty((10, 2), np.uint8), np.empty((10, 2), np.int64)
    for s, steps in enumerate(table.steps):
        for step in steps:
            ends.flat[table.slot(s, step.time)] = step.end
            ids.flat[table.slot(s, step.time)] = step.ids[0]
    again, cursor = Episodes(10, 2), table.cursor
    again.on_write(cursor, 10 - cursor, address(ends[cursor:]), [address(ids[cursor:])])
    again.on_write(0, cursor, address(ends), [address(ids)])
    assert Table(again, table.steps).listed() == table.listed()
    table.core = again
    table.now = again.now
    for steps in table.steps:
        steps[:] = [step._replace(time=i) for i, step in enumerate(steps)]
    table.check()


def test_bad_writes_change_nothing():
    table = Table.empty(10, 2)
    table.write(6, np.zeros((6, 2)), [np.ones((6, 2))])
    flags = np.ones((20, 2), np.uint8)
    for count in (-1, 11, 2**62):
        with pytest.raises(ValueError, match="on_write: expected 0 to capacity steps, 10"):
            table.core.on_write(6, count, address(flags))
    for start in (-1, 10, 2**62):
        with pytest.raises(IndexError, match=f"on_write: start {start}"):
            table.core.on_write(start, 1, address(flags))
    for start in (5, 7, 0):
        with pytest.raises(ValueError, match=f"a write from the cursor on, 6, got one from {start}"):
            table.core.on_write(start, 1, address(flags))
    with pytest.raises(ValueError, match="null address"):
        table.core.on_write(6, 1, 0, [0])
    with pytest.raises(ValueError, match="isn't aligned"):
        table.core.on_write(6, 1, 0, [address(flags) + 1])
    with pytest.raises(TypeError):
        table.core.on_write(6, 1, 0, 7)
    table.core.on_write(99, 0)
    table.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slice_len": 0}, "slice_len: expected 1 or more, got 0"),
        ({"slice_len": 2**61 + 1}, r"slice_len: expected at most 2\^61, got 2305843009213693953"),
        ({"slice_len": 3, "left": 3}, "left: expected 0 to slice_len - 1, 2, got 3"),
        ({"slice_len": 3, "right": -1}, "right: expected 0 to slice_len - 1, 2, got -1"),
        ({"slice_len": 3, "uniforms": [0.5, 1.0]}, r"uniforms in \[0, 1\), got 1 at position 1 of 2"),
        ({"slice_len": 3, "uniforms": [math.nan, 0.5]}, "got -?nan at position 0"),
    ],
)
def test_bad_draws_write_nothing(arguments, message):
    table, out = Table.empty(10), np.full(1, -7)
    table.write(8)
    slice_len, uniforms = arguments.pop("slice_len"), np.array(arguments.pop("uniforms", [0.5, 0.5]))
    with pytest.raises(ValueError, match=message):
        table.core.draw(slice_len, 1, address(uniforms), address(out), address(out), **arguments)
    assert out[0] == -7


def test_invalid_and_empty_tables_are_refused():
    for arguments in ((0, 1), (1, 0), (-1, 1), (2**40, 2**40)):
        with pytest.raises(ValueError):
            Episodes(*arguments)
    table = Table.empty(10)
    table.check()
    with pytest.raises(RuntimeError, match="nothing is stored"):
        table.draw(3, [0.5, 0.5])
    with pytest.raises(ValueError, match="null address"):
        table.core.draw(3, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="0 or more slices"):
        table.core.draw(3, -1, 0, 0, 0)
    table.write(10)
    assert table.core.draw(3, 0, 0, 0, 0) == 0
    with pytest.raises(RuntimeError, match="none of the 1 stored trajectories has 11 steps"):
        table.draw(11, [0.5, 0.5])


def test_slices_of_any_length_dont_overflow():
    table = Table.empty(10)
    table.write(8)
    for room in (0, 2**61 - 1):
        uniforms = [0.0, 0.0, 0.5, BELOW_ONE]
        options = {"strict": False, "left": room, "right": room}
        for slot, length in table.draw(2**61, uniforms, **options):
            assert 0 <= slot < 8 and 1 <= length <= 8 - slot
    with pytest.raises(RuntimeError, match="none of the 1 stored trajectories"):
        table.draw(2**61, [0.5, 0.5])


def test_long_draw_releases_the_interpreter_lock():
    table, uniforms = Table.empty(1000), np.random.default_rng(0).random((500_000, 2))
    table.write(1000, np.arange(1000) % 10 == 9)
    found, ticks = [], []
    thread = threading.Thread(target=lambda: found.append(table.draw(4, uniforms)))
    thread.start()
    while thread.is_alive():
        ticks.append(None)
    thread.join()
    assert found[0] == table.draw(4, uniforms) and ticks
