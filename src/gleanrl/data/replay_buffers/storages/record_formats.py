"""Record formats: which one records have, and what is done to records before they have one.

A format is found in the first data that is written and frozen from then on. It knows the leaves' shapes and
dtypes (a `Schema`) and checks later data against them; the storage sees nothing but lists of leaves in a
fixed order.

Records that are TensorDicts or tensorclasses.

Records that are one tensor, or dictionaries, lists and tuples of tensors or NumPy arrays.
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
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, check_uniform, iter_leaves, key_argument
from gleanrl.data.replay_buffers.storages.record_format import (
    Builder,
    RecordFormat,
    check_storable,
    classes_below,
    classes_of,
    from_names,
    leading,
    plain_format,
    to_names,
    wrap,
)
from gleanrl.errors import GleanError, InvalidArgumentError, InvalidTypeError, MissingKeyError, SchemaError

# What samples carry beside the records. A sample that is written again must not store it as data.
ADDED_KEYS = ("index", "_weight", "priority_weight", "_generation")


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
        self._narrowed: dict[tuple[Path, ...], RecordFormat] = {}

    def read(self, data: Any, dims: int, where: str) -> tuple[torch.Size, list[Leaf]]:
        """Read `data`; keys that samples carry beside the records (`ADDED_KEYS`) are left out."""
        is_plain = type(data) is TensorDict  # the class's own check is an abstract one's, and slow
        if self.classes or not (is_plain or isinstance(data, TensorDictBase)):
            self._check_classes(data, where)
        if not is_plain:
            check_uniform(data, where)
        lead = size = data.batch_size
        if len(size) != dims:
            lead = leading(size, dims, "batch dimensions", where)
        leaves = self.schema.layout.match(data)
        if leaves is None:
            leaves = self.schema.layout.read(without_added_keys(data), where)
        return lead, self.schema.as_lists(leaves, lead, where) if self.schema.lists else leaves

    def wider(self, data: Any, dims: int, where: str) -> TensorDictFormat | None:
        """Return the format with the keys that only `data` has; None if it has none, or lacks one."""
        if self.classes or not isinstance(data, TensorDictBase):
            return None
        mine, theirs = self.schema, find_tensordict_format(data, dims, where).schema
        if not set(mine.paths) < set(theirs.paths):
            return None
        fields = {**mine.items(), **{p: theirs[p] for p in theirs.paths if p not in mine}}
        whole = Schema(fields, {**theirs.groups, **mine.groups}, theirs.layout.empty)
        return TensorDictFormat(whole, self.item_shape)

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

    def builder(self) -> Builder:
        """Return what builds plain TensorDicts, where records are that."""
        return self.build if self.item_shape or self.classes else self.schema.layout.build

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
    whole, item_shape = Schema.of(known), data.batch_size[dims:]
    for path in whole.lists if item_shape else ():
        if -1 in whole[path].shape:
            raise SchemaError(
                f"{where}: key {as_key(path)!r} holds tensors of unlike shapes, and a record {tuple(item_shape)} of "
                f"them; give the storage ndim={len(data.batch_size)}, or flatten the batch"
            )
    fields = {path: Field(item_shape + field.shape, field.dtype) for path, field in whole.items().items()}
    return TensorDictFormat(Schema(fields, whole.groups, whole.layout.empty), item_shape, classes_of(known))


def without_added_keys(data: Any) -> Any:
    """Return `data` without the root keys of `ADDED_KEYS`: itself if it has none, else a shallow copy."""
    found = [key for key in ADDED_KEYS if key in data.keys()]
    return data.exclude(*found) if found else data


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
        """Return the tree around `leaves`."""
        return _pytree.tree_unflatten(list(leaves), self.spec)

    def state(self, by_name: bool = True) -> dict[str, Any]:
        """Return the format as plain values; the structure as a tree with the leaves' numbers in it."""
        numbered = _pytree.tree_unflatten(range(self.spec.num_leaves), self.spec)
        return {**plain_format("tree", self), "tree": numbered}


def find_tree_format(data: Any, dims: int, where: str) -> TreeFormat:
    """Return the format of a tree of tensors; see `find_format`."""
    paths_and_leaves, spec = _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)
    fields: dict[Path, Field] = {}
    for place, found in paths_and_leaves:
        leaf = as_tensor(found)
        if not isinstance(leaf, torch.Tensor):
            raise no_tensor(leaf, place, where)
        path = tree_path(place)
        check_storable(leaf, path, where)
        leading(leaf.shape, dims, "dimensions", where)
        fields[path] = Field(leaf.shape[dims:], leaf.dtype)
    if not fields:
        raise SchemaError(
            f"{where}: got a {type(data).__name__} without any tensor; there is nothing to store"
        )
    return TreeFormat(Schema(fields), spec)


def as_tensor(leaf: Any) -> Any:
    """Return a NumPy array or number as a tensor of its dtype, over its memory if that may be written; else `leaf`.

    A Python number gets the dtype that TensorDict gives it.
    """
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return _number(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
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


def no_tensor(leaf: Any, place: Sequence[Any], where: str) -> InvalidTypeError:
    """Return the error for a leaf of a tree, at `place`, that is no tensor."""
    return InvalidTypeError(
        f"{where}: expected a TensorDict, a tensor, or dictionaries, lists and tuples of tensors, "
        f"got {_kind(leaf)}{' at ' + _pytree.keystr(tuple(place)) if place else ''}; "
        "ListStorage keeps any object"
    )


def _kind(leaf: Any) -> str:
    dtype = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return type(leaf).__name__ + dtype


def tree_path(place: Sequence[Any]) -> Path:
    """Return the name of a leaf's place in a tree."""
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


def find_format(data: Any, dims: int, where: str) -> RecordFormat:
    """Return the format of `data`; its first `dims` batch dimensions are slots, not part of a record.

    Raises:
        InvalidTypeError: neither a TensorDict, a tensorclass nor a tree of tensors.
        SchemaError: fewer than `dims` batch dimensions, a leaf that isn't a tensor, or one that columns can't
            hold, or no leaf at all.
    """
    return (find_tensordict_format if is_tensor_collection(data) else find_tree_format)(data, dims, where)


def check_all_storable(data: Any, where: str) -> None:
    """Raise `SchemaError`, naming the key, if a tensor of `data` is one that columns can't hold."""
    if is_tensor_collection(data):
        for path, leaf in iter_leaves(data):
            check_storable(leaf, path, where)
        return
    for place, leaf in _pytree.tree_flatten_with_path(data, is_leaf=is_tensor_collection)[0]:
        if isinstance(leaf, torch.Tensor):
            check_storable(leaf, tree_path(place), where)


def format_from_state(state: dict[str, Any], known: RecordFormat | None = None) -> RecordFormat:
    """Return the format that `RecordFormat.state` described.

    Args:
        state: what described it.
        known: a format whose tensorclasses are known, those of functions too; None for none.

    Raises:
        SchemaError: it described none.
    """
    _check_plain(state)
    try:
        return _format_from_state(state, known)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as cause:
        if isinstance(cause, SchemaError):
            raise
        raise SchemaError(f"load_state_dict: a state that isn't a format's: {cause!r}") from cause


def _format_from_state(state: dict[str, Any], known: RecordFormat | None) -> RecordFormat:
    fields = {
        tuple(path): Field(torch.Size(shape), dtype)
        for path, shape, dtype in zip(state["paths"], state["shapes"], state["dtypes"], strict=True)
    }
    if state["kind"] == "tree":
        return TreeFormat(Schema(fields), _pytree.tree_flatten(state["tree"])[1])
    mine = known.classes.values() if isinstance(known, TensorDictFormat) else ()
    classes = from_names(state.get("classes", ()), mine)
    groups = {tuple(path): tuple(size) for path, size in state.get("groups", ())}
    empty = [tuple(path) for path in state.get("empty", ())]
    for path in (*fields, *groups, *empty):
        if not all(isinstance(key, str) for key in path):
            raise SchemaError(f"load_state_dict: {path!r:.100} isn't a path in a TensorDict")
    return TensorDictFormat(Schema(fields, groups, empty), torch.Size(state["item_shape"]), classes)


def _check_plain(value: Any) -> None:
    """Raise `SchemaError` if there are arrays: to iterate over one takes what its shape says, not what it holds."""
    if isinstance(value, (torch.Tensor, TensorDictBase)):
        raise SchemaError(f"load_state_dict: a {type(value).__name__} isn't part of a format")
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_plain(part)


def swap_batch_dims(data: Any, dim: int, where: str) -> Any:
    """Return `data` with its batch dimensions 0 and `dim` exchanged (views)."""
    if is_tensor_collection(data):
        leading(data.batch_size, dim + 1, "batch dimensions", where)
        return data.transpose(0, dim)

    def swapped(leaf: Any) -> torch.Tensor:
        tensor = as_tensor(leaf)
        leading(tensor.shape, dim + 1, "dimensions", where)
        return tensor.transpose(0, dim)

    return _pytree.tree_map(swapped, data)


def stack_records(records: Sequence[Any], where: str) -> Any:
    """Return single records of one structure as one batch; `SchemaError` if they differ."""
    if not records:
        raise SchemaError(f"{where}: got no record at all; write at least one")
    try:
        if is_tensor_collection(records[0]):
            return _stacked(records)
        return _pytree.tree_map_with_path(partial(_column, where), *records)
    except GleanError:
        raise
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as cause:
        raise SchemaError(f"{where}: a list holds records of one structure, these differ: {cause}") from cause


def _column(where: str, place: tuple[Any, ...], *leaves: Any) -> torch.Tensor:
    """Return the leaves of several trees, all at one place, as one tensor."""
    tensors = [leaf if type(leaf) is torch.Tensor else as_tensor(leaf) for leaf in leaves]
    try:
        if len({tensor.dtype for tensor in tensors}) == 1:  # torch.stack would cast
            return torch.stack(tensors)
    except (RuntimeError, TypeError, AttributeError):
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise no_tensor(tensor, place, where) from None
    found = sorted({f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors})
    raise SchemaError(
        f"{where}: a list holds records of one structure, these differ at {as_key(tree_path(place))!r}: "
        f"{', '.join(found)}"
    )


def _stacked(records: Sequence[Any]) -> Any:
    """Return records stacked, lazily if they differ in shapes alone."""
    try:
        return torch.stack(list(records))
    except RuntimeError:
        lazy = LazyStackedTensorDict.lazy_stack(list(records))
        check_uniform(lazy, "stack")
        for _ in iter_leaves(lazy):  # which raises where more differs
            pass
        return lazy
