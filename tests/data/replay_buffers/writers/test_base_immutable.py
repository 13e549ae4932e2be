"""The immutable writer rejects all writes."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)
from gleanrl.data.replay_buffers.storages.base import Prepared
from gleanrl.errors import UnsupportedError
from tests.data.replay_buffers.oracle import clock, fingerprint, ted


def dataset() -> ReplayBuffer:
    return ReplayBuffer(storage=TensorStorage(ted(6)), writer=ImmutableDatasetWriter(), batch_size=4, seed=0)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda rb: rb.extend(ted(2)), "extend"),
        (lambda rb: rb.add(ted(1)[0]), "add"),
        (lambda rb: rb.empty(), "empty"),
        (lambda rb: rb.__setitem__(0, ted(1)[0]), "__setitem__"),
        (lambda rb: rb.__setitem__(("next", "reward"), torch.ones(6, 1)), "__setitem__"),
        (lambda rb: rb.writer.place(Prepared([], 1)), "place"),
    ],
)
def test_nothing_can_be_changed(call, name):
    rb = dataset()
    before = fingerprint(rb.state_dict())
    with pytest.raises(RuntimeError, match=f"{name}: the buffer has an ImmutableDatasetWriter"):
        call(rb)
    assert fingerprint(rb.state_dict()) == before
    assert set(clock(rb.sample()).tolist()) <= set(range(6))


def test_empty_dataset_stays_empty_and_without_schema():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=ImmutableDatasetWriter())
    with pytest.raises(UnsupportedError):
        rb.extend(ted(2))
    assert len(rb) == 0 and not rb.storage.initialized


def test_a_buffer_becomes_a_dataset_and_a_buffer_again():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(ted(7))
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(UnsupportedError):
        rb.extend(ted(1))
    rb.set_writer(RoundRobinWriter())
    assert rb.extend(ted(1, start=7)).tolist() == [2]


def test_the_state_of_a_written_buffer_can_be_restored():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(ted(3))
    other = ReplayBuffer(storage=LazyTensorStorage(5), writer=ImmutableDatasetWriter())
    other.load_state_dict(rb.state_dict())
    assert clock(other[:]).tolist() == [0, 1, 2]
    again = ReplayBuffer(storage=LazyTensorStorage(5), writer=ImmutableDatasetWriter())
    again.load_state_dict(other.state_dict())
    assert len(again) == 3
