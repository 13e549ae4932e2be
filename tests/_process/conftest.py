"""Worker pools that the tests destroy."""

from __future__ import annotations

import pytest

from gleanrl._process.worker import WorkerPlan
from gleanrl._process.worker_pool import WorkerPool
from tests._process.crews import started
from tests._process.servants import Clerk
from tests.leaks import Holdings


@pytest.fixture
def doomed():
    """Make worker pools that tests destroy; the test must leave no process or descriptor."""
    WorkerPool([Clerk], WorkerPlan()).close()  # start the fork server now, because it outlives the test
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
