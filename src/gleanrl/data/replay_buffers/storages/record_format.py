"""What every record format does: it reads records into leaves in a fixed order, and puts leaves together again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gleanrl.data.boundaries import MASK
from gleanrl.errors import SchemaError, UnsupportedError
from gleanrl.objects import Leaf, Objects
from gleanrl.schema import Schema, has_memory
from gleanrl.tree import NestedKey, Path, as_key

Builder = Callable[[Sequence[torch.Tensor], torch.Size, torch.device], Any]


class RecordFormat(ABC):
    """The frozen structure of records, with the shape and dtype of each leaf.

    Args:
        schema: the leaves; a field's shape starts with `item_shape`.
        item_shape: batch dimensions that belong to the record itself, ``()`` for most data.
    """

    def __init__(self, schema: Schema, item_shape: torch.Size) -> None:
        self.schema = schema
        self.item_shape = item_shape
        self.mask = _mask_of(schema)
        """The position of the leaf that tells steps from other rows, None if there is none."""

    @abstractmethod
    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[Leaf]]:
        """Return the first `dims` batch dimensions of `data`, and its leaves in the schema's order.

        Shapes and dtypes of the leaves are for `check` to look at.

        Raises:
            SchemaError: another structure, or fewer than `dims` batch dimensions.
            InvalidTypeError: another kind of data.
        """

    @abstractmethod
    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return records ``[*lead]`` around `leaves`; nothing is copied or checked."""

    def builder(self) -> Builder:
        """Return what does as `build` does, by the shortest way, for whoever builds again and again."""
        return self.build

    def same_as(self, other: RecordFormat) -> bool:
        """Return whether records of the one format are records of the other."""
        return type(self) is type(other) and self.schema == other.schema

    @abstractmethod
    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return what `format_from_state` needs to rebuild the format.

        Args:
            by_name: whether tensorclasses are named, so that all values are plain; otherwise they are the
                classes themselves, for pickles.
        """

    def wider(self, data: Any, dims: int, where: str) -> RecordFormat | None:
        """Return the format of records that have the further keys of `data` as well; None without such keys."""
        return None

    def select(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the leaves that `keys` name, in their order; the key of a group stands for all below it.

        Raises:
            MissingKeyError: a key without a leaf.
            UnsupportedError: the records have no keys.
        """
        raise UnsupportedError("keys: only records that are TensorDicts can be fetched in part")

    def narrow(self, paths: tuple[Path, ...]) -> RecordFormat:
        """Return the format of the records with these leaves only."""
        raise UnsupportedError("keys: only records that are TensorDicts can be fetched in part")


def check_storable(leaf: Leaf, path: Path, where: str) -> None:
    """Raise `SchemaError` unless `leaf` is a list, or dense, with data in memory, and one number to an element."""
    if isinstance(leaf, Objects):
        return
    if leaf.is_meta:
        found, advice = "a meta tensor, which holds no data", "make it on a real device"
    elif leaf.is_nested:
        found, advice = "a nested tensor, whose rows differ in shape", "pad the rows to one shape"
    elif leaf.layout is not torch.strided:
        found = f"a {str(leaf.layout).removeprefix('torch.')} tensor"
        advice = "write leaf.to_dense()"
    elif leaf.is_quantized:
        found, advice = f"a quantized {leaf.dtype} tensor", "write leaf.dequantize() or leaf.int_repr()"
    elif not has_memory(leaf):
        found = "a tensor without memory, which holds no data"
        advice = "write one whose memory wasn't given back, outside of tracing and torch.func"
    else:
        return
    raise SchemaError(
        f"{where}: key {as_key(path)!r} expected a dense tensor, got {found}; {advice}, or use ListStorage, which "
        "keeps any object"
    )


def in_memory(leaf: torch.Tensor) -> torch.Tensor:
    """Return `leaf`; RuntimeError if its elements can't be read: storages look for the key then."""
    if not has_memory(leaf):
        raise RuntimeError("a tensor without memory")
    return leaf


def leading(shape: torch.Size, dims: int, what: str, where: str) -> torch.Size:
    """Return the first `dims` of `shape`; `SchemaError` if there are fewer."""
    if len(shape) < dims:
        raise SchemaError(
            f"{where}: expected at least {dims} {what}, got {tuple(shape)}; `extend` takes many records, "
            "`add` takes one"
        )
    return shape[:dims]


def plain_format(kind: str, form: RecordFormat) -> dict[str, Any]:
    """Return what every format's `state` holds."""
    return {
        "kind": kind,
        "paths": [list(path) for path in form.schema.paths],
        "shapes": [list(field.shape) for field in form.schema.fields],
        "dtypes": [field.dtype for field in form.schema.fields],
        "item_shape": list(form.item_shape),
    }


def _mask_of(schema: Schema) -> int | None:
    if MASK not in schema or schema[MASK].dtype != torch.bool or schema[MASK].shape.numel() != 1:
        return None
    return schema.index(MASK)
