"""Tensors for samples behave as ordinary tensors, whether the core or NumPy allocates them."""

from __future__ import annotations

import ctypes
import gc
import resource
import threading

import numpy as np
import pytest
import torch

from gleanrl._arrays import sample_tensors
from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import FreshTensors
from gleanrl._arrays.sample_tensors import maker
from tests.ways import both_ways

FORMS = [
    ((256, 4), torch.float32),
    ((256, 1), torch.bool),
    ((3,), torch.bfloat16),
    ((), torch.int64),
    ((0, 2), torch.float64),
    ((2, 3, 4), torch.complex64),
    ((5,), torch.uint8),
    ((7,), torch.float8_e5m2),
]
# Dtypes of torch that NumPy can't compute with.
PRIVATE = [torch.uint4, torch.int4, torch.bits8, torch.bits16]


by = both_ways(sample_tensors)  # allocated by the core or by NumPy


def test_tensors_have_the_requested_form(by):
    tensors, addresses = maker(FORMS)()
    for tensor, address, (shape, dtype) in zip(tensors, addresses, FORMS, strict=True):
        assert type(tensor) is torch.Tensor and tensor.dtype == dtype and tensor.shape == shape
        assert tensor.is_contiguous() and tensor.is_leaf and not tensor.requires_grad
        assert tensor.device == torch.device("cpu") and tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.numel() or tensor.data_ptr() == address


@pytest.mark.parametrize("dtype", PRIVATE)
def test_dtypes_unknown_to_numpy_are_allocated(by, dtype):
    (tensor, other), (address, _) = maker([((3, 2), dtype), ((4,), torch.float32)])()
    assert tensor.dtype == dtype and tensor.shape == (3, 2) and tensor.data_ptr() == address
    assert other.dtype == torch.float32


def test_tensors_share_no_memory_and_keep_it_alive(by):
    make = maker([((100,), torch.int64)] * 2)
    made = [tensor for _ in range(20) for tensor in make()[0]]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    views = [tensor[10:20] for tensor in made]
    arrays = [tensor.numpy()[50:] for tensor in made]
    del make, made
    gc.collect()
    others = [torch.full((100,), -1) for _ in range(100)]
    assert all((view == number).all() for number, view in enumerate(views))
    assert all((array == number).all() for number, array in enumerate(arrays))
    del others


def test_writes_by_address_are_seen(by):
    (tensor,), (address,) = maker([((8,), torch.float64)])()
    array = np.arange(8.0)

    ctypes.memmove(address, array.ctypes.data, array.nbytes)
    assert tensor.tolist() == array.tolist()


def test_torch_modes_do_not_change_the_tensors(by):
    make = maker([((2,), torch.float32)])
    with torch.inference_mode(), torch.device("meta"):
        (tensor,), _ = make()
        assert tensor.device.type == "cpu"
        assert tensor.is_inference() == torch.from_numpy(np.empty(2)).is_inference()
    with torch.no_grad():
        (tensor,), _ = make()
    assert tensor.zero_().requires_grad_().sum().backward() is None and tensor.grad.tolist() == [1.0, 1.0]


def test_large_tensors_come_from_the_pool(by):
    pool = BufferPool(min_bytes=4096)
    make = maker([((4096,), torch.uint8), ((4,), torch.bfloat16)], pool)
    (large, small), (at, _) = make()
    assert large.shape == (4096,) and small.dtype == torch.bfloat16
    del large
    assert make()[1][0] == at, "its memory is used again"


def test_memory_is_returned_from_any_thread(by):
    make = maker([((1 << 16,), torch.uint8)] * 4)
    made = []

    def fill():
        for _ in range(2_000):
            tensors, _ = make()
            for tensor in tensors:
                tensor[::4096] = 1
            made.append(tensors)
            if len(made) > 8:
                made.pop(0)

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    fill()
    before = peak()
    threads = [threading.Thread(target=fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak() - before < 64 << 20, "of 1.5 GB that were made"


@pytest.mark.skipif(EXCHANGE is None, reason="this release of torch doesn't show how")
def test_the_core_refuses_another_interface():
    with pytest.raises(ValueError, match="exchange: expected a capsule"):
        sample_tensors.FreshTensors(object(), torch.Tensor, [])


@pytest.mark.skipif(EXCHANGE is None, reason="torch shows no tensors to the core")
@pytest.mark.parametrize(
    "shape, dtype, error",
    [
        ((2**62,), torch.float64, ValueError),
        ((2**31, 2**31), torch.float32, ValueError),
        ((2**61,), torch.float32, ValueError),
        ((2**58,), torch.uint8, MemoryError),
    ],
)
def test_tensors_larger_than_any_memory_raise(shape, dtype, error):
    like = torch.empty((1,) * len(shape), dtype=dtype).expand(shape)
    with pytest.raises(error):
        FreshTensors(EXCHANGE, torch.Tensor, [torch.zeros(3), like]).make()
