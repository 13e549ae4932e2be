"""Record formats: how records of each supported type are split into leaves and rebuilt from them.

The first data written to a storage determine its format. The format is fixed from then on. It holds the leaves' shapes
and dtypes (a `Schema`) and checks later data against them. The storage itself handles only lists of leaves in a fixed
order.

`TensorDictFormat` is for TensorDicts and tensorclasses. `TreeFormat` is for single tensors, and for dictionaries, lists
and tuples of tensors or NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import (
    NestedKey,
    Path,
    as_key,
    check_uniform,
    did_you_mean,
    iter_leaves,
    key_argument,
)
from gleanrl.data.replay_buffers.storages.record_format import (
    Builder,
    RecordFormat,
    check_storable,
    classes_below,
    classes_of,
    common_classes,
    from_names,
    leading,
    plain_format,
    to_names,
    wrap,
)
from gleanrl.errors import GleanError, InvalidArgumentError, InvalidTypeError, MissingKeyError, SchemaError

_NUMBERS = (bool, int, float, complex)
# Keys that `sample` adds to records. They aren't stored when a user writes a sample back.
ADDED_KEYS = ("index", "_weight", "priority_weight", "_generation")


class TensorDictFormat(RecordFormat):
    """The format of TensorDicts and tensorclasses of tensors, including nested ones.

    Args:
        schema: see `RecordFormat`.
        item_shape: see `RecordFormat`.
        classes: the tensorclasses in a record, by path (see `classes_of`).
    """

    def __init__(
        self, schema: Schema, item_shape: torch.Size, classes: Mapping[Path, type[Any]] | None = None
    ) -> None:
        super().__init__(schema, item_shape)
        self.classes = dict(classes or {})
        self._narrowed: dict[tuple[Path, ...], RecordFormat] = {}

    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[Leaf]]:
        """Read `data`, without the keys that samples add to records (`ADDED_KEYS`)."""
        is_plain = type(data) is TensorDict  # fast: `isinstance` with an abstract base class is slow
        if self.classes or not (is_plain or isinstance(data, TensorDictBase)):
            self._check_classes(data, where)
        if not is_plain:
            check_uniform(data, where)
        lead = size = data.batch_size
        if len(size) != dims:
            lead = leading(size, dims, "batch dimensions", where)
        leaves = self.schema.layout.match(data)
        if leaves is None:
            if is_plain:  # `match` refuses groups whose parts differ in keys, `read` doesn't
                check_uniform(data, where)
            leaves = self.schema.layout.read(without_added_keys(data), where)
            is_plain = False
        if not (
            is_plain or self.classes
        ):  # `match` refuses tensorclasses inside a plain TensorDict, `read` doesn't
            self._check_classes(data, where)
        return lead, self.schema.as_lists(leaves, lead, where) if self.schema.lists else leaves

    def wider(self, data: Any, dims: int, where: str) -> TensorDictFormat | None:
        """Return the format with the new keys of `data`.

        None if it has no new keys, lacks a stored key, or a stored record or a stored group would be a tensorclass.
        """
        if self.classes or not isinstance(data, TensorDictBase):
            return None
        found = find_tensordict_format(data, dims, where)
        own, new = self.schema, found.schema
        if not set(own.paths) < set(new.paths) or classes_below(own.paths, found.classes):
            return None
        fields = {**own.items(), **{p: new[p] for p in new.paths if p not in own}}
        merged = Schema(fields, {**new.groups, **own.groups}, new.layout.empty)
        return TensorDictFormat(merged, self.item_shape, found.classes)

    def _check_classes(self, data: Any, where: str) -> None:
        """Raise `InvalidTypeError` unless `data` consists of the same tensorclasses as the records."""
        found: dict[Path, type[Any]] = (
            classes_of(data, where) if is_tensor_collection(data) else {(): type(data)}
        )
        for path in {**self.classes, **found}:
            expected, got = (kinds.get(path, TensorDictBase) for kinds in (self.classes, found))
            if expected is not got:
                kind = "TensorDict" if expected is TensorDictBase else f"tensorclass {expected.__name__}"
                other = "TensorDict" if got is TensorDictBase else got.__name__
                suffix = f" at {as_key(path)!r}" if path else "s"
                raise InvalidTypeError(
                    f"{where}: the first write fixed the records as a {kind}{suffix}, got a {other}"
                )

    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return a TensorDict, or the tensorclass, of batch size ``[*lead, *item_shape]``."""
        size = lead + self.item_shape if self.item_shape else lead
        record = self.schema.layout.build(leaves, size, device)
        return wrap(record, self.classes) if self.classes else record

    def builder(self) -> Builder:
        """Return `build`, or the schema's faster one if records are plain TensorDicts without `item_shape`."""
        return self.build if self.item_shape or self.classes else self.schema.layout.build

    def select(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the leaves that `keys` name (see `RecordFormat.select`)."""
        chosen: dict[Path, None] = {}
        for path in (key_argument("keys", key) for key in keys):
            found = [leaf for leaf in self.schema.paths if leaf[: len(path)] == path]
            if not found:
                stored = [as_key(leaf) for leaf in self.schema.paths]
                hint = did_you_mean(as_key(path), stored)
                raise MissingKeyError(f"keys: {as_key(path)!r} isn't stored; there are {stored}{hint}")
            chosen.update(dict.fromkeys(found))
        if not chosen:
            raise InvalidArgumentError("keys: expected at least one key, got none; None stands for all")
        return tuple(chosen)

    def narrow(self, paths: tuple[Path, ...]) -> RecordFormat:
        """Return the format of records that have only these leaves. Each choice of leaves is cached."""
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
        empty = [list(path) for path in self.schema.layout.empty]
        return {**plain_format("tensordict", self), "classes": classes, "groups": groups, "empty": empty}

    def same_as(self, other: RecordFormat) -> bool:
        """Return whether the schemas and the tensorclasses are the same."""
        return super().same_as(other) and self.classes == getattr(other, "classes", None)


def find_tensordict_format(data: Any, dims: int, where: str) -> TensorDictFormat:
    """Return the format of a TensorDict or tensorclass; see `find_format`."""
    check_uniform(data, where)
    leading(data.batch_size, dims, "batch dimensions", where)
    known = without_added_keys(data)
    for path, leaf in iter_leaves(known):
        check_storable(leaf, path, where)
    schema, item_shape = Schema.of(known), data.batch_size[dims:]
    for path in schema.lists if item_shape else ():
        if -1 in schema[path].shape:
            raise SchemaError(
                f"{where}: key {as_key(path)!r} holds tensors of different shapes, and a record has "
                f"{tuple(item_shape)} of them, which no column can hold; build the storage with "
                f"ndim={len(data.batch_size)}, or flatten the batch"
            )
    fields = {path: Field(item_shape + field.shape, field.dtype) for path, field in schema.items().items()}
    return TensorDictFormat(
        Schema(fields, schema.groups, schema.layout.empty), item_shape, classes_of(known, where)
    )


def without_added_keys(data: Any) -> Any:
    """Return `data` without the root keys of `ADDED_KEYS`: itself if it has none of them, else a shallow copy."""
    found = [key for key in ADDED_KEYS if key in data.keys()]
    return data.exclude(*found) if found else data


class TreeFormat(RecordFormat):
    """The format of single tensors, and of dictionaries, lists and tuples of tensors. NumPy arrays count as tensors.

    Args:
        schema: the leaves, named by their place in the tree.
        spec: the tree's structure.
    """

    def __init__(self, schema: Schema, spec: _pytree.TreeSpec) -> None:
        super().__init__(schema, torch.Size(()))
        self.spec = spec

    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[torch.Tensor]]:
        """Read `data`. The first leaf determines the batch dimensions."""
        leaves, spec = _pytree.tree_flatten(data, is_leaf=is_tensor_collection)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            leaves = [as_tensor(leaf) for leaf in leaves]
        if spec != self.spec or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            expected = [as_key(path) for path in self.schema.paths]
            raise SchemaError(
                f"{where}: the first write fixed the structure as {_describe(self.spec)} with tensors at "
                f"{expected}, got {_describe(spec)} of {sorted({_kind(leaf) for leaf in leaves})}"
            )
        return leading(leaves[0].shape, dims, "dimensions", where), leaves

    def build(self, leaves: Sequence[torch.Tensor], lead: torch.Size, device: torch.device) -> Any:
        """Return the tree with `leaves` in it."""
        return _pytree.tree_unflatten(list(leaves), self.spec)

    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return the format as plain values. The structure is a tree that holds the leaves' positions."""
        numbered = _pytree.tree_unflatten(range(self.spec.num_leaves), self.spec)
        return {**plain_format("tree", self), "tree": numbered}


def find_tree_format(data: Any, dims: int, where: str) -> TreeFormat:
    """Return the format of a tree of tensors; see `find_format`."""
    paths_and_leaves, spec = _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)
    # Each number would become a column, and the next `extend` of such a list would fail.
    if (
        paths_and_leaves
        and isinstance(data, list)
        and all(isinstance(leaf, _NUMBERS) for _, leaf in paths_and_leaves)
    ):
        raise InvalidTypeError(
            f"{where}: expected a record of tensors, got a list of {len(paths_and_leaves)} numbers, {data!r:.60}; "
            "write extend(list) for one record each, or add(torch.tensor(list)) for one record"
        )
    fields: dict[Path, Field] = {}
    for key_path, found in paths_and_leaves:
        leaf = as_tensor(found)
        if not isinstance(leaf, torch.Tensor):
            raise no_tensor(leaf, key_path, where)
        path = tree_path(key_path)
        check_storable(leaf, path, where)
        leading(leaf.shape, dims, "dimensions", where)
        fields[path] = Field(leaf.shape[dims:], leaf.dtype)
    if not fields:
        raise SchemaError(
            f"{where}: got a {type(data).__name__} without any tensor; there is nothing to store"
        )
    return TreeFormat(Schema(fields), spec)


def as_tensor(leaf: Any) -> Any:
    """Return a NumPy array or a number as a tensor, and any other value unchanged.

    The tensor shares the array's memory if that is contiguous, writable and in native byte order. A Python number gets
    the dtype that TensorDict would give it. An array whose dtype is neither boolean nor a number is returned unchanged.
    """
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return _number(leaf) if isinstance(leaf, _NUMBERS) else leaf
    if leaf.dtype.kind not in "biufc":
        return leaf
    native = np.asarray(leaf, leaf.dtype.newbyteorder("="))
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _number(number: Any) -> Any:
    """Return a tensor; an integer that int64 can't hold is returned unchanged."""
    try:
        return torch.tensor(number, device="cpu")
    except (RuntimeError, ValueError, OverflowError):
        return number


def no_tensor(leaf: Any, key_path: Sequence[Any], where: str) -> InvalidTypeError:
    """Return the error for a leaf of a tree, at `key_path`, that isn't a tensor."""
    return InvalidTypeError(
        f"{where}: expected a TensorDict, a tensor, or dictionaries, lists and tuples of tensors, "
        f"got {_kind(leaf)}{' at ' + _pytree.keystr(tuple(key_path)) if key_path else ''}; "
        "ListStorage keeps any object"
    )


def _kind(leaf: Any) -> str:
    dtype = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return type(leaf).__name__ + dtype


def tree_path(key_path: Sequence[Any]) -> Path:
    """Return the path of a leaf's place in a tree."""
    return tuple(_part(key) for key in key_path) or ("tensor",)


def _part(key: Any) -> str:
    """Return the name of one step of a tree path: a dictionary key, a position or an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _describe(spec: _pytree.TreeSpec) -> str:
    """Return a text that shows a tree, with dots for its leaves."""
    return str(_pytree.tree_unflatten([_DOT] * spec.num_leaves, spec))


class _Dot:
    def __repr__(self) -> str:
        return "."


_DOT = _Dot()


def find_format(data: Any, dims: int, where: str) -> RecordFormat:
    """Return the format of `data`. Its first `dims` batch dimensions are slots, not part of a record.

    Keys that `sample` adds to TensorDicts are left out.

    Raises:
        InvalidTypeError: the data are neither a TensorDict, a tensorclass nor a tree of tensors, or a leaf isn't a
            tensor.
        SchemaError: there are fewer than `dims` batch dimensions, columns can't hold a leaf, or there is no leaf.
    """
    return (find_tensordict_format if is_tensor_collection(data) else find_tree_format)(data, dims, where)


def check_all_storable(data: Any, where: str) -> None:
    """Raise `SchemaError`, naming the key, if `data` contain a tensor that columns can't hold."""
    if is_tensor_collection(data):
        for path, leaf in iter_leaves(data):
            check_storable(leaf, path, where)
        return
    for key_path, leaf in _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)[0]:
        if isinstance(leaf, torch.Tensor):
            check_storable(leaf, tree_path(key_path), where)


def format_from_state(state: dict[str, Any], known: RecordFormat | None = None) -> RecordFormat:
    """Return the format from the result of `RecordFormat.state`.

    Args:
        state: the state of the format.
        known: a format whose tensorclasses are found even if they were made inside functions; None for none.

    Raises:
        SchemaError: the value isn't the state of a format.
    """
    _check_plain(state)
    try:
        return _format_from_state(state, known)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as cause:
        if isinstance(cause, SchemaError):
            raise
        raise SchemaError(
            f"load_state_dict: the state holds no valid format of records: {cause!r}"
        ) from cause


def _format_from_state(state: dict[str, Any], known: RecordFormat | None) -> RecordFormat:
    fields = {
        tuple(path): Field(torch.Size(shape), dtype)
        for path, shape, dtype in zip(state["paths"], state["shapes"], state["dtypes"], strict=True)
    }
    if state["kind"] == "tree":
        return TreeFormat(Schema(fields), _pytree.tree_flatten(state["tree"])[1])
    known_classes = known.classes.values() if isinstance(known, TensorDictFormat) else ()
    classes = from_names(state.get("classes", ()), known_classes)
    groups = {tuple(path): tuple(size) for path, size in state.get("groups", ())}
    empty = [tuple(path) for path in state.get("empty", ())]
    for path in (*fields, *groups, *empty):
        if not all(isinstance(key, str) for key in path):
            raise SchemaError(
                f"load_state_dict: expected paths of strings in the format of records, got {path!r:.100}"
            )
    return TensorDictFormat(Schema(fields, groups, empty), torch.Size(state["item_shape"]), classes)


def _check_plain(value: Any) -> None:
    """Raise `SchemaError` if the value contains tensors or TensorDicts.

    A state comes from a file and may be broken. Iterating over a tensor would take as long as its shape claims, even if
    it holds few elements.
    """
    if isinstance(value, (torch.Tensor, TensorDictBase)):
        raise SchemaError(
            f"load_state_dict: expected plain values in the format of records, got a {type(value).__name__}"
        )
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_plain(part)


def swap_batch_dims(data: Any, dim: int, where: str) -> Any:
    """Return `data` with batch dimensions 0 and `dim` exchanged, as views; raise `SchemaError` if there are fewer."""
    if is_tensor_collection(data):
        leading(data.batch_size, dim + 1, "batch dimensions", where)
        return data.transpose(0, dim)

    def swapped(leaf: Any) -> torch.Tensor:
        tensor = as_tensor(leaf)
        leading(tensor.shape, dim + 1, "dimensions", where)
        return tensor.transpose(0, dim)

    return _pytree.tree_map(swapped, data)


def stack_records(records: Sequence[Any], where: str) -> Any:
    """Return single records of one structure as one batch. TensorDicts that differ only in sizes give a lazy stack.

    Raises:
        SchemaError: there are no records, or their structures, shapes or dtypes differ.
        InvalidTypeError: their tensorclasses differ, or a leaf isn't a tensor.
    """
    if not records:
        raise SchemaError(f"{where}: got no record at all; write at least one")
    try:
        if is_tensor_collection(records[0]):
            common_classes(records, where)
            return _stacked(records)
        return _pytree.tree_map_with_path(partial(_column, where), *records)
    except GleanError:
        raise
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as cause:
        raise SchemaError(f"{where}: a list holds records of one structure, these differ: {cause}") from cause


def _column(where: str, key_path: tuple[Any, ...], *leaves: Any) -> torch.Tensor:
    """Return the leaves at one place of several trees as one stacked tensor."""
    tensors = [leaf if type(leaf) is torch.Tensor else as_tensor(leaf) for leaf in leaves]
    try:
        if len({tensor.dtype for tensor in tensors}) == 1:  # torch.stack would cast different dtypes
            return torch.stack(tensors)
    except (RuntimeError, TypeError, AttributeError):
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise no_tensor(tensor, key_path, where) from None
    found = sorted({f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors})
    raise SchemaError(
        f"{where}: a list holds records of one structure, these differ at {as_key(tree_path(key_path))!r}: "
        f"{', '.join(found)}"
    )


def _stacked(records: Sequence[Any]) -> Any:
    """Return stacked records; a lazy stack if they differ only in shapes."""
    try:
        return torch.stack(list(records))
    except RuntimeError:
        lazy = LazyStackedTensorDict.lazy_stack(list(records))
        check_uniform(lazy, "stack")
        for _ in iter_leaves(lazy):  # raises if leaves differ in more than their sizes
            pass
        return lazy
