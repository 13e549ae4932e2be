"""Pickled batches restore equal values. Tensors travel outside the pickle, and unwritten ones arrive uncopied."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from gleanrl._process.serialization import Arrived, PickledBatch
from gleanrl.data.trajectories import hold_slice_ends, trajectory_ends


@tensorclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def sent(data: Any) -> tuple[Arrived, list[bytes]]:
    """Return the received pickled batch and the memory that it arrived in."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(PickledBatch(data), 5, buffer_callback=buffers.append)
    memory = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(pickled, buffers=memory), memory


def batch() -> TensorDict:
    inner = TensorDict({"reward": torch.rand(500, 1), "agents": TensorDict({}, [500, 2])}, [500])
    return TensorDict({"x": torch.arange(1000).view(500, 2), "next": inner}, [500], names=["time"])


def test_tensordict_arrives_unchanged():
    td = batch().lock_()
    arrived, memory = sent(td)
    assert list(map(len, memory)) == [10000] and arrived.num_bytes == 10000  # small tensors share a buffer
    for found in (arrived.open(), arrived.open()):
        assert type(found) is TensorDict and found.names == ["time"] and found.is_locked
        assert (found == td).all() and found["next", "agents"].batch_size == (500, 2)
        assert list(found.keys(True)) == list(td.keys(True))
        assert found["x"].untyped_storage().nbytes() == 8000  # only the part that is in use is saved
        found["x"].zero_()  # the next batch is another copy


def test_a_batch_of_slices_still_knows_where_they_end():
    ends, done = torch.arange(6) % 3 == 2, torch.zeros(6, 1, dtype=torch.bool)
    td = TensorDict({"next": {"done": done}}, [6])
    hold_slice_ends(td, ends, None)
    assert torch.equal(trajectory_ends(sent(td)[0].open()), ends)


def test_packed_tensors_are_not_referenced():
    tensor = torch.rand(100_000)
    kept = weakref.ref(tensor)
    gc.disable()
    try:
        sent([tensor])
        del tensor
        assert kept() is None
    finally:
        gc.enable()


def test_view_shares_the_received_memory():
    arrived, memory = sent({"x": torch.arange(1000)})
    (place,) = {found.view()["x"].data_ptr() for found in (arrived, arrived)}
    assert place == np.frombuffer(memory[0], np.uint8).ctypes.data
    assert arrived.open()["x"].data_ptr() != place


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(300, 4).t(),
        torch.rand(4, 200)[1:3],
        torch.tensor(3.5),
        torch.rand(600).bfloat16(),
        torch.rand(600, dtype=torch.complex64).conj(),
        torch.rand(600) > 0.5,
        torch.empty(0, 7, dtype=torch.int16),
        torch.rand(400_000),  # large enough for memory of the pool
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_tensors_of_every_kind_arrive(tensor: torch.Tensor) -> None:
    found = sent([tensor])[0].open()[0]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    found.add_(1) if found.dtype != torch.bool else found.logical_not_()


def test_containers_of_tensors_arrive():
    lazy = LazyStackedTensorDict.lazy_stack([TensorDict({"w": torch.rand(n)}) for n in (200, 300)])
    texts = TensorDict({"x": torch.rand(200), "text": NonTensorStack(*"ab" * 100)}, [200])
    pair = Pair(left=torch.rand(200), right=torch.rand(200, 2), batch_size=[200])
    found = sent((lazy, texts, pair, lambda: 3))[0].open()
    assert torch.equal(found[0][1]["w"], lazy[1]["w"]) and found[1]["text"] == list("ab" * 100)
    assert isinstance(found[2], Pair) and torch.equal(found[2].right, pair.right) and found[3]() == 3
    parameter = torch.nn.Parameter(torch.rand(200))
    assert sent(parameter)[0].open().requires_grad
