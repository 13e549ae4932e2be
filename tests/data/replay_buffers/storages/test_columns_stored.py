"""Leaves are stored in columns, and equal leaves may share one."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl.data.replay_buffers.storages.columns import (
    ColumnSource,
    DeviceColumns,
    OwnColumns,
    StoredSchema,
    UserColumns,
)
from gleanrl.errors import SchemaError

OBS, REWARD = Field(torch.Size([3]), torch.float32), Field(torch.Size([1]), torch.bfloat16)
SCHEMA = Schema({("obs",): OBS, ("next", "reward"): REWARD, ("next", "obs"): OBS})
SHARED = [ColumnSource(0), ColumnSource(1), ColumnSource(0, 1)]


def test_each_leaf_has_a_column():
    stored = StoredSchema(SCHEMA)
    assert stored.paths == SCHEMA.paths and stored.fields == SCHEMA.fields
    leaves = [torch.zeros(2)] * 3
    assert stored.to_store(leaves) is leaves and stored.wanted() is None
    assert stored.wanted([("next", "obs"), ("obs",)]) == (ColumnSource(2), ColumnSource(0))
    assert stored.column_of(("next", "obs")) == 2


@pytest.mark.parametrize("kind", [OwnColumns, UserColumns, DeviceColumns])
def test_leaves_that_share_a_column_are_fetched_by_one_call(kind):
    stored = StoredSchema(SCHEMA, SHARED)
    assert stored.paths == (("obs",), ("next", "reward"))
    leaves = [torch.arange(30.0).view(10, 3), torch.arange(10.0).bfloat16()[:, None], torch.zeros(10, 3)]
    columns = kind(stored.fields, [torch.zeros(10, *f.shape, dtype=f.dtype) for f in stored.fields])
    columns.write(0, 10, columns.ready(stored.to_store(leaves)))
    slots = torch.tensor([3, 9, 3])
    obs, reward, after = columns.gather((slots, (slots + 1) % 10), stored.wanted())
    assert obs.tolist() == leaves[0][slots].tolist() and reward.tolist() == leaves[1][slots].tolist()
    assert after.tolist() == leaves[0][[4, 0, 4]].tolist()
    (after,) = columns.gather((slots, slots - 1), stored.wanted([("next", "obs")]))
    assert after.tolist() == leaves[0][[2, 8, 2]].tolist()


@pytest.mark.parametrize(
    "sources",
    [
        [ColumnSource(0), ColumnSource(2), ColumnSource(0, 1)],
        [ColumnSource(0), ColumnSource(1), ColumnSource(2, 1)],
    ],
)
def test_every_column_is_stored_by_a_leaf(sources):
    with pytest.raises(SchemaError, match="expected columns from 0 on"):
        StoredSchema(SCHEMA, sources)
