"""The queue of prefetched batches keeps order, depth and threads, and can be pickled."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

from gleanrl._arrays.results import Draw
from gleanrl.data.replay_buffers import LazyTensorStorage
from gleanrl.data.replay_buffers.prefetch import PendingSample, Prefetcher
from tests.data.replay_buffers.oracle import fill


def storage_of(rows: int) -> LazyTensorStorage:
    storage = LazyTensorStorage(100)
    fill(storage, torch.arange(rows) * 10)
    return storage


def ticket(storage: Any, slot: int, ran_out: bool = False) -> PendingSample:
    drawn = Draw(torch.tensor([slot]))
    return PendingSample(drawn, storage, storage.version, ran_out)


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_the_order_of_their_draws(threads):
    storage, queue = storage_of(50), Prefetcher(depth=4, threads=threads)
    for slot in range(50):
        queue.put(ticket(storage, slot))
    assert len(queue) == 50 and [int(found.drawn.slots) for found in queue] == list(range(50))
    for slot in range(50):
        found, coming = queue.take()
        assert int(found.drawn.slots) == slot and coming.result().records.tolist() == [slot * 10]
    assert len(queue) == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_queue_holds_depth_plus_one_draws_and_none_after_an_epoch(depth):
    storage, queue = storage_of(5), Prefetcher(depth, 1)
    for _ in range(depth + 1):
        assert queue.wants_more
        queue.put(ticket(storage, 0))
    assert not queue.wants_more
    queue.take()
    queue.put(ticket(storage, 1, ran_out=True))
    queue.take()
    assert not queue.wants_more
    queue.clear()
    assert queue.wants_more and len(queue) == 0


class Waiting(LazyTensorStorage):
    """A storage whose fetches wait until two of them run."""

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
        self.barrier.wait(timeout=20)
        return super().fetch(slots, paths)


def test_threads_work_side_by_side_and_end_with_the_queue():
    storage, queue = Waiting(10), Prefetcher(2, 2)
    storage.barrier = threading.Barrier(2)
    fill(storage, torch.arange(10))
    before = threading.active_count()
    queue.put(ticket(storage, 1))
    queue.put(ticket(storage, 2))
    assert [int(queue.take()[1].result().records) for _ in range(2)] == [1, 2]
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("gleanrl-prefetch")]
    assert workers and threading.active_count() <= before + 2
    del queue
    gc.collect()
    for thread in workers:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in workers)


class Timed(LazyTensorStorage):
    """A storage whose fetches advance a fake clock, and which records whether the main thread makes them."""

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
        self.makers.append(threading.current_thread() is threading.main_thread())
        self.clock[0] += self.takes
        return super().fetch(slots, paths)


def test_short_fetches_are_left_to_the_taker_and_long_ones_to_threads(monkeypatch):
    storage, queue = Timed(10), Prefetcher(1, 1)
    fill(storage, torch.arange(10))
    storage.makers, storage.clock, storage.takes = [], [0.0], 1e-5
    monkeypatch.setattr("gleanrl.data.replay_buffers.prefetch.monotonic", lambda: storage.clock[0])

    def by_taker(count: int) -> list[bool]:
        storage.makers.clear()
        for slot in range(count):
            queue.put(ticket(storage, slot % 10))
            assert int(queue.take()[1].result().records) == slot % 10
        return [*storage.makers]

    assert by_taker(40) == [False] * 16 + [True] * 24
    storage.takes = 1e-2
    assert by_taker(2) == [True] * 2
    storage.takes = 1e-5
    assert by_taker(2) == [True] * 2  # a few slow fetches don't change the choice
    storage.takes = 1e-2
    assert by_taker(3 + 16 + 1 + 32 + 1) == [*[True] * 3, *[False] * 16, True, *[False] * 32, True]
    storage.takes = 1e-5
    assert by_taker(64 + 10) == [False] * 64 + [True] * 10


def test_no_thread_before_the_first_batch():
    before = threading.active_count()
    Prefetcher(3, 3)
    assert threading.active_count() == before


def test_errors_of_a_fetch_arrive_with_the_batch():
    class Broken(LazyTensorStorage):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
            raise OSError("the disk is gone")

    storage, queue = Broken(4), Prefetcher(1, 1)
    fill(storage, torch.arange(4))
    queue.put(ticket(storage, 0))
    with pytest.raises(OSError, match="the disk is gone"):
        queue.take()[1].result()


def test_a_pickle_holds_the_draws_and_fetches_again():
    storage, queue = storage_of(9), Prefetcher(3, 2)
    for slot in (4, 2, 7):
        queue.put(ticket(storage, slot, ran_out=slot == 7))
    other = pickle.loads(pickle.dumps(queue))
    assert (other.depth, other.threads, len(other)) == (3, 2, 3) and not other.wants_more
    assert [other.take()[1].result().records.tolist() for _ in range(3)] == [[40], [20], [70]]
    assert len(queue) == 3


@pytest.mark.parametrize("before", [0, 20])
def test_deleted_queue_frees_its_draws(before):
    storage, queue = storage_of(5), Prefetcher(3, 1)
    for slot in [0] * before:
        queue.put(ticket(storage, slot))
        queue.take()[1].result()
    queue.put(ticket(storage, 1))
    gone = weakref.ref(queue)
    gc.disable()
    try:
        del queue
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("before", [0, 20])
def test_forked_process_fetches_with_new_threads(before):
    storage, queue = storage_of(5), Prefetcher(3, 2)
    for slot in [0] * before:
        queue.put(ticket(storage, slot))
        queue.take()[1].result()
    for slot in (1, 2, 3):
        queue.put(ticket(storage, slot))
    assert int(queue.take()[1].result().records) == 10
    child = os.fork()
    if child == 0:
        queue.put(ticket(storage, 4))
        try:
            found = [int(queue.take()[1].result().records) for _ in range(3)]
        except BaseException:
            os._exit(2)
        os._exit(int(found != [20, 30, 40] or queue.forked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not queue.forked
    assert [int(queue.take()[1].result().records) for _ in range(2)] == [20, 30]
