"""A small block that one rollout after the other is written into.

Views of a block's rows cost more to make than its columns do to copy, if these are small: memory that is written again
keeps its views, and batches are copies of it. A policy may keep what it was shown, though, and must find it unchanged:
then the block is left to it, as one that was handed out would be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, cast

import torch

from gleanrl.block import Block, copier
from gleanrl.exchange import EXCHANGE
from gleanrl.inference import lasting
from gleanrl.native import TensorForms
from gleanrl.pool import BufferPool
from gleanrl.schema import Schema, numpy_twin
from gleanrl.tree import Path

_LARGEST = 1 << 18
"""Bytes of a block up to which copying it costs less than making its views does."""


class KeptBlock(Block):
    """A block of the CPU that tells whether anybody else still has what was shown of it; see `Block`.

    Args:
        schema: the record's leaves; `can_keep` says of which ones.
        batch_size: the environments' batch dimensions.
        num_steps: T.
    """

    def __init__(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> None:
        super().__init__(schema, batch_size, num_steps, borrowed=True)
        self._shown: dict[tuple[Path, ...], _Shown] = {}
        self._copy = copier(cast("list[torch.Tensor]", self.columns))

    def copied(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a copy, made without another look at columns that are all alike; see `Block.owned`."""
        out = into or Block(self.schema, self.batch_size[:-1], self.num_steps, pool=pool)
        self._copy(cast("list[torch.Tensor]", out.columns))
        return out

    def shown(self, paths: Sequence[Path]) -> Sequence[tuple[Any, ...]]:
        """Return the rows at `paths`, step by step, the same ones again; see `Block.shown`."""
        found = self._shown.get(tuple(paths))
        if found is None:
            columns = [self.column(path) for path in paths]
            found = self._shown[tuple(paths)] = _Shown(columns, self.num_steps, self.time_dim)
        return found.rows

    cloning = None  # whoever keeps a row keeps the block

    @property
    def is_free(self) -> bool:
        """Whether nobody else has any of the rows that were shown, or a view of one."""
        return all(shown.is_free for shown in self._shown.values())


class _Shown:
    """Rows of some columns, which share their storages with no other views.

    Attributes:
        rows: the tensors of each step.
    """

    @lasting
    def __init__(self, columns: Sequence[torch.Tensor], num_steps: int, time_dim: int) -> None:
        self._aliases = [torch.from_numpy(column.numpy()) for column in columns]
        self._storages = [alias.untyped_storage() for alias in self._aliases]
        self.rows: list[tuple[torch.Tensor, ...]] = [()] * num_steps
        if columns:
            self.rows = list(zip(*[alias.unbind(time_dim) for alias in self._aliases], strict=True))
        self._flat = list(chain.from_iterable(self.rows))
        self._forms = TensorForms(EXCHANGE, torch.Tensor, self._flat)
        self._references = self._count()

    @property
    def is_free(self) -> bool:
        return self._count() == self._references and self._forms.unchanged(self._flat)

    def _count(self) -> int:
        """Return how many references there are to the rows, and to tensors over their memory."""
        objects = sum(map(sys.getrefcount, chain(self._flat, self._aliases, self._storages)))
        return objects + sum(torch._C._storage_Use_Count(storage._cdata) for storage in self._storages)


def can_keep(schema: Schema, batch_size: Sequence[int], num_steps: int) -> bool:
    """Return whether a block is small, holds nothing but what NumPy has, too, and torch tells who has its rows."""
    rows = torch.Size(batch_size).numel() * num_steps
    return (
        0 < rows * schema.row_bytes <= _LARGEST
        and all(not field.is_list and numpy_twin(field.dtype) is field.dtype for field in schema.fields)
        and EXCHANGE is not None
        and _sees_references()
    )


@cache
def _sees_references() -> bool:
    """Return whether what torch itself holds, for a backward pass say, counts for `sys.getrefcount`."""
    with torch.enable_grad():
        tensor = torch.ones(1)
        before = sys.getrefcount(tensor)
        held = torch.ones(1, requires_grad=True) * tensor
    return held.grad_fn is not None and sys.getrefcount(tensor) > before
