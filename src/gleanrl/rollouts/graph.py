"""A block that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gleanrl.block import Block
from gleanrl.objects import Leaf, stack_leaves
from gleanrl.schema import Schema, new_column
from gleanrl.tree import Path


class GraphBlock(Block):
    """A block whose rows are tensors of their own, so that gradients flow through what is written into them.

    Columns written in place can't carry gradients: here they are stacked when they are asked for, once the rows are
    written. A step costs some more, and each row keeps the graph that it came from.

    The arguments are those of `Block`.
    """

    keeps_graph = True

    def __init__(
        self, schema: Schema, batch_size: Sequence[int], num_steps: int, device: torch.device | None = None
    ) -> None:
        super().__init__(schema, batch_size, num_steps, columns=())
        self._rows = {
            path: tuple(new_column(batch_size, field, device) for _ in range(num_steps))
            for path, field in schema.items().items()
        }

    def column(self, path: Path) -> Leaf:
        """Return a copy of the column at `path`, with its graph."""
        return stack_leaves(self._rows[path], self.time_dim)

    def rows(self, path: Path) -> tuple[Leaf, ...]:
        """Return the T rows of the column at `path`."""
        return self._rows[path]

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write all rows of the column at `path`."""
        for row, value in zip(self._rows[path], values, strict=True):
            row.copy_(value)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> Any:
        """Return a TensorDict of copies; see `Block.batch`."""
        columns = [self.column(path) for path in self.schema.paths]
        whole = Block(self.schema, self.batch_size[:-1], self.num_steps, columns=columns)
        return whole.batch(num_steps, device)
