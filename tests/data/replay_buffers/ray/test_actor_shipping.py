"""The queue of an actor's buffer keeps each sent batch until it is handed out."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from gleanrl.data.replay_buffers.ray.actor import Shipping


def sending(*clients: str) -> tuple[ReplayBuffer, Shipping]:
    """Return a buffer of 12 rows that has sent batches of 4 to these clients, beginning with number 1."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=1,
        generator=torch.Generator(),
    )
    buffer.extend(torch.arange(12))
    queue = buffer.server.draws.prefetcher = Shipping()
    for client in clients:
        queue.client = client.encode()
        buffer.sample()
    return buffer, queue


def test_sent_batch_is_queued_until_it_is_handed_out():
    buffer, queue = sending("a", "a", "b")
    tickets = list(queue)
    assert len(queue) == 3 and queue.number == 3 and queue.position is tickets[0].position
    assert queue.at_end(b"b") and not queue.at_end(b"a") and not queue.at_end(b"c")
    queue.handed_out(b"a", 1)
    assert list(queue) == tickets[1:] and queue.position is tickets[1].position
    queue.clear()
    assert not len(queue)
    with pytest.raises(NotImplementedError):
        queue.join(buffer.storage.version)


@pytest.mark.parametrize(
    ("clients", "taken", "kept"), [("aaa", 0, 3), ("aaa", 2, 1), ("aba", 0, 1), ("bba", 0, 1), ("aab", 0, 0)]
)
def test_batches_before_another_clients_cannot_be_taken_back(clients, taken, kept):
    _, queue = sending(*clients)
    queue.keep_only(b"a", taken)
    assert len(queue) == kept


def test_write_marks_overwritten_batches_in_the_queue():
    buffer, queue = sending("a", "b")
    assert queue.overtaken(b"a") == ()
    slot = int(next(iter(queue)).drawn.slots[0])
    buffer[slot] = torch.tensor(50)
    assert queue.overtaken(b"a") == (1,) and queue.overtaken(b"b") == () and not queue.gone(b"a")
    buffer.storage.clear()
    assert queue.gone(b"b") and queue.overtaken(b"b") == ()
    queue.forget_gone()
    assert not len(queue)


def test_a_batch_is_served_again_once():
    buffer, queue = sending("a", "a")
    with queue.again(1) as ticket:
        assert ticket is not None and len(buffer.sample()) == 4
    assert queue.number == 2 and len(queue) == 1
    with queue.again(1) as ticket:
        assert ticket is None
