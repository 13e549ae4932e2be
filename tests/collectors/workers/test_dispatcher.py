"""Losses and restarts, with real kills."""

from __future__ import annotations

import os
import signal

import pytest

from gleanrl.errors import ClosedError, WorkerCrashedError
from tests.collectors.workers.crews import collecting


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_worker_is_reported_and_the_collector_ends(kind: str) -> None:
    with collecting(kind) as collector:
        collector.next()
        os.kill(collector.processes[1], signal.SIGKILL)
        with pytest.raises(WorkerCrashedError, match="worker 1 .*SIGKILL"):
            while True:
                collector.next()
        with pytest.raises(ClosedError, match="worker 1 was lost"):
            collector.next()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_worker_is_replaced(kind: str) -> None:
    with collecting(kind, on_worker_error="restart") as collector:
        ids: set[int] = set()
        for round_ in range(4):
            pid = collector.processes[round_ % 2]
            os.kill(pid, signal.SIGKILL)
            while collector.processes[round_ % 2] == pid:
                batch = collector.next()
                ids |= set(batch["collector", "traj_ids"].unique().tolist())
        stats = collector.stats()
    assert [worker.restarts for worker in stats.workers] == [2, 2]
    assert stats.stepped == stats.delivered + stats.discarded and set(stats.reasons) <= {"worker"}
