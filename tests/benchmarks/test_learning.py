"""The comparison of learning finds a difference that exists, and none where both sides are alike."""

from __future__ import annotations

import numpy as np

from benchmarks.learning import interval


def test_interval_contains_the_true_difference_and_is_as_wide_as_the_noise() -> None:
    generator, hits, widths = np.random.default_rng(1), 0, []
    for _ in range(100):
        theirs, ours = generator.normal(5.0, 2.0, 10), generator.normal(8.0, 2.0, 10)
        low, high = interval([*theirs], [*ours])
        hits += low < 3.0 < high
        widths.append(high - low)
    assert hits >= 85
    # The standard error of the difference is 2 * sqrt(2 / 10), less a factor sqrt(9 / 10) of the bootstrap.
    np.testing.assert_allclose(np.mean(widths), 2 * 1.96 * 2 * np.sqrt(0.2 * 0.9), rtol=0.1)
