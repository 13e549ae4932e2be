"""Blocks: preallocated memory that a rollout writes, with one column for each leaf of a schema.

Columns are ``[*batch, T, *leaf]``. NumPy views of the same memory serve writers that use NumPy. Time is the last batch
dimension and is named ``"time"``.

`ReusableBlock` is a small block that serves many rollouts. For small columns, making views of the rows costs more than
copying the columns. So the block keeps its views, and each batch is a copy of its columns. A policy may keep a row that
it has seen, and that row must not change. The source therefore takes a new block while the policy still holds rows of
the old one.
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
    """Preallocated, uninitialised columns of one rollout: ``[*batch, T, *leaf]`` for each leaf of a schema.

    A block has one writer at a time. A full block is handed out whole and is never written again, with two exceptions.
    The memory of a `borrowed` block is written again, so `owned` hands out a copy. A `rewritten` block is handed out
    without a copy because its owner asked for that.

    Args:
        schema: the record's leaves.
        batch_size: the environments' batch dimensions, ``()`` for one environment.
        num_steps: T.
        device: the device of the columns; None for the CPU.
        pool: provides the memory of large columns; None for NumPy's allocator.
        columns: existing columns to use, one for each leaf (views of another block, or shared memory); None to allocate
            them.
        borrowed: whether the columns are written again after the rollout, so that `owned` must return a copy.
    """

    rewritten = False
    """Whether the block is written again after it was handed out without a copy, because its owner asked for that."""
    redraw_seed: int | None = None
    """Seed for redrawing forbidden actions, if all actions were drawn at once and without a mask.

    Environment i of the flattened batch uses this seed plus i. If it is None, the policy chose the actions, and no
    environment redraws an action that its mask forbids.
    """
    keeps_graph = False
    """Whether gradients flow through the values written into the block."""

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
        self.num_complete = 0  # steps that a rollout has written, or had written when it failed
        self.policy_failed = False  # whether the policy raised an error in the last rollout
        self.time_dim = len(batch_size)
        self.borrowed = borrowed
        if columns is None:
            columns = schema.new_columns(self.batch_size, device, pool)
        self.columns: list[Leaf] = list(columns)
        # Caches of views: a block over shared memory serves many rollouts.
        self._arrays: dict[Path, np.ndarray[Any, Any]] = {}
        self._row_arrays: dict[Path, np.ndarray[Any, Any]] = {}
        self._rows: dict[Path, tuple[Leaf, ...]] = {}
        self._flat: dict[Path, Leaf] = {}

    def part(self, index: int) -> Block:
        """Return a block of views: the columns of environment `index` of the first batch dimension.

        Of the attributes that describe a rollout, the new block takes over only `borrowed`.
        """
        columns = [column[index] for column in self.columns]
        return Block(
            self.schema, self.batch_size[1:-1], self.num_steps, columns=columns, borrowed=self.borrowed
        )

    def leading(self, num_steps: int) -> Block:
        """Return a block of views: the first `num_steps` steps of the columns; the block itself for all steps."""
        if num_steps == self.num_steps:
            return self
        columns = [column.narrow(self.time_dim, 0, num_steps) for column in self.columns]
        return Block(self.schema, self.batch_size[:-1], num_steps, columns=columns, borrowed=self.borrowed)

    def owned(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a block that is never written again: the block itself, or a copy if its memory is borrowed.

        Args:
            pool: provides the memory of the copy's large columns.
            into: a block of the same shape that receives the copy, instead of a new one.
        """
        return self.copied(pool, into) if self.borrowed else self

    def copied(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a copy of the columns in `into`, or in a new block on the CPU; see `owned` for the arguments."""
        out = into or Block(self.schema, self.batch_size[:-1], self.num_steps, pool=pool)
        copy_columns(out.columns, self.columns)
        return out

    @property
    def on_cpu(self) -> bool:
        """Whether the columns are on the CPU; True for a block without columns."""
        return not self.columns or self.columns[0].device.type == "cpu"

    def column(self, path: Path) -> Leaf:
        """Return the whole column at `path`, ``[*batch, T, *leaf]``."""
        return self.columns[self.schema.index(path)]

    def time_first(self, path: Path) -> Any:
        """Return the column at `path` with time as the first dimension, ``[T, *batch, *leaf]``."""
        column = self.column(path)
        return column.movedim(self.time_dim, 0) if self.time_dim else column

    def array(self, path: Path) -> np.ndarray[Any, Any]:
        """Return a NumPy view of the column at `path`, or the array of objects of a list.

        Only for blocks on the CPU. A dtype that NumPy lacks is viewed as an unsigned integer (bfloat16 as uint16).
        """
        array = self._arrays.get(path)
        if array is None:
            column = self.column(path)
            array = column.array if isinstance(column, ObjectColumn) else numpy_view(column)
            self._arrays[path] = array
        return array

    def row_arrays(self, path: Path) -> np.ndarray[Any, Any] | None:
        """Return a NumPy view of the column at `path` with time first, or None if there is no such view.

        Writing a small row through NumPy costs a third of writing it through a tensor. There is no view of missing
        columns, lists, dtypes that NumPy lacks, and columns on other devices than the CPU.
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

    def rows_by_step(self, paths: Sequence[Path]) -> Sequence[tuple[Any, ...]]:
        """Return the rows at `paths` for each step.

        If `cloning` isn't None, the caller shows copies of the rows to the policy.
        """
        return list(zip(*map(self.rows, paths), strict=True)) if paths else [()] * self.num_steps

    @property
    def cloning(self) -> Callable[[Any], Any] | None:
        """The function that copies a row before the policy sees it; None if the policy sees the rows themselves.

        The policy may keep the rows that it sees. It needs copies if the memory is written again, or if gradients flow
        through it.
        """
        if not (self.borrowed or self.rewritten or self.keeps_graph):
            return None
        return lasting(_cloned) if torch.is_inference_mode_enabled() else _cloned

    def flat(self, path: Path) -> Leaf:
        """Return the column at `path` with all batch dimensions flattened into one: ``[P, T, *leaf]``.

        It is a view if the strides allow it, otherwise a copy from the first call.
        """
        flat = self._flat.get(path)
        if flat is None:
            column, dims = self.column(path), len(self.batch_size)
            shape = (self.batch_size[:-1].numel(), self.num_steps, *column.shape[dims:])
            flat = self._flat[path] = column.reshape(shape)
        return flat

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write the whole column at `path` from `values`, which have time first: ``(T, *batch, *leaf)``.

        The values are broadcast and cast without a check.
        """
        self.time_first(path).copy_(values)

    def record(self, t: int, device: torch.device | None = None) -> Any:
        """Return the TensorDict of step `t` over the block's memory; `device` has the same meaning as in `batch`."""
        leaves = [self.rows(path)[t] for path in self.schema.paths]
        return self.schema.layout.build(leaves, self.batch_size[:-1], device)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> Any:
        """Return a TensorDict over the columns' memory. Its last batch dimension is named ``"time"``.

        If tensors of a leaf differ in shape, the result is a lazy stack of views (see `TensorDictBuilder.build`).

        Args:
            num_steps: the number of steps that were written; a smaller number than T gives the leading steps, None
                gives all.
            device: the TensorDict's device attribute; None for a TensorDict without a device.
        """
        columns, size = self.columns, self.batch_size
        if num_steps is not None and num_steps != self.num_steps:
            columns = [column.narrow(self.time_dim, 0, num_steps) for column in columns]
            size = torch.Size((*size[:-1], num_steps))
        names = [None] * self.time_dim + ["time"]
        return self.schema.layout.build(columns, size, device, names)


_cloned = methodcaller("clone")


def copier(sources: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """Return a function that copies `sources` into tensors of the same sizes by one call of the native core.

    Sources and targets are contiguous tensors on the CPU. The function expects the targets in the order of `sources`,
    and checks neither. It copies the values that the sources have when it is called.
    """
    rows = Columns([source.data_ptr() for source in sources], [source.nbytes for source in sources], 1)

    def copy(targets: Sequence[torch.Tensor]) -> None:
        rows.gather(_FIRST.ctypes.data, 1, [target.data_ptr() for target in targets])

    return copy


def copy_columns(targets: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
    """Copy columns into other columns of the same shapes; torch casts where dtypes differ.

    One call of the native core copies all contiguous CPU tensors, in the caller's thread. Torch's threads would be
    faster for large columns on an idle machine, but here they would take cores away from the collecting workers.
    """
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if (
            isinstance(source, torch.Tensor)
            and isinstance(target, torch.Tensor)
            and (source.shape, source.dtype) == (target.shape, target.dtype)
            and all(one.is_cpu and one.is_contiguous() and not one.requires_grad for one in (source, target))
            and source.is_conj() == target.is_conj()  # the bytes of a lazy conjugate aren't its values
            and source.is_neg() == target.is_neg()
        ):
            plain.append((target, source))
        else:
            target.copy_(source)
    copier([source for _, source in plain])([target for target, _ in plain])


_FIRST = np.zeros(1, np.int64)


_LARGEST = 1 << 18
"""The largest block, in bytes, for which copying the columns costs less than making views of the rows."""


class ReusableBlock(Block):
    """A block on the CPU that detects whether other objects still hold rows that it has shown; see `Block`.

    Args:
        schema: the record's leaves; `can_keep` tells whether a schema is suitable.
        batch_size: the environments' batch dimensions.
        num_steps: T.
    """

    def __init__(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> None:
        super().__init__(schema, batch_size, num_steps, borrowed=True)
        self._cached_rows: dict[tuple[Path, ...], _CachedRows] = {}
        self._copy = copier(cast("list[torch.Tensor]", self.columns))

    def copied(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a copy of the columns; see `Block.copied`.

        `can_keep` has checked the columns, so the copy skips the checks of `copy_columns`.
        """
        out = into or Block(self.schema, self.batch_size[:-1], self.num_steps, pool=pool)
        self._copy(cast("list[torch.Tensor]", out.columns))
        return out

    def rows_by_step(self, paths: Sequence[Path]) -> Sequence[tuple[Any, ...]]:
        """Return the rows at `paths` for each step, the same objects at each call; see `Block.rows_by_step`."""
        found = self._cached_rows.get(tuple(paths))
        if found is None:
            columns = [self.column(path) for path in paths]
            found = self._cached_rows[tuple(paths)] = _CachedRows(columns, self.num_steps, self.time_dim)
        return found.rows

    cloning = None  # not needed: while the policy holds a row, the block isn't written again

    @property
    def is_free(self) -> bool:
        """Whether no other object holds a row that was shown, or a view of such a row.

        It is also False if a row got another address or shape, a gradient, or a Python attribute.
        """
        return all(rows.is_free for rows in self._cached_rows.values())


class _CachedRows:
    """The rows of some columns, in torch storages that no other views share.

    The separate storages make the reference counts exact: only these rows, and views of them, refer to them.

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
        """Return the number of references to the rows, to the columns' aliases, and to their torch storages."""
        objects = sum(map(sys.getrefcount, chain(self._flat, self._aliases, self._storages)))
        return objects + sum(torch._C._storage_Use_Count(storage._cdata) for storage in self._storages)


def can_keep(schema: Schema, batch_size: Sequence[int], num_steps: int) -> bool:
    """Return whether a rollout may use a `ReusableBlock`.

    The block must be small, and all its dtypes must exist in NumPy. Torch's references to the rows must also be
    visible, because `ReusableBlock.is_free` counts references.
    """
    rows = torch.Size(batch_size).numel() * num_steps
    return (
        0 < rows * schema.row_bytes <= _LARGEST
        and all(not field.is_list and numpy_twin(field.dtype) is field.dtype for field in schema.fields)
        and EXCHANGE is not None
        and _sees_references()
    )


@cache
def _sees_references() -> bool:
    """Return whether `sys.getrefcount` counts references that torch itself holds, for example for a backward pass."""
    with torch.enable_grad():
        tensor = torch.ones(1)
        before = sys.getrefcount(tensor)
        product = torch.ones(1, requires_grad=True) * tensor
    return product.grad_fn is not None and sys.getrefcount(tensor) > before
