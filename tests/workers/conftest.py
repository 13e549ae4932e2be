"""Crews that are ended by their tests."""

from __future__ import annotations

import pytest

from gleanrl.workers.crew import Crew
from gleanrl.workers.handle import Plan
from tests.leaks import Holdings
from tests.workers.crews import started
from tests.workers.servants import Clerk


@pytest.fixture
def doomed():
    """Makes crews that don't survive; nothing may be left of them."""
    Crew([Clerk], Plan()).close()  # the launcher itself stays
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
