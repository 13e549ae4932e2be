"""Crews that are ended by their tests."""

from __future__ import annotations

import pytest

from gleanrl._process.worker import WorkerPlan
from gleanrl._process.worker_pool import WorkerPool
from tests._process.crews import started
from tests._process.servants import Clerk
from tests.leaks import Holdings


@pytest.fixture
def doomed():
    """Makes crews that don't survive; nothing may be left of them."""
    WorkerPool([Clerk], WorkerPlan()).close()  # the launcher itself stays
    before = Holdings.now()
    made = []

    def make(*servants, **timeouts):
        made.append(started(*servants, **timeouts))
        made[-1].wait_all()
        return made[-1]

    yield make
    for crew in made:
        crew.close()
    before.check()
