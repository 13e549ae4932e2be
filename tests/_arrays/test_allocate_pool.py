"""The allocator reuses memory only after the last reference to it is gone."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.allocate import BufferPool
from gleanrl.data import LazyTensorStorage, ReplayBuffer

SIZE = 1 << 12


def make_pool() -> BufferPool:
    return BufferPool(min_bytes=SIZE, spare=2)


def take(pool: BufferPool, size: int = SIZE) -> np.ndarray:
    return pool.empty((size,), np.dtype(np.uint8))


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_freed_buffer_is_reused() -> None:
    pool = make_pool()
    first = take(pool)
    where = address(first)
    del first
    assert address(take(pool)) == where


@pytest.mark.slow
@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a,
        lambda a: a[5:6],
        lambda a: torch.from_numpy(a),
        lambda a: torch.from_numpy(a)[3:4],
        lambda a: torch.from_numpy(a.view(np.float32)).reshape(2, -1)[1].numpy(),
        lambda a: memoryview(a)[1:2],
        lambda a: torch.utils.dlpack.from_dlpack(torch.from_numpy(a)),
        lambda a: TensorDict({"x": torch.from_numpy(a)}, [SIZE])[1:3],
        lambda a: torch.from_numpy(a).untyped_storage(),
    ],
)
def test_buffer_is_in_use_while_a_view_of_it_lives(derive) -> None:
    pool = make_pool()
    buffer = take(pool)
    where = address(buffer)
    kept = derive(buffer)
    del buffer
    gc.collect()
    others = [take(pool) for _ in range(20)]
    assert where not in {address(other) for other in others}
    del kept, others
    gc.collect()
    assert where in {address(b) for b in [take(pool) for _ in range(20)]}


def test_live_buffers_never_share_memory() -> None:
    pool = make_pool()
    rng = np.random.default_rng(0)
    live: dict[int, np.ndarray] = {}
    for turn in range(500):
        if live and rng.random() < 0.5:
            key = list(live)[rng.integers(len(live))]
            assert (live.pop(key) == key % 251).all()
        buffer = take(pool)
        buffer.fill(turn % 251)
        live[turn] = buffer
        if len(live) > 12:
            live.pop(min(live))
    for key, buffer in live.items():
        assert (buffer == key % 251).all()


def test_idle_memory_is_bounded() -> None:
    pool = make_pool()
    many = [take(pool) for _ in range(50)]
    del many
    kept = take(pool)
    assert sum(len(buffers) for buffers in pool._buffers.values()) <= 3
    assert kept.nbytes == SIZE


def test_new_size_frees_idle_buffers_of_other_sizes() -> None:
    pool = make_pool()
    live, idle = take(pool), take(pool)
    del idle
    other = take(pool, 2 * SIZE)
    assert {size: len(buffers) for size, buffers in pool._buffers.items()} == {SIZE: 1, 2 * SIZE: 1}
    del live, other
    take(pool, 3 * SIZE)
    assert list(pool._buffers) == [3 * SIZE]


def test_empty_returns_the_requested_shape_and_dtype() -> None:
    array = make_pool().empty((4, 2, 1024), np.dtype(np.float32))
    assert array.shape == (4, 2, 1024) and array.dtype == np.float32 and array.flags.c_contiguous


def test_arrays_outlive_their_pool() -> None:
    pool = make_pool()
    array = take(pool)
    array.fill(3)
    del pool
    gc.collect()
    assert (array == 3).all()


def test_samples_of_large_rows_never_share_memory_while_alive() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8, seed=0)
    width = BufferPool().min_bytes // 8
    for value in range(8):
        row = torch.full((width,), value, dtype=torch.uint8)
        buffer.add({"x": row, "y": torch.ones_like(row)})
    kept = [buffer.sample() for _ in range(4)]
    copies = [batch["x"].clone() for batch in kept]
    addresses = {batch["x"].data_ptr() for batch in kept}
    for _ in range(20):
        assert buffer.sample()["x"].data_ptr() not in addresses
    assert all(torch.equal(batch["x"], copy) for batch, copy in zip(kept, copies, strict=True))


def test_small_buffers_are_not_pooled() -> None:
    pool = make_pool()
    assert pool.empty((SIZE - 1,), np.dtype(np.uint8)).nbytes == SIZE - 1
    assert not pool._buffers


def test_threads_never_share_a_buffer() -> None:
    pool = make_pool()
    torn: list[int] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for _ in range(300):
            buffer = take(pool)
            buffer.fill(mark)
            if not (buffer == mark).all():
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
