"""Calls to an actor work while it lives and fail clearly after its death or end; data takes the object store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Job
from gleanrl._process.ray import RayRuntime
from gleanrl._process.serialization import PickledBatch
from gleanrl.data import LazyTensorStorage, RayReplayBuffer
from gleanrl.data.replay_buffers.ray import client as module
from gleanrl.data.replay_buffers.ray.actor import Opened
from gleanrl.errors import ClosedError, WorkerCrashedError


def mapped() -> list[tuple[int, int]]:
    """Return the address ranges of the object store's memory in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.match(r"(\w+)-(\w+) .*(plasma|/dev/shm/)", line):
            found.append((int(match[1], 16), int(match[2], 16)))
    return found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_records_are_seen_where_the_object_store_has_them(ray_session):
    ray = ray_session
    batch = TensorDict({"x": torch.rand(500, 100), "next": {"x": torch.rand(500, 100)}}, [500])
    arrived = ray.get(ray.put(PickledBatch(batch)))
    assert arrived.num_bytes == 400_000
    view = arrived.view()
    for leaf in (view["x"], view["next", "x"]):
        assert any(start <= leaf.data_ptr() < stop for start, stop in mapped())
    assert (view == batch).all() and view["x"].data_ptr() == arrived.view()["x"].data_ptr()
    own = arrived.open()["x"].data_ptr()
    assert not any(start <= own < stop for start, stop in mapped())


def test_dead_actor_raises_at_once_with_advice(ray_session):
    storage, config = LazyTensorStorage(100), {"name": "doomed"}
    buffer = RayReplayBuffer(storage=storage, batch_size=5, prefetch=2, remote_config=config)
    buffer.extend(torch.arange(50))
    buffer.sample()
    with pytest.raises(WorkerCrashedError, match=r"(?s)buffer's actor is gone.*loads\(folder\)"):
        ray_session.kill(ray_session.get_actor("doomed"))
        for _ in range(10):  # batches that had arrived are still valid
            buffer.sample()
    for call in (buffer.sample, lambda: len(buffer), lambda: buffer.extend(torch.arange(3))):
        with pytest.raises(WorkerCrashedError, match="checkpoint"):
            call()
    assert repr(buffer) == "RayReplayBuffer(its actor has ended)" and "ended" in buffer._repr_html_()
    buffer.shutdown()
    buffer.shutdown()
    for call in (buffer.sample, lambda: len(buffer), lambda: buffer.sampler.ran_out):
        with pytest.raises(ClosedError):
            call()
    assert repr(buffer) == "RayReplayBuffer(shut down)" and "ended" in buffer._repr_html_()


def test_the_end_waits_for_all_messages_together(ray_session, monkeypatch):
    monkeypatch.setattr(module, "_END_S", 0.1)
    client = module.Client(RayRuntime(), None, Opened(2, 5))
    client._line.coming.extend(Job(lambda: None) for _ in range(20))  # their replies never arrive
    deadline = Deadline(1.0)
    client.end(kill=False)
    assert not deadline.passed()
