"""What every sampler does, seen on all of them."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, RandomSampler, SamplerWithoutReplacement
from gleanrl.errors import EmptyBufferError, InvalidArgumentError
from tests.data.replay_buffers.oracle import fingerprint, ted

SAMPLERS = [RandomSampler, SamplerWithoutReplacement]


def filled(ndim: int = 1) -> LazyTensorStorage:
    storage = LazyTensorStorage(30, ndim=ndim)
    storage.set(0, ted(8, streams=3).transpose(0, 1) if ndim == 2 else ted(20))
    return storage


@pytest.mark.parametrize("make", SAMPLERS)
def test_an_empty_storage_is_an_error(make):
    with pytest.raises(EmptyBufferError, match="empty"):
        make().draw(LazyTensorStorage(5), 2)


@pytest.mark.parametrize("make", SAMPLERS)
def test_slots_lie_in_the_stored_part(make):
    storage = filled()
    drawn = make(seed=0).draw(storage, 20, generations=True)
    assert drawn.slots.dtype == torch.int64
    assert int(drawn.slots.min()) >= 0 and int(drawn.slots.max()) < 20
    assert drawn.generation.tolist() == [1] * 20
    assert make(seed=0).draw(storage, 20).generation is None


@pytest.mark.parametrize("make", SAMPLERS)
def test_sample_gives_coordinates(make):
    storage = filled(ndim=2)
    index, info = make(seed=0).sample(storage, 6)
    assert [part.shape for part in index] == [(6,), (6,)]
    rows = storage.get(tuple(index))
    expected = storage.fetch(make(seed=0).draw(storage, 6).slots)
    assert (rows == expected).all()
    assert info["generation"].tolist() == [1] * 6
    with pytest.raises(InvalidArgumentError, match="batch_size: expected 1 or more, got 0"):
        make().sample(storage, 0)


@pytest.mark.parametrize("cut", [0, 1, 2, 5])
@pytest.mark.parametrize("make", SAMPLERS)
def test_a_restored_sampler_goes_on(make, cut):
    storage = filled()
    sampler = make(seed=1)
    for _ in range(cut):
        sampler.draw(storage, 6)
    state = sampler.state_dict()
    saved = fingerprint(state)
    expected = [sampler.draw(storage, 6).slots.tolist() for _ in range(5)]
    assert fingerprint(state) == saved, "drawing changed a saved state"
    other = make()
    other.load_state_dict(state)
    assert [other.draw(storage, 6).slots.tolist() for _ in range(5)] == expected
    assert fingerprint(state) == saved, "loading or drawing changed the caller's state"


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_seed_starts_the_sequence_anew(make):
    storage = filled()
    first = make(seed=3).draw(storage, 6).slots
    sampler = make()
    sampler.set_seed(3)
    assert torch.equal(sampler.draw(storage, 6).slots, first)
