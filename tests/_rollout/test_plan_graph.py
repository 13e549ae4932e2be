"""Gradients flow through blocks."""

from __future__ import annotations

import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.plan import GraphBlock


def test_block_with_gradients_keeps_its_graph():
    schema = Schema(
        {("x",): Field(torch.Size((2,)), torch.float32), ("n",): Field(torch.Size(), torch.int64)}
    )
    block, weight = GraphBlock(schema, (3,), 4), torch.tensor(2.0, requires_grad=True)
    for t in range(4):
        block.rows(("x",))[t].copy_(weight * t)
    block.fill(("n",), torch.arange(12).reshape(4, 3))
    batch = block.batch(3)
    assert batch.shape == (3, 3) and batch.names == [None, "time"] and batch["n"].tolist()[1] == [1, 4, 7]
    assert block.record(2)["n"].tolist() == [6, 7, 8] == batch["n"][:, 2].tolist()
    batch["x"].sum().backward()
    assert weight.grad == (0 + 1 + 2) * 6
