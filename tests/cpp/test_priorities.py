"""Priorities of rows: rule, generations, blocks and running maxima, against a plain model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpp.priorities_model import Table


def test_a_new_row_gets_the_largest_priority_seen_once_raised_to_alpha():
    table = Table.empty(10, single=True, alpha=0.6)
    table.fill(0, 4, table.core.default_priority(False))
    table.update(range(4), [5.0, 1.0, 1.0, 1.0])
    table.fill(4, 1, table.core.default_priority(False))
    table.check()
    assert table.got(leaves=True)[4] == pytest.approx(5**0.6, rel=1e-8)
    table.set_rule(0.3, 1e-8)
    table.check()
    assert np.allclose(table.got(leaves=True)[[0, 4]], 5**0.3)
