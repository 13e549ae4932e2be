"""Two Ray collectors that all tests of a process share, because each node takes seconds to start."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from gleanrl.collectors.distributed import DistributedSyncDataCollector
from gleanrl.envs import Timeouts
from tests import rays
from tests.collectors.distributed.helpers import HalfLent, Says, environments

PATIENT = {
    "timeouts": Timeouts(start_s=400.0),
    "remote_configs": {"num_cpus": 0},
    "track_policy_version": True,
}


@contextmanager
def two_nodes():
    """Yield a collector of two nodes without a budget, which delivers 20 frames of one node and restarts lost nodes."""
    collector = HalfLent(environments(2), Says(), frames_per_batch=20, on_worker_error="restart", **PATIENT)
    yield collector
    collector.shutdown()
    assert rays.prepare().is_initialized()


@contextmanager
def shares_of_two_nodes():
    """Yield a collector without a budget; each of its two nodes makes 10 frames of each batch."""
    collector = DistributedSyncDataCollector(environments(2), Says(), frames_per_batch=20, **PATIENT)
    yield collector
    collector.shutdown()


@pytest.fixture(scope="session")
def apart(ray_session):
    return rays.kept(two_nodes)


@pytest.fixture(scope="session")
def together(ray_session):
    return rays.kept(shares_of_two_nodes)


@pytest.fixture
def growing(ray_session):
    """Yield a collector like `apart` for the test that adds nodes."""
    with two_nodes() as collector:
        yield collector
