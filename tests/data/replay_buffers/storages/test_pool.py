"""Recycled arrays: only dead ones, and never more than a batch of them."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from gleanrl.data.replay_buffers.storages.pool import MIN_BYTES, BlockPool

SHAPE, TYPE = (4, 100), np.dtype(np.float32)


def where(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_dead_array_is_used_again():
    pool = BlockPool(2)
    array = pool.take(SHAPE, TYPE)
    address = where(array)
    assert where(other := pool.take(SHAPE, TYPE)) != address
    del array
    assert where(pool.take(SHAPE, TYPE)) == address
    assert other.shape == SHAPE and other.dtype == TYPE


def test_whatever_sees_the_memory_keeps_it():
    pool = BlockPool(5)
    holders = [
        lambda tensor: tensor,
        lambda tensor: tensor[1:, ::2],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.detach().view(torch.int32),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: TensorDict({"x": tensor}, [4])[1:3],
        lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
    ]
    kept, addresses = [], set()
    for hold in holders:
        array = pool.take(SHAPE, TYPE)
        addresses.add(where(array))
        kept.append(hold(torch.from_numpy(array)))
        del array
        gc.collect()
    assert len(addresses) == len(holders)
    kept.clear()
    gc.collect()
    assert where(pool.take(SHAPE, TYPE)) in addresses


def test_no_more_than_the_spare_ones_are_kept():
    pool = BlockPool(2)
    arrays = [pool.take(SHAPE, TYPE) for _ in range(5)]
    arrays.clear()
    assert [len(unused) for unused in pool._unused.values()] == [2]


def test_another_batch_size_lets_the_unused_go():
    pool = BlockPool(2)
    late, early = pool.take(SHAPE, TYPE), pool.take(SHAPE, TYPE)
    del early
    pool.take((8, 100), TYPE)
    del late
    assert [key[0] for key in pool._unused] == [(8, 100)]


def test_arrays_may_outlive_their_pool():
    pool = BlockPool(2)
    array = pool.take(SHAPE, TYPE)
    array.fill(3)
    del pool
    gc.collect()
    assert float(array.sum()) == 1200


def test_samples_of_large_rows_never_share_memory_while_alive():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8, seed=0)
    width = MIN_BYTES // 8
    for value in range(8):
        rb.add(
            {
                "x": torch.full((width,), value, dtype=torch.uint8),
                "y": torch.full((width,), 1, dtype=torch.uint8),
            }
        )
    kept = [rb.sample() for _ in range(4)]
    copies = [batch["x"].clone() for batch in kept]
    addresses = {batch["x"].data_ptr() for batch in kept}
    for _ in range(20):
        assert rb.sample()["x"].data_ptr() not in addresses
    assert all(torch.equal(batch["x"], copy) for batch, copy in zip(kept, copies, strict=True))


def test_threads_get_arrays_of_their_own():
    pool = BlockPool(4)
    mixed = []

    def work(value: int) -> None:
        for _ in range(300):
            array = pool.take(SHAPE, TYPE)
            array.fill(value)
            if not (array == value).all():
                mixed.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []
