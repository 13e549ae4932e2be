"""Blocks: the memory that a rollout writes into, one preallocated column for each leaf of a schema.

Columns are ``[*batch, T, *leaf]``, with NumPy views of the same memory for the writers that work in NumPy. Time is the
last batch dimension and is called ``"time"``.

A small block that one rollout after the other is written into.

Views of a block's rows cost more to make than its columns do to copy, if these are small: memory that is written again
keeps its views, and batches are copies of it. A policy may keep what it was shown, though, and must find it unchanged:
then the block is left to it, as one that was handed out would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import methodcaller
from typing import Any, cast

import numpy as np
import torch

from gleanrl._arrays.allocate import BufferPool, lasting
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Columns, TensorForms
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Schema, numpy_twin, numpy_view
from gleanrl._arrays.tensordicts import Path


class Block:
    """Preallocated columns of one rollout: ``[*batch, T, *leaf]`` for each leaf of a schema, uninitialised.

    One writer at a time; a block is handed out whole when it is full and never written again, unless it's borrowed:
    then what is handed out is a copy. (Or its owner asked for one block to be reused.)

    Args:
        schema: the record's leaves.
        batch_size: the environments' batch dimensions, ``()`` for one environment.
        num_steps: T.
        device: where the columns live; None for the CPU.
        pool: where large columns come from; None for the allocator.
        columns: columns that exist already, one for each leaf (views of another block, or shared memory); None
            allocates them.
        borrowed: whether the columns are written again after the rollout, so that what is handed out must be a
            copy (see `owned`).
    """

    rewritten = False
    """Whether it is handed out, and written again all the same, as its owner wants it."""
    redraw_seed: int | None = None
    """Set if all actions were drawn at once, without a mask: the seed of the environments' redraws of forbidden ones.

    Environment i of the flat batch adds i. None: the actions are the policy's, whatever a mask says."""
    keeps_graph = False
    """Whether gradients flow through what is written into it."""

    def __init__(
        self,
        schema: Schema,
        batch_size: Sequence[int],
        num_steps: int,
        device: torch.device | None = None,
        pool: BufferPool | None = None,
        columns: Sequence[Leaf] | None = None,
        borrowed: bool = False,
    ) -> None:
        self.schema = schema
        self.batch_size = torch.Size((*batch_size, num_steps))
        self.num_steps = num_steps
        self.num_whole = 0  # steps that a rollout has written, or had written when it failed
        self.policy_failed = False  # whether the policy raised in the last rollout
        self.time_dim = len(batch_size)
        self.borrowed = borrowed
        if columns is None:
            columns = schema.new_columns(self.batch_size, device, pool)
        self.columns: list[Leaf] = list(columns)
        # Views that were made: those of shared memory serve many rollouts.
        self._arrays: dict[Path, np.ndarray[Any, Any]] = {}
        self._row_arrays: dict[Path, np.ndarray[Any, Any]] = {}
        self._rows: dict[Path, tuple[Leaf, ...]] = {}
        self._flat: dict[Path, Leaf] = {}

    def part(self, index: int) -> Block:
        """Return the block of environment `index` of the first batch dimension: views of this one's columns."""
        columns = [column[index] for column in self.columns]
        return Block(
            self.schema, self.batch_size[1:-1], self.num_steps, columns=columns, borrowed=self.borrowed
        )

    def leading(self, num_steps: int) -> Block:
        """Return the block of the first steps: views of this one's columns."""
        if num_steps == self.num_steps:
            return self
        columns = [column.narrow(self.time_dim, 0, num_steps) for column in self.columns]
        return Block(self.schema, self.batch_size[:-1], num_steps, columns=columns, borrowed=self.borrowed)

    def owned(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a block that nobody writes any more: this one itself, or a copy if its memory is borrowed.

        Args:
            pool: where the copy's large columns come from.
            into: a block of the same shape to copy into instead of a fresh one.
        """
        return self.copied(pool, into) if self.borrowed else self

    def copied(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a copy; see `owned`."""
        out = into or Block(self.schema, self.batch_size[:-1], self.num_steps, pool=pool)
        copy_columns(out.columns, self.columns)
        return out

    @property
    def on_cpu(self) -> bool:
        """Whether its columns are on the CPU."""
        return not self.columns or self.columns[0].device.type == "cpu"

    def column(self, path: Path) -> Leaf:
        """Return the whole column at `path`, ``[*batch, T, *leaf]``."""
        return self.columns[self.schema.index(path)]

    def time_first(self, path: Path) -> Any:
        """Return the column at `path`, time first, ``[T, *batch, *leaf]``."""
        column = self.column(path)
        return column.movedim(self.time_dim, 0) if self.time_dim else column

    def array(self, path: Path) -> np.ndarray[Any, Any]:
        """Return a NumPy view of the column at `path` (CPU blocks only; bfloat16 as uint16); of a list, the objects."""
        array = self._arrays.get(path)
        if array is None:
            column = self.column(path)
            array = column.array if isinstance(column, ObjectColumn) else numpy_view(column)
            self._arrays[path] = array
        return array

    def row_arrays(self, path: Path) -> np.ndarray[Any, Any] | None:
        """Return a NumPy view of the column at `path`, time first: to write a small row costs a third of a tensor's.

        None for what has no such view: columns that aren't there, lists, dtypes that NumPy doesn't have, other devices
        than the CPU.
        """
        rows = self._row_arrays.get(path)
        if rows is None:
            column = self.columns[self.schema.index(path)] if self.columns and path in self.schema else None
            if (
                not isinstance(column, torch.Tensor)
                or not column.is_cpu
                or numpy_twin(column.dtype) is not column.dtype
            ):
                return None
            rows = self._row_arrays[path] = self.time_first(path).numpy()
        return rows

    def rows(self, path: Path) -> tuple[Leaf, ...]:
        """Return T views of the column at `path`, one for each step: ``[*batch, *leaf]``."""
        rows = self._rows.get(path)
        if rows is None:
            rows = self._rows[path] = self.column(path).unbind(self.time_dim)
        return rows

    def shown(self, paths: Sequence[Path]) -> Sequence[tuple[Any, ...]]:
        """Return for each step the rows at `paths`, as a policy is given them, or copies of them: see `cloning`."""
        return list(zip(*map(self.rows, paths), strict=True)) if paths else [()] * self.num_steps

    @property
    def cloning(self) -> Callable[[Any], Any] | None:
        """What copies a row for whoever is shown it, and may keep it: of memory that is written again, or of a graph.

        None where rows are shown themselves.
        """
        if not (self.borrowed or self.rewritten or self.keeps_graph):
            return None
        return lasting(_cloned) if torch.is_inference_mode_enabled() else _cloned

    def flat(self, path: Path) -> Leaf:
        """Return the column at `path` with its batch dimensions, if any, as one: ``[P, T, *leaf]``."""
        flat = self._flat.get(path)
        if flat is None:
            column, dims = self.column(path), len(self.batch_size)
            shape = (self.batch_size[:-1].numel(), self.num_steps, *column.shape[dims:])
            flat = self._flat[path] = column.reshape(shape)
        return flat

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write the whole column at `path`; `values` have time first, ``(T, *batch, *leaf)``."""
        self.time_first(path).copy_(values)

    def record(self, t: int, device: torch.device | None = None) -> Any:
        """Return the TensorDict of step `t` over the rows' memory; `device` as in `batch`."""
        leaves = [self.rows(path)[t] for path in self.schema.paths]
        return self.schema.layout.build(leaves, self.batch_size[:-1], device)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> Any:
        """Return the TensorDict over the columns' memory, its last batch dimension named ``"time"``.

        With tensors of unlike shapes it is a lazy stack of views (see `Layout.build`).

        Args:
            num_steps: how many steps were written; None for all. Fewer gives the leading steps.
            device: what the TensorDict says of its device; None for a TensorDict without one.
        """
        columns, size = self.columns, self.batch_size
        if num_steps is not None and num_steps != self.num_steps:
            columns = [column.narrow(self.time_dim, 0, num_steps) for column in columns]
            size = torch.Size((*size[:-1], num_steps))
        names = [None] * self.time_dim + ["time"]
        return self.schema.layout.build(columns, size, device, names)


_cloned = methodcaller("clone")


def copier(sources: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """Return what copies columns of the CPU, each one piece, into others like them by one call of the core."""
    rows = Columns([source.data_ptr() for source in sources], [source.nbytes for source in sources], 1)

    def copy(targets: Sequence[torch.Tensor]) -> None:
        rows.gather(_FIRST.ctypes.data, 1, [target.data_ptr() for target in targets])

    return copy


def copy_columns(targets: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
    """Copy columns into others of their shapes and dtypes: plain ones by one call of the core, in the caller's thread.

    torch's threads, which would help with large ones on an idle machine, take the cores from those that collect.
    """
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if (
            isinstance(source, torch.Tensor)
            and isinstance(target, torch.Tensor)
            and (source.shape, source.dtype) == (target.shape, target.dtype)
            and all(one.is_cpu and one.is_contiguous() and not one.requires_grad for one in (source, target))
            and source.is_conj() == target.is_conj()  # what is lazy has other bytes
            and source.is_neg() == target.is_neg()
        ):
            plain.append((target, source))
        else:
            target.copy_(source)
    copier([source for _, source in plain])([target for target, _ in plain])


_FIRST = np.zeros(1, np.int64)


_LARGEST = 1 << 18
"""Bytes of a block up to which copying it costs less than making its views does."""


class ReusableBlock(Block):
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
