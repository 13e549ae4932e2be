"""Base class of record formats: it reads records into leaves in a fixed order, and builds records from leaves.

Also finds the tensorclasses in records, and restores them in fetched records.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensorclass

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Schema, has_memory
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, groups_of, level_of
from gleanrl.data.trajectories import MASK
from gleanrl.errors import InvalidTypeError, SchemaError, UnsupportedError

Builder = Callable[[Sequence[torch.Tensor], torch.Size, torch.device], Any]


class RecordFormat(ABC):
    """The frozen structure of records, with the shape and dtype of each leaf.

    Args:
        schema: the leaves; each field's shape begins with `item_shape`.
        item_shape: batch dimensions inside the record itself, ``()`` for most data.
    """

    def __init__(self, schema: Schema, item_shape: torch.Size) -> None:
        self.schema = schema
        self.item_shape = item_shape
        self.mask = _mask_of(schema)
        """The position of the leaf that marks rows as steps or padding; None if there is none."""

    @abstractmethod
    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[Leaf]]:
        """Return the first `dims` batch dimensions of `data`, and its leaves in the schema's order.

        It doesn't check shapes and dtypes of the leaves; that is done by `Schema.check`.

        Raises:
            SchemaError: the structure differs, or there are fewer than `dims` batch dimensions.
            InvalidTypeError: the type of the data differs.
        """

    @abstractmethod
    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return records ``[*lead]`` around `leaves`. Nothing is copied or checked."""

    def builder(self) -> Builder:
        """Return the fastest function that does the same as `build`, for repeated use."""
        return self.build

    def same_as(self, other: RecordFormat) -> bool:
        """Return whether records of one format are also records of the other."""
        return type(self) is type(other) and self.schema == other.schema

    @abstractmethod
    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return the values from which `format_from_state` rebuilds the format.

        Args:
            by_name: whether tensorclasses are named, so that all values are plain; False puts the classes themselves
                into the result, for pickles.
        """

    def wider(self, data: Any, dims: int, where: str) -> RecordFormat | None:
        """Return the format of records that also have the new keys of `data`; None if there are none, or can't be."""
        return None

    def select(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the leaves that `keys` name, in their order. The key of a nested TensorDict names all leaves below it.

        Raises:
            InvalidArgumentError: there is no key.
            MissingKeyError: a key names no leaf.
            UnsupportedError: the records have no keys.
        """
        raise UnsupportedError("keys: only records that are TensorDicts can be fetched in part")

    def narrow(self, paths: tuple[Path, ...]) -> RecordFormat:
        """Return the format of records that have only these leaves; raise `UnsupportedError` if there are no keys."""
        raise UnsupportedError("keys: only records that are TensorDicts can be fetched in part")


def check_storable(leaf: Leaf, path: Path, where: str) -> None:
    """Raise `SchemaError` unless columns can hold `leaf`.

    A list passes. A tensor must be dense, have its data in memory, and have one number for each element.
    """
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
    """Return `leaf`; raise `RuntimeError` if its elements can't be read.

    Storages catch the error and look for the key of the leaf then, so that the common case stays fast.
    """
    if not has_memory(leaf):
        raise RuntimeError("a tensor without memory")
    return leaf


def leading(shape: torch.Size, dims: int, kind: str, where: str) -> torch.Size:
    """Return the first `dims` sizes of `shape`; raise `SchemaError` if it has fewer."""
    if len(shape) < dims:
        raise SchemaError(
            f"{where}: expected at least {dims} {kind}, got {tuple(shape)}; `extend` takes many records, "
            "`add` takes one"
        )
    return shape[:dims]


def plain_format(kind: str, form: RecordFormat) -> dict[str, Any]:
    """Return the part of `state` that all formats share."""
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


def classes_of(data: Any, where: str) -> dict[Path, type[Any]]:
    """Return the tensorclasses in `data` by path, the deepest first. The path of `data` itself is empty.

    Args:
        data: a TensorDict or tensorclass.
        where: the call, for the error message.

    Raises:
        InvalidTypeError: the parts of a lazy stack differ in their classes.
    """
    return common_classes([data], where)


def common_classes(records: Sequence[Any], where: str, path: Path = ()) -> dict[Path, type[Any]]:
    """Return the tensorclasses that all records consist of (see `classes_of`).

    It goes by level through all records at once, since a walk through each record takes longer than stacking them.

    Raises:
        InvalidTypeError: the records differ in their classes. A column would give each the class of the first one.
    """
    parts = [part for record in records for part in _parts(record)]
    found: dict[Path, type[Any]] = {}
    for key in groups_of(parts[0]) if parts else ():
        groups = (level.get(key) for level in map(level_of, parts))
        found |= common_classes([group for group in groups if group is not None], where, (*path, key))
    kinds = list(map(type, parts))
    classes = {kind: is_tensorclass(kind) for kind in set(kinds)}
    if any(classes.values()):
        for position, kind in enumerate(kinds):
            if kind is not kinds[0] and (classes[kind] or classes[kinds[0]]):
                names = [[each.__name__] if classes[each] else [] for each in (kinds[0], kind)]
                raise InvalidTypeError(
                    f"{where}: expected records of the same tensorclasses, record 0 has {names[0]}, record {position} "
                    f"has {names[1]}; store them in a ListStorage"
                )
        found[path] = kinds[0]
    return found


def _parts(record: Any) -> Iterator[Any]:
    """Yield the parts of a lazy stack, and of lazy stacks in it; any other record is its only part."""
    if isinstance(record, LazyStackedTensorDict):
        for part in record.tensordicts:
            yield from _parts(part)
    else:
        yield record


def wrap(record: TensorDict, classes: Mapping[Path, type[Any]]) -> Any:
    """Return `record` with its groups as the tensorclasses in `classes`. Fields without a column are None.

    Args:
        record: a TensorDict that only the caller holds; it is changed.
        classes: the result of `classes_of`.
    """
    wrapped: Any = record
    for path, kind in classes.items():
        if not path:
            wrapped = kind.from_tensordict(record)
        else:
            parent = record if len(path) == 1 else record.get(path[:-1])
            parent.set(path[-1], kind.from_tensordict(parent.get(path[-1])))
    return wrapped


def classes_below(paths: Sequence[Path], classes: Mapping[Path, type[Any]]) -> dict[Path, type[Any]]:
    """Return the part of `classes` whose groups hold one of the leaves `paths`."""
    return {
        group: kind for group, kind in classes.items() if any(path[: len(group)] == group for path in paths)
    }


def to_names(classes: Mapping[Path, type[Any]]) -> list[tuple[list[str], str]]:
    """Return `classes` as plain values: for each path a name ``"module:Class"``."""
    return [(list(path), _name_of(kind)) for path, kind in classes.items()]


def from_names(
    named: Sequence[tuple[Sequence[str], str | type[Any]]], known: Iterable[type[Any]] = ()
) -> dict[Path, type[Any]]:
    """Return the classes by path, from the result of `to_names` or from the classes themselves.

    It searches only modules that the program has imported, and the `known` classes. No name leads to a class that was
    made inside a function. Its records become TensorDicts, with a warning.

    Raises:
        SchemaError: the module of a class isn't imported, or doesn't contain the class.
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
    # `vars` finds only existing names. `getattr` could make a module import more code.
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not (isinstance(found, type) and is_tensorclass(found)):
        raise SchemaError(
            f"load_state_dict: the records are of the tensorclass {name!r}, which isn't known here: import its "
            "module first"
        )
    return found
