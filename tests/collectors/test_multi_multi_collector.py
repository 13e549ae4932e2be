"""`MultiCollector` is one name for both collectors with workers."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gleanrl.collectors import (
    MultiaSyncDataCollector,
    MultiCollector,
    MultiSyncDataCollector,
    aSyncDataCollector,
)
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import MissingArgumentError, WorkerCrashedError
from tests.collectors.workers.crews import Stream


@pytest.mark.parametrize(("sync", "cls"), [(True, MultiSyncDataCollector), (False, MultiaSyncDataCollector)])
def test_sync_chooses_the_class(sync: bool, cls: type) -> None:
    collector = MultiCollector(Stream(0), sync=sync, num_workers=2, frames_per_batch=8, total_frames=8)
    assert type(collector) is cls and isinstance(collector, MultiCollector)
    assert sum(batch.numel() for batch in collector) == 8


def test_missing_sync_is_refused() -> None:
    with pytest.raises(MissingArgumentError, match="sync: expected True .* or False"):
        MultiCollector([Stream(0)], frames_per_batch=8)
    assert issubclass(aSyncDataCollector, MultiCollector) and not issubclass(Stream, MultiCollector)


def test_shutdown_after_a_reported_loss_raises_nothing() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=4)
    collector = aSyncDataCollector(Stream(0), None, frames_per_batch=5, total_frames=-1, replay_buffer=buffer)
    collector.start()
    with pytest.raises(WorkerCrashedError, match="SIGKILL"), collector.pause():
        os.kill(collector.processes[0], signal.SIGKILL)
        collector.reset()
    # The background thread has continued, and found no worker.
    while not collector._delivery.background._job.ended:
        time.sleep(0.001)
    for _ in range(2):
        collector.shutdown()
    assert not collector.is_running()
