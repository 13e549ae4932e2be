"""Transforms that are arithmetic on entries: in rows of few values the core does it, without a tensor in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.operations import CONVERSIONS, Operation
from gleanrl.exchange import EXCHANGE
from gleanrl.native import RowMaps
from gleanrl.tree import NestedKey, as_path

Array = np.ndarray[Any, Any]
_MOST_VALUES = 1024  # of a row: torch has kernels for more
_DTYPES = {name: dtype for dtype, name in CONVERSIONS.items()}


class _Mapped(NamedTuple):
    """What becomes of a column of the base environment's.

    Attributes:
        source: its rows, ``(T, *batch, *leaf)``.
        dtype: of what comes out.
        operations: what is done, in order.
    """

    source: Array
    dtype: torch.dtype
    operations: tuple[Operation, ...] = ()

    def after(self, operations: Sequence[Operation]) -> _Mapped:
        """Return what becomes of it where more is done."""
        dtype = self.dtype
        for operation in operations:
            dtype = _DTYPES.get(operation.name, dtype)
        return _Mapped(self.source, dtype, (*self.operations, *operations))

    def mark(self) -> tuple[Any, ...]:
        """Return what differs where numbers stand elsewhere or have another form, or other operations are done."""
        places = [(name, id(tensors), key) for name, tensors, key in self.operations]
        return id(self.source), *places, *map(_form_of, self.numbers())

    def numbers(self) -> list[torch.Tensor | None]:
        """Return the tensors of the operations."""
        return [operation.numbers for operation in self.operations]


Maps = dict[NestedKey, _Mapped]
"""What becomes of which column, by the key where it stands in the end."""


class MappedRows(NamedTuple):
    """Does in a row what some transforms would do there.

    Attributes:
        keys: what is written.
        run: called with `t`, writes row `t` and the root behind it; or returns False, and does nothing, if numbers
            have another form now.
    """

    keys: frozenset[NestedKey]
    run: Callable[[int], bool]


class RowArithmetic:
    """Between what a base environment writes and the block that is handed out.

    Args:
        inner: what the base environment writes into: a column that a transform writes may be a single row there.
        outer: the block that is handed out.
    """

    def __init__(self, inner: Block, outer: Block) -> None:
        self._inner, self._outer = inner, outer
        self._known: tuple[Any, MappedRows | None] | None = None

    def of(self, chain: Sequence[Transform]) -> MappedRows | None:
        """Return what does all that some transforms do in a row.

        Args:
            chain: the transforms, in order; no classes of users', which may do anything.

        Returns:
            None if that is more than arithmetic; or if rows are large, or not those of the columns that get them.
        """
        maps = self._maps_of(chain)
        if maps is None:
            return None
        mark = tuple((key, *mapped.mark()) for key, mapped in maps.items())
        if self._known is None or self._known[0] != mark:
            self._known = mark, self._made(maps)
        return self._known[1]

    def _maps_of(self, chain: Sequence[Transform]) -> Maps | None:
        maps: Maps = {}
        for one in chain:
            if not isinstance(one, EntryTransform) or "_apply_transform" in vars(one):
                return None
            for in_key, out_key in one.pairs():
                before = maps.get(in_key) or self._source(in_key)
                operations = None if before is None else one.arithmetic(before.dtype)
                if before is None or operations is None:
                    return None
                maps[out_key] = before.after(operations)
        return maps

    def _source(self, key: NestedKey) -> _Mapped | None:
        path = ("next", *as_path(key))
        array = self._inner.row_arrays(path)
        if array is None or self._inner.schema[path].dtype not in CONVERSIONS:
            return None
        return _Mapped(array, self._inner.schema[path].dtype)

    def _made(self, maps: Maps) -> MappedRows | None:
        if not all(self._fits(key, mapped) for key, mapped in maps.items()):
            return None
        rows = [self._arrays(*item) for item in maps.items()]
        return MappedRows(frozenset(maps), RowMaps(EXCHANGE, torch.Tensor, rows).run)

    def _fits(self, key: NestedKey, mapped: _Mapped) -> bool:
        """Return whether a map's results are what the columns at a key hold, and its numbers fit the rows."""
        after, shape = ("next", *as_path(key)), mapped.source.shape
        columns = [path for path in (after, as_path(key)) if path in self._outer.schema]
        arrays = [self._outer.row_arrays(path) for path in columns]
        return (
            after in columns
            and mapped.source[0].size <= _MOST_VALUES
            and all(array is not None and array.shape == shape for array in arrays)
            and all(self._outer.schema[path].dtype is mapped.dtype for path in columns)
            and all(_is_readable(one, shape[1:]) for one in mapped.numbers() if one is not None)
        )

    def _arrays(self, key: NestedKey, mapped: _Mapped) -> tuple[Any, ...]:
        """Return what `RowMaps` takes."""
        path = as_path(key)
        after, root = self._outer.row_arrays(("next", *path)), self._outer.row_arrays(path)
        return mapped.source, after, root, [tuple(operation) for operation in mapped.operations]


def _form_of(numbers: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Return what may be another one although a tensor stands where it stood."""
    if numbers is None or numbers.layout is not torch.strided:
        return None
    return type(numbers), numbers.shape, numbers.stride(), numbers.device, numbers.is_neg()


def _is_readable(numbers: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the core can read a tensor for each value of a row: it's on the CPU, as it is, and no larger."""
    if EXCHANGE is None or type(numbers) is not torch.Tensor or numbers.layout is not torch.strided:
        return False
    if not numbers.is_cpu or numbers.is_neg() or not numbers.numel() or numbers.ndim > len(shape):
        return False
    sizes = zip(reversed(numbers.shape), reversed(shape), strict=False)
    return all(size in (1, whole) for size, whole in sizes)
