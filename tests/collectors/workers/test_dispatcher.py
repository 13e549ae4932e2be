"""Losses and restarts, with real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gleanrl.errors import ClosedError, WorkerCrashedError
from tests.chaos.faults import Fault
from tests.chaos.oracle import Record, makers
from tests.collectors.workers.crews import collecting
from tests.fakes import FakeFailure


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


@pytest.mark.parametrize(("kind", "error"), [("kill", WorkerCrashedError), ("raise", FakeFailure)])
def test_a_worker_that_is_lost_while_it_is_made(kind: str, error: type[Exception], tmp_path: Path) -> None:
    fault = Fault(kind, "construction", tmp_path / "token", os.getpid(), 6)
    with pytest.raises(error), collecting("sync", makers(2, fault=fault)):
        pass
    fault.token.unlink()
    with collecting(
        "sync", makers(2, fault=fault), total_frames=24, on_worker_error="restart", max_restarts=1
    ) as collector:
        record = Record()
        assert sum(record.add(batch) for batch in collector) == 24
        record.check()
        assert sum(worker.restarts for worker in collector.stats().workers) == 1
