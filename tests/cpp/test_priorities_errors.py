"""`Priorities` refuses wrong arguments and then leaves all state unchanged."""

from __future__ import annotations

import math
from contextlib import contextmanager

import numpy as np
import pytest

from gleanrl._arrays.native import Priorities
from tests.cpp.priorities_model import Table, address, float64, int64

FLOAT32_MAX = float(np.finfo(np.float32).max)


def in_use(single: bool = False) -> Table:
    """Return ten rows, at least one in each state."""
    table = Table.empty(10, single, alpha=0.6, eps=1e-8)
    table.fill(0, 8, 1.0)
    table.update([1, 2, 3], [0.0, 4.0, 7.0])
    table.draw([0.1, 0.7])
    table.block([2, 9], [1, 1])
    table.check()
    return table


def snapshot(table: Table) -> tuple[object, ...]:
    core = table.core
    values = (table.got().tolist(), table.got(leaves=True).tolist(), *(a.tolist() for a in table.state()))
    return (*values, core.max_seen, core.end, core.total, core.alpha, core.eps)


@contextmanager
def refused(table: Table, error: type[Exception], message: str):
    before = snapshot(table)
    with pytest.raises(error, match=message):
        yield
    table.core.check_valid()
    assert snapshot(table) == before


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, -1.0, -5e-324, math.nextafter(2.0**960, math.inf)]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_bad_priority_changes_nothing(bad, late):
    table = in_use()
    if late:
        table.written[4] += 1
    index, message = [3, 5, 4, -1], "expected finite priorities of 0 or more .at most 2.960., got"
    with refused(table, ValueError, f"update: {message} .* at position 2 of 4"):
        table.update(index, [2.0, 3.0, bad, 1.0], expected=[1, 1, 1, 1])
    with refused(table, ValueError, "fill: " + message):
        table.core.fill(0, 3, bad)
    with refused(table, ValueError, "max_seen: " + message):
        table.core.max_seen = bad
    # A value at an index of -1 is ignored, so it needn't be a valid priority.
    row, value = int64([-1]), float64([bad])
    assert table.core.update(address(row), address(value), 1, 10, address(table.written)) == 0
    table.check()


def test_overflow_of_single_precision_is_refused():
    table = in_use(single=True)
    for bad in (math.nextafter(FLOAT32_MAX, math.inf), 1e39, 1e300):
        with refused(table, ValueError, "update: .*at most float32's largest number"):
            table.update([3, 4], [1.0, bad])
        with refused(table, ValueError, "fill: .*float32"):
            table.core.fill(0, 1, bad)


def test_powers_that_the_tree_cant_add_up_are_refused():
    table = in_use()
    table.set_rule(2.0, 0.0)
    with refused(table, ValueError, "update: priority .* is too large for alpha = 2, eps = 0"):
        table.update([3, 4], [1.0, 1e200])
    with refused(table, ValueError, "fill: priority .* is too large"):
        table.core.fill(0, 2, 1e200)
    with refused(table, ValueError, "max_seen: priority .* is too large"):
        table.core.max_seen = 1e200
    table.update([4], [1e100])
    with refused(table, ValueError, "set_rule: priority .* is too large for alpha = 3"):
        table.set_rule(3.0, 0.0)
    # New rows get the largest priority seen, which is too large.
    table.update([4], [1.0])
    with refused(table, ValueError, "set_rule: priority .* is too large"):
        table.set_rule(3.0, 0.0)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_a_bad_rule_changes_nothing(bad):
    table = in_use()
    for rule, name in (((bad, 0.5), "alpha"), ((0.5, bad), "eps")):
        with refused(table, ValueError, f"set_rule: expected a finite {name} of 0 or more"):
            table.set_rule(*rule)
    with refused(table, ValueError, "draw: expected a finite beta of 0 or more"):
        table.draw([0.5], bad)


@pytest.mark.parametrize("bad", [-2, 10, 2**40, -(2**63), 2**63 - 1])
def test_a_bad_row_changes_nothing(bad):
    table = in_use()
    with refused(table, IndexError, rf"update: row {bad} at position 1 of 3 .* \[0, 10\)"):
        table.update([3, bad, -1], [5.0, 5.0, 5.0])
    with refused(table, IndexError, f"remember: row {bad} at position 1 of 2"):
        table.remember([3, bad])
    with refused(table, IndexError, f"block: row {bad} at position 1 of 2"):
        table.block([3, bad], [1, 1])
    with refused(table, IndexError, f"fill: row {bad}"):
        table.core.fill(bad, 1, 5.0)
    index, value = int64([3, bad]), np.full(2, -1.0)
    for read in (table.core.get, table.core.leaves):
        with refused(table, IndexError, f"get: row {bad}"):
            read(address(index), 2, address(value))
    assert (value == -1).all()


@pytest.mark.parametrize("position", [0, 63, 64, 511, 512, 1499])
def test_a_long_update_changes_all_or_nothing(position):
    table = in_use()
    index, raw = np.arange(1500) % 10, np.full(1500, 5.0)
    for bad in (math.nan, -1.0, math.inf, 2.0**961):
        spoilt = raw.copy()
        spoilt[position] = bad
        with refused(table, ValueError, f"at position {position} of 1500"):
            table.update(index, spoilt)
    index[position] = 10
    with refused(table, IndexError, f"row 10 at position {position} of 1500"):
        table.update(index, raw)


def test_minus_one_is_a_row_for_updates_only():
    table = in_use()
    with refused(table, IndexError, "remember: row -1"):
        table.remember([-1])
    with refused(table, IndexError, "block: row -1"):
        table.block([-1], [1])


def test_rows_beyond_the_limit_are_refused():
    table = in_use()
    with refused(table, IndexError, r"update: row 8 at position 0 of 1 .* \[0, 8\)"):
        table.update([8], [1.0], limit=8)
    for limit in (-1, 11, 2**62):
        with refused(table, ValueError, f"update: limit is {limit}, expected at most the capacity, 10"):
            table.update([3], [1.0], limit=limit)
    for n in (-1, 11):
        with refused(table, ValueError, f"fill: expected 0 to capacity rows, 10, got {n}"):
            table.core.fill(0, n, 1.0)
    assert table.update([-1], [1.0], limit=0) == 0
    table.check()


@pytest.mark.parametrize("bad", [1.0, -5e-324, math.nan])
def test_a_bad_uniform_draws_and_remembers_nothing(bad):
    table = in_use()
    with refused(table, ValueError, "draw: expected uniforms in .* at position 1 of 2"):
        table.draw([0.5, bad])


def test_draws_without_a_row_are_refused():
    table = Table.empty(10)
    message = "draw: no row has a positive priority"
    with refused(table, RuntimeError, message):
        table.draw([0.5])
    table.fill(0, 10, 0.0)
    with refused(table, RuntimeError, message):
        table.draw([0.5])
    table.set_rule(0.0, 0.0)
    table.draw([0.5])
    table.block(range(10), np.ones(10))
    with refused(table, RuntimeError, message):
        table.draw([0.5])
    assert len(table.draw([])[0]) == 0


def test_states_that_were_never_saved_are_refused():
    table = in_use()
    raw, mark = table.state()
    core = table.core

    def load(raw: np.ndarray, mark: np.ndarray) -> None:
        core.load(address(raw), address(mark), len(raw))

    for bad in (math.nan, -1.0, math.inf):
        with refused(table, ValueError, "load: expected finite priorities .* position 3"):
            load(np.where(np.arange(len(raw)) == 3, bad, raw), mark)
    with refused(table, ValueError, "load: row 8 has mark"):  # not in use
        load(np.where(np.arange(len(raw)) == 8, 1.0, raw), mark)
    with refused(table, ValueError, "load: row 5 has mark 5"):  # a generation that was never drawn
        load(np.where(np.arange(len(raw)) == 5, 0.0, raw), np.where(np.arange(len(raw)) == 5, 5, mark))
    with refused(table, ValueError, "load: expected at most capacity rows, 10, got 11"):
        load(np.zeros(11), np.zeros(11, np.int32))
    table.set_rule(3.0, 0.0)
    with refused(table, ValueError, "load: priority .* is too large"):
        load(np.full(1, 1e100), np.full(1, -(2**31), np.int32))
    core.load(0, 0, 0)
    assert core.end == 0 and core.total == 0 and core.max_seen == 7.0
    core.check_valid()


def test_invalid_sizes_and_addresses_are_refused():
    for capacity in (2**62, 2**63 - 1, 2**50):
        with pytest.raises(MemoryError):
            Priorities(capacity, True)
    for capacity in (0, -1):
        with pytest.raises(ValueError, match="capacity: expected 1 or more"):
            Priorities(capacity, True)
    table = in_use()
    core, written, room = table.core, address(table.written), np.zeros(4)
    some = address(room)
    calls = [
        lambda a, n: core.update(a, some, n, 10, written),
        lambda a, n: core.update(some, a, n, 10, written),
        lambda a, n: core.update(some, some, n, 10, a),
        lambda a, n: core.draw(a, n, 1.0, False, written, some, some, some),
        lambda a, n: core.draw(some, n, 1.0, False, a, some, some, some),
        lambda a, n: core.draw(some, n, 1.0, False, written, some, some, a),
        lambda a, n: core.remember(a, n, written),
        lambda a, n: core.block(a, n, some),
        lambda a, n: core.get(a, n, some),
        lambda a, n: core.load(a, some, n),
    ]
    for call in calls:
        with refused(table, ValueError, "null address"):
            call(0, 1)
        with refused(table, ValueError, "isn't aligned"):
            call(written + 1, 1)
        with refused(table, ValueError, "expected 0 or more values, got -1|null"):
            call(0, -1)
