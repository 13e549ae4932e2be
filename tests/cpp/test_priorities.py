"""Priorities of rows follow a plain model: rule, generations, blocks and running maxima."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gleanrl._arrays.native import Priorities, Random, SumTree, importance_weights
from tests.cpp.priorities_model import GENERATION, Table, address

CAPACITIES = [1, 2, 9, 65, 1023, 1025, 2500]
BELOW_ONE = math.nextafter(1.0, 0.0)
FLOAT32_MAX = float(np.finfo(np.float32).max)

raws = st.sampled_from([0.0, 1e-50, 1e-30, 0.1, 1.0, 7.0, 1e20]) | st.floats(0, 1e6)


class PrioritiesMachine(RuleBasedStateMachine):
    """Any history of calls, compared with the model."""

    @initialize(capacity=st.sampled_from(CAPACITIES), single=st.booleans(), seed=st.integers(0, 99))
    def start(self, capacity, single, seed):
        self.table = Table.empty(capacity, single, 0.6, 1e-8)
        self.random = np.random.default_rng(seed)

    def rows(self, n: int, spread: int) -> np.ndarray:
        # All rows are near one of two places, so that calls hit the same rows.
        first = self.random.integers(0, 2) * (self.table.capacity - 3)
        return (first + self.random.integers(0, spread, n)) % self.table.capacity

    @rule(alpha=st.sampled_from([0.0, 0.5, 0.6, 1.0, 2.0]), eps=st.sampled_from([0.0, 1e-8, 0.5]))
    def set_rule(self, alpha, eps):
        self.table.set_rule(alpha, eps)

    @rule(share=st.floats(0, 1), start=st.integers(0, 2499), raw=raws)
    def fill(self, share, start, raw):
        self.table.fill(start % self.table.capacity, int(share * self.table.capacity), raw)

    @rule(start=st.integers(0, 2499), within=st.booleans())
    def add(self, start, within):
        self.table.fill(start % self.table.capacity, 1, self.table.core.default_priority(within))

    @rule(n=st.sampled_from([0, 1, 5, 64, 600]), spread=st.sampled_from([1, 10, 10**9]), raw=raws)
    def update(self, n, spread, raw):
        index = np.where(self.random.random(n) < 0.1, -1, self.rows(n, spread))
        self.table.update(index, self.random.choice([0.0, 1.0, raw], n))

    @rule(n=st.sampled_from([1, 5, 64]), raw=raws)
    def update_with_generations(self, n, raw):
        index = self.rows(n, 50)
        expected = self.table.written[index] - (self.random.random(n) < 0.3)
        self.table.update(index, np.full(n, raw), expected=expected)

    @rule(n=st.sampled_from([0, 1, 7, 64]))
    def remember(self, n):
        self.table.remember(self.rows(n, 50))

    @rule(n=st.sampled_from([0, 1, 7, 64]), spread=st.sampled_from([2, 50, 10**9]))
    def block(self, n, spread):
        self.table.block(self.rows(n, spread), self.random.integers(0, 2, n))

    @rule()
    def clear(self):
        self.table.clear()

    @rule()
    def save_and_load(self):
        before = self.table.core.total
        assert self.table.reloaded().core.total == before

    @rule(n=st.sampled_from([0, 1, 30, 700]), by_batch=st.booleans())
    def draw(self, n, by_batch):
        uniforms = np.concatenate([self.random.random(n), [0.0, BELOW_ONE]])
        if self.table.core.total > 0:
            self.table.draw(uniforms, 0.4, by_batch)
        else:
            with pytest.raises(RuntimeError, match="draw: no row has a positive priority"):
                self.table.draw(uniforms)

    @invariant()
    def agrees(self):
        self.table.check()


TestPrioritiesMachine = PrioritiesMachine.TestCase
TestPrioritiesMachine.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_a_new_row_gets_the_largest_priority_seen_once_raised_to_alpha():
    table = Table.empty(10, single=True, alpha=0.6)
    table.fill(0, 4, table.core.default_priority(False))
    table.update(range(4), [5.0, 1.0, 1.0, 1.0])
    table.fill(4, 1, table.core.default_priority(False))
    assert table.got(leaves=True)[4] == pytest.approx(5**0.6, rel=1e-8)
    # Annealed alpha starts from the raw priorities each time, so no priority is raised to a power twice.
    for alpha in np.linspace(0, 1, 7):
        table.set_rule(alpha, 1e-8)
        table.check()


@given(st.lists(raws, min_size=1, max_size=40), st.floats(0, 3), st.floats(0, 10))
def test_leaves_are_powers(values, alpha, eps):
    table = Table.empty(len(values), alpha=alpha, eps=eps)
    table.update(range(len(values)), values)
    table.check()


def test_special_powers_are_exact():
    values = np.random.default_rng(0).random(100)
    table = Table.empty(100, eps=0.25)
    table.update(range(100), values)
    assert (table.got(leaves=True) == values + 0.25).all()
    table.update([0, 1], [0.0, -0.0])
    table.set_rule(0.0, 0.0)
    assert (table.got(leaves=True) == 1).all()
    assert not np.signbit(table.got()).any()


@pytest.mark.parametrize("alpha", [0.6, 1.0, 2.0, 40.0])
def test_a_positive_priority_never_gets_lost(alpha):
    table = Table.empty(4, alpha=alpha)
    table.update(range(4), [5e-324, 1e-200, 0.0, 1.0])
    leaves = table.got(leaves=True)
    assert (leaves[[0, 1, 3]] > 1e-302).all() and leaves[2] == 0
    _, weight, _ = table.draw([0.5], beta=1.0)
    assert np.isfinite(weight).all()


def test_single_precision_rounds_and_keeps_less():
    table = Table.empty(3, single=True)
    table.update([0, 1], [0.1, FLOAT32_MAX])
    assert table.got()[0] == float(np.float32(0.1)) != 0.1
    assert table.core.max_seen == table.core.largest == FLOAT32_MAX and table.core.single
    assert Priorities(3, False).largest == 2.0**960
    table.check()


def test_last_of_repeated_rows_wins_and_the_largest_is_seen():
    table = Table.empty(10)
    table.update([3, 4, 3, -1, 3], [1.0, 2.0, 9.0, math.nan, 5.0])
    assert table.got()[[3, 4]].tolist() == [5.0, 2.0]
    assert table.core.max_seen == 9.0
    table.update(np.tile([3, 4], 700), np.arange(1400.0))
    assert table.got()[[3, 4]].tolist() == [1398.0, 1399.0]


@pytest.mark.parametrize("single", [False, True])
def test_served_rows_are_remembered_by_the_draw(single):
    one, other = (Table.empty(700, single=single) for _ in range(2))
    for table, served in ((one, True), (other, False)):
        random = np.random.default_rng(0)
        table.fill(0, 700, 1.0)
        for _ in range(3):
            table.draw(random.random(600), served=served)
            table.fill(int(random.integers(700)), 90, 2.0)
        core_random, out = Random(7), [np.zeros(5, np.int64), np.zeros(5, np.float32), np.zeros(5, np.int64)]
        table.core.draw(core_random, 5, 0.4, False, address(table.written), *map(address, out), served)
        if not served:
            table.core.remember(address(out[0]), 5, address(out[2]))
        table.check()
    assert all((a == b).all() for a, b in zip(one.state(), other.state(), strict=True))
    assert (one.state()[1] != 0).any()


@pytest.mark.parametrize("single", [False, True])
def test_long_updates_equal_consecutive_short_ones(single):
    random = np.random.default_rng(1)
    one, other = (Table.empty(900, single=single, alpha=0.6, eps=1e-8) for _ in range(2))
    index = random.integers(-1, 900, 2_000)
    raw, generation = random.random(2_000) * 5, random.integers(1, 3, 2_000)
    for table in (one, other):
        table.fill(0, 900, 1.0)
        table.fill(100, 300, 1.0)
        table.block([5, 6], [1, 1])
    dropped = one.update(index, raw, expected=generation)
    parts = [slice(start, start + 100) for start in range(0, 2_000, 100)]
    assert dropped == sum(other.update(index[p], raw[p], expected=generation[p]) for p in parts) > 0
    assert (one.got(leaves=True) == other.got(leaves=True)).all()
    assert all((a == b).all() for a, b in zip(one.state(), other.state(), strict=True))
    assert one.core.max_seen == other.core.max_seen
    one.check()


def test_late_updates_are_dropped_and_counted():
    table = Table.empty(8)
    table.fill(0, 8, 1.0)
    index, _, generation = table.draw([0.0, 0.5, 0.99])  # rows 0, 4, 7
    table.fill(4, 1, 1.0)
    assert table.update(index, [5.0, 6.0, 7.0]) == 1  # with the remembered generations
    assert table.update(index, [5.0, 60.0, 7.0], expected=generation) == 1
    assert table.update([1], [3.0]) == 0  # never drawn
    assert table.got().tolist() == [5.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0]
    assert table.core.max_seen == 7.0  # a dropped priority doesn't count
    table.remember([4])
    assert table.update([4], [2.0]) == 0
    table.check()


@pytest.mark.parametrize("start", [GENERATION - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, -1, -(2**63)])
def test_generations_survive_every_wrap(start):
    table = Table.empty(2)
    table.fill(0, 2, 1.0)
    table.written[:] = start
    _, _, generation = table.draw([0.1])
    assert generation[0] == start and table.update([0], [2.0]) == 0
    with np.errstate(over="ignore"):
        table.written[0] += np.int64(1)
    assert table.update([0], [3.0]) == 1 and table.update([0], [3.0], expected=[start]) == 1
    table.written[0] = start
    assert table.update([0], [4.0]) == 0
    table.check()


def test_the_largest_priority_in_use_follows_every_change():
    table, random = Table.empty(5000), np.random.default_rng(0)
    assert table.core.default_priority(True) == 1.0
    for step in range(300):
        start = step * 37 % 5000
        table.fill(start, 30, float(random.integers(0, 50)))
        table.update(random.integers(0, 5000, 3), random.integers(0, 60, 3))
        assert table.core.default_priority(True) == max(table.raw.values())
    table.fill(0, 5000, 0.25)
    assert table.core.default_priority(True) == 0.25 and table.core.default_priority(False) == 59.0
    table.block([3], [1])
    table.update([3], [4.0])
    assert table.core.default_priority(True) == 4.0


def test_blocked_rows_are_never_drawn_and_keep_their_priority():
    table = Table.empty(20)
    table.fill(0, 20, 1.0)
    table.block(range(0, 20, 2), np.ones(10))
    table.update([0, 1], [100.0, 2.0])
    table.fill(4, 3, 3.0)
    index, _, _ = table.draw(np.linspace(0, BELOW_ONE, 500), 1.0)
    assert set(index.tolist()) == set(range(1, 20, 2))
    table.block([0, 1, 0], [0, 1, 1])
    assert table.got(leaves=True)[[0, 1]].tolist() == [0.0, 0.0]
    table.block(range(20), np.zeros(20))
    assert table.got(leaves=True)[[0, 1, 4]].tolist() == [100.0, 2.0, 3.0]
    table.check()


def test_a_blocked_row_stays_blocked_when_its_generation_is_remembered():
    table = Table.empty(4)
    table.fill(0, 4, 1.0)
    table.block([1], [1])
    table.remember([0, 1])
    table.check()
    table.fill(1, 1, 1.0)
    assert table.update([1], [2.0]) == 1
    table.check()


def test_draws_and_weights_equal_the_trees():
    table, tree, n = Table.empty(3000, alpha=0.7, eps=0.01), SumTree(3000), 2000
    random = np.random.default_rng(1)
    table.update(np.arange(3000), random.random(3000))
    leaves, uniforms = table.got(leaves=True), random.random(n)
    rows = np.arange(3000)
    tree.update(address(rows), address(leaves), 3000)
    index, value, weight = np.empty(n, np.int64), np.empty(n), np.empty(n, np.float32)
    tree.draw(address(uniforms), n, address(index), address(value))
    for by_batch in (False, True):
        found = table.draw(uniforms, 0.4, by_batch)
        importance_weights(address(value), n, tree.min_positive, 0.4, address(weight), by_batch)
        assert (found[0] == index).all() and (found[1] == weight).all()


def test_draws_follow_the_priorities():
    random = np.random.default_rng(3)
    table, n = Table.empty(700, alpha=0.5), 400_000
    table.update(range(700), random.random(700) ** 4 * (random.random(700) < 0.7))
    table.block(range(0, 700, 9), np.ones(78))
    leaves = table.all_leaves()
    counts = np.bincount(table.draw(random.random(n))[0], minlength=700)
    expected = leaves / leaves.sum() * n
    often = expected >= 5
    assert counts[leaves == 0].sum() == 0
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    # Chi-square has mean k and variance 2k; five deviations are allowed on either side.
    assert abs(statistic - often.sum()) < 5 * math.sqrt(2 * often.sum())


def test_restored_object_continues_identically():
    random = np.random.default_rng(7)
    table = Table.empty(1500, single=True, alpha=0.6, eps=1e-6)
    table.fill(0, 1200, 1.0)
    table.draw(random.random(300))
    table.update(random.integers(0, 1200, 200), random.random(200))
    table.block(random.integers(0, 1500, 50), np.ones(50))
    twin = Table(table.core, table.written, 0.6, 1e-6, table.raw, table.drawn, table.blocked, table.seen)
    twin.reloaded()
    uniforms = random.random(1000)
    index, weight, _ = table.draw(uniforms)
    again = twin.draw(uniforms)
    assert (again[0] == index).all() and (again[1] == weight).all()
    twin.fill(1190, 5, 2.0)
    assert twin.update(np.arange(1200), np.ones(1200)) == len(
        [r for r in range(1190, 1195) if r in twin.drawn]
    )


def test_long_calls_release_the_interpreter_and_agree():
    table = Table.empty(5000)
    random = np.random.default_rng(2)
    table.update(np.arange(5000), random.random(5000))
    table.draw(random.random(3000), by_batch=True)
    table.update(random.integers(-1, 5000, 3000), random.random(3000))
    table.check()


def test_generator_draws_equal_draws_by_its_uniforms():
    table = Table.empty(1000, alpha=0.7, eps=0.1)
    table.update(np.arange(1000), np.random.default_rng(0).random(1000))
    source, twin, n = Random(5), Random(5), 700

    def drawn(uniforms):
        found = np.zeros(n, np.int64), np.zeros(n, np.float32), np.zeros(n, np.int64)
        table.core.draw(uniforms, n, 0.4, False, address(table.written), *map(address, found))
        return found

    for _ in range(3):
        uniforms = np.zeros(n)
        twin.uniforms(address(uniforms), n)
        for ours, theirs in zip(drawn(source), drawn(address(uniforms)), strict=True):
            assert ours.tolist() == theirs.tolist()
    table.clear()
    with pytest.raises(RuntimeError, match="no row has a positive priority"):
        drawn(source)
    assert source.save() == twin.save()


def test_priorities_of_both_precisions_are_accepted():
    given = np.random.default_rng(0).random(600).astype(np.float32)
    tables = [Table.empty(600, alpha=0.7, eps=0.1) for _ in range(2)]
    rows = np.arange(600)
    for table, values in zip(tables, (given, given.astype(np.float64)), strict=True):
        written = address(table.written)
        single = values.dtype == np.float32
        assert table.core.update(address(rows), address(values), 600, 600, written, 0, single) == 0
    assert tables[0].got().tolist() == tables[1].got().tolist() == given.tolist()
    given[3] = -1.0
    with pytest.raises(ValueError, match="got -1.* at position 3 of 600"):
        table.core.update(address(rows), address(given), 600, 600, written, 0, True)
