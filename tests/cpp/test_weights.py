"""Importance weights equal the power function in high precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._arrays.native import importance_weights
from tests.cpp.widths import from_every_width

positive = st.floats(5e-324, 2.0**960)


def weights(priority, unit: float, beta: float, normalise: bool) -> np.ndarray:
    priority = np.ascontiguousarray(priority, dtype=np.float64)

    def work() -> bytes:
        out = np.full(len(priority) + 1, -7, np.float32)
        importance_weights(priority.ctypes.data, len(priority), unit, beta, out.ctypes.data, normalise)
        assert out[-1] == -7
        return out[:-1].tobytes()

    return np.frombuffer(from_every_width(work), np.float32)


def power(ratio_log2: float, beta: float) -> float:
    exponent = -beta * ratio_log2
    return 0.0 if exponent < -1000 else math.inf if exponent > 1000 else 2.0**exponent


def assert_close(found: np.ndarray, expected: list[float]) -> None:
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.array(expected).astype(np.float32)
    # The difference is at most one unit in the last place: the result is rounded once, from a double exact to 1e-9.
    assert (np.isfinite(found) == np.isfinite(rounded)).all()
    finite = np.isfinite(found)
    np.testing.assert_array_max_ulp(found[finite], rounded[finite], maxulp=1)


@given(st.lists(positive, min_size=1, max_size=9), st.floats(0, 3), st.floats(1e-30, 1e30))
def test_weights_are_powers(priority, beta, unit):
    expected = [power(math.log2(p) - math.log2(unit), beta) for p in priority]
    assert_close(weights(priority, unit, beta, False), expected)
    assert weights([unit], unit, beta, False) == 1.0


@given(st.lists(positive, min_size=1, max_size=9), st.floats(0, 3))
def test_normalised_weights_are_at_most_one(priority, beta):
    found = weights(priority, 1.0, beta, True)
    assert found.max() == 1.0 and found[np.argmin(priority)] == 1.0
    assert_close(found, [power(math.log2(p) - math.log2(min(priority)), beta) for p in priority])


def test_weights_of_a_batch_equal_the_formula():
    priority = np.random.default_rng(0).random(257) ** 2 + 1e-8
    for beta in (0.0, 0.4, 0.6, 1.0):
        expected = (priority / priority.min()) ** -beta
        np.testing.assert_allclose(weights(priority, priority.min(), beta, False), expected, rtol=1.2e-7)
        np.testing.assert_allclose(weights(priority, 5.0, beta, True), expected, rtol=1.2e-7)


def test_without_correction_every_weight_is_one():
    assert (weights([5e-324, 1.0, 2.0**960], 3.0, 0.0, False) == 1).all()


def test_the_normalised_batch_doesnt_depend_on_the_unit():
    # A power in float32 would overflow or vanish here.
    for factor in (1e-200, 1.0, 1e200):
        np.testing.assert_allclose(
            weights(np.array([1.0, 4.0, 16.0]) * factor, 1.0, 0.5, True), [1, 0.5, 0.25], rtol=1e-7
        )


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.nan, math.inf, 2.0**961])
@pytest.mark.parametrize("position", [0, 299])
def test_a_bad_priority_writes_nothing(bad, position):
    priority, out = np.ones(300), np.full(300, -7, np.float32)
    priority[position] = bad
    with pytest.raises(
        ValueError, match=f"weights: expected positive priorities .* position {position} of 300"
    ):
        importance_weights(priority.ctypes.data, 300, 1.0, 0.5, out.ctypes.data, True)
    assert (out == -7).all()


def test_invalid_units_betas_and_addresses_are_refused():
    one, out = np.ones(1), np.full(1, -7, np.float32)
    for unit in (0.0, -1.0, math.nan, math.inf, 2.0**961):
        with pytest.raises(ValueError, match="expected a positive unit"):
            importance_weights(one.ctypes.data, 1, unit, 0.5, out.ctypes.data, False)
    for beta in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected a finite beta of 0 or more"):
            importance_weights(one.ctypes.data, 1, 1.0, beta, out.ctypes.data, False)
    with pytest.raises(ValueError, match="null address"):
        importance_weights(0, 1, 1.0, 0.5, out.ctypes.data, False)
    importance_weights(0, 0, 1.0, 0.5, 0, True)
    assert out[0] == -7
