"""Two collectors on Ray for all tests of a process: each node takes seconds to start."""

from __future__ import annotations

import pytest

from gleanrl.collectors.distributed import DistributedSyncDataCollector
from gleanrl.envs import Timeouts
from tests.collectors.distributed.helpers import HalfLent, Says, environments

PATIENT = {
    "timeouts": Timeouts(start_s=400.0),
    "remote_configs": {"num_cpus": 0},
    "track_policy_version": True,
}


def two_nodes(ray_session):
    """Yield a collector of two nodes: batches of 20 frames from one node each, endlessly; lost nodes are restarted."""
    collector = HalfLent(environments(2), Says(), frames_per_batch=20, on_worker_error="restart", **PATIENT)
    yield collector
    collector.shutdown()
    assert ray_session.is_initialized()


apart = pytest.fixture(two_nodes, scope="session", name="apart")
growing = pytest.fixture(two_nodes, name="growing")  # for the test that adds nodes


@pytest.fixture(scope="session")
def together(ray_session):
    """Two nodes with a share of 10 frames in each batch, endlessly."""
    collector = DistributedSyncDataCollector(environments(2), Says(), frames_per_batch=20, **PATIENT)
    yield collector
    collector.shutdown()
