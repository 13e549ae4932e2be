"""The same bits from registers of every width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.native import (
    Priorities,
    first_nonfinite_f32,
    first_nonfinite_f64,
    importance_weights,
    lanes,
    use_lanes,
)
from tests.cpp.test_sum_tree import draw, loaded, update

WIDTHS = (2, 8)
usual = st.floats(0, 2.0**100)
leaf = st.sampled_from([0.0, 0.0, 5e-324, 1e-9, 0.1, 0.3, 1.0, 1e16, 2.0**960]) | usual


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


def test_only_widths_of_the_processor_are_used():
    before = lanes()
    assert before in WIDTHS
    for n in (0, 1, 3, 4, 16, -2):
        assert not use_lanes(n) and lanes() == before
    assert use_lanes(2) and lanes() == 2
    assert use_lanes(before)


@settings(deadline=None)
@given(st.lists(usual.filter(bool), min_size=1, max_size=19), st.floats(0, 3), st.booleans())
def test_weights(priorities, beta, normalise):
    given_ = np.array(priorities)

    def work() -> bytes:
        out = np.full(len(given_) + 1, -7, np.float32)
        importance_weights(given_.ctypes.data, len(given_), 0.3, beta, out.ctypes.data, normalise)
        assert out[-1] == -7
        return out.tobytes()

    from_every_width(work)


@settings(deadline=None)
@given(st.lists(usual, min_size=1, max_size=19), st.floats(0.01, 1.5), st.sampled_from([0.0, 1e-8, 1.0]))
def test_leaves(priorities, alpha, eps):
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
def test_draws(leaves, n, seed):
    tree = loaded(leaves)
    uniforms = np.random.default_rng(seed).random(n)
    uniforms[0] = np.nextafter(1.0, 0.0)  # a search that rounding may carry too far

    def work() -> bytes:
        index, value = draw(tree, uniforms)
        assert (np.array(leaves)[index] == value).all() and (value > 0).all()
        return index.tobytes() + value.tobytes()

    from_every_width(work)


def test_draws_from_many_levels():
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
def test_the_first_value_that_is_not_finite(dtype, scan, bad):
    largest, least = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    for length in (1, 2, 7, 8, 17, 1023, 1024, 1025, 2050):
        values = np.resize(np.array([0.0, -0.0, 1.0, largest, -largest, least], dtype), length)
        assert from_every_width(lambda v=values: bytes([scan(v.ctypes.data, len(v)) == -1])) == b"\1"
        for at in {0, length // 2, length - 1}:
            spoilt = values.copy()
            spoilt[at] = bad
            spoilt[length - 1] = bad
            assert from_every_width(lambda v=spoilt, i=at: bytes([scan(v.ctypes.data, len(v)) == i])) == b"\1"
