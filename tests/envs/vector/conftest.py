"""What tests of pools share."""

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
    """No process, descriptor or thread is left of the pools of a module."""
    ParallelEnv(1, oracle).reset()  # the launcher itself stays
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
    """Makes pools and closes them."""
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
    """Where an environment waits until it's opened."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return str(path)
