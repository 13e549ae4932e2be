"""The prioritized sampler returns draws and weights, keeps its state, and reports to its buffer."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError
from tests.data.replay_buffers.oracle import fill


def buffer_of(
    rows: int, capacity: int = 10, storage: Any = LazyTensorStorage, **options: Any
) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, **{"alpha": 1.0, "beta": 1.0, "eps": 0.0, "seed": 0, **options})
    buffer = ReplayBuffer(storage=storage(capacity), sampler=sampler, batch_size=1000)
    if rows:
        buffer.extend(list(range(rows)) if storage is ListStorage else torch.arange(rows))
    return buffer


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_rows_are_drawn_by_their_priority(storage):
    buffer = buffer_of(4, storage=storage)
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 5.0]))
    batch, info = buffer.sample(return_info=True)
    counts = torch.bincount(batch, minlength=4).tolist()
    assert counts[1] == 0
    for found, share in zip(counts, (1 / 8, 0, 2 / 8, 5 / 8), strict=True):
        assert abs(found - 1000 * share) < 80
    weights = torch.tensor([1.0, 0.0, 0.5, 0.2])[batch]
    torch.testing.assert_close(info["_weight"], weights)
    assert info["priority_weight"] is info["_weight"]
    assert info["generation"].tolist() == [1] * 1000


def test_weights_of_a_batch_and_dtypes():
    buffer = buffer_of(4, normalize="batch", dtype=torch.float64)
    buffer.update_priority([0, 1, 2, 3], [1e-9, 2.0, 2.0, 4.0])
    batch, info = buffer.sample(return_info=True)
    assert bool((batch > 0).all()) and info["_weight"].max() == 1.0
    assert info["_weight"].dtype == torch.float64
    assert buffer_of(1).sample(return_info=True)[1]["_weight"].dtype == torch.float32


def test_a_redraw_is_a_whole_batch():
    buffer = buffer_of(5)
    drawn = buffer.sampler.draw(buffer.storage, 50)
    stale = torch.zeros(50, dtype=torch.bool)
    stale[3] = True
    again = buffer.sampler.redraw(buffer.storage, drawn, stale)
    assert again.slots.shape == again.extras["_weight"].shape == (50,)
    assert not torch.equal(again.slots, drawn.slots)


def test_sampling_without_a_buffer_works_unless_the_storage_is_empty():
    sampler, storage = PrioritizedSampler(10, 0.7, 0.5, seed=0), LazyTensorStorage(10)
    with pytest.raises(EmptyBufferError):
        sampler.sample(storage, 3)
    fill(storage, torch.arange(6))
    index, info = sampler.sample(storage, 3)
    assert index.shape == info["_weight"].shape == info["generation"].shape == (3,)
    assert sampler.default_priority == 1.0 and not sampler.ran_out


def test_invalid_options_are_refused():
    for options in (
        {"alpha": -1.0},
        {"beta": "a"},
        {"eps": None},
        {"reduction": "avg"},
        {"normalize": "all"},
    ):
        with pytest.raises(InvalidArgumentError, match=next(iter(options))):
            buffer_of(0, **options)


def test_new_and_replaced_and_marked_records():
    buffer = buffer_of(4)
    assert buffer.sampler.default_priority == 1.0
    buffer.update_priority([0, 1], [8.0, 3.0])
    buffer.extend(torch.arange(2))
    buffer[1] = torch.tensor(7)
    buffer.mark_update(3)
    buffer.mark_update([-1, 0])
    assert buffer.sampler.default_priority == 8.0
    assert buffer.sampler._priorities.state_dict()["raw"].tolist() == [8.0, 8.0, 1.0, 8.0, 8.0, 8.0]


def test_a_column_that_is_replaced_keeps_priorities():
    sampler = PrioritizedSampler(4, 1.0, 1.0, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
    buffer.update_priority([0, 1, 2, 3], [0.0, 2.0, 0.0, 0.0])
    buffer["x"] = torch.arange(4) * 10
    assert set(buffer.sample(20)["x"].tolist()) == {10}


def test_the_exponents_belong_to_the_state():
    buffer = buffer_of(4)
    buffer.update_priority([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    sampler = buffer.sampler
    sampler.alpha, sampler.beta, sampler.eps = 0.5, 0.25, 0.125
    other = buffer_of(0)
    other.load_state_dict(buffer.state_dict())
    assert (other.sampler.alpha, other.sampler.beta, other.sampler.eps) == (0.5, 0.25, 0.125)
    for _ in range(3):
        (a, one), (b, two) = buffer.sample(return_info=True), other.sample(return_info=True)
        assert torch.equal(a, b) and torch.equal(one["_weight"], two["_weight"])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_copies_share_nothing(duplicate):
    buffer = buffer_of(4)
    buffer.update_priority([0, 1, 2, 3], [1.0, 0.0, 0.0, 0.0])
    other = duplicate(buffer)
    other.update_priority([0, 1], [0.0, 1.0])
    assert set(buffer.sample().tolist()) == {0} and set(other.sample().tolist()) == {1}
    part = duplicate(buffer.sampler)
    assert part.owner is None and part.draw(buffer.storage, 5).slots.tolist() == [0] * 5


@pytest.mark.parametrize("change", [{"priorities": None}, {"priorities": {}}, {"generator": False}])
def test_a_broken_state_changes_nothing(change):
    buffer, twin = buffer_of(4), buffer_of(4)
    state = {**buffer.sampler.state_dict(), **change}
    with pytest.raises(SchemaError):
        buffer.sampler.load_state_dict(state)
    assert torch.equal(buffer.sample(), twin.sample())


def test_a_sampler_that_moves_to_another_buffer_takes_all_rows_for_new():
    buffer = buffer_of(4)
    buffer.update_priority([0, 1, 2, 3], [1.0, 0.0, 0.0, 0.0])
    sampler = buffer.set_sampler(PrioritizedSampler(10, 1.0, 1.0))
    other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    other.extend(torch.arange(3))
    assert set(other.sample(200).tolist()) == {0, 1, 2}


def test_replaced_mask_column_changes_the_drawn_rows():
    mask = torch.ones(2, 4, dtype=torch.bool)
    steps = TensorDict({"x": torch.arange(8).view(2, 4), "collector": {"mask": mask}}, [2, 4])
    sampler = PrioritizedSampler(8, 1.0, 1.0, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler, batch_size=200)
    buffer.extend(steps)
    for kept in ([0], [1, 6], list(range(8))):
        changed = torch.zeros(2, 4, dtype=torch.bool)
        changed.view(-1)[kept] = True
        buffer["collector", "mask"] = changed
        assert buffer.sample()["x"].unique().tolist() == kept
    sampler._priorities.check_valid()


@pytest.mark.parametrize("behind", [False, True])
def test_a_table_that_was_made_before_the_first_write_rounded_the_storage_up(behind):
    sampler = PrioritizedSampler(10, 1.0, 1.0, seed=0)
    buffer = copy.deepcopy(
        ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=sampler, batch_size=200)
    )
    buffer.load_state_dict(buffer.state_dict())
    steps = TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4])
    if behind:
        fill(buffer.storage, steps.transpose(0, 1))
    else:
        buffer.extend(steps)
    assert buffer.storage.max_size == 12
    assert buffer.sample()["x"].unique().tolist() == list(range(12))


@pytest.mark.parametrize("reduction, expected", [("max", [3, 6]), ("sum", [6, 15]), ("min", [1, 4])])
def test_priorities_with_more_dimensions_than_the_index_are_reduced(reduction, expected):
    values = torch.arange(1.0, 7.0).view(2, 3)
    for priority in (values, values.numpy()):
        sampler = PrioritizedSampler(2, 1.0, 1.0, reduction=reduction)
        buffer = ReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler)
        buffer.update_priority(buffer.extend(torch.arange(2)), priority)
        assert sampler._priorities.state_dict()["raw"].tolist() == expected
    with pytest.raises(SchemaError, match="expected 2 items"):
        buffer.update_priority(torch.arange(2), values.T)


def test_priorities_in_the_shape_of_the_index():
    sampler = PrioritizedSampler(6, 1.0, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), sampler=sampler)
    index = buffer.extend(torch.arange(6).view(2, 3))
    buffer.update_priority(index, torch.arange(6.0).view(6, 1))
    assert sampler._priorities.state_dict()["raw"].tolist() == [0, 1, 2, 3, 4, 5]
    buffer.update_priority(index[:2], torch.tensor([[7.0], [8.0]]))
    buffer.update_priority(index[2:].view(2, 2, 2), torch.tensor([[9.0, 10.0], [11.0, 12.0]]))
    assert sampler._priorities.state_dict()["raw"].tolist() == [7, 8, 9, 10, 11, 12]


def test_a_capacity_isnt_needed():
    sampler = PrioritizedSampler(None, 1.0, 1.0)
    assert sampler.max_size is None
    buffer = ReplayBuffer(storage=LazyTensorStorage(7), sampler=sampler)
    assert sampler.max_size == 7 and PrioritizedSampler(12, 1.0, 1.0).max_size == 12
    buffer.set_storage(LazyTensorStorage(70))
    buffer.extend(torch.arange(70))
    assert sampler.max_size == 70


@pytest.mark.parametrize(
    "made", [PrioritizedSampler, partial(PrioritizedSliceSampler, slice_len=2, traj_key="episode")]
)
def test_a_sampler_without_max_capacity_takes_the_storage_of_its_buffer(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=made(alpha=0.7, beta=0.5), batch_size=4)
    buffer.extend(TensorDict({"episode": torch.zeros(20, dtype=torch.int64)}, [20]))
    buffer.update_priority(torch.arange(20), torch.rand(20))
    assert len(buffer.sample()) == 4 and buffer.sampler.max_size == 20
    for missing in ("alpha", "beta"):
        given = {"alpha": 0.7, "beta": 0.5}
        del given[missing]
        with pytest.raises(InvalidArgumentError, match=f"{missing}: expected a .*number.*None"):
            made(**given)
    with pytest.raises(InvalidArgumentError, match="max_capacity=5 is less than the 20 rows"):
        ReplayBuffer(storage=LazyTensorStorage(20), sampler=made(5, 0.7, 0.5))
