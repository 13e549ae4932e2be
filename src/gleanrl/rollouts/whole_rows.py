"""Rows of several columns that are written by one call of the core, whatever batch dimensions there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.exchange import EXCHANGE
from gleanrl.native import Columns, TensorRows
from gleanrl.tree import Path


def written_whole(block: Block, path: Path) -> bool:
    """Return whether `WholeRows` writes a column of `block`: it is on the CPU, and its rows lie at equal distances.

    Complex numbers aren't for it, which would have to see whether they are conjugated.
    """
    column = block.column(path) if block.columns and block.batch_size.numel() else None
    if not isinstance(column, torch.Tensor) or not column.is_cpu or column.is_complex():
        return False
    if EXCHANGE is not None and column.stride(block.time_dim) == 0:  # a single row, seen as many
        column = column.select(block.time_dim, 0)
    return column.is_contiguous()


class WholeRows(Protocol):
    """Writes rows of some columns, ``[*batch, T, *leaf]``."""

    def write(self, t: int, values: Mapping[Any, Any], exactly: bool = False) -> bool | None:
        """Write row `t`, and the roots' behind it; return whether a flag is set.

        Args:
            t: the row.
            values: one for each key.
            exactly: whether there must be no others.

        Returns:
            None, and nothing is written, if a value isn't there, isn't a plain tensor as declared, or is large and in
            several pieces.
        """


def whole_rows(
    block: Block,
    paths: Mapping[Any, Path],
    roots: Mapping[Any, Path] | None = None,
    flags: Collection[Any] = (),
) -> WholeRows | None:
    """Return what writes rows of columns by one call; None if `paths` is empty, or a column isn't `written_whole`.

    To copy a tensor of a few bytes costs a tenth of what showing it to NumPy, or to torch, does. The core looks at
    tensors itself, where torch offers DLPack's exchange interface, as newer releases do; else they are asked here.

    Args:
        block: has the columns.
        paths: where, by the key of what is written there.
        roots: by key the column whose next row gets the same values, where there is one.
        flags: the keys of flags of which `write` tells.
    """
    roots = roots or {}
    if not paths or not all(written_whole(block, path) for path in (*paths.values(), *roots.values())):
        return None
    if EXCHANGE is None:
        return _AskedRows(block, paths, roots, flags)
    columns, behind = ({key: block.column(path) for key, path in given.items()} for given in (paths, roots))
    return TensorRows(EXCHANGE, torch.Tensor, columns, behind, [*flags], block.time_dim)


class _AskedRows:
    """Asks tensors for their form and address in Python; see `WholeRows`."""

    def __init__(
        self, block: Block, paths: Mapping[Any, Path], roots: Mapping[Any, Path], flags: Collection[Any]
    ) -> None:
        lead, steps = block.batch_size[:-1], block.num_steps
        columns = {key: block.column(path) for key, path in paths.items()}
        self._forms = [
            (key, torch.Size((*lead, *c.shape[len(lead) + 1 :])), c.dtype) for key, c in columns.items()
        ]
        self._flags = flags
        ours = [*columns.values(), *map(block.column, roots.values())]
        self._storages = {column.untyped_storage().data_ptr() for column in ours}
        self._copied = [position for position, key in enumerate(paths) if key in roots]
        self._last, self._parts = steps - 1, lead.numel()
        self._rows = _rows(block, [*paths.values()])
        self._root_rows = _rows(block, [roots[key] for key in paths if key in roots])
        self._at = _places(steps, self._parts)
        self._first, self._stride = self._at.ctypes.data, self._parts * self._at.itemsize

    def write(self, t: int, values: Mapping[Any, Any], exactly: bool = False) -> bool | None:
        if exactly and len(values) != len(self._forms):
            return None
        found: list[int] = []
        held = []
        for key, shape, dtype in self._forms:
            value = values.get(key)
            if (
                value.__class__ is not torch.Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or not value.is_cpu
                or value.layout is not torch.strided
                or value.is_neg()  # lazily: it has other bytes
            ):
                return None
            if not value.is_contiguous():  # a half of what a layer put out, say
                held.append(value := value.contiguous())
            elif value.untyped_storage().data_ptr() in self._storages:  # another value may be written over it
                held.append(value := value.clone())
            found.append(value.data_ptr())
        at = self._first + t * self._stride
        self._rows.put(at, self._parts, found)
        if self._copied and t < self._last:
            self._root_rows.put(
                at + self._stride, self._parts, [found[position] for position in self._copied]
            )
        return any(bool(values[key].any()) for key in self._flags)


@lru_cache(maxsize=8)
def _places(steps: int, parts: int) -> np.ndarray[Any, Any]:
    """Return where each environment's row of a step stands in a column, ``(T, P)`` int64, for reading.

    The memory of an environment's steps follows that of another one's.
    """
    return np.add.outer(np.arange(steps), np.arange(parts) * steps)


def _rows(block: Block, paths: Sequence[Path]) -> Columns:
    columns, count = [block.column(path) for path in paths], block.batch_size.numel()
    return Columns([c.data_ptr() for c in columns], [c.nbytes // count for c in columns], count)
