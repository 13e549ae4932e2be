"""Tests of the buffer pool: memory is used again only when nothing can see it any more."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from gleanrl.pool import BufferPool

SIZE = 1 << 12


def make_pool() -> BufferPool:
    return BufferPool(min_bytes=SIZE, spare=2)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_dead_buffer_is_used_again() -> None:
    pool = make_pool()
    first = pool.take(SIZE)
    where = address(first)
    del first
    assert address(pool.take(SIZE)) == where


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a,
        lambda a: a[5:6],
        lambda a: torch.from_numpy(a),
        lambda a: torch.from_numpy(a)[3:4],
        lambda a: torch.from_numpy(a.view(np.float32)).reshape(2, -1)[1].numpy(),
        lambda a: memoryview(a)[1:2],
        lambda a: torch.from_numpy(a).untyped_storage(),
    ],
)
def test_a_buffer_is_in_use_while_anything_made_of_it_lives(derive) -> None:
    pool = make_pool()
    buffer = pool.take(SIZE)
    where = address(buffer)
    kept = derive(buffer)
    del buffer
    gc.collect()
    others = [pool.take(SIZE) for _ in range(20)]
    assert where not in {address(other) for other in others}
    del kept, others
    gc.collect()
    assert where in {address(b) for b in [pool.take(SIZE) for _ in range(20)]}


def test_live_buffers_never_share_memory() -> None:
    pool = make_pool()
    rng = np.random.default_rng(0)
    live: dict[int, np.ndarray] = {}
    for turn in range(500):
        if live and rng.random() < 0.5:
            key = list(live)[rng.integers(len(live))]
            assert (live.pop(key) == key % 251).all()
        buffer = pool.take(SIZE)
        buffer.fill(turn % 251)
        live[turn] = buffer
        if len(live) > 12:
            live.pop(min(live))
    for key, buffer in live.items():
        assert (buffer == key % 251).all()


def test_idle_memory_is_bounded() -> None:
    pool = make_pool()
    many = [pool.take(SIZE) for _ in range(50)]
    del many
    kept = pool.take(SIZE)
    assert sum(len(buffers) for buffers in pool._buffers.values()) <= 3
    assert kept.nbytes == SIZE


def test_small_buffers_are_not_pooled() -> None:
    pool = make_pool()
    assert pool.take(SIZE - 1).nbytes == SIZE - 1
    assert not pool._buffers


def test_threads_never_get_one_buffer_at_once() -> None:
    pool = make_pool()
    torn: list[int] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for _ in range(300):
            buffer = pool.take(SIZE)
            buffer.fill(mark)
            if not (buffer == mark).all():
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
