"""Transforms that are arithmetic on entries: in rows of few values the core does it, without a tensor in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.mapping import EntryTransform, Operation
from gleanrl.native import RowMaps
from gleanrl.overrides import overridden
from gleanrl.tree import NestedKey, Path, as_path

_MOST_VALUES = 1024  # of a row: torch has kernels for more
_CONVERSIONS = {"float": torch.float32, "double": torch.float64}
_HOOKS = ("_apply_transform", "_call", "_step")


class _Mapped(NamedTuple):
    """What becomes of a column of the base environment's: its path, the operations, and the dtype in the end."""

    source: Path
    dtype: torch.dtype
    operations: tuple[Operation, ...] = ()

    def mark(self) -> tuple[Any, ...]:
        """Return what is another one where other tensors, or other memory, hold the numbers."""
        numbers = [one for _, one in self.operations if one is not None]
        places = [(id(one), one.data_ptr(), one.shape) for one in numbers]
        return self.source, self.dtype, *(name for name, _ in self.operations), *places


Maps = dict[NestedKey, _Mapped]
"""What stands where in the end."""


class MappedRows(NamedTuple):
    """Does in a row what some transforms would do there.

    Attributes:
        keys: what is written.
        run: called with `t`, writes row `t` and the root behind it; None if there is nothing to be done.
    """

    keys: frozenset[NestedKey]
    run: Callable[[int], None] | None


class RowArithmetic:
    """Between what a base environment writes and the block that is handed out.

    Args:
        inner: what the base environment writes into: a column that a transform writes may be a single row there.
        block: the block that is handed out.
    """

    def __init__(self, inner: Block, block: Block) -> None:
        self._inner, self._block = inner, block
        self._known: tuple[Any, MappedRows | None] = (), MappedRows(frozenset(), None)
        self._maps: Maps = {}  # what that is made of: its tensors are these as long as they are held

    def of(self, chain: Sequence[Transform]) -> MappedRows | None:
        """Return what does all that some transforms do; None if that is more than arithmetic, or rows are large.

        Numbers are read at every row, from the tensors that hold them now.

        Args:
            chain: the transforms, in order.
        """
        maps = _maps_of(chain, self._inner)
        if maps is None:
            return None
        mark = tuple((key, *mapped.mark()) for key, mapped in maps.items())
        if mark != self._known[0]:
            self._maps = maps
            self._known = mark, self._made(maps)
        return self._known[1]

    def _made(self, maps: Maps) -> MappedRows | None:
        if not all(_fits(key, mapped, self._inner, self._block) for key, mapped in maps.items()):
            return None
        rows = RowMaps([_arrays(key, mapped, self._inner, self._block) for key, mapped in maps.items()])
        return MappedRows(frozenset(maps), rows.run)


def _maps_of(chain: Sequence[Transform], inner: Block) -> Maps | None:
    """Return what becomes of a base environment's outcomes; None if a transform does more than arithmetic."""
    maps: Maps = {}
    for one in chain:
        if not isinstance(one, EntryTransform) or overridden(one, *_HOOKS, of=type(one)):
            return None
        for in_key, out_key in one.pairs():
            before = maps.get(in_key) or _source(inner, in_key)
            operations = None if before is None else one.arithmetic(before.dtype)
            if before is None or operations is None:
                return None
            maps[out_key] = _after(before, operations)
    return maps


def _source(inner: Block, key: NestedKey) -> _Mapped | None:
    path = ("next", *as_path(key))
    if path not in inner.schema or inner.row_arrays(path) is None:
        return None
    dtype = inner.schema[path].dtype
    return _Mapped(path, dtype) if dtype in _CONVERSIONS.values() else None


def _after(before: _Mapped, operations: Sequence[Operation]) -> _Mapped:
    dtype = before.dtype
    for operation in operations:
        dtype = _CONVERSIONS.get(operation.name, dtype)
    return _Mapped(before.source, dtype, (*before.operations, *operations))


def _fits(key: NestedKey, mapped: _Mapped, inner: Block, block: Block) -> bool:
    """Return whether a map's results are what columns of `block` hold, and its numbers fit the rows."""
    source = inner.row_arrays(mapped.source)
    assert source is not None
    after = ("next", *as_path(key))
    columns = [path for path in (after, as_path(key)) if path in block.schema]
    arrays = [block.row_arrays(path) for path in columns]
    return (
        after in columns
        and source[0].size <= _MOST_VALUES
        and all(array is not None and array.shape == source.shape for array in arrays)
        and all(block.schema[path].dtype is mapped.dtype for path in columns)
        and all(_broadcasts(operation, source.shape[1:]) for operation in mapped.operations)
    )


def _broadcasts(operation: Operation, shape: tuple[int, ...]) -> bool:
    operand = operation.operand
    if operand is None:
        return True
    if not operand.is_cpu or operand.is_neg() or operand.ndim > len(shape):
        return False
    return all(
        size in (1, whole) for size, whole in zip(reversed(operand.shape), reversed(shape), strict=False)
    )


def _arrays(key: NestedKey, mapped: _Mapped, inner: Block, block: Block) -> tuple[Any, ...]:
    """Return what `RowMaps` takes."""
    source, path = inner.row_arrays(mapped.source), as_path(key)
    assert source is not None
    operations = [
        (name, None if operand is None else np.broadcast_to(operand.detach().numpy(), source.shape[1:])[None])
        for name, operand in mapped.operations
    ]
    root = block.row_arrays(path) if path in block.schema else None
    return source, block.row_arrays(("next", *path)), root, operations
