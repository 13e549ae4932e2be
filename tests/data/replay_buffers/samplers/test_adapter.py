"""Samplers that users wrote for other releases work in gleanrl's buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.truncate import end_trajectories
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError
from tests.data.replay_buffers.familiar import Told, Walk
from tests.data.replay_buffers.oracle import ted


def made(sampler, size=5, **options):
    return ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=4, **options)


def test_foreign_sampler_stays_the_users_object():
    sampler = Told()
    buffer = made(sampler)
    buffer.extend(torch.arange(4))
    batch, info = buffer.sample(return_info=True)
    assert buffer.sampler is buffer._sampler is sampler
    assert torch.equal(info["half"] * 2, batch) and info["generation"].tolist() == [1] * 4
    assert buffer.set_sampler(RandomSampler()) is sampler
    other = made(sampler)
    with pytest.raises(InvalidArgumentError, match="this Told belongs to another ReplayBuffer"):
        made(sampler)
    del other
    made(sampler)


def test_foreign_sampler_hears_of_writes_in_order():
    sampler = Told()
    buffer = made(sampler)
    buffer.extend(torch.arange(4))
    buffer.add(torch.tensor(4))
    buffer.extend(torch.arange(5, 8))
    buffer[1] = torch.tensor(9)
    assert [event for event in sampler.told if event[0] != "mark"] == [
        ("extend", [0, 1, 2, 3]),
        ("add", 4),
        ("extend", [0, 1, 2]),
        ("add", 1),
    ]
    assert [event[1] for event in sampler.told if event[0] == "mark"] == [[0, 1, 2, 3], [4], [0, 1, 2], [1]]
    sampler.told = []
    buffer.extend(torch.arange(4))
    assert sampler.told[-1] == ("extend", [3, 4, 0, 1])
    buffer.storage.set(range(2), torch.arange(2))
    buffer.sample()
    assert sampler.told[-1] == ("extend", [0, 1]), "a write past the buffer is told at the next draw"
    buffer.empty()
    assert sampler.told == ["empty"]


def test_foreign_sampler_receives_no_amended_records():
    sampler = Told()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=4)
    buffer.extend(ted(4))
    buffer.sample()
    sampler.told = []
    buffer["observation"] = torch.zeros_like(buffer[:]["observation"])
    buffer.sample()
    assert sampler.told == []
    buffer["observation"] = torch.ones_like(buffer[:]["observation"])
    buffer.add(ted(1)[0])
    buffer[0] = ted(1)[0]
    assert sampler.told == [("mark", [4]), ("add", 4), ("mark", [0]), ("add", 0)]


def test_a_sampler_of_another_library_may_lack_priorities():
    class Foreign:
        sample, add, extend, _empty = Told.sample, Told.add, Told.extend, Told._empty
        state_dict, load_state_dict = Told.state_dict, Told.load_state_dict
        __init__, ran_out = Told.__init__, False

    sampler = Foreign()
    buffer = made(sampler)
    buffer.extend(torch.arange(4))
    assert len(buffer.sample()) == 4 and sampler.told == [("extend", [0, 1, 2, 3])]
    buffer.mark_update(0)
    with pytest.warns(UserWarning, match="priorities"):
        buffer.update_priority(0, 1.0)


def test_overridden_mark_update_keeps_the_priorities_of_amended_records():
    class Marked(PrioritizedSampler):
        def mark_update(self, index, *, storage=None):
            super().mark_update(index, storage=storage)

    buffer = made(Marked(4, 1.0, 1.0, seed=0), 4)
    steps = ted(4)
    steps["collector", "traj_ids"] = torch.full((4,), 7)
    steps["next", "truncated"].zero_()
    steps["next", "done"].zero_()
    buffer.extend(steps)
    buffer.update_priority(range(4), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    buffer["observation"] = torch.zeros_like(steps["observation"])
    assert buffer.sample(return_info=True)[1]["index"].tolist() == [2] * 4
    assert end_trajectories(buffer.storage, [7]) == 1
    assert buffer.sample(return_info=True)[1]["index"].tolist() == [2] * 4


def test_foreign_sampler_hears_of_coordinates():
    sampler = Told()
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), sampler=sampler)
    buffer.extend(torch.arange(4).view(2, 2))
    assert sampler.told[-1] == ("extend", [[0, 0], [0, 1], [1, 0], [1, 1]])


def test_foreign_sampler_hears_of_no_earlier_records():
    buffer, sampler = made(None), Told()
    buffer.extend(torch.arange(3))
    buffer.set_sampler(sampler)
    buffer.sample()
    assert sampler.told == []


def test_priorities_pass_but_for_records_that_are_gone():
    sampler = Told()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=5)
    buffer.extend(ted(5))
    buffer.update_priority([1, 3], torch.tensor([0.5, 2.0]))
    assert sampler.told[-1] == ("priority", [1, 3], [0.5, 2.0])
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(5)))
    assert sampler.told[-1] == ("priority", batch["index"].tolist(), [1.0] * 5)
    before = buffer.generation(range(5))
    buffer.add(ted(1)[0])
    buffer.update_priority(torch.arange(5), torch.arange(5.0), before)
    assert sampler.told[-1] == ("priority", [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    buffer.mark_update(2)
    assert sampler.told[-1] == ("mark", [2])


def test_foreign_samplers_state_is_saved_with_the_buffer():
    sampler = Told()
    buffer = made(sampler)
    buffer.extend(torch.arange(4))
    told = [*sampler.told]
    state = buffer.state_dict()
    buffer.empty()
    buffer.load_state_dict(state)
    assert sampler.told == told, "loading isn't told, the state says it"
    for copied in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert copied.sampler is not sampler and copied.sampler.told == told
        copied.add(torch.tensor(1))
        assert copied.sampler.told[-1] == ("add", 4) and sampler.told == told
    with pytest.raises(SchemaError, match="a Told rejects the state"):
        buffer.load_state_dict({**state, "_sampler": {"state": {}}})
    assert sampler.told == told and len(buffer) == 4


@pytest.mark.parametrize("prefetch", [None, 3])
def test_foreign_sampler_ends_its_epochs(prefetch):
    buffer = made(Walk(), 10, prefetch=prefetch)
    buffer.extend(torch.arange(10))
    for _ in range(2):
        assert torch.cat([*buffer]).tolist() == [*range(10)]


class Counting(PrioritizedSampler):
    """Overrides one method."""

    updates = 0

    def update_priority(self, index, priority, *, storage=None):
        self.updates += 1
        super().update_priority(index, torch.as_tensor(priority) * 2, storage=storage)


def test_overridden_update_priority_is_called():
    sampler = Counting(5, 1.0, 1.0, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=5)
    index = buffer.extend(ted(5))
    buffer.update_priority(index, torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]))
    batch = buffer.sample()
    assert sampler.updates == 1 and batch["index"].tolist() == [2] * 5
    assert sampler.default_priority == 6.0 and "_weight" in batch.keys()
    buffer.add(ted(1)[0])
    drawn = [row for _ in range(10) for row in buffer.sample()["index"].tolist()]
    assert set(drawn) == {0, 2}
    sampler.alpha = 0.0
    drawn = [row for _ in range(20) for row in buffer.sample()["index"].tolist()]
    assert set(drawn) == {*range(5)}


class Noted(SamplerWithoutReplacement):
    """Has a private state in addition to its base's."""

    note = 0

    def state_dict(self):
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state_dict):
        self.note = state_dict["note"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "note"})


def test_derived_sampler_saves_an_additional_state():
    buffer, other = (made(Noted(seed=0), 8) for _ in range(2))
    for one in (buffer, other):
        one.extend(torch.arange(8))
    first = buffer.sample()
    buffer.sampler.note = 3
    other.load_state_dict(buffer.state_dict())
    assert other.sampler.note == 3
    rest = other.sample()
    assert torch.equal(rest, buffer.sample()) and sorted([*first, *rest]) == [*range(8)]


class Once(SliceSampler):
    """Handles writes in addition to its base."""

    heard = ()

    def extend(self, index):
        super().extend(index)
        self.heard += (len(index),)


def test_slice_sampler_with_extend_hears_of_writes():
    sampler = Once(slice_len=2, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    buffer.extend(ted(20))
    assert buffer.sample()["next", "truncated"].view(2, 2)[:, 1].all() and sampler.heard == (20,)


def test_foreign_sampler_may_return_arrays():
    class Arrays(RandomSampler):
        def sample(self, storage, batch_size):
            index, _ = super().sample(storage, batch_size)
            return index.numpy(), {"twice": index.numpy() * 2}

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=Arrays(seed=0), batch_size=3)
    buffer.extend(TensorDict({"x": torch.arange(5)}, [5]))
    batch = buffer.sample()
    assert torch.equal(batch["twice"], 2 * batch["x"])


def test_class_is_accepted_as_a_sampler_and_a_buffer_is_refused():
    assert isinstance(made(Told).sampler, Told)
    with pytest.raises(InvalidArgumentError, match="sampler: expected a Sampler"):
        made(ReplayBuffer)


@pytest.mark.parametrize("number", [7, 0.5, True, torch.tensor(3)])
def test_number_in_the_info_is_expanded_to_all_rows(number):
    class Numbered(RandomSampler):
        def sample(self, storage, batch_size):
            return torch.randint(len(storage), (batch_size,)), {"n": number}

    buffer = made(Numbered())
    buffer.extend(torch.arange(4))
    assert buffer.sample().shape == (4,)
    _, info = buffer.sample(return_info=True)
    assert torch.equal(info["n"], torch.as_tensor(number).repeat(4))
    records = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=Numbered(), batch_size=4)
    records.extend(TensorDict({"a": torch.arange(4)}, [4]))
    assert torch.equal(records.sample()["n"], torch.as_tensor(number).repeat(4))


def test_info_that_is_neither_a_number_nor_rows_is_refused():
    class Worded(RandomSampler):
        def sample(self, storage, batch_size):
            return torch.randint(len(storage), (batch_size,)), {"how": "newest"}

    buffer = made(Worded())
    buffer.extend(torch.arange(4))
    with pytest.raises(InvalidTypeError, match="'how', one value for each row, or a number for all"):
        buffer.sample()
