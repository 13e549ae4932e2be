"""Writing rows of columns: a policy's outputs with conversion of actions, and several columns in one native call.

An action may differ from its declaration in dtype, or by a trailing dimension of size one. Many policies write such
actions: an `argmax` as float, a one-hot vector of integers, ``(N,)`` for ``(N, 1)``. An action is converted if that
keeps every value. Other outputs are never converted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Columns, TensorRows
from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_leaf
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl.errors import PolicyError


def is_batch_writable(block: Block, path: Path) -> bool:
    """Return whether `BatchedRowWriter` can write a column of `block`: it is on the CPU, with rows at equal distances.

    Complex numbers are excluded, because they may be lazily conjugated.
    """
    column = block.column(path) if block.columns and block.batch_size.numel() else None
    if not isinstance(column, torch.Tensor) or not column.is_cpu or column.is_complex():
        return False
    if EXCHANGE is not None and column.stride(block.time_dim) == 0:  # one row, expanded
        column = column.select(block.time_dim, 0)
    return column.is_contiguous()


class BatchedRowWriter(Protocol):
    """Writes rows of several columns, ``[*batch, T, *leaf]``, in one call."""

    def write(self, t: int, values: Mapping[Any, Any], exactly: bool = False) -> bool | None:
        """Write row `t`, and row ``t + 1`` of the roots; return whether a flag is set.

        Args:
            t: the row.
            values: the value for each key.
            exactly: whether `values` must have no further keys.

        Returns:
            Whether a flag is set. None, without any write, if a value is missing, isn't a plain tensor in the declared
            form, or is large and not contiguous. Also None for further keys if `exactly`.
        """


def batched_row_writer(
    block: Block,
    paths: Mapping[Any, Path],
    roots: Mapping[Any, Path] | None = None,
    flags: Collection[Any] = (),
) -> BatchedRowWriter | None:
    """Return a writer for rows of columns in one call; None if `paths` is empty or a column isn't `is_batch_writable`.

    The copy of a small tensor takes a tenth of the time of its conversion to NumPy or of a torch operation. If torch
    offers DLPack's exchange interface (newer releases), the native core reads tensors itself. Otherwise Python code
    reads their attributes.

    Args:
        block: has the columns.
        paths: the path of the column for each key.
        roots: for some keys, the path of the root column whose next row gets the same values.
        flags: keys of the flags that `write` reports.
    """
    roots = roots or {}
    if not paths or not all(is_batch_writable(block, path) for path in (*paths.values(), *roots.values())):
        return None
    if EXCHANGE is None:
        return _PythonRows(block, paths, roots, flags)
    columns, behind = ({key: block.column(path) for key, path in group.items()} for group in (paths, roots))
    return TensorRows(EXCHANGE, torch.Tensor, columns, behind, [*flags], block.time_dim)


class _PythonRows:
    """A `BatchedRowWriter` that reads forms and addresses of tensors in Python."""

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
        temporaries = []
        for key, shape, dtype in self._forms:
            value = values.get(key)
            if (
                value.__class__ is not torch.Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or not value.is_cpu
                or value.layout is not torch.strided
                or value.is_neg()  # negated lazily: its bytes differ
            ):
                return None
            if not value.is_contiguous():  # for example, half of a layer's output
                temporaries.append(value := value.contiguous())
            elif value.untyped_storage().data_ptr() in self._storages:  # this call may overwrite it
                temporaries.append(value := value.clone())
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
    """Return the position of each environment's row in a column, ``(T, P)`` int64; callers must not change it.

    In memory, all steps of one environment come before all steps of the next one.
    """
    return np.add.outer(np.arange(steps), np.arange(parts) * steps)


def _rows(block: Block, paths: Sequence[Path]) -> Columns:
    columns, count = [block.column(path) for path in paths], block.batch_size.numel()
    return Columns([c.data_ptr() for c in columns], [c.nbytes // count for c in columns], count)


class _Converted(NamedTuple):
    """An action of one row, ``[*batch, *leaf]``, before and after its conversion."""

    t: int
    original: torch.Tensor
    converted: torch.Tensor


class Conversions:
    """Converts actions of one block that don't come in the declared form.

    A step pays for one conversion and one copy. `check` verifies once per block that all values were kept. The first
    row is verified immediately, so that scores of choices never reach an environment.

    Args:
        block: the block of the actions.
    """

    def __init__(self, block: Block) -> None:
        self._batch = block.batch_size[:-1]
        self._converted: dict[tuple[Path, torch.dtype], list[_Converted]] = {}

    def fit(
        self, path: Path, value: torch.Tensor, shape: torch.Size, dtype: torch.dtype, t: int
    ) -> torch.Tensor:
        """Return an action of row `t` in the declared form; keep a copy of a converted value for `check`.

        Raises:
            PolicyError: if its shape doesn't fit, or if it is the block's first of its dtype and a value would change.
        """
        reshaped = with_shape(value, shape, len(self._batch))
        if reshaped is None or reshaped.is_complex() is not dtype.is_complex:
            raise misfit(path, value, shape, dtype)
        if value.dtype is dtype:
            return reshaped
        fitting = reshaped.to(dtype)
        # The policy may overwrite its output, so the value before the conversion is copied.
        row = _Converted(t, reshaped.detach().clone(), fitting.detach())
        rows = self._converted.get((path, value.dtype))
        if rows is not None:
            rows.append(row)
        else:
            self._check_unchanged(path, [row])
            self._converted[path, value.dtype] = [row]
        return fitting

    def check(self) -> None:
        """Check that no conversion of the block changed a value.

        Raises:
            PolicyError: if one did. The message names the key, the environment, the step of the batch, and the value.
        """
        for (path, _), rows in self._converted.items():
            self._check_unchanged(path, rows)

    def _check_unchanged(self, path: Path, rows: Sequence[_Converted]) -> None:
        original, fitting = (
            torch.stack([row.original for row in rows]),
            torch.stack([row.converted for row in rows]),
        )
        changed = first_change(original, fitting)
        if changed is None:
            return
        row, rest = divmod(changed, original[0].numel())
        env = rest * self._batch.numel() // original[0].numel()
        value, became = original.flatten()[changed].item(), fitting.flatten()[changed].item()
        raise PolicyError(
            f"policy: {as_key(path)!r} holds {value} for environment {env} at step {rows[row].t} of the batch, which "
            f"{fitting.dtype} can't hold (it would become {became}): {advice((), original.dtype, (), fitting.dtype)}"
        )


class RowWriter:
    """Checks a policy's outputs and writes them into the columns of a row; see `Conversions`.

    Args:
        block: has the columns.
        fields: the policy's columns.
        actions: the paths of `fields` that are actions.
    """

    def __init__(self, block: Block, fields: Mapping[Path, Field], actions: tuple[Path, ...]) -> None:
        self.conversions = Conversions(block)
        self._block, self._fields, self._actions = block, fields, actions
        # The fast path for values in the declared form.
        self._batched = batched_row_writer(block, {path: path for path in fields})

    @cached_property
    def _targets(self) -> list[tuple[Path, torch.Size, torch.dtype, np.ndarray[Any, Any] | None, Any]]:
        """Path, shape, dtype and rows (array or tensors) of each column; most blocks only need `_batched` instead."""
        block, targets = self._block, []
        for path, field in self._fields.items():
            if not field.is_list:
                array = block.row_arrays(path)
                rows = block.rows(path) if array is None else ()
                shape = torch.Size((*block.batch_size[:-1], *field.shape))
                targets.append((path, shape, field.dtype, array, rows))
        return targets

    @cached_property
    def _lists(self) -> list[tuple[Path, Any]]:
        """Path and rows of each list."""
        return [(path, self._block.rows(path)) for path, field in self._fields.items() if field.is_list]

    def write(self, t: int, values: Mapping[Path, Any]) -> None:
        """Write `values` into row t.

        Raises:
            PolicyError: if an output is missing, or its shape or dtype doesn't fit. Other columns of the row may have
                been written then.
        """
        if self._batched is not None and self._batched.write(t, values) is not None:
            return
        for path, shape, dtype, array, rows in self._targets:
            value = values.get(path)
            if not isinstance(value, torch.Tensor):
                found = "nothing" if value is None else type(value).__name__
                raise PolicyError(f"policy: expected a tensor under {as_key(path)!r}, got {found}")
            if value.shape != shape or value.dtype is not dtype:
                if path not in self._actions:
                    raise misfit(path, value, shape, dtype)
                value = self.conversions.fit(path, value, shape, dtype, t)
            if array is None:
                rows[t].copy_(value)
            elif value.requires_grad or not value.is_cpu or value.is_neg() or value.is_conj():
                array[t] = value.numpy(force=True)
            else:
                array[t] = value.numpy()
        for path, rows in self._lists:
            rows[t].copy_(_list_output(path, values.get(path)))


def _list_output(path: Path, value: Any) -> Leaf:
    leaf = as_leaf(value)
    if not isinstance(leaf, (torch.Tensor, ObjectColumn)):
        raise PolicyError(
            f"policy: expected non-tensor data under {as_key(path)!r}, got {type(value).__name__}"
        )
    return leaf


def with_shape(value: torch.Tensor, shape: torch.Size, dims: int) -> torch.Tensor | None:
    """Return `value` in `shape`, if it differs at most by a trailing dimension of size one; otherwise None.

    Args:
        value: a tensor.
        shape: the shape, batch dimensions first.
        dims: the number of batch dimensions.
    """
    if value.shape == shape:
        return value
    if value.shape == (*shape, 1):
        return value.squeeze(-1)
    if len(shape) > dims and shape == (*value.shape, 1):
        return value.unsqueeze(-1)
    return None


def first_change(original: torch.Tensor, converted: torch.Tensor) -> int | None:
    """Return the flat index of the first value that a conversion changed; None if it changed none."""
    # Converting back reveals all changes except of integers that wrapped around; these changed their sign.
    unchanged = (converted.to(original.dtype) == original) & ((converted < 0) == (original < 0))
    if original.is_floating_point() and converted.is_floating_point():
        unchanged |= original.isnan() & converted.isnan()
    changed = ~unchanged.flatten()
    return int(changed.int().argmax()) if bool(changed.any()) else None


def misfit(path: Path, value: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> PolicyError:
    """Return the error for an output whose shape or dtype doesn't fit."""
    return PolicyError(
        f"policy: {as_key(path)!r} expected shape {tuple(shape)} {dtype}, got {tuple(value.shape)} "
        f"{value.dtype}; nothing is broadcast, and only actions are cast: "
        f"{advice(value.shape, value.dtype, shape, dtype)}"
    )


def advice(found: Sequence[int], found_dtype: torch.dtype, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return advice for a user whose action doesn't have the declared form.

    Args:
        found: the action's shape.
        found_dtype: its dtype.
        shape: the declared shape.
        dtype: the declared dtype.
    """
    if found_dtype.is_floating_point and not dtype.is_floating_point:
        return (
            "the action is a choice, and these may be scores or logits; return their argmax (and make the "
            "environment with categorical_action_encoding=True), or the one-hot vector of it"
        )
    found, shape = tuple(found), tuple(shape)
    if not dtype.is_floating_point and shape and found in (shape[:-1], (*shape[:-1], 1)):
        return (
            "if the action is the index of a choice, make the environment with categorical_action_encoding=True, or "
            "return the one-hot vector of it (torch.nn.functional.one_hot); if there are several environments, return "
            "an action for each"
        )
    if not dtype.is_floating_point and found and shape in (found[:-1], (*found[:-1], 1)):
        return "if the action is a one-hot vector, return its argmax; else make it match the action spec"
    return "make the policy's output match the action spec"
