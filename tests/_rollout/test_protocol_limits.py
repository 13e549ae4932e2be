"""A step limit truncates episodes by environment."""

from __future__ import annotations

import numpy as np

from gleanrl._rollout.protocol import StepLimit


def test_limit_marks_episodes_that_reach_it():
    limit = StepLimit((2,), 3)
    assert limit.step() is None and limit.step(np.array([False, True])) is None
    assert limit.counts.tolist() == [2, 0]
    assert limit.step().tolist() == [True, False]
    limit.restart(np.array([True, False]))
    assert limit.counts.tolist() == [0, 1]
    limit.restart(None)
    assert limit.counts.tolist() == [0, 0]


def test_limit_counts_an_unbatched_environment():
    limit = StepLimit((), 1)
    assert limit.step().shape == () and limit.counts == 1
    limit.restart(np.asarray(True))
    assert limit.counts == 0


def test_no_limit_counts_nothing():
    limit = StepLimit((), None)
    assert limit.step() is None and limit.counts == 0
