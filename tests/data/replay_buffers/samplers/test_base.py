"""All samplers share this behaviour."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.data.replay_buffers.oracle import fill, fingerprint, ted
from tests.data.replay_buffers.samplers.acts import Kind, cut_by, trajectories
from tests.interrupts import interruptions

SAMPLERS = [RandomSampler, SamplerWithoutReplacement]


def filled(ndim: int = 1) -> LazyTensorStorage:
    storage = LazyTensorStorage(30, ndim=ndim)
    fill(storage, ted(8, streams=3).transpose(0, 1) if ndim == 2 else ted(20))
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
def test_restored_sampler_continues_with_the_same_draws(make, cut):
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


KIND = Kind()
FOLLOWERS = {
    "epochs": lambda: SamplerWithoutReplacement(seed=0),
    "prioritized": lambda: PrioritizedSampler(20, 1.0, 1.0, seed=0),
    "within": lambda: PrioritizedSampler(20, 1.0, 1.0, max_priority_within_buffer=True, seed=0),
    "slices": lambda: SliceSampler(slice_len=2, seed=0),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=2, seed=0),
    "prioritized slices": lambda: PrioritizedSliceSampler(20, 1.0, 1.0, slice_len=2, seed=0),
}
CHANGES = {
    "write": lambda storage: fill(storage, KIND.rows(2, 7), 5),
    "clear": lambda storage: (storage.clear(), fill(storage, KIND.rows(9, 8))),
    "load": lambda storage: storage.load_state_dict(storage.state_dict()),
}
CALLS = {
    "follow": lambda sampler, storage: sampler.follow(storage),
    "draw": lambda sampler, storage: sampler.draw(storage, 4),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", FOLLOWERS.values(), ids=FOLLOWERS)
def test_sampler_catches_up_after_an_interrupt(make, change, call):
    def subject() -> tuple[Sampler, LazyTensorStorage]:
        sampler, storage = make(), KIND.storage()
        fill(storage, KIND.rows(storage.max_size, 3))
        sampler.draw(storage, 4)
        if sampler.takes_priorities:
            sampler.prioritize(storage, torch.arange(len(storage)), 3.0, None)
        change(storage)
        return sampler, storage

    calm, storage = subject()
    call(calm, storage)
    for (sampler, stored), place in interruptions(subject, lambda made: call(*made), most=40):
        runs = trajectories(stored, KIND)
        for _ in range(3):
            drawn = sampler.draw(stored, 4)
            if drawn.last is None:
                assert int(drawn.slots.max()) < len(stored), place
                continue
            for piece in cut_by(drawn.slots.tolist(), drawn.last.tolist()):
                assert any(set(piece) <= set(run) for run in runs), f"{place}: a slice of two trajectories"
        if sampler.takes_priorities:
            rows, expected = sampler.snapshot().priorities, calm.snapshot().priorities
            assert torch.equal(rows.raw, expected.raw), place


class Newest(Sampler):
    """Draws the newest rows."""

    def sample(self, storage, batch_size):
        slots = (storage.end - 1 - torch.arange(batch_size)) % len(storage)
        return slots, {"age": torch.arange(batch_size)}


class Even(RandomSampler):
    """Draws as its base does, and moves odd slots to the even slot before."""

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index - index % 2, info


class Marked(PrioritizedSliceSampler):
    """Draws as its base does, and adds an entry."""

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index, {**info, "mine": torch.ones(len(index))}


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_users_sample_is_called(prefetch):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=Newest(), batch_size=3, prefetch=prefetch
    )
    buffer.extend(ted(20))
    batch = buffer.sample()
    assert batch["index"].tolist() == [19, 18, 17] and batch["age"].tolist() == [0, 1, 2]
    even = ReplayBuffer(storage=LazyTensorStorage(20), sampler=Even(), batch_size=30, prefetch=prefetch)
    even.extend(torch.arange(20))
    assert not (even.sample() % 2).any()


def test_overridden_sample_keeps_entries_of_its_base():
    sampler = Marked(20, 1.0, 1.0, slice_len=4, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=8)
    buffer.extend(ted(20))
    batch = buffer.sample().view(2, 4)
    assert batch["next", "truncated"][:, -1].all() and batch["mine"].all() and "_weight" in batch.keys()


def test_a_users_sample_that_returns_something_else():
    class Odd(Sampler):
        def sample(self, storage, batch_size):
            return torch.arange(batch_size), {"age": "three"}

    with pytest.raises(InvalidTypeError, match="Odd.sample: expected a tensor"):
        Odd().draw(filled(), 2)


PRIORITIZED = {
    "transitions": lambda: PrioritizedSampler(30, 1.0, 1.0, seed=0),
    "slices": lambda: PrioritizedSliceSampler(30, 1.0, 1.0, slice_len=1, seed=0),
}


@pytest.mark.parametrize("make", PRIORITIZED.values(), ids=PRIORITIZED)
@pytest.mark.parametrize("when", ["before any storage", "after a sample", "with the storage", "in a buffer"])
def test_priorities_are_taken_without_a_buffer(make, when):
    sampler, storage = make(), filled()
    index, priority = torch.arange(20), torch.zeros(20).index_fill(0, torch.tensor([7]), 1.0)
    if when == "in a buffer":
        ReplayBuffer(storage=storage, sampler=sampler)
    elif when == "after a sample":
        sampler.sample(storage, 4)
    sampler.update_priority(index, priority, **({"storage": storage} if when == "with the storage" else {}))
    drawn, info = sampler.sample(storage, 5)
    assert drawn.tolist() == [7] * 5 and info["_weight"].shape == (5,)
    sampler.mark_update(torch.tensor([3, -1]))
    assert set(sampler.sample(storage, 50)[0].tolist()) == {3, 7}


def test_a_storage_tells_a_sampler_that_is_attached():
    sampler, storage = PrioritizedSampler(20, 1.0, 1.0, seed=0), LazyTensorStorage(20)
    storage.attach(sampler)
    storage.set(range(5), ted(5))
    sampler.update_priority(torch.arange(5), torch.tensor([0.0, 0, 0, 0, 1]), storage=storage)
    storage.set(range(2), ted(2))
    assert set(sampler.sample(storage, 50)[0].tolist()) == {0, 1, 4}


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_sampler_hears_of_writes_by_itself(make):
    sampler, storage = make(seed=0), filled()
    sampler.add(3)
    sampler.extend(torch.arange(20))
    assert sorted(sampler.sample(storage, 20)[0].tolist()) == sorted(
        make(seed=0).sample(storage, 20)[0].tolist()
    )
    sampler._empty()
    assert not sampler.ran_out
    with pytest.warns(UserWarning, match="has no priorities"):
        sampler.update_priority(torch.arange(3), 1.0, storage=storage)


def test_a_sampler_has_to_draw():
    with pytest.raises(UnsupportedError, match="class Idle: a sampler has to override sample"):
        type("Idle", (Sampler,), {})()


class Told(RandomSampler):
    def __init__(self) -> None:
        super().__init__(seed=0)
        self.rows: list[int] = []

    def follow(self, storage) -> None:
        self.rows.append(len(storage))


class Weighing(RandomSampler):
    def annotate(self, draw, records):
        return {**draw.extras, "_weight": torch.ones(len(draw.slots))}


def test_buffer_skips_calls_that_a_sampler_does_not_need():
    assert not (RandomSampler().follows or RandomSampler().weighs)
    assert PrioritizedSampler(5, 1.0, 1.0).follows and PrioritizedSampler(5, 1.0, 1.0).weighs
    rows = TensorDict({"x": torch.zeros(4)}, [4])
    for sampler in (Told(), partial(Told)):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=3)
        buffer.extend(rows)
        buffer.add(rows[0])
        assert buffer.sampler.rows[-2:] == [4, 5]
    buffer.set_sampler(RandomSampler())
    buffer.set_sampler(told := Told())
    buffer.extend(rows)
    assert told.rows[-1] == 5
    buffer.set_sampler(Weighing())
    batch = buffer.sample()
    assert torch.equal(batch["_generation"], buffer.generation(batch["index"]))
    info = TensorDictReplayBuffer(storage=buffer.storage, batch_size=3).sample(return_info=True)[1]
    assert torch.equal(info["generation"], buffer.generation(info["index"]))
