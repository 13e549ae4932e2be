"""The sum tree equals NumPy in sums and draws, and its search survives float rounding."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gleanrl._arrays.native import SumTree

LARGEST = 2.0**960
# Around every change of the number of levels, up to five levels.
CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097]
BELOW_ONE = math.nextafter(1.0, 0.0)

whole = st.integers(0, 2**20).map(float)  # sums of these are exact
wild = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 0.3, 1.0, 1e16, 1e280, LARGEST]) | st.floats(0, 1e100)


def update(tree: SumTree, index, value) -> None:
    index = np.ascontiguousarray(index, dtype=np.int64)
    value = np.ascontiguousarray(value, dtype=np.float64)
    assert len(index) == len(value)
    tree.update(index.ctypes.data, value.ctypes.data, len(index))


def draw(tree: SumTree, uniforms) -> tuple[np.ndarray, np.ndarray]:
    uniforms = np.ascontiguousarray(uniforms, dtype=np.float64)
    index = np.full(len(uniforms) + 1, -7, np.int64)
    value = np.full(len(uniforms) + 1, -7.0)
    tree.draw(uniforms.ctypes.data, len(uniforms), index.ctypes.data, value.ctypes.data)
    assert index[-1] == -7 and value[-1] == -7.0
    return index[:-1], value[:-1]


def leaves(tree: SumTree) -> np.ndarray:
    index, values = np.arange(tree.capacity), np.empty(tree.capacity)
    tree.get(index.ctypes.data, tree.capacity, values.ctypes.data)
    return values


def loaded(values) -> SumTree:
    tree = SumTree(len(values))
    update(tree, np.arange(len(values)), values)
    return tree


def assert_summaries(tree: SumTree, expected: np.ndarray) -> None:
    tree.check_valid()
    assert (leaves(tree) == expected).all()
    positive = expected[expected > 0]
    assert tree.min_positive == (positive.min() if len(positive) else 0.0)
    assert tree.total == pytest.approx(math.fsum(expected), rel=1e-14, abs=0)


class SumTreeMachine(RuleBasedStateMachine):
    """Any history of calls, compared with a NumPy array."""

    @initialize(capacity=st.sampled_from(CAPACITIES), seed=st.integers(0, 99))
    def start(self, capacity, seed):
        self.tree, self.model = SumTree(capacity), np.zeros(capacity)
        self.random = np.random.default_rng(seed)

    @rule(
        n=st.sampled_from([0, 1, 2, 5, 64, 513, 1500]),
        spread=st.sampled_from([1, 10, 10**9]),
        values=st.data(),
    )
    def update(self, n, spread, values):
        first = self.random.integers(0, len(self.model))
        index = (first + self.random.integers(0, spread, n)) % len(self.model)
        value = self.random.choice([0.0, 1.0, values.draw(wild)], n) * 1.0
        update(self.tree, index, value)
        for i, v in zip(index, value, strict=True):
            self.model[i] = v

    @rule(data=st.data(), value=wild)
    def fill(self, data, value):
        start = data.draw(st.integers(0, len(self.model) - 1))
        n = data.draw(st.integers(0, len(self.model)))
        self.tree.fill(start, n, value)
        self.model[(start + np.arange(n)) % len(self.model)] = value

    @rule()
    def rebuild(self):
        copy = loaded(leaves(self.tree))
        assert copy.total == self.tree.total
        self.tree = copy

    @rule()
    def draw(self):
        if not self.model.any():
            with pytest.raises(RuntimeError, match="no row has a positive priority"):
                draw(self.tree, [0.5])
            return
        uniforms = np.concatenate([self.random.random(20), [0.0, BELOW_ONE]])
        index, value = draw(self.tree, uniforms)
        assert (value == self.model[index]).all() and (value > 0).all()

    @invariant()
    def agrees(self):
        assert_summaries(self.tree, self.model)


TestSumTreeMachine = SumTreeMachine.TestCase
TestSumTreeMachine.settings = settings(max_examples=40, stateful_step_count=15)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_full_trees_of_every_height_are_valid(capacity):
    values = np.random.default_rng(capacity).random(capacity)
    tree = loaded(values)
    assert tree.capacity == capacity
    assert_summaries(tree, values)
    index, _ = draw(tree, np.random.default_rng(0).random(500))
    assert index.min() >= 0 and index.max() < capacity


@given(st.lists(whole, min_size=1, max_size=600).filter(any), st.lists(st.floats(0, BELOW_ONE), max_size=40))
def test_draws_are_a_search_in_the_cumulative_sum(values, uniforms):
    tree = loaded(values)
    index, value = draw(tree, uniforms)
    expected = np.searchsorted(np.cumsum(values), np.array(uniforms) * tree.total, side="right")
    assert (index == expected).all()
    assert (value == np.array(values)[expected]).all()


@given(st.lists(wild, min_size=1, max_size=80).filter(any), st.lists(st.floats(0, BELOW_ONE), max_size=20))
def test_rows_of_zero_priority_are_never_drawn(values, uniforms):
    tree = loaded(values)
    total = tree.total
    # Rounding decides at the borders between rows.
    borders = np.cumsum(values) / total
    near = np.concatenate(
        [np.nextafter(borders, 0), borders, np.nextafter(borders, 2), uniforms, [BELOW_ONE]]
    )
    index, value = draw(tree, near[near < 1])
    assert (value > 0).all() and (value == np.array(values)[index]).all()


@pytest.mark.parametrize("zeros", [1, 2, 7, 8, 9, 100, 4000])
def test_the_search_stops_at_the_last_positive_row(zeros):
    # Sums of tenths are inexact in every order, so a search for the last share steps past the last row.
    values = np.concatenate([np.full(1000, 0.1), np.zeros(zeros)])
    for positive in (values, np.roll(values, 3), np.tile([0.1, 0.7, 0.0], 333)):
        index, _ = draw(loaded(positive), np.full(3, BELOW_ONE))
        assert (index == np.flatnonzero(positive)[-1]).all()
        assert (draw(loaded(positive), np.zeros(3))[0] == np.flatnonzero(positive)[0]).all()


def test_a_search_that_rounding_carries_too_far_goes_back():
    # Ten million random trees would do as well; these shapes overshoot within a node and between nodes.
    random = np.random.default_rng(5)
    for _ in range(300):
        values = random.random(24) * 10.0 ** random.integers(-17, 17, 24) * (random.random(24) < 0.4)
        if not values.any():
            continue
        tree = loaded(values)
        share = np.nextafter(np.cumsum(values) / tree.total, random.integers(0, 2, 24) * 2.0)
        _, value = draw(tree, np.clip(np.concatenate([share, [BELOW_ONE]]), 0, BELOW_ONE))
        assert (value > 0).all()


def test_nothing_drifts():
    tree, random = SumTree(3000), np.random.default_rng(1)
    for _ in range(400):
        update(tree, random.integers(0, 3000, 64), random.random(64) * 10.0 ** random.integers(-12, 12, 64))
    fresh = loaded(leaves(tree))
    assert (tree.total, tree.min_positive) == (fresh.total, fresh.min_positive)
    uniforms = random.random(2000)
    assert (draw(tree, uniforms)[0] == draw(fresh, uniforms)[0]).all()
    tree.fill(0, 3000, 0.0)
    assert tree.total == 0.0


def test_draws_follow_the_priorities():
    random = np.random.default_rng(3)
    values = random.random(700) ** 3 * (random.random(700) < 0.7)
    values[100] = values.sum() / 10
    tree, n = loaded(values), 400_000
    counts = np.bincount(draw(tree, random.random(n))[0], minlength=700)
    expected = values / values.sum() * n
    often = expected >= 5
    assert counts[values == 0].sum() == 0
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    # Chi-square has mean k and variance 2k; five deviations are allowed on either side.
    assert abs(statistic - often.sum()) < 5 * math.sqrt(2 * often.sum())


def test_the_last_of_equal_rows_wins():
    tree = SumTree(20)
    update(tree, [3, 4, 3, 3, 4], [1.0, 2.0, 5.0, 7.0, 9.0])
    assert leaves(tree)[[3, 4]].tolist() == [7.0, 9.0]
    index = np.tile([3, 4], 700)  # more than one round of the batch
    update(tree, index, np.arange(1400.0))
    assert leaves(tree)[[3, 4]].tolist() == [1398.0, 1399.0]


def test_get_reads_any_rows():
    values = np.arange(100.0)
    index, out = np.array([99, 0, 5, 5]), np.empty(4)
    loaded(values).get(index.ctypes.data, 4, out.ctypes.data)
    assert out.tolist() == [99.0, 0.0, 5.0, 5.0]


def test_minus_zero_is_zero():
    tree = loaded([-0.0, 1.0])
    update(tree, [1], [-0.0])
    tree.fill(0, 1, -0.0)
    assert not np.signbit(leaves(tree)).any() and tree.total == 0.0
    tree.check_valid()


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, -1.0, -5e-324, math.nextafter(LARGEST, math.inf)]
)
@pytest.mark.parametrize("position", [0, 700])
def test_a_bad_priority_changes_nothing(bad, position):
    before = np.arange(1000.0)
    tree = loaded(before)
    values = np.ones(1000)
    values[position] = bad
    message = rf"expected finite priorities of 0 or more .* got .* at position {position} of 1000"
    with pytest.raises(ValueError, match="update: " + message):
        update(tree, np.arange(1000), values)
    with pytest.raises(ValueError, match="fill: expected finite priorities"):
        tree.fill(0, 3, bad)
    assert_summaries(tree, before)


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**63), 2**63 - 1])
def test_a_bad_row_changes_nothing(bad):
    tree = loaded(np.ones(10))
    with pytest.raises(IndexError, match=rf"update: row {bad} at position 1 of 2 .* \[0, 10\)"):
        update(tree, [3, bad], [5.0, 5.0])
    out, index = np.full(2, -1.0), np.array([3, bad])
    with pytest.raises(IndexError, match=f"get: row {bad}"):
        tree.get(index.ctypes.data, 2, out.ctypes.data)
    with pytest.raises(IndexError, match=f"fill: start {bad}"):
        tree.fill(bad, 1, 5.0)
    assert_summaries(tree, np.ones(10))
    assert (out == -1).all()


@pytest.mark.parametrize("bad", [1.0, -5e-324, math.nan, math.inf])
def test_a_bad_uniform_draws_nothing(bad):
    tree = loaded(np.ones(10))
    uniforms, index, value = np.array([0.5, bad]), np.full(2, -7), np.full(2, -7.0)
    with pytest.raises(ValueError, match=r"draw: expected uniforms in \[0, 1\), got .* at position 1 of 2"):
        tree.draw(uniforms.ctypes.data, 2, index.ctypes.data, value.ctypes.data)
    assert (index == -7).all() and (value == -7).all()


def test_bad_sizes_and_addresses_are_refused():
    for capacity in (0, -1):
        with pytest.raises(ValueError, match="capacity: expected 1 or more"):
            SumTree(capacity)
    for capacity in (2**62, 2**63 - 1, 2**50):
        with pytest.raises(MemoryError):
            SumTree(capacity)
    tree = SumTree(4)
    for n in (-1, 5):
        with pytest.raises(ValueError, match="fill: expected 0 to capacity rows, 4"):
            tree.fill(0, n, 1.0)
    for call in (tree.update, tree.get):
        with pytest.raises((ValueError, TypeError)):
            call(0, 0, 1)
    with pytest.raises(ValueError, match="null address"):
        tree.draw(0, 1, 0, 0)
    with pytest.raises(ValueError, match="isn't aligned"):
        tree.draw(np.zeros(2).ctypes.data + 1, 1, 0, 0)
    with pytest.raises(ValueError, match="expected 0 or more values, got -1"):
        tree.update(0, 0, -1)
    tree.update(0, 0, 0)
    tree.draw(0, 0, 0, 0)
    tree.fill(99, 0, 1.0)
    assert_summaries(tree, np.zeros(4))


def test_the_largest_priorities_dont_overflow():
    tree = SumTree(100_000)
    tree.fill(0, 100_000, LARGEST)
    assert tree.total == LARGEST * 100_000
    assert (draw(tree, [0.0, 0.5, BELOW_ONE])[0] == [0, 50_000, 99_999]).all()
    tree.fill(0, 100_000, 5e-324)
    assert tree.total == 5e-324 * 100_000 and tree.min_positive == 5e-324
    assert (draw(tree, [0.0, 0.5, BELOW_ONE])[0] == [0, 50_000, 99_999]).all()


def test_long_calls_let_other_threads_run_and_shared_draws_agree():
    tree, uniforms = loaded(np.random.default_rng(0).random(50_000)), np.random.default_rng(1).random(20_000)
    expected, found = draw(tree, uniforms)[0], []

    def work():
        found.append(draw(tree, uniforms)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((index == expected).all() for index in found) and len(found) == 4
