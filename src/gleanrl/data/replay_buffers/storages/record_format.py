"""What every record format does: it reads records into leaves in a fixed order, and puts leaves together again.

Tensorclasses in columns: which groups of a record are tensorclasses, and how they become such again.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Schema, has_memory
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key
from gleanrl.data.trajectories import MASK
from gleanrl.errors import SchemaError, UnsupportedError

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
    if isinstance(leaf, ObjectColumn):
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


def classes_of(data: Any, path: Path = ()) -> dict[Path, type[Any]]:
    """Return the tensorclasses in `data` by their paths, the deepest first; the root's path is empty.

    Args:
        data: a TensorDict or tensorclass.
        path: where it stands.
    """
    if isinstance(data, LazyStackedTensorDict):
        return classes_of(data.tensordicts[0], path)  # of the others the stack shows the same
    found: dict[Path, type[Any]] = {}
    for key in data.keys():
        below = data.get(key)
        if is_tensor_collection(below) and not is_non_tensor(below):
            found.update(classes_of(below, (*path, key)))
    if is_tensorclass(data):
        found[path] = type(data)
    return found


def wrap(record: TensorDict, classes: Mapping[Path, type[Any]]) -> Any:
    """Return `record` with its groups as the tensorclasses they were; fields without a column are None.

    Args:
        record: a TensorDict that nobody else holds; it is changed.
        classes: what `classes_of` returned.
    """
    whole: Any = record
    for path, kind in classes.items():
        if not path:
            whole = kind.from_tensordict(record)
        else:
            parent = record if len(path) == 1 else record.get(path[:-1])
            parent.set(path[-1], kind.from_tensordict(parent.get(path[-1])))
    return whole


def classes_below(paths: Sequence[Path], classes: Mapping[Path, type[Any]]) -> dict[Path, type[Any]]:
    """Return those of `classes` that hold one of the leaves `paths`."""
    return {
        group: kind for group, kind in classes.items() if any(path[: len(group)] == group for path in paths)
    }


def to_names(classes: Mapping[Path, type[Any]]) -> list[tuple[list[str], str]]:
    """Return `classes` as plain values, ``"module:Class"`` for each path."""
    return [(list(path), _name_of(kind)) for path, kind in classes.items()]


def from_names(
    named: Sequence[tuple[Sequence[str], str | type[Any]]], known: Iterable[type[Any]] = ()
) -> dict[Path, type[Any]]:
    """Return the classes that `to_names` described, or that stand there themselves.

    Looks only at modules that the program has imported, and at `known` classes. Records of a class that was made
    within a function, which no name leads to, are TensorDicts, with a warning.

    Raises:
        SchemaError: a class of a module that isn't imported, or hasn't got it.
    """
    own = {_name_of(kind): kind for kind in known}
    found = {tuple(path): name if isinstance(name, type) else _class_named(name, own) for path, name in named}
    return {path: kind for path, kind in found.items() if kind is not None}


def _name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_named(name: str, known: Mapping[str, type[Any]]) -> type[Any] | None:
    if name in known:
        return known[name]
    if "<locals>" in name:
        warnings.warn(
            f"load_state_dict: the records are of the tensorclass {name!r}, which was made within a function and can't "
            "be found by its name; they are loaded as TensorDicts",
            stacklevel=2,
        )
        return None
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split(
        "."
    ):  # what is there already: modules import some of their names when asked for them
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not (isinstance(found, type) and is_tensorclass(found)):
        raise SchemaError(
            f"load_state_dict: the records are of the tensorclass {name!r}, which isn't known here: import its "
            "module first"
        )
    return found
