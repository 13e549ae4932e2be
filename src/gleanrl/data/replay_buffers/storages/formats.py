"""Record formats: how records look to the user, and how their leaves are read and put together.

A format is found in the first data that is written and frozen from then on. It knows the leaves' shapes and
dtypes (a `Schema`) and checks later data against them; the storage sees nothing but lists of leaves in a
fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils import _pytree

from gleanrl.block import Field, Schema
from gleanrl.data.boundaries import MASK
from gleanrl.data.replay_buffers.storages.tensorclasses import (
    classes_below,
    classes_of,
    from_names,
    to_names,
    wrap,
)
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.tree import NestedKey, Path, as_key, check_uniform, iter_leaves, key_argument

# What samples carry beside the records. A sample that is written again must not store it as data.
ADDED_KEYS = ("index", "_weight", "priority_weight", "_generation")

_PLANS = 64  # batch sizes whose expected shapes are remembered


class RecordFormat(ABC):
    """The frozen structure of records, with the shape and dtype of each leaf.

    Args:
        schema: the leaves; a field's shape starts with `item_shape`.
        item_shape: batch dimensions that belong to the record itself, ``()`` for most data.
    """

    def __init__(self, schema: Schema, item_shape: torch.Size) -> None:
        self.schema = schema
        self.item_shape = item_shape
        self._shapes: dict[torch.Size, list[tuple[torch.Size, torch.dtype]]] = {}
        self.mask = _mask_of(schema)
        """The position of the leaf that tells steps from other rows, None if there is none."""
        self._narrowed: dict[tuple[Path, ...], RecordFormat] = {}

    @abstractmethod
    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[torch.Tensor]]:
        """Return the first `dims` batch dimensions of `data`, and its leaves in the schema's order.

        Shapes and dtypes of the leaves are for `check` to look at.

        Raises:
            SchemaError: another structure, or fewer than `dims` batch dimensions.
            InvalidTypeError: another kind of data.
        """

    @abstractmethod
    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return records ``[*lead]`` around `leaves`; nothing is copied or checked."""

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

    def check(self, leaves: Sequence[torch.Tensor], lead: torch.Size, where: str) -> None:
        """Raise `SchemaError` unless every leaf is ``[*lead, *field]`` and of the field's dtype."""
        expected = self._shapes.get(lead) or self._expect(lead)
        for leaf, (shape, dtype) in zip(leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                self._raise_mismatch(leaves, expected, where)

    def _expect(self, lead: torch.Size) -> list[tuple[torch.Size, torch.dtype]]:
        if len(self._shapes) >= _PLANS:
            self._shapes.clear()
        found = [(torch.Size((*lead, *field.shape)), field.dtype) for field in self.schema.fields]
        self._shapes[lead] = found
        return found

    def _raise_mismatch(
        self, leaves: Sequence[torch.Tensor], expected: Sequence[tuple[torch.Size, torch.dtype]], where: str
    ) -> None:
        for path, leaf, (shape, dtype) in zip(self.schema.paths, leaves, expected, strict=True):
            if leaf.shape != shape or leaf.dtype is not dtype:
                raise SchemaError(
                    f"{where}: key {as_key(path)!r} expected shape {tuple(shape)} {dtype}, got "
                    f"{tuple(leaf.shape)} {leaf.dtype}; the first write fixed the schema and nothing is cast "
                    "or broadcast: convert the data before it comes here"
                )


class TensorDictFormat(RecordFormat):
    """Records that are TensorDicts or tensorclasses of tensors, nested ones included.

    Args:
        schema: see `RecordFormat`.
        item_shape: see `RecordFormat`.
        classes: the groups that are tensorclasses, by path (see `classes_of`).
    """

    def __init__(
        self, schema: Schema, item_shape: torch.Size, classes: Mapping[Path, type[Any]] | None = None
    ) -> None:
        super().__init__(schema, item_shape)
        self.classes = dict(classes or {})

    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[torch.Tensor]]:
        """Read `data`; keys that samples carry beside the records (`ADDED_KEYS`) are left out."""
        if not isinstance(data, TensorDictBase) or self.classes:
            self._check_classes(data, where)
        if type(data) is not TensorDict:
            check_uniform(data, where)
        lead = _lead(data.batch_size, dims, "batch dimensions", where)
        try:
            return lead, self.schema.layout.read(data, where)
        except SchemaError:
            known = without_added_keys(data)
            if known is data:
                raise
            return lead, self.schema.layout.read(known, where)

    def _check_classes(self, data: Any, where: str) -> None:
        """Raise `InvalidTypeError` unless `data` is made of the very tensorclasses that the records are."""
        found: dict[Path, type[Any]] = classes_of(data) if is_tensor_collection(data) else {(): type(data)}
        for path in {**self.classes, **found}:
            expected, got = (kinds.get(path, TensorDictBase) for kinds in (self.classes, found))
            if expected is not got:
                kind = "TensorDict" if expected is TensorDictBase else f"tensorclass {expected.__name__}"
                other = "TensorDict" if got is TensorDictBase else got.__name__
                place = f" at {as_key(path)!r}" if path else "s"
                raise InvalidTypeError(
                    f"{where}: the first write fixed the records as a {kind}{place}, got a {other}"
                )

    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return a TensorDict, or the tensorclass, of batch size ``[*lead, *item_shape]``."""
        size = lead + self.item_shape if self.item_shape else lead
        record = self.schema.layout.build(leaves, size, device)
        return wrap(record, self.classes) if self.classes else record

    def select(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the leaves that `keys` name (see `RecordFormat.select`)."""
        chosen: dict[Path, None] = {}
        for path in (key_argument("keys", key) for key in keys):
            found = [leaf for leaf in self.schema.paths if leaf[: len(path)] == path]
            if not found:
                raise MissingKeyError(
                    f"keys: {as_key(path)!r} isn't stored; there are {[as_key(p) for p in self.schema.paths]}"
                )
            chosen.update(dict.fromkeys(found))
        if not chosen:
            raise InvalidArgumentError("keys: expected at least one key, got none; None stands for all")
        return tuple(chosen)

    def narrow(self, paths: tuple[Path, ...]) -> RecordFormat:
        """Return the format of the records with these leaves only; made once for each choice."""
        found = self._narrowed.get(paths)
        if found is None:
            schema = Schema({path: self.schema[path] for path in paths}, self.schema.groups)
            found = TensorDictFormat(schema, self.item_shape, classes_below(paths, self.classes))
            self._narrowed[paths] = found
        return found

    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return the format as plain values; see `RecordFormat.state`."""
        classes = to_names(self.classes) if by_name else list(self.classes.items())
        groups = [[list(path), list(size)] for path, size in self.schema.groups.items()]
        return {**_state("tensordict", self), "classes": classes, "groups": groups}

    def same_as(self, other: RecordFormat) -> bool:
        """Return whether the schemas and the tensorclasses are the same."""
        return super().same_as(other) and self.classes == getattr(other, "classes", None)


class TreeFormat(RecordFormat):
    """Records that are one tensor, or dictionaries, lists and tuples of tensors.

    Args:
        schema: the leaves, named by their place in the tree.
        spec: the tree's structure.
    """

    def __init__(self, schema: Schema, spec: _pytree.TreeSpec) -> None:
        super().__init__(schema, torch.Size(()))
        self.spec = spec

    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[torch.Tensor]]:
        """Read `data`; the first leaf says what the batch dimensions are."""
        leaves, spec = _pytree.tree_flatten(data, is_leaf=is_tensor_collection)
        if spec != self.spec or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            expected = [as_key(path) for path in self.schema.paths]
            raise SchemaError(
                f"{where}: the first write fixed the structure as {_describe(self.spec)} with tensors at "
                f"{expected}, got {_describe(spec)} of {sorted({type(leaf).__name__ for leaf in leaves})}"
            )
        return _lead(leaves[0].shape, dims, "dimensions", where), leaves

    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return the tree around `leaves`."""
        return _pytree.tree_unflatten(list(leaves), self.spec)

    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return the format as plain values; the structure as a tree with the leaves' numbers in it."""
        numbered = _pytree.tree_unflatten(range(self.spec.num_leaves), self.spec)
        return {**_state("tree", self), "tree": numbered}


def _mask_of(schema: Schema) -> int | None:
    if MASK not in schema or schema[MASK].dtype != torch.bool or schema[MASK].shape.numel() != 1:
        return None
    return schema.index(MASK)


def find_format(data: Any, dims: int, where: str) -> RecordFormat:
    """Return the format of `data`; its first `dims` batch dimensions are slots, not part of a record.

    Raises:
        InvalidTypeError: neither a TensorDict, a tensorclass nor a tree of tensors.
        SchemaError: fewer than `dims` batch dimensions, a leaf that isn't a tensor, or one that columns can't
            hold, or no leaf at all.
    """
    if is_tensor_collection(data):
        return _find_tensordict(data, dims, where)
    paths_and_leaves, spec = _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)
    fields: dict[Path, Field] = {}
    for place, leaf in paths_and_leaves:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidTypeError(
                f"{where}: expected a TensorDict, a tensor, or dictionaries, lists and tuples of tensors, "
                f"got {type(leaf).__name__}{' at ' + _pytree.keystr(place) if place else ''}; "
                "ListStorage keeps any object"
            )
        path = _tree_path(place)
        check_storable(leaf, path, where)
        _lead(leaf.shape, dims, "dimensions", where)
        fields[path] = Field(leaf.shape[dims:], leaf.dtype)
    if not fields:
        raise SchemaError(
            f"{where}: got a {type(data).__name__} without any tensor; there is nothing to store"
        )
    return TreeFormat(Schema(fields), spec)


def check_storable(leaf: torch.Tensor, path: Path, where: str) -> None:
    """Raise `SchemaError` unless `leaf` is dense, with data, and one number to an element."""
    if leaf.is_meta:
        found, advice = "a meta tensor, which holds no data", "make it on a real device"
    elif leaf.is_nested:
        found, advice = "a nested tensor, whose rows differ in shape", "pad the rows to one shape"
    elif leaf.layout is not torch.strided:
        found = f"a {str(leaf.layout).removeprefix('torch.')} tensor"
        advice = "write leaf.to_dense()"
    elif leaf.is_quantized:
        found, advice = f"a quantized {leaf.dtype} tensor", "write leaf.dequantize() or leaf.int_repr()"
    else:
        return
    raise SchemaError(
        f"{where}: key {as_key(path)!r} expected a dense tensor, got {found}; {advice}, or use ListStorage, which "
        "keeps any object"
    )


def check_all_storable(data: Any, where: str) -> None:
    """Raise `SchemaError`, naming the key, if a tensor of `data` is one that columns can't hold."""
    if is_tensor_collection(data):
        for path, leaf in iter_leaves(data):
            check_storable(leaf, path, where)
        return
    for place, leaf in _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)[0]:
        if isinstance(leaf, torch.Tensor):
            check_storable(leaf, _tree_path(place), where)


def format_from_state(state: dict[str, Any]) -> RecordFormat:
    """Return the format that `RecordFormat.state` described."""
    fields = {
        tuple(path): Field(torch.Size(shape), dtype)
        for path, shape, dtype in zip(state["paths"], state["shapes"], state["dtypes"], strict=True)
    }
    if state["kind"] == "tree":
        return TreeFormat(Schema(fields), _pytree.tree_flatten(state["tree"])[1])
    classes = from_names(state.get("classes", ()))
    groups = {tuple(path): tuple(size) for path, size in state.get("groups", ())}
    return TensorDictFormat(Schema(fields, groups), torch.Size(state["item_shape"]), classes)


def swap_batch_dims(data: Any, dim: int, where: str) -> Any:
    """Return `data` with its batch dimensions 0 and `dim` exchanged (views)."""
    if is_tensor_collection(data):
        _lead(data.batch_size, dim + 1, "batch dimensions", where)
        return data.transpose(0, dim)
    return _pytree.tree_map(lambda leaf: leaf.transpose(0, dim), data)


def stack_records(records: Sequence[Any], where: str) -> Any:
    """Return single records of one structure as one batch; `SchemaError` if they differ."""
    if not records:
        raise SchemaError(f"{where}: got no record at all; write at least one")
    try:
        if is_tensor_collection(records[0]):
            return torch.stack(list(records))
        return _pytree.tree_map(lambda *leaves: torch.stack(leaves), *records)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as cause:
        raise SchemaError(f"{where}: a list holds records of one structure, these differ: {cause}") from cause


def without_added_keys(data: Any) -> Any:
    """Return `data` without the root keys of `ADDED_KEYS`: itself if it has none, else a shallow copy."""
    found = [key for key in ADDED_KEYS if key in data.keys()]
    return data.exclude(*found) if found else data


def _find_tensordict(data: Any, dims: int, where: str) -> RecordFormat:
    check_uniform(data, where)
    _lead(data.batch_size, dims, "batch dimensions", where)
    known = without_added_keys(data)
    check_all_storable(known, where)
    whole = Schema.of(known)
    if not len(whole):
        raise SchemaError(f"{where}: got a TensorDict without any tensor; there is nothing to store")
    item_shape = data.batch_size[dims:]
    fields = {path: Field(item_shape + field.shape, field.dtype) for path, field in whole.items().items()}
    return TensorDictFormat(Schema(fields, whole.groups), item_shape, classes_of(known))


def _lead(shape: torch.Size, dims: int, what: str, where: str) -> torch.Size:
    if len(shape) < dims:
        raise SchemaError(
            f"{where}: expected at least {dims} {what}, got {tuple(shape)}; `extend` takes many records, "
            "`add` takes one"
        )
    return shape[:dims]


def _state(kind: str, form: RecordFormat) -> dict[str, Any]:
    return {
        "kind": kind,
        "paths": [list(path) for path in form.schema.paths],
        "shapes": [list(field.shape) for field in form.schema.fields],
        "dtypes": [field.dtype for field in form.schema.fields],
        "item_shape": list(form.item_shape),
    }


def _tree_path(place: Sequence[Any]) -> Path:
    return tuple(_part(key) for key in place) or ("tensor",)


def _part(key: Any) -> str:
    """Name one step of a tree path: a dictionary key, a position, or an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _describe(spec: _pytree.TreeSpec) -> str:
    """Show a tree with dots in place of its leaves."""
    return str(_pytree.tree_unflatten([_DOT] * spec.num_leaves, spec))


class _Dot:
    def __repr__(self) -> str:
        return "."


_DOT = _Dot()
