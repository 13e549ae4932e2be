"""Record formats: what is found in the first data, and what later data is held against."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.data.replay_buffers.storages.formats import (
    ADDED_KEYS,
    find_format,
    format_from_state,
    swap_batch_dims,
    without_added_keys,
)
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import ted

TREE = {"a": torch.zeros(4, 2), "b": (torch.zeros(4, dtype=torch.int64), [torch.zeros(4, 1)])}


@pytest.mark.parametrize(
    "data, dims",
    [(ted(4), 1), (ted(4, streams=3), 2), (ted(4, streams=3), 1), (TREE, 1), (torch.zeros(4, 2), 1)],
)
def test_a_format_survives_its_state(data, dims):
    form = find_format(data, dims, "test")
    again = format_from_state(form.state())
    assert type(again) is type(form)
    assert again.schema == form.schema and again.schema.paths == form.schema.paths
    assert again.item_shape == form.item_shape
    lead, leaves = again.read(data, dims, "test")
    again.check(leaves, lead, "test")


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
    form.check(leaves, lead, "test")
    assert (form.build(leaves, lead, torch.device("cpu")) == ted(5)).all()


def test_swapped_batch_dimensions():
    assert swap_batch_dims(ted(4, streams=3), 1, "test").batch_size == (4, 3)
    assert swap_batch_dims({"a": torch.zeros(2, 3, 4)}, 2, "test")["a"].shape == (4, 3, 2)
    with pytest.raises(SchemaError, match="expected at least 2 batch dimensions"):
        swap_batch_dims(ted(4), 1, "test")


def test_many_batch_sizes_are_forgotten_again():
    form = find_format(torch.zeros(4, 2), 1, "test")
    for count in range(1, 500):
        form.check([torch.zeros(count, 2)], torch.Size([count]), "test")
    with pytest.raises(SchemaError):
        form.check([torch.zeros(3, 1)], torch.Size([3]), "test")
    assert len(form._shapes) <= 64
