"""Rows of several columns that are written by one call of the core, whatever batch dimensions there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.native import Columns, TensorRows, knows_exchange
from gleanrl.tree import Path


def _exchange() -> Any:
    offered = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return offered if offered is not None and knows_exchange(offered) else None


_EXCHANGE = _exchange()
"""How torch shows its tensors to the core; None if it doesn't, or in a way that the core doesn't know."""


def written_whole(block: Block, path: Path) -> bool:
    """Return whether a column of `block` is one piece of memory on the CPU: then `WholeRows` writes it."""
    column = block.column(path) if block.columns and block.batch_size.numel() else None
    return (
        isinstance(column, torch.Tensor)
        and column.is_cpu
        and column.is_contiguous()
        and not column.is_complex()
    )


class WholeRows:
    """Writes rows of some columns, ``[*batch, T, *leaf]``.

    To copy a tensor of a few bytes costs a tenth of what showing it to NumPy, or to torch, does. The core looks at
    tensors itself, where torch offers DLPack's exchange interface (2.10 and later); else they are asked here.

    Args:
        block: has the columns.
        paths: where; `written_whole` holds for each.
        roots: for each path the one whose next row gets the same values, or None; none at all by default.

    Attributes:
        write: ``write(t, values)`` takes a value for each path, in a list or a tuple, and writes row `t`, and the
            roots' behind it; if a value isn't a plain tensor as declared, nothing: False.
    """

    def __init__(self, block: Block, paths: Sequence[Path], roots: Sequence[Path | None] = ()) -> None:
        roots = roots or [None] * len(paths)
        self.write: Callable[[int, Sequence[Any]], bool]
        if _EXCHANGE is None:
            self.write = _AskedRows(block, paths, roots).write
        else:
            behind = [None if root is None else block.column(root) for root in roots]
            columns = [block.column(path) for path in paths]
            self.write = TensorRows(_EXCHANGE, torch.Tensor, columns, behind, block.time_dim).write


class _AskedRows:
    """See `WholeRows`: tensors are asked for their form and address in Python."""

    def __init__(self, block: Block, paths: Sequence[Path], roots: Sequence[Path | None]) -> None:
        lead, steps = block.batch_size[:-1], block.num_steps
        columns = [block.column(path) for path in paths]
        self._forms = [(torch.Size((*lead, *c.shape[len(lead) + 1 :])), c.dtype) for c in columns]
        self._copied = [position for position, root in enumerate(roots) if root is not None]
        self._last, self._parts = steps - 1, lead.numel()
        self._rows = _rows(block, paths)
        self._root_rows = _rows(block, [root for root in roots if root is not None])
        self._at = _places(steps, self._parts)
        self._first, self._stride = self._at.ctypes.data, self._parts * self._at.itemsize

    def write(self, t: int, values: Sequence[Any]) -> bool:
        found: list[int] = []
        held = []
        for value, (shape, dtype) in zip(values, self._forms, strict=False):
            if (
                value.__class__ is not torch.Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or not value.is_cpu
                or value.is_neg()  # lazily: it has other bytes
            ):
                return False
            if not value.is_contiguous():  # a half of what a layer put out, say
                held.append(value := value.contiguous())
            found.append(value.data_ptr())
        at = self._first + t * self._stride
        self._rows.put(at, self._parts, found)
        if self._copied and t < self._last:
            self._root_rows.put(
                at + self._stride, self._parts, [found[position] for position in self._copied]
            )
        return True


@lru_cache(maxsize=8)
def _places(steps: int, parts: int) -> np.ndarray[Any, Any]:
    """Return where each environment's row of a step stands in a column, ``(T, P)`` int64, for reading.

    The memory of an environment's steps follows that of another one's.
    """
    return np.add.outer(np.arange(steps), np.arange(parts) * steps)


def _rows(block: Block, paths: Sequence[Path]) -> Columns:
    columns, count = [block.column(path) for path in paths], block.batch_size.numel()
    return Columns([c.data_ptr() for c in columns], [c.nbytes // count for c in columns], count)
