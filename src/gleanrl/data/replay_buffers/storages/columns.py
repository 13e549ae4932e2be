"""Columns: the memory of a tensor storage, one tensor per leaf, and the three ways in and out of it.

Rows are slots with time and batch dimensions flattened. On the CPU the native core copies all leaves in one
call; on other devices torch does it leaf by leaf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.block import Field, numpy_dtype, numpy_twin
from gleanrl.native import Columns as NativeColumns
from gleanrl.pool import BufferPool

_CPU = torch.device("cpu")
_PLANS = 64  # batch sizes whose allocations are remembered
Wanted: TypeAlias = tuple[int, ...]
"""Positions of columns."""
Plan: TypeAlias = list[tuple[Callable[..., Any], tuple[int, ...], np.dtype[Any]]]

_MAY_BE_LAZY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ColumnStore(ABC):
    """Columns ``[num_rows, *field]``, one for each field, all rows in slot order.

    `gather` may run in any thread beside anything else (rows written meanwhile come out torn: compare
    generations); the writing calls one at a time.

    Args:
        fields: the leaves.
        columns: their memory, contiguous, ``[num_rows, *field]`` each. Kept alive and never replaced.
    """

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        self.fields = tuple(fields)
        self.columns = list(columns)
        self.num_rows = columns[0].shape[0]

    @abstractmethod
    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `leaves` as the copies need them: on the right device, contiguous. May copy."""

    @abstractmethod
    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy `count` rows of ready leaves to row `start` and the following, around the end."""

    @abstractmethod
    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy ready leaves to `slots`, ``(n,)`` int64; of equal slots the last one wins."""

    @abstractmethod
    def gather(self, slots: torch.Tensor, wanted: Wanted | None = None) -> list[torch.Tensor]:
        """Return the rows of `slots` (``(n,)`` int64, CPU) as fresh contiguous tensors ``[n, *field]``.

        `wanted` names the columns by position, in the order of the result; None for all.
        """


class HostColumns(ColumnStore):
    """Columns in the CPU's memory or in mapped files."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self._native = NativeColumns(
            [column.data_ptr() for column in columns], [field.row_bytes for field in fields], self.num_rows
        )
        self._lazy = [
            dtype in _MAY_BE_LAZY or dtype.is_complex for dtype in (field.dtype for field in fields)
        ]
        self._plans: dict[tuple[int, Wanted | None], Plan] = {}
        self._pool = BufferPool()
        self._disguised = any(numpy_twin(field.dtype) is not field.dtype for field in fields)
        self._ranges = [(column.data_ptr(), column.data_ptr() + column.nbytes) for column in columns]
        self._low = min(low for low, _ in self._ranges)
        self._high = max(high for _, high in self._ranges)

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous CPU leaves, with lazy conjugations and negations carried out."""
        return [
            leaf
            if leaf.is_cpu and leaf.is_contiguous() and not (lazy and (leaf.is_neg() or leaf.is_conj()))
            else plain(leaf, _CPU)
            for leaf, lazy in zip(leaves, self._lazy, strict=True)
        ]

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy with at most two memory moves per column."""
        self._native.write(start, count, self._sources(leaves))

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy row by row in the order of `slots`."""
        self._native.put(slots.data_ptr(), slots.shape[0], self._sources(leaves))

    def gather(self, slots: torch.Tensor, wanted: Wanted | None = None) -> list[torch.Tensor]:
        """Fetch all columns in one native call, the interpreter lock released."""
        count = slots.shape[0]
        plan = self._plans.get((count, wanted)) or self._plan(count, wanted)
        leaves = [from_numpy(make(shape, dtype)) for make, shape, dtype in plan]
        self._native.gather(slots.data_ptr(), count, [leaf.data_ptr() for leaf in leaves], wanted)
        if self._disguised:
            fields = self.fields if wanted is None else [self.fields[position] for position in wanted]
            leaves = [leaf.view(field.dtype) for leaf, field in zip(leaves, fields, strict=True)]
        return leaves

    def _sources(self, leaves: list[torch.Tensor]) -> list[int]:
        """Return the leaves' addresses, after copying those that are views of these very columns."""
        low, high = self._low, self._high
        addresses = [leaf.data_ptr() for leaf in leaves]
        for position, address in enumerate(addresses):
            if low <= address < high and any(first <= address < last for first, last in self._ranges):
                # `leaves` keeps the copy alive until the caller's copy is done.
                leaves[position] = leaves[position].clone()
                addresses[position] = leaves[position].data_ptr()
        return addresses

    def _plan(self, count: int, wanted: Wanted | None) -> Plan:
        """Return, for each leaf of a batch, what makes its array, the array's shape and dtype."""
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = [
            (
                self._pool.empty if count * field.row_bytes >= self._pool.min_bytes else empty,
                (count, *field.shape),
                numpy_dtype(field.dtype),
            )
            for field in (self.fields if wanted is None else [self.fields[position] for position in wanted])
        ]
        self._plans[count, wanted] = plan
        return plan


# Bound once: a gather of eleven leaves makes eleven arrays, in NumPy because that is cheaper than in torch.
empty, from_numpy = np.empty, torch.from_numpy


class DeviceColumns(ColumnStore):
    """Columns on an accelerator, or on any device that torch knows."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.device = columns[0].device

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves on the columns' device."""
        return [leaf.detach().to(self.device) for leaf in leaves]

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy at most two ranges per column."""
        head = min(count, self.num_rows - start)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(count, *field.shape)
            column[start : start + head].copy_(rows[:head])
            if head < count:
                column[: count - head].copy_(rows[head:])

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy with one indexed write per column."""
        # On a device the order of equal indices is open: keep the last of each slot.
        last = {slot: position for position, slot in enumerate(slots.tolist())}
        where = torch.tensor(list(last), dtype=torch.int64, device=self.device)
        which = torch.tensor(list(last.values()), dtype=torch.int64, device=self.device)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            column[where] = leaf.reshape(slots.shape[0], *field.shape)[which]

    def gather(self, slots: torch.Tensor, wanted: Wanted | None = None) -> list[torch.Tensor]:
        """Fetch with one `index_select` per column on the device."""
        where = slots.to(self.device)
        columns = self.columns if wanted is None else [self.columns[position] for position in wanted]
        return [column.index_select(0, where) for column in columns]


def column_store(fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> ColumnStore:
    """Return the store for columns on the CPU or on another device."""
    return (HostColumns if columns[0].is_cpu else DeviceColumns)(fields, columns)


def plain(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `leaf` on `device`, contiguous, with lazy conjugations and negations carried out."""
    return leaf.detach().to(device).resolve_conj().resolve_neg().contiguous()


def apart(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous `columns`, with copies of those that lie in another one's memory.

    What is written into one column must not show in another.
    """
    found = list(columns)
    end = 0
    for position in sorted(range(len(found)), key=lambda position: found[position].data_ptr()):
        start = found[position].data_ptr()
        if start < end and found[position].nbytes:
            found[position] = found[position].clone()
        else:
            end = max(end, start + found[position].nbytes)
    return found
