"""Schemas: the shapes and dtypes of a batch's columns, and the allocation of these columns.

A `Schema` gives the path, shape and dtype of each leaf of a record. A leaf without a fixed shape or a dtype is a
*list*: its column is an array of objects (see `gleanrl._arrays.ragged`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import starmap
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool, lasting
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.results import laid_out
from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    as_key,
    empty_groups,
    group_sizes,
    iter_leaves,
)
from gleanrl.errors import SchemaError

_REMEMBERED = 64
"""Number of recent batch sizes for which a schema caches column shapes."""


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype for `dtype`; if NumPy has none (bfloat16), an unsigned integer of the same size."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


@cache
def numpy_twin(dtype: torch.dtype) -> torch.dtype:
    """Return the torch dtype of `numpy_dtype(dtype)`, which is `dtype` itself unless NumPy lacks it."""
    return torch.from_numpy(np.empty(0, numpy_dtype(dtype))).dtype


def numpy_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array over the memory of a CPU tensor, in the dtype `numpy_dtype`."""
    twin = numpy_twin(tensor.dtype)
    return tensor.numpy() if tensor.dtype is twin else tensor.view(twin).numpy()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` can be read; True if it has none.

    Wrappers of torch.func, fake tensors and freed tensors have no memory.
    """
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:
        return False


@dataclass(frozen=True)
class Field:
    """One leaf of a record: its shape without batch dimensions, and its dtype.

    A leaf that a tensor column can't hold is a list. There are two kinds. If sizes differ between records, they are -1
    in the shape, and each record's tensor is one object. If the dtype is None, the leaf holds arbitrary objects, as
    many as the shape has elements.
    """

    shape: torch.Size
    dtype: Any
    """A torch.dtype, or None for arbitrary objects."""

    @classmethod
    def of(cls, leaf: Leaf, dims: int) -> Field:
        """Return the field of a leaf of a batch with `dims` batch dimensions."""
        if isinstance(leaf, ObjectColumn) and leaf.blank is not None:
            return cls(leaf.field_shape, leaf.blank.dtype)
        return cls(leaf.shape[dims:], leaf.dtype)

    @property
    def is_list(self) -> bool:
        """Whether the column is an array of objects."""
        return self.dtype is None or -1 in self.shape

    @property
    def blank(self) -> torch.Tensor | None:
        """The value of empty positions in a list: an empty tensor, or None; see `ObjectColumn`."""
        if self.dtype is None:
            return None
        return torch.empty([0 if size == -1 else size for size in self.shape], dtype=self.dtype, device="cpu")

    @property
    def row_shape(self) -> torch.Size:
        """The shape of one row of the column."""
        return torch.Size() if -1 in self.shape else self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one record's leaf. For a list only the references count."""
        return prod(self.row_shape) * (8 if self.is_list else self.dtype.itemsize)

    def fits(self, value: Any) -> bool:
        """Return whether `value` is a tensor of this dtype and of a shape that `allows` accepts."""
        return isinstance(value, torch.Tensor) and value.dtype is self.dtype and self.allows(value.shape)

    def allows(self, shape: Sequence[int]) -> bool:
        """Return whether a shape equals this one, where -1 in this shape accepts any size."""
        return len(shape) == len(self.shape) and all(
            size in (-1, actual) for size, actual in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        """Return a text such as ``(84, 84, 4) uint8``."""
        kind = "objects" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{tuple(self.shape)} {kind}"


class Schema:
    """The leaves of a record: paths in a fixed order, each with a shape and a dtype. Immutable.

    Args:
        fields: a `Field` for each path, in the order of the columns and of built TensorDicts.
        groups: batch sizes of nested TensorDicts in addition to the batch's own dimensions (see `TensorDictBuilder`).
            Equality of schemas ignores them.
        empty: nested TensorDicts that hold nothing. Equality of schemas ignores them too.
    """

    def __init__(
        self,
        fields: Mapping[Path, Field],
        groups: Mapping[Path, Sequence[int]] | None = None,
        empty: Iterable[Path] = (),
    ) -> None:
        self.lists: tuple[Path, ...] = tuple(path for path, field in fields.items() if field.is_list)
        """The paths of the leaves that are lists."""
        self.layout = TensorDictBuilder(fields, groups, self.lists, empty)
        self.fields: tuple[Field, ...] = tuple(fields.values())
        self._positions = {path: position for position, path in enumerate(self.layout.paths)}
        self._shapes: dict[torch.Size, list[tuple[torch.Size, torch.dtype | None]]] = {}
        self._forms: dict[torch.Size, tuple[list[tuple[tuple[int, ...], np.dtype[Any]]], int]] = {}

    @classmethod
    def of(cls, batch: TensorDictBase, exclude: Iterable[Path] = ()) -> Schema:
        """Return the schema of the records in `batch`. The batch dimensions aren't part of a record."""
        drop = set(exclude)
        dims = len(batch.batch_size)
        return cls(
            {path: Field.of(leaf, dims) for path, leaf in iter_leaves(batch) if path not in drop},
            group_sizes(batch, dims),
            empty_groups(batch),
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the leaves, in order."""
        return self.layout.paths

    @property
    def groups(self) -> Mapping[Path, tuple[int, ...]]:
        """The dimensions that nested TensorDicts have in addition to the batch dimensions, by path."""
        return self.layout.groups

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one record."""
        return sum(field.row_bytes for field in self.fields)

    def __contains__(self, path: object) -> bool:
        """Return whether `path` is a leaf of this schema."""
        return path in self._positions

    def __getitem__(self, path: Path) -> Field:
        """Return the field at `path`; `KeyError` if there is none."""
        return self.fields[self._positions[path]]

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        """Return whether both schemas have the same fields at the same paths, in any order."""
        return isinstance(other, Schema) and self.items() == other.items()

    def __hash__(self) -> int:
        """Return a hash that is consistent with `__eq__`."""
        return hash(frozenset(self.items().items()))

    def __repr__(self) -> str:
        """Return a text that shows each leaf."""
        return "Schema(" + ", ".join(f"{as_key(p)!r}: {f}" for p, f in self.items().items()) + ")"

    def on_lines(self) -> str:
        """Return the repr with each leaf on its own line."""
        return laid_out("Schema", (f"{as_key(path)!r}: {field}" for path, field in self.items().items()))

    def items(self) -> dict[Path, Field]:
        """Return the fields by path, in order."""
        return dict(zip(self.paths, self.fields, strict=True))

    def index(self, path: Path) -> int:
        """Return the position of `path` among the leaves; `KeyError` if there is none."""
        return self._positions[path]

    def as_lists(self, leaves: list[Leaf], lead: torch.Size, where: str) -> list[Leaf]:
        """Convert the leaves of lists to `ObjectColumn` ``[*lead, *row]`` in place, and return `leaves`.

        A tensor that holds the rows of a list is split into rows, which are copied. An error may leave some leaves
        converted.

        Raises:
            SchemaError: a tensor of a list has another dtype, or a shape that its field doesn't allow.
        """
        for path in self.lists:
            position, field = self._positions[path], self[path]
            leaf = leaves[position]
            if field.dtype is not None:
                if isinstance(leaf, torch.Tensor):
                    leaf = leaves[position] = ObjectColumn.rows_of(leaf, lead)
                for item in leaf.array.flat:
                    if not field.fits(item):
                        actual = (
                            Field(item.shape, item.dtype) if isinstance(item, torch.Tensor) else type(item)
                        )
                        raise SchemaError(f"{where}: key {as_key(path)!r} expected {field}, got {actual}")
        return leaves

    def check(self, leaves: Sequence[Leaf], lead: torch.Size, where: str) -> None:
        """Raise unless every leaf is ``[*lead, *field]`` and has the field's dtype.

        Args:
            leaves: the leaves, in the order of the schema.
            lead: the dimensions before each record's shape.
            where: the call that the error message names, for example ``"extend"``.

        Raises:
            SchemaError: a leaf differs. The message names the key, the expected and the actual shape and dtype. Nothing
                is broadcast or cast.
        """
        expected = self._shapes.get(lead) or self._expected(lead)
        for leaf, (shape, dtype) in zip(leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                self._raise_mismatch(leaves, expected, where)

    def _expected(self, lead: torch.Size) -> list[tuple[torch.Size, torch.dtype | None]]:
        if len(self._shapes) >= _REMEMBERED:
            self._shapes.clear()
        found = [
            (torch.Size((*lead, *field.row_shape)), None if field.is_list else field.dtype)
            for field in self.fields
        ]
        self._shapes[lead] = found
        return found

    @lasting
    def new_columns(
        self, lead: torch.Size, device: torch.device | None = None, pool: BufferPool | None = None
    ) -> list[Leaf]:
        """Return memory for records ``[*lead]``, one column for each leaf; see `new_column`."""
        if device is None or device.type == "cpu":
            forms, most = self._forms.get(lead) or self._formed(lead)
            # This runs for each batch: cached forms halve the time of calling `new_column` for each field.
            if forms and (pool is None or most < pool.min_bytes):
                return list(map(torch.from_numpy, starmap(np.empty, forms)))
        return [new_column(lead, field, device, pool) for field in self.fields]

    def _formed(self, lead: torch.Size) -> tuple[list[tuple[tuple[int, ...], np.dtype[Any]]], int]:
        """Return the shapes and NumPy dtypes of columns ``[*lead]``, and the bytes of the largest column.

        The list is empty if NumPy lacks the dtype of a column, or if a column is a list.
        """
        if len(self._forms) >= _REMEMBERED:
            self._forms.clear()
        known = all(not field.is_list and numpy_twin(field.dtype) is field.dtype for field in self.fields)
        forms = [((*lead, *field.shape), numpy_dtype(field.dtype)) for field in self.fields] if known else []
        most = max((prod(shape) * kind.itemsize for shape, kind in forms), default=0)
        self._forms[lead] = forms, most
        return forms, most

    def _raise_mismatch(
        self, leaves: Sequence[Leaf], expected: Sequence[tuple[torch.Size, torch.dtype | None]], where: str
    ) -> None:
        for path, leaf, (shape, dtype) in zip(self.paths, leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                unlike = isinstance(leaf, ObjectColumn) and leaf.blank is not None
                actual = Field.of(leaf, len(leaf.shape) if unlike else 0)
                kind = "of objects" if isinstance(leaf, ObjectColumn) else leaf.dtype
                raise SchemaError(
                    f"{where}: key {as_key(path)!r} expected shape {tuple(shape)} {dtype or 'of objects'}, got "
                    f"{f'tensors of different shapes {actual}' if unlike else f'{tuple(leaf.shape)} {kind}'}; the "
                    "first write fixed the schema and nothing is cast or broadcast: convert the data first"
                    + (", or use LazyStackStorage" if isinstance(leaf, ObjectColumn) else "")
                )


def new_column(
    lead: Sequence[int], field: Field, device: torch.device | None = None, pool: BufferPool | None = None
) -> Leaf:
    """Return memory for one leaf of records ``[*lead]``: an uninitialised tensor, or a column of blanks.

    See `allocate` for the arguments.
    """
    if field.is_list:
        return ObjectColumn.blanks((*lead, *field.row_shape), field.blank)
    return allocate((*lead, *field.shape), field.dtype, device, pool)


@lasting
def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
    pool: BufferPool | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor; on the CPU its memory comes from `pool`, or from NumPy if `pool` is None.

    NumPy requests huge pages for large arrays. Page faults in fresh memory then take a third of the time that they take
    after `torch.empty`. The tensor can be written inside and outside of `torch.inference_mode`.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    kind = numpy_dtype(dtype)
    array = np.empty(tuple(shape), kind) if pool is None else pool.empty(tuple(shape), kind)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
