"""The limits in C compute the same results as NumPy; a wrong limit would invalidate every measured ratio."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from benchmarks.climit import BinaryTree, Gather, GatherRuns, OctTree, Tree
from benchmarks.workload import rows

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
TREES = (OctTree, BinaryTree)


def test_gathers_copy_the_rows() -> None:
    columns = list(rows("cartpole", 500).values())
    index = np.random.default_rng(0).integers(0, 500, 64)
    for column, out in zip(columns, Gather(columns, 64)(index), strict=True):
        np.testing.assert_array_equal(out, column[index])


def test_runs_are_consecutive_rows() -> None:
    columns = list(rows("cartpole", 500).values())
    starts = np.array([0, 490, 17])
    index = (starts[:, None] + np.arange(10)).ravel()
    for column, out in zip(columns, GatherRuns(columns, 10, 3)(starts), strict=True):
        np.testing.assert_array_equal(out, column[index])


@pytest.mark.parametrize("make", TREES)
@pytest.mark.parametrize("n", [3, 8, 9, 64, 700])
def test_trees_draw_in_proportion_with_the_weights_of_their_rows(make: type[Tree], n: int) -> None:
    batch = 100_000
    priorities = np.random.default_rng(n).random(n) * 3
    tree = make(np.ones(n), batch)
    tree.update(np.arange(n), priorities)
    tree._scale = n / ((priorities + 1e-8) ** 0.6).sum()
    drawn = tree.draw(batch)
    probability = (priorities + 1e-8) ** 0.6
    probability /= probability.sum()
    counts = np.bincount(drawn, minlength=n)
    assert len(counts) == n
    deviation = (counts - batch * probability) / np.sqrt(batch * probability + 1)
    assert np.abs(deviation).max() < 5
    weight = (probability[drawn] * n) ** -0.4
    np.testing.assert_allclose(tree.weights, weight / weight.max(), rtol=1e-4)


@pytest.mark.parametrize("make", TREES)
def test_rows_without_priority_are_not_drawn(make: type[Tree]) -> None:
    tree = make(np.ones(1000), 1000)
    tree.EPS = 0.0
    tree.update(np.arange(1000), np.where(np.arange(1000) % 10 == 3, 1.0, 0.0))
    assert set(tree.draw(1000) % 10) == {3}
