"""Schemas and blocks: what a batch's columns look like, and the memory that a rollout writes into.

A `Schema` names the leaves of a record with their shapes and dtypes. A `Block` is one preallocated column per
leaf, ``[*batch, T, *leaf]``, with NumPy views of the same memory for the writers that work in NumPy. Time is
the last batch dimension and is called ``"time"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.errors import SchemaError
from gleanrl.pool import BufferPool
from gleanrl.tree import Layout, Path, as_key, group_sizes, iter_leaves


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype of `dtype`, or an unsigned integer of its size where NumPy has none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


@cache
def numpy_twin(dtype: torch.dtype) -> torch.dtype:
    """Return the torch dtype of `numpy_dtype`: `dtype` itself, but for those that NumPy doesn't have."""
    return torch.from_numpy(np.empty(0, numpy_dtype(dtype))).dtype


def numpy_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array over the memory of a CPU tensor, in `numpy_dtype`."""
    twin = numpy_twin(tensor.dtype)
    return tensor.numpy() if tensor.dtype is twin else tensor.view(twin).numpy()


@dataclass(frozen=True)
class Field:
    """One leaf of a record: its shape without batch dimensions, and its dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one record's leaf."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Show as ``(84, 84, 4) uint8``."""
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Schema:
    """The leaves of a record: paths in a fixed order, each with a shape and a dtype. Immutable.

    Args:
        fields: path to `Field`, in the order that columns and built TensorDicts have.
        groups: what the batch sizes of nested TensorDicts have beyond the batch's own (see `Layout`); two schemas
            that differ in nothing else are equal.
    """

    def __init__(
        self, fields: Mapping[Path, Field], groups: Mapping[Path, Sequence[int]] | None = None
    ) -> None:
        self.layout = Layout(fields, groups)
        self.fields: tuple[Field, ...] = tuple(fields.values())
        self._positions = {path: position for position, path in enumerate(self.layout.paths)}
        self._shapes: dict[torch.Size, list[tuple[torch.Size, torch.dtype]]] = {}

    @classmethod
    def of(cls, batch: TensorDictBase, exclude: Iterable[Path] = ()) -> Schema:
        """Return the schema of the records in `batch`; its batch dimensions are not part of a record."""
        drop = set(exclude)
        dims = len(batch.batch_size)
        return cls(
            {
                path: Field(leaf.shape[dims:], leaf.dtype)
                for path, leaf in iter_leaves(batch)
                if path not in drop
            },
            group_sizes(batch, dims),
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The leaves' paths, in order."""
        return self.layout.paths

    @property
    def groups(self) -> Mapping[Path, tuple[int, ...]]:
        """What the batch sizes of nested TensorDicts have beyond the batch's own."""
        return self.layout.groups

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one record."""
        return sum(field.row_bytes for field in self.fields)

    def __contains__(self, path: object) -> bool:
        """Return whether `path` is a leaf of this schema."""
        return path in self._positions

    def __getitem__(self, path: Path) -> Field:
        """Return the field at `path` (KeyError if there is none)."""
        return self.fields[self._positions[path]]

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        """Two schemas are equal if the same paths have the same fields, in any order."""
        return isinstance(other, Schema) and self.items() == other.items()

    def __hash__(self) -> int:
        """Hash consistent with `__eq__`."""
        return hash(frozenset(self.items().items()))

    def __repr__(self) -> str:
        """Show each leaf."""
        return "Schema(" + ", ".join(f"{as_key(p)!r}: {f}" for p, f in self.items().items()) + ")"

    def items(self) -> dict[Path, Field]:
        """Return path to field, in order."""
        return dict(zip(self.paths, self.fields, strict=True))

    def index(self, path: Path) -> int:
        """Return the position of `path` among the leaves (KeyError if there is none)."""
        return self._positions[path]

    def check(self, leaves: Sequence[torch.Tensor], lead: torch.Size, where: str) -> None:
        """Raise unless every leaf is ``[*lead, *field]`` and of the field's dtype.

        Args:
            leaves: in the order of the schema.
            lead: what precedes each record's shape.
            where: the call that the error message names, ``"extend"`` say.

        Raises:
            SchemaError: naming the key, what was expected and what came. Nothing is broadcast or cast.
        """
        expected = self._shapes.get(lead) or self._expected(lead)
        for leaf, (shape, dtype) in zip(leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                self._raise_mismatch(leaves, expected, where)

    def _expected(self, lead: torch.Size) -> list[tuple[torch.Size, torch.dtype]]:
        if len(self._shapes) >= 64:  # a bounded memory of recent batch sizes
            self._shapes.clear()
        found = [(torch.Size((*lead, *field.shape)), field.dtype) for field in self.fields]
        self._shapes[lead] = found
        return found

    def _raise_mismatch(
        self, leaves: Sequence[torch.Tensor], expected: Sequence[tuple[torch.Size, torch.dtype]], where: str
    ) -> None:
        for path, leaf, (shape, dtype) in zip(self.paths, leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                raise SchemaError(
                    f"{where}: key {as_key(path)!r} expected shape {tuple(shape)} {dtype}, got "
                    f"{tuple(leaf.shape)} {leaf.dtype}; the first write fixed the schema and nothing is cast "
                    "or broadcast: convert the data before it comes here"
                )


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
    pool: BufferPool | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor; on the CPU its memory comes from `pool`, or else from NumPy.

    NumPy asks the kernel for huge pages in large arrays: fresh memory then faults in a third of the time that
    `torch.empty` takes.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    kind = numpy_dtype(dtype)
    array = np.empty(tuple(shape), kind) if pool is None else pool.empty(tuple(shape), kind)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


class Block:
    """Preallocated columns of one rollout: ``[*batch, T, *leaf]`` for each leaf of a schema, uninitialised.

    One writer at a time; a block is handed out whole when it is full and never written again (unless its
    owner asked for one block to be reused).

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

    def __init__(
        self,
        schema: Schema,
        batch_size: Sequence[int],
        num_steps: int,
        device: torch.device | None = None,
        pool: BufferPool | None = None,
        columns: Sequence[torch.Tensor] | None = None,
        borrowed: bool = False,
    ) -> None:
        self.schema = schema
        self.batch_size = torch.Size((*batch_size, num_steps))
        self.num_steps = num_steps
        self.num_whole = 0  # steps that a rollout has written, or had written when it failed
        self.time_dim = len(batch_size)
        self.borrowed = borrowed
        if columns is None:
            columns = [
                allocate((*self.batch_size, *field.shape), field.dtype, device, pool)
                for field in schema.fields
            ]
        self.columns: list[torch.Tensor] = list(columns)

    def part(self, index: int) -> Block:
        """Return the block of environment `index` of the first batch dimension: views of this one's columns."""
        columns = [column[index] for column in self.columns]
        return Block(self.schema, self.batch_size[1:-1], self.num_steps, columns=columns)

    def owned(self, pool: BufferPool | None = None, into: Block | None = None) -> Block:
        """Return a block that nobody writes any more: this one itself, or a copy if its memory is borrowed.

        Args:
            pool: where the copy's large columns come from.
            into: a block of the same shape to copy into instead of a fresh one.
        """
        if not self.borrowed:
            return self
        out = into or Block(self.schema, self.batch_size[:-1], self.num_steps, pool=pool)
        for target, column in zip(out.columns, self.columns, strict=True):
            target.copy_(column)
        return out

    def column(self, path: Path) -> torch.Tensor:
        """Return the whole column at `path`, ``[*batch, T, *leaf]``."""
        return self.columns[self.schema.index(path)]

    def array(self, path: Path) -> np.ndarray[Any, Any]:
        """Return a NumPy view of the column at `path` (CPU blocks only; bfloat16 as uint16)."""
        return numpy_view(self.column(path))

    def rows(self, path: Path) -> tuple[torch.Tensor, ...]:
        """Return T tensor views of the column at `path`, one for each step: ``[*batch, *leaf]``."""
        return self.column(path).unbind(self.time_dim)

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write the whole column at `path`; `values` have time first, ``(T, *batch, *leaf)``."""
        self.column(path).movedim(self.time_dim, 0).copy_(values)

    def record(self, t: int, device: torch.device | None = None) -> TensorDict:
        """Return the TensorDict of step `t` over the rows' memory; `device` as in `batch`."""
        leaves = [self.rows(path)[t] for path in self.schema.paths]
        return self.schema.layout.build(leaves, self.batch_size[:-1], device)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> TensorDict:
        """Return the TensorDict over the columns' memory, its last batch dimension named ``"time"``.

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


class GraphBlock(Block):
    """A block whose rows are tensors of their own, so that gradients flow through what is written into them.

    Columns written in place can't carry gradients: here they are stacked when they are asked for, once the rows are
    written. A step costs some more, and each row keeps the graph that it came from.

    Args:
        schema: see `Block`.
        batch_size: see `Block`.
        num_steps: see `Block`.
        device: see `Block`.
    """

    def __init__(
        self, schema: Schema, batch_size: Sequence[int], num_steps: int, device: torch.device | None = None
    ) -> None:
        super().__init__(schema, batch_size, num_steps, columns=())
        shapes = {path: (*batch_size, *field.shape) for path, field in schema.items().items()}
        self._rows = {
            path: tuple(allocate(shape, schema[path].dtype, device) for _ in range(num_steps))
            for path, shape in shapes.items()
        }

    def column(self, path: Path) -> torch.Tensor:
        """Return a copy of the column at `path`, with its graph."""
        return torch.stack(self._rows[path], self.time_dim)

    def rows(self, path: Path) -> tuple[torch.Tensor, ...]:
        """Return the T tensors of the column at `path`."""
        return self._rows[path]

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write all rows of the column at `path`."""
        for row, value in zip(self._rows[path], values, strict=True):
            row.copy_(value)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> TensorDict:
        """Return a TensorDict of copies; see `Block.batch`."""
        columns = [self.column(path) for path in self.schema.paths]
        whole = Block(self.schema, self.batch_size[:-1], self.num_steps, columns=columns)
        return whole.batch(num_steps, device)
