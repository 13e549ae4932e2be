"""Records that are TensorDicts: groups, and keys that samples carry."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.data.replay_buffers.storages.formats import find_format, format_from_state
from gleanrl.data.replay_buffers.storages.tensordict_format import ADDED_KEYS, without_added_keys
from tests.data.replay_buffers.oracle import ted


def test_groups_keep_their_batch_sizes():
    data = TensorDict({"a": TensorDict({"x": torch.zeros(4, 2, 3)}, [4, 2]), "y": torch.zeros(4)}, [4])
    form = find_format(data, 1, "test")
    for one in (form, format_from_state(form.state()), form.narrow((("a", "x"),))):
        leaves = [torch.zeros(5, *field.shape) for field in one.schema.fields]
        assert one.build(leaves, torch.Size([5]), None)["a"].batch_size == (5, 2)


def test_what_samples_carry_is_no_data():
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


def test_a_nested_key_of_such_a_name_is_data():
    data = TensorDict({"x": TensorDict({"index": torch.zeros(3)}, [3])}, [3])
    assert find_format(data, 1, "test").schema.paths == (("x", "index"),)


def test_lazy_stacks_are_read():
    stack = LazyStackedTensorDict.lazy_stack([ted(5)[i] for i in range(5)])
    form = find_format(ted(5), 1, "test")
    lead, leaves = form.read(stack, 1, "test")
    form.schema.check(leaves, lead, "test")
    assert (form.build(leaves, lead, torch.device("cpu")) == ted(5)).all()
