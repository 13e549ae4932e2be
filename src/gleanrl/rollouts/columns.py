"""Columns of what environments return: rows are looked at before they are written."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.block import Block
from gleanrl.errors import EnvironmentContractError
from gleanrl.objects import Leaf, Objects
from gleanrl.rollouts.whole_rows import written_whole
from gleanrl.schema import Field
from gleanrl.tree import Path, as_key


class Column:
    """Writes rows of one column after a look at shape and dtype.

    Args:
        block: has the column.
        path: where.
        inner: what the environment calls it.
        field: what its rows are.
        accepted: the dtype that values come in.
        casts: whether they may come in any dtype of floating point.
        root: the column whose next row gets the same values; None for none.
    """

    def __init__(
        self,
        block: Block,
        path: Path,
        inner: Path,
        field: Field,
        accepted: torch.dtype | None,
        casts: bool,
        root: Column | None = None,
    ) -> None:
        self.field = field
        self._inner, self._accepted, self._casts = inner, accepted, casts
        self._block, self.path = block, path
        self._shape = torch.Size((*block.batch_size[:-1], *field.row_shape))
        self.arrays = block.row_arrays(path) if accepted is field.dtype else None
        self._root, self._last = root, block.num_steps - 1
        self._root_arrays = None if root is None else root.arrays
        self.root_path = None if root is None else root.path
        whole = self.arrays is not None and written_whole(block, path)
        self.whole: bool = whole and (root is None or root.whole)
        """Whether values in the declared form may be written past this column, by `WholeRows`."""

    def write(self, t: int, value: Any) -> None:
        """Write row `t`, and row ``t + 1`` of the root's column if there is one.

        Raises:
            EnvironmentContractError: the value isn't as declared.
        """
        if (
            self.arrays is not None
            and isinstance(value, torch.Tensor)
            and value.dtype is self._accepted
            and value.shape == self._shape
            and value.is_cpu
            and not value.requires_grad
        ):
            self.arrays[t] = array = value.numpy()
            if self._root is None or t == self._last:
                return
            if self._root_arrays is not None:
                self._root_arrays[t + 1] = array
                return
        else:
            self._write(self._block.rows(self.path)[t], value)
        if self._root is not None and t < self._last:
            self._root.write(t + 1, value)

    def _write(self, row: torch.Tensor, value: Any) -> None:
        path, accepted = self._inner, self._accepted
        if self.field.is_list:
            row.copy_(_list_row(path, row, value, self.field))
            return
        if not isinstance(value, torch.Tensor) or value.shape != row.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise EnvironmentContractError(
                f"key {as_key(path)!r} expected shape {tuple(row.shape)} {accepted}, got {got}"
            )
        if value.dtype is not accepted and not (self._casts and value.dtype.is_floating_point):
            raise EnvironmentContractError(
                f"key {as_key(path)!r} expected dtype {accepted}, got {value.dtype}"
            )
        row.copy_(value)


def _list_row(path: Path, row: Leaf, value: Any, field: Field) -> Leaf:
    """Return what came for a row of a list, after a look at it."""
    lists = isinstance(value, Objects)
    if field.dtype is None:
        if lists and value.blank is None and value.shape == row.shape:
            return value
        came = f"shape {tuple(value.shape)}" if lists else type(value).__name__
        raise EnvironmentContractError(
            f"key {as_key(path)!r} expected non-tensor data of shape {tuple(row.shape)}, got {came}"
        )
    if isinstance(value, torch.Tensor) and value.shape[: row.ndim] == row.shape:
        value = Objects.rows_of(value, row.shape)
    if not isinstance(value, Objects) or value.shape != row.shape:
        raise EnvironmentContractError(
            f"key {as_key(path)!r} expected tensors {field}, got {getattr(value, 'shape', type(value).__name__)}"
        )
    for item in value.array.flat:
        if not field.fits(item):
            found = Field(item.shape, item.dtype) if isinstance(item, torch.Tensor) else type(item).__name__
            raise EnvironmentContractError(f"key {as_key(path)!r} expected tensors {field}, got {found}")
    return value
