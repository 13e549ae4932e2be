"""The ring writer of TensorDict buffers."""

from __future__ import annotations

import pytest
import torch
from tensordict import tensorclass

from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictRoundRobinWriter
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import clock, fingerprint, ted


@tensorclass
class Point:
    x: torch.Tensor


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_it_is_a_ring_and_leaves_its_input_alone(storage):
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter())
    data = ted(13)
    before = fingerprint(data.to_dict())
    assert rb.extend(data).tolist() == [-1, -1, -1, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert fingerprint(data.to_dict()) == before
    rb.add(ted(1, start=13)[0])
    rb.extend([ted(1, start=14)[0]])
    stored = rb[:] if storage is LazyTensorStorage else torch.stack(list(rb.storage.get(slice(None))))
    assert sorted(clock(stored).tolist()) == list(range(5, 15))


@pytest.mark.parametrize("data", [torch.zeros(3), {"x": torch.zeros(3)}, [torch.zeros(())], [3, "text"]])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_other_data_is_refused_before_anything_changes(storage, data):
    if storage is LazyTensorStorage and data == [3, "text"]:
        pytest.skip("a tensor storage can't stack it")
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter(), seed=0)
    before = fingerprint(rb.state_dict())
    with pytest.raises(ValueError, match="extend: a TensorDictRoundRobinWriter takes TensorDicts, got"):
        rb.extend(data)
    with pytest.raises(SchemaError, match="add: "):
        rb.add(torch.zeros(()))
    assert fingerprint(rb.state_dict()) == before
    rb.extend(ted(3))
    with pytest.raises(SchemaError, match="__setitem__: "):
        rb[0] = 3


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_tensorclasses_are_welcome(storage):
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter(), batch_size=4)
    rb.extend(Point(x=torch.arange(3), batch_size=[3]))
    assert type(rb.sample()) is Point
