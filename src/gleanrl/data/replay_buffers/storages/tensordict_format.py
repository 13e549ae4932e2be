"""Records that are TensorDicts or tensorclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from gleanrl.data.replay_buffers.storages.record_format import (
    Builder,
    RecordFormat,
    check_storable,
    leading,
    plain_format,
)
from gleanrl.data.replay_buffers.storages.tensorclasses import classes_below, classes_of, to_names, wrap
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, SchemaError
from gleanrl.objects import Leaf
from gleanrl.schema import Field, Schema
from gleanrl.tree import NestedKey, Path, as_key, check_uniform, iter_leaves, key_argument

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
