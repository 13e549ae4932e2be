"""The first data determines the record format, and later data is checked against it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers.storages.record_formats import (
    find_format,
    format_from_state,
    swap_batch_dims,
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
    again.schema.check(leaves, lead, "test")


def test_swap_batch_dims_moves_time_to_the_front():
    assert swap_batch_dims(ted(4, streams=3), 1, "test").batch_size == (4, 3)
    assert swap_batch_dims({"a": torch.zeros(2, 3, 4)}, 2, "test")["a"].shape == (4, 3, 2)
    with pytest.raises(SchemaError, match="expected at least 2 batch dimensions"):
        swap_batch_dims(ted(4), 1, "test")


@pytest.mark.parametrize("name", ["paths", "groups", "empty", "item_shape"])
@pytest.mark.parametrize(
    "value", [TensorDict({}, [2**40]), [TensorDict({}, [2**40])], [[torch.empty(2**40, 0)]]]
)
def test_arrays_of_any_shape_in_a_saved_format_are_refused(name, value):
    with pytest.raises(SchemaError, match="expected plain values in the format"):
        format_from_state({**find_format(ted(4), 1, "test").state(), name: value})


@pytest.mark.parametrize(("name", "value"), [("groups", [[[1], [2]]]), ("empty", [["a", 2]])])
def test_paths_in_a_saved_format_are_strings(name, value):
    with pytest.raises(SchemaError, match="expected paths of strings"):
        format_from_state({**find_format(ted(4), 1, "test").state(), name: value})


@pytest.mark.parametrize(
    "state",
    [{}, {"paths": [["a"]], "shapes": [], "dtypes": []}, {"paths": 3, "shapes": 3, "dtypes": 3}, None],
)
def test_invalid_saved_format_is_refused(state):
    with pytest.raises(SchemaError, match="holds no valid format of records"):
        format_from_state(state)


@pytest.mark.parametrize("data", [torch.zeros(5), {"a": torch.zeros(5, 2), "b": torch.zeros(5)}, ted(5)])
def test_batch_dimensions_that_are_missing_are_named(data):
    with pytest.raises(SchemaError, match=r"extend: expected at least 2 (batch )?dimensions, got \(5,\)"):
        swap_batch_dims(data, 1, "extend")
