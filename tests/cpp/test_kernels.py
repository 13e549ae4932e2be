"""Registers of every width compute the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._arrays.native import Priorities, first_nonfinite_f32, first_nonfinite_f64, lanes, use_lanes
from tests.cpp.test_sum_tree import draw, loaded, update
from tests.cpp.widths import WIDTHS, from_every_width

usual = st.floats(0, 2.0**100) | st.floats(0, 2.0**960) | st.floats(0, 1e-300)
leaf = st.sampled_from([0.0, 0.0, 5e-324, 1e-9, 0.1, 0.3, 1.0, 1e16, 2.0**960]) | usual


def test_only_widths_of_the_processor_are_used():
    before = lanes()
    assert before in WIDTHS
    for n in (0, 1, 3, 4, 16, -2):
        assert not use_lanes(n) and lanes() == before
    assert use_lanes(2) and lanes() == 2
    assert use_lanes(before)


@settings(deadline=None)
@given(
    st.lists(usual.filter(lambda raw: raw < 2.0**600), min_size=1, max_size=19),
    st.floats(0.01, 1.5),
    st.sampled_from([0.0, 1e-8, 1.0]),
)
def test_leaves_are_equal_for_every_width(priorities, alpha, eps):
    raw, index = np.array(priorities), np.arange(len(priorities))
    written = np.zeros(len(raw), np.int64)

    def work() -> bytes:
        table, leaves = Priorities(len(raw), False), np.empty(len(raw))
        table.set_rule(alpha, eps)
        table.update(
            index.ctypes.data, raw.ctypes.data, len(raw), len(raw), written.ctypes.data, written.ctypes.data
        )
        table.leaves(index.ctypes.data, len(raw), leaves.ctypes.data)
        return leaves.tobytes()

    from_every_width(work)


@settings(deadline=None)
@given(st.lists(leaf, min_size=1, max_size=90).filter(any), st.integers(1, 40), st.integers(0, 99))
def test_draws_are_equal_for_every_width(leaves, n, seed):
    tree = loaded(leaves)
    uniforms = np.random.default_rng(seed).random(n)
    uniforms[0] = np.nextafter(1.0, 0.0)  # rounding may carry this search too far

    def work() -> bytes:
        index, value = draw(tree, uniforms)
        assert (np.array(leaves)[index] == value).all() and (value > 0).all()
        return index.tobytes() + value.tobytes()

    from_every_width(work)


def test_draws_from_many_levels_are_equal_for_every_width():
    random = np.random.default_rng(3)
    tree = loaded(np.zeros(300_000))
    rows = random.choice(300_000, 20_000, replace=False)
    update(tree, rows, random.random(20_000) ** 3)
    uniforms = random.random(5_003)
    from_every_width(lambda: b"".join(found.tobytes() for found in draw(tree, uniforms)))


@pytest.mark.parametrize(
    ("dtype", "scan"), [(np.float32, first_nonfinite_f32), (np.float64, first_nonfinite_f64)]
)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_first_non_finite_value_is_equal_for_every_width(dtype, scan, bad):
    largest, least = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    for length in (1, 2, 7, 8, 17, 1023, 1024, 1025, 2050):
        values = np.resize(np.array([0.0, -0.0, 1.0, largest, -largest, least], dtype), length)
        assert from_every_width(lambda v=values: bytes([scan(v.ctypes.data, len(v)) == -1])) == b"\1"
        for at in {0, length // 2, length - 1}:
            spoilt = values.copy()
            spoilt[at] = bad
            spoilt[length - 1] = bad
            assert from_every_width(lambda v=spoilt, i=at: bytes([scan(v.ctypes.data, len(v)) == i])) == b"\1"
