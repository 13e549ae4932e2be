"""Fixtures for tests of environment pools."""

from __future__ import annotations

import gc
import os

import pytest

from gleanrl.envs import AsyncEnvPool, ParallelEnv
from tests.envs.vector.makers import oracle
from tests.envs.vector.pools import BACKENDS, pool_threads
from tests.leaks import Holdings


@pytest.fixture(scope="module")
def nothing_is_left():
    """Check that the pools of a module leave no process, descriptor or thread."""
    ParallelEnv(1, oracle).reset()  # start the fork server now, because it outlives the test
    gc.collect()
    before = Holdings.now()
    yield
    gc.collect()
    for thread in pool_threads():
        thread.join(20)
    assert not pool_threads()
    before.check()


@pytest.fixture(params=BACKENDS)
def make_pool(request, nothing_is_left):
    """Make pools, and close them after the test."""
    made = []

    def build(*args, **kwargs):
        made.append(AsyncEnvPool(*args, backend=request.param, **kwargs))
        return made[-1]

    build.backend = request.param
    yield build
    for pool in made:
        pool.close()


@pytest.fixture
def gate(tmp_path):
    """Return the path of a gate that an environment waits at until it is opened."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return str(path)
