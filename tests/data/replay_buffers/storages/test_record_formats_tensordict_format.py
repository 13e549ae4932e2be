"""TensorDict records keep their groups, and samples carry additional keys."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, TensorStorage
from gleanrl.data.replay_buffers.storages.record_formats import (
    ADDED_KEYS,
    find_format,
    format_from_state,
    without_added_keys,
)
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import ted


def test_groups_keep_their_batch_sizes():
    data = TensorDict({"a": TensorDict({"x": torch.zeros(4, 2, 3)}, [4, 2]), "y": torch.zeros(4)}, [4])
    form = find_format(data, 1, "test")
    for one in (form, format_from_state(form.state()), form.narrow((("a", "x"),))):
        leaves = [torch.zeros(5, *field.shape) for field in one.schema.fields]
        assert one.build(leaves, torch.Size([5]), None)["a"].batch_size == (5, 2)


def test_keys_added_to_samples_are_not_stored():
    data = ted(3)
    carried = data.clone(recurse=False)
    for key in ADDED_KEYS:
        carried[key] = torch.zeros(3)
    assert without_added_keys(data) is data
    assert set(without_added_keys(carried).keys()) == set(data.keys())
    assert set(ADDED_KEYS) <= set(carried.keys()), "the caller's object isn't changed"
    assert find_format(carried, 1, "test").schema == find_format(data, 1, "test").schema
    _, leaves = find_format(data, 1, "test").read(carried, 1, "test")
    assert len(leaves) == 11


def test_nested_key_with_the_name_of_an_added_key_is_stored():
    data = TensorDict({"x": TensorDict({"index": torch.zeros(3)}, [3])}, [3])
    assert find_format(data, 1, "test").schema.paths == (("x", "index"),)


def test_lazy_stacks_are_read():
    stack = LazyStackedTensorDict.lazy_stack([ted(5)[i] for i in range(5)])
    form = find_format(ted(5), 1, "test")
    lead, leaves = form.read(stack, 1, "test")
    form.schema.check(leaves, lead, "test")
    assert (form.build(leaves, lead, torch.device("cpu")) == ted(5)).all()


def test_records_without_any_tensor_are_stored():
    storage = TensorStorage(TensorDict(batch_size=[100]))
    buffer = ReplayBuffer(storage=storage, batch_size=3)
    assert len(buffer) == 100 and buffer.sample().batch_size == (3,) and storage.get(0).batch_size == ()
    written = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    written.extend(TensorDict({"g": {"h": {}}}, [3]))
    assert len(written) == 3 and ("g", "h") in written.sample().keys(True)


def test_groups_without_tensors_at_their_level_are_kept():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    data = TensorDict({"x": torch.ones(3), "g": {}, "h": {"i": {"j": torch.ones(3)}, "k": {}}}, [3])
    buffer.extend(data)
    assert set(buffer.sample().keys(True)) == set(data.keys(True))
    assert set(buffer.sample(keys=["x"]).keys(True)) == {"x"}


def test_the_state_of_a_tensorclass_of_a_function():
    @tensorclass
    class Local:
        x: torch.Tensor

    def buffer() -> ReplayBuffer:
        made = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        made.extend(Local(x=torch.arange(3), batch_size=[3]))
        return made

    state, same = buffer().state_dict(), buffer()
    same.load_state_dict(state)
    assert isinstance(same.sample(), Local)
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.warns(UserWarning, match="loaded as TensorDicts"):
        other.load_state_dict(state)
    assert other[:]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("first", [True, False], ids=["first write", "later write"])
def test_a_group_whose_stacked_parts_differ_in_keys_is_refused(first):
    def steps(*groups: dict[str, float]) -> TensorDict:
        stack = LazyStackedTensorDict(
            *(TensorDict({k: torch.tensor(v) for k, v in g.items()}) for g in groups)
        )
        return TensorDict({"outer": TensorDict({"group": stack}, [len(groups)])}, [len(groups)])

    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    if not first:
        buffer.extend(steps({"x": 1.0}, {"x": 2.0}))
    with pytest.raises(SchemaError, match="same keys in every part of the stacked batch, part 1 .*'y'"):
        buffer.extend(steps({"x": 3.0}, {"x": 4.0, "y": 5.0}))
    assert len(buffer) == (0 if first else 2)
    buffer.extend(steps({"x": 3.0}, {"x": 4.0}))
    assert buffer[:]["outer", "group", "x"].tolist()[-2:] == [3.0, 4.0]
