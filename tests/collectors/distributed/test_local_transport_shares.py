"""Lent shares and shares in the object store have the same interface and content."""

from __future__ import annotations

import pickle

import pytest
import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._process.serialization import PickledBatch
from gleanrl.collectors.distributed.local_transport import NodeShare, SharedMemoryShare, StoredShare

SCHEMA = Schema(
    {
        ("x",): Field(torch.Size((3,)), torch.float32),
        ("next", "x"): Field(torch.Size((3, 2000)), torch.float32),
    }
)


def batch_in() -> Block:
    block = Block(SCHEMA, (2,), 5, borrowed=True)
    for number, column in enumerate(block.columns):
        column.copy_(torch.arange(column.numel()).reshape(column.shape) + number)
    return block


@pytest.mark.parametrize("lent", [True, False])
def test_a_share_is_viewed_or_copied(lent: bool) -> None:
    block = batch_in()
    batch = block.batch()
    arrived = pickle.loads(pickle.dumps(PickledBatch(batch), protocol=5))
    share: NodeShare = SharedMemoryShare(block, None) if lent else StoredShare(arrived)
    own, view, (columns, device) = share.own(BufferPool()), share.view(), share.block()
    for found in (own, view, columns.batch(None, device)):
        assert found.names == [None, "time"] and bool((found == batch).all())
    view["x"].fill_(-1.0)
    assert bool((columns.column(("x",)) == -1).all()) and bool((own["x"] >= 0).all())
