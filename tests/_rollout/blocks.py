"""Blocks for actors to write into, and their rows as a user would build them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._rollout.actors import RowLayout

T = 5
ROOT = {
    ("observation",): Field(torch.Size([3]), torch.float32),
    ("robot", "clock"): Field(torch.Size([]), torch.int64),
    ("done",): Field(torch.Size([1]), torch.bool),
    ("next", "observation"): Field(torch.Size([3]), torch.float32),
}
ACTION = {("action",): Field(torch.Size([2]), torch.float32)}


def make_block(fields: dict[Path, Field], size: tuple[int, ...]) -> Block:
    """Return a block with random environment columns; all other columns hold far-off values."""
    block = Block(Schema({**ROOT, **fields}), size, T)
    generator = torch.Generator().manual_seed(0)
    for path, column in zip(block.schema.paths, block.columns, strict=True):
        column.copy_(
            torch.randint(0, 9, column.shape, generator=generator) if path in ROOT else torch.tensor(99)
        )
    return block


def layout(fields: dict[Path, Field], size: tuple[int, ...], device: Any = None) -> RowLayout:
    roots = tuple(path for path in ROOT if path[0] != "next")
    return RowLayout(roots, tuple(ACTION), torch.Size(size), None, device)


def rows(block: Block) -> list[TensorDict]:
    """Return the root of every row as a user would build it."""
    paths = [path for path in ROOT if path[0] != "next"]
    size = block.batch_size[:-1]
    out = []
    for t in range(T):
        root = TensorDict({}, size)
        for path in paths:
            root.set(as_key(path), block.column(path).select(block.time_dim, t).clone())
        out.append(root)
    return out


def drive(actor: Any, block: Block) -> None:
    act = actor.bind(block)
    assert act is not None
    with torch.no_grad():
        for t in range(T):
            act(t)
