"""Helpers that read, build and change TensorDicts by path; the only module that uses TensorDict's internals.

A `TensorDictBuilder` reads the leaves of one kind of batch in a fixed order, and builds batches around leaves. It skips
the container's checks of each key, because the leaves were checked against a schema before.

A *path* is a tuple of strings, for example ``("next", "reward")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from gleanrl._arrays.devices import device_of
from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_entry, lazy_leaf, non_tensors
from gleanrl.errors import InvalidTypeError, SchemaError

Path: TypeAlias = tuple[str, ...]
NestedKey: TypeAlias = str | tuple[str, ...]

FLAGS = ("done", "terminated", "truncated")
"""The flags of a step. The flags of one group are entries of the same nested TensorDict."""
SLICE_ENDS = "_gleanrl_slice_ends"
"""The attribute in which a batch keeps the ends of its slices, ``(n,)`` bool; see `gleanrl.data.trajectories`."""


def as_path(key: NestedKey) -> Path:
    """Return `key` as a path: ``"a"`` gives ``("a",)``, ``(("a", "b"), "c")`` gives ``("a", "b", "c")``.

    Raises:
        SchemaError: `key` is neither a string nor a (nested) tuple of strings, or is an empty tuple.
    """
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for piece in key for part in as_path(piece))
    raise SchemaError(f"a key is a string or a tuple of strings, got {key!r}")


def key_argument(name: str, key: Any) -> Path:
    """Return a user's key as a path.

    Args:
        name: the argument that the error message names.
        key: a string or a (nested) tuple of strings.

    Raises:
        InvalidTypeError: the key is anything else.
    """
    try:
        return as_path(key)
    except SchemaError as cause:
        raise InvalidTypeError(
            f"{name}: expected a key, a string or a tuple of strings, got {key!r}"
        ) from cause


def as_key(path: Path) -> NestedKey:
    """Return the shortest spelling of `path`: a string for one level, the tuple itself for more levels."""
    return path[0] if len(path) == 1 else path


def did_you_mean(key: NestedKey, keys: Iterable[NestedKey]) -> str:
    """Return ``"; did you mean ...?"`` with the most similar one of `keys`, or "" if none is similar."""
    spelled = {".".join(as_path(one)): one for one in keys}
    found = difflib.get_close_matches(".".join(as_path(key)), list(spelled), n=1)
    return f"; did you mean {spelled[found[0]]!r}?" if found else ""


def iter_leaves(batch: Any, prefix: Path = (), dims: int | None = None) -> Iterator[tuple[Path, Leaf]]:
    """Yield ``(path, leaf)`` for every leaf of `batch`, depth first, in insertion order.

    A leaf is a tensor or an `ObjectColumn`. Non-tensor entries, and tensors of different shapes in a lazy stack, give
    an `ObjectColumn`.

    Args:
        batch: a TensorDict or another tensor collection.
        prefix: the path of `batch` itself, with which all yielded paths begin.
        dims: the number of batch dimensions that position a record; None for all batch dimensions of `batch`.

    Raises:
        SchemaError: an entry has a type that a TensorDict can't hold, or parts of a lazy stack differ in dtype or
            number of dimensions.
    """
    dims = len(batch.batch_size) if dims is None else dims
    if is_tensorclass(batch):
        batch = batch._tensordict  # which holds non-tensor fields as non-tensor data
    first = batch
    while isinstance(first, LazyStackedTensorDict):
        first = first.tensordicts[0]
    entries = level_of(first)
    for key in entries if first is batch else batch.keys():
        path, sample = (*prefix, key), entries[key]
        if isinstance(sample, torch.Tensor):
            yield path, sample if first is batch else lazy_leaf(batch, key, dims)
        elif is_non_tensor(sample):
            yield path, non_tensors(batch.get(key))
        elif is_tensor_collection(sample):
            yield from iter_leaves(batch.get(key), path, dims)
        else:
            raise SchemaError(
                f"{as_key(path)!r}: expected a tensor, non-tensor data or a nested TensorDict, got "
                f"{type(sample).__name__}"
            )


def flatten(batch: TensorDictBase) -> dict[Path, Leaf]:
    """Return the leaves of `batch` by path, in insertion order (see `iter_leaves`)."""
    return dict(iter_leaves(batch))


def set_leaf(batch: Any, path: Path, leaf: Leaf) -> None:
    """Set the entry at `path` of a TensorDict to a leaf, in place.

    Tensors of different shapes can only be set in a lazy stack, where each part gets its own tensor.
    """
    if isinstance(leaf, ObjectColumn) and leaf.blank is not None and leaf.ndim:
        if not isinstance(batch, LazyStackedTensorDict):  # the lazy stack is a nested entry of `batch`
            set_leaf(batch.get(path[0]), path[1:], leaf)
            return
        for part, piece in zip(batch.tensordicts, leaf.unbind(batch.stack_dim), strict=True):
            set_leaf(part, path, piece)
    else:
        batch.set(path, as_entry(leaf))


def group_sizes(batch: Any, dims: int, prefix: Path = ()) -> dict[Path, tuple[int, ...]]:
    """Return the dimensions that nested TensorDicts, or nested specs, have after the first `dims` dimensions.

    The result names only the nested levels that have such dimensions; see `TensorDictBuilder`.
    """
    if isinstance(batch, LazyStackedTensorDict) and batch.stack_dim < dims:
        return group_sizes(batch.tensordicts[0], dims - 1, prefix)  # the same in every part
    found: dict[Path, tuple[int, ...]] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) or not hasattr(value, "keys"):
            continue
        path = (*prefix, key)
        if len(value.shape) > dims:
            found[path] = tuple(value.shape[dims:])
        found |= group_sizes(value, dims, path)
    return found


def empty_groups(batch: Any, prefix: Path = ()) -> list[Path]:
    """Return the paths of nested TensorDicts that hold nothing at all; of a lazy stack only the first part counts."""
    if isinstance(batch, LazyStackedTensorDict):
        return empty_groups(batch.tensordicts[0], prefix)
    found: list[Path] = []
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            found += empty_groups(value, (*prefix, key)) or ([] if len(value.keys()) else [(*prefix, key)])
    return found


def outermost(groups: Iterable[Path]) -> list[Path]:
    """Return the `groups` that aren't inside another one. Their flags end the trajectories of all groups inside them.

    Examples:
        >>> outermost([(), ("agents",)]), outermost([("red",), ("blue",)])
        ([()], [('red',), ('blue',)])
    """
    known = list(dict.fromkeys(groups))
    return [g for g in known if not any(g[: len(other)] == other for other in known if other != g)]


def stand_apart(paths: Collection[Path]) -> bool:
    """Return whether no path of `paths` is inside another one.

    Examples:
        >>> stand_apart([("a", "b"), ("a", "c")]), stand_apart([("a", "b"), ("a",)])
        (True, False)
    """
    known = set(paths)
    return not any(path[:end] in known for path in known for end in range(1, len(path)))


def batch_device(batch: Any) -> torch.device:
    """Return the device of a batch; see `device_of`."""
    return device_of(leaf for _, leaf in iter_leaves(batch))


def check_uniform(batch: Any, where: str) -> None:
    """Raise `SchemaError` if `batch`, or a group in it, is a lazy stack whose parts have different keys.

    Such a stack shows only the keys that all parts share, so the other entries would be lost silently.
    """
    if isinstance(batch, LazyStackedTensorDict):
        parts = [set(part.keys(True, True, is_leaf=_is_leaf)) for part in batch.tensordicts]
        for position, part in enumerate(parts):
            if part != parts[0]:
                raise SchemaError(
                    f"{where}: expected the same keys in every part of the stacked batch, part {position} differs from "
                    f"the first one in {sorted(part ^ parts[0], key=str)}"
                )
        groups: list[Any] = batch.tensordicts
    else:
        groups = list(groups_of(batch).values())
    for group in groups:
        check_uniform(group, where)


def groups_of(batch: Any) -> dict[str, Any]:
    """Return the nested tensor collections of one level by key, without non-tensor data."""
    return {
        key: value
        for key, value in level_of(batch).items()
        # The first test is fast and true for most values; the others look through base classes.
        if not isinstance(value, torch.Tensor) and is_tensor_collection(value) and not is_non_tensor(value)
    }


def _is_leaf(kind: type[Any]) -> bool:
    """Return whether values of a class are leaves, including non-tensor data."""
    return not is_tensor_collection(kind) or is_non_tensor(kind)


def is_private(path: Path) -> bool:
    """Return whether any part of `path` starts with an underscore."""
    return any(part.startswith("_") for part in path)


def level_of(batch: Any) -> Mapping[str, Any]:
    """Return the entries of one level by key: TensorDict's internal dictionary, or a new one for other collections."""
    if type(batch) is TensorDict:
        return batch._tensordict
    return {key: batch.get(key) for key in batch.keys()}


def num_entries(batch: Any) -> int:
    """Return the number of entries of one level, including nested TensorDicts."""
    return len(batch._tensordict if type(batch) is TensorDict else batch.keys())


def leaf_at(batch: Any, path: Path) -> torch.Tensor | None:
    """Return the tensor at `path`; None if there is no tensor, or `batch` isn't a TensorDict."""
    found = _entry_at(batch, path)
    return found if isinstance(found, torch.Tensor) else None


def group_at(batch: Any, path: Path) -> Any:
    """Return the nested TensorDict at `path`, or ``{}`` if there is none. A tensorclass gives its TensorDict."""
    found = _entry_at(batch, path)
    if is_tensorclass(found):
        found = found._tensordict
    return found if isinstance(found, TensorDictBase) else {}


def _entry_at(batch: Any, path: Path) -> Any:
    for part in path:
        if type(batch) is TensorDict:
            batch = batch._tensordict.get(part)
        elif isinstance(batch, TensorDictBase):
            batch = batch.get(part, None)
        else:
            return None
    return batch


def drop_entry(batch: Any, path: Path) -> None:
    """Remove an entry from a TensorDict, if it exists."""
    if type(batch) is TensorDict and len(path) == 1 and not batch._is_locked:
        batch._tensordict.pop(path[0], None)
    elif path in batch.keys(True):
        batch.del_(path)  # `exclude` of tensordict 0.10 ignores the lock


def put_leaf(batch: Any, path: Path, value: Any) -> None:
    """Set an entry of a TensorDict, and skip the container's checks where they would pass.

    The shortcut needs a plain, unlocked TensorDict, and a tensor with its batch size and device. All other cases use
    `TensorDict.set`, which creates missing nested TensorDicts, moves tensors to the device, and raises its errors.
    """
    group = batch
    for part in path[:-1]:
        group = group._tensordict.get(part) if type(group) is TensorDict else None
    if (
        type(group) is TensorDict
        and not group._is_locked
        and isinstance(value, torch.Tensor)
        and (not (size := group._batch_size) or value.shape[: len(size)] == size)
        and ((device := group._device) is None or device == value.device)
    ):
        group._tensordict[path[-1]] = value
    else:
        batch.set(path, value)


def record_of(leaves: Mapping[Path, Leaf], batch_size: torch.Size, device: torch.device | None = None) -> Any:
    """Return a TensorDict, or a lazy stack, with the given leaves by path; see `TensorDictBuilder.build`."""
    lists = [path for path, leaf in leaves.items() if isinstance(leaf, ObjectColumn)]
    return TensorDictBuilder(leaves, None, lists).build(list(leaves.values()), batch_size, device)


class TensorDictBuilder:
    """The nested structure of one kind of batch; reads its leaves and builds TensorDicts quickly.

    Leaves are in the order of `paths`. A builder is immutable, so any thread may use it.

    Args:
        paths: the paths of the leaves; no path may be a prefix of another one.
        groups: the dimensions that a nested TensorDict's batch size has after the batch's own dimensions, by path, for
            example the number of agents.
        lists: the paths whose leaves are `ObjectColumn`.
        empty: paths of nested TensorDicts that hold nothing.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        groups: Mapping[Path, Sequence[int]] | None = None,
        lists: Collection[Path] = (),
        empty: Iterable[Path] = (),
    ) -> None:
        self.paths: tuple[Path, ...] = tuple(paths)
        self.empty: tuple[Path, ...] = tuple(empty)
        self._lists = tuple(position for position, path in enumerate(self.paths) if path in lists)
        self.groups: dict[Path, tuple[int, ...]] = {
            group: tuple(map(int, size)) for group, size in (groups or {}).items() if group and size
        }
        self._root = _node(self.paths, self.empty)
        self._root.widen(self.groups)

    def __eq__(self, other: object) -> bool:
        """Return whether both builders have the same paths, in any order."""
        return isinstance(other, TensorDictBuilder) and set(self.paths) == set(other.paths)

    def __hash__(self) -> int:
        """Return a hash that is consistent with `__eq__`."""
        return hash(frozenset(self.paths))

    def __repr__(self) -> str:
        """Return a text that shows the keys."""
        return f"TensorDictBuilder({[as_key(path) for path in self.paths]})"

    def read(self, batch: TensorDictBase, where: str = "batch") -> list[Any]:
        """Return the leaves of `batch` in the order of `paths`.

        Args:
            batch: a TensorDict (read through its internals) or any other tensor collection (read through its public
                interface).
            where: the name of the batch in the error message.

        Raises:
            SchemaError: a key is missing or unexpected. The message names it.
        """
        leaves = self.match(batch)
        if leaves is not None:
            return leaves
        found = flatten(batch)
        if found.keys() != set(self.paths):
            self._raise_difference(set(found), where)
        # The leaves are complete: `match` also refuses empty groups, lists and tensorclasses.
        return [found[path] for path in self.paths]

    def match(self, batch: Any) -> list[Any] | None:
        """Return the leaves of `batch` in the order of `paths`.

        Returns None if its keys differ, a leaf isn't a tensor, or a nested entry is a tensorclass.
        """
        leaves: list[Any] = [None] * len(self.paths)
        return leaves if _read(self._root, batch, leaves, exact=True) else None

    def find(self, batch: Any) -> list[Any] | None:
        """Return the leaves of `batch` in the order of `paths`, and ignore its other keys.

        Returns None if a leaf is missing or isn't a tensor, or a nested entry is a tensorclass.
        """
        leaves: list[Any] = [None] * len(self.paths)
        return leaves if _read(self._root, batch, leaves, exact=False) else None

    def build(
        self,
        leaves: Sequence[Leaf],
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Any:
        """Return a TensorDict around `leaves`, without copies and checks.

        Nested TensorDicts get the batch size that `groups` gives them. If the leaves include tensors of different
        shapes, the result is a lazy stack of records. It is stacked along the first batch dimension, and recursively
        along the following ones.
        """
        if self._lists:
            return self._build_with_lists(list(leaves), batch_size, device, names)
        return _build(self._root, leaves, batch_size, device, names)

    def _build_with_lists(
        self,
        leaves: list[Leaf],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Sequence[str | None] | None,
    ) -> Any:
        unlike = [position for position in self._lists if leaves[position].blank is not None]
        if unlike and batch_size.numel():
            if batch_size:
                rows = range(batch_size[0])
                parts = [
                    self._build_with_lists([leaf[row] for leaf in leaves], batch_size[1:], device, None)
                    for row in rows
                ]
                out: Any = LazyStackedTensorDict.lazy_stack(parts, 0)
                if names is not None:
                    out.names = list(names)
                return out
        for position in self._lists:
            leaf = leaves[position]
            if position in unlike and batch_size:  # the batch has no record, so an empty tensor serves
                leaves[position] = leaf.blank.new_empty((*batch_size, *leaf.blank.shape))
            else:
                leaves[position] = leaf.wrapped(device)
        return _build(self._root, leaves, batch_size, device, names)

    def _raise_difference(self, found: set[Path], where: str) -> None:
        missing, extra = sorted(set(self.paths) - found), sorted(found - set(self.paths))
        parts = []
        if missing:
            parts.append(f"missing {[as_key(path) for path in missing]}")
        if extra:
            parts.append(f"unexpected {[as_key(path) for path in extra]}")
        expected = [as_key(path) for path in self.paths]
        hints = [did_you_mean(as_key(path), [as_key(one) for one in missing]) for path in extra]
        hint = next(filter(None, hints), "")
        raise SchemaError(f"{where}: {' and '.join(parts)}; the keys were fixed as {expected}{hint}")


class _Node:
    """One level of a builder's structure: the position of each key's leaf, and the levels below it."""

    __slots__ = ("leaves", "children", "size", "more")

    def __init__(self) -> None:
        self.leaves: list[tuple[str, int]] = []
        self.children: list[tuple[str, _Node]] = []
        self.size = 0
        self.more: tuple[int, ...] = ()  # dimensions of its batch size that the level above lacks

    def below(self, path: Path) -> _Node:
        """Return the level at `path` below this one, and create missing levels."""
        node = self
        for part in path:
            child = next((child for key, child in node.children if key == part), None)
            if child is None:
                child = _Node()
                node.children.append((part, child))
            node = child
        return node

    def widen(
        self, groups: Mapping[Path, tuple[int, ...]], path: Path = (), above: tuple[int, ...] = ()
    ) -> None:
        """Set for each level the dimensions that its batch size has in addition to that of the level `above`.

        A level's batch size must begin with the batch size of the level above. A size in `groups` that doesn't is
        ignored.
        """
        own = groups.get(path, above)
        own = own if own[: len(above)] == above else above
        self.more = own[len(above) :]
        for key, child in self.children:
            child.widen(groups, (*path, key), own)


def _node(paths: Sequence[Path], empty: Sequence[Path]) -> _Node:
    root = _Node()
    for position, path in enumerate(paths):
        root.below(path[:-1]).leaves.append((path[-1], position))
    for path in empty:
        root.below(path)
    pending = [root]
    while pending:
        node = pending.pop()
        node.size = len(node.leaves) + len(node.children)
        keys = {key for key, _ in node.leaves} | {key for key, _ in node.children}
        if len(keys) != node.size:
            raise SchemaError(
                f"expected each key once, either as a leaf or as a group, got {[as_key(p) for p in paths]}; rename one"
            )
        pending.extend(child for _, child in node.children)
    return root


def _read(node: _Node, batch: Any, leaves: list[Any], exact: bool) -> bool:
    try:
        entries = batch._tensordict if type(batch) is TensorDict else level_of(batch)
        if exact and len(entries) != node.size:
            return False
        for key, position in node.leaves:
            value = entries[key]
            if not isinstance(value, torch.Tensor):
                return False
            leaves[position] = value
        for key, child in node.children:
            below = entries[key]
            if type(below) is not TensorDict:
                # A tensorclass is refused, because its class is no entry: the caller looks for it.
                if is_tensorclass(below) or not is_tensor_collection(below):
                    return False
                # A lazy stack shows only the keys that all parts share. The caller reports a difference. It has
                # checked the groups of a batch that is a lazy stack itself.
                if isinstance(below, LazyStackedTensorDict) and type(batch) is TensorDict:
                    first, *others = map(level_of, below.tensordicts)
                    if any(map(is_tensorclass, below.tensordicts)):
                        return False
                    if any(other.keys() != first.keys() for other in others):
                        return False
            if not _read(child, below, leaves, exact):
                return False
    except (KeyError, RuntimeError):  # a lazy stack raises RuntimeError for entries that it can't stack
        return False
    return True


def _build(
    node: _Node,
    leaves: Sequence[torch.Tensor],
    batch_size: torch.Size,
    device: torch.device | None,
    names: Sequence[str | None] | None,
) -> TensorDict:
    entries: dict[str, Any] = {}
    for key, position in node.leaves:
        entries[key] = leaves[position]
    if node.more:
        batch_size = torch.Size((*batch_size, *node.more))
        names = None if names is None else [*names, *[None] * len(node.more)]
    for key, child in node.children:
        entries[key] = _build(child, leaves, batch_size, device, names)
    # Each level gets a copy of the names, because a container may change its list.
    return dict_batch(entries, batch_size, device, None if names is None else list(names))


_new = object.__new__
_Entries: Any = type(vars(TensorDict())["_tensordict"])


def dict_batch(
    entries: Mapping[str, Any],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: list[str | None] | None = None,
) -> TensorDict:
    """Return a TensorDict around tensors or TensorDicts of that batch size. Nothing is checked or copied.

    It does the work of the container's constructor without checks in a third of the time. Every batch is made here.
    """
    made: Any = _new(TensorDict)
    made._device, made._tensordict = device, _Entries(entries)
    made._batch_size, made._td_dim_names = batch_size, names
    return made


def shallow_copy(batch: Any) -> Any:
    """Return an unlocked copy of a batch and its nested TensorDicts that shares all leaves.

    TensorDict's ``copy`` does the same, but visits each entry twice.
    """
    if type(batch) is not TensorDict:
        return batch.copy()
    entries = {
        key: value if isinstance(value, torch.Tensor) else shallow_copy(value)
        for key, value in level_of(batch).items()
    }
    names = batch.names
    return dict_batch(entries, batch.batch_size, batch.device, [*names] if any(names) else None)


def add_entries(batch: Any, entries: Mapping[NestedKey, torch.Tensor], num_rows: int) -> None:
    """Put tensors ``(num_rows, ...)`` into a batch, and replace existing entries at their keys.

    If the batch has more than one batch dimension, each row's value is repeated over the other dimensions. This also
    works if the rows differ in length. Tensors are moved to the batch's device, and missing nested TensorDicts are
    created.

    Args:
        batch: a TensorDict ``[num_rows, *item]`` that only the caller holds.
        entries: the tensors by key.
        num_rows: the size of their first dimension.

    Raises:
        SchemaError: the batch isn't a TensorDict of that many rows.
    """
    # This runs for each sample, so a plain TensorDict with one batch dimension gets its entries without checks.
    plain = type(batch) is TensorDict and batch._batch_size == (num_rows,)
    if not plain and (not isinstance(batch, TensorDictBase) or batch.batch_size[:1] != (num_rows,)):
        found = (
            f"batch size {tuple(batch.batch_size)}"
            if isinstance(batch, TensorDictBase)
            else type(batch).__name__
        )
        raise SchemaError(
            f"{sorted(map(str, entries))} can't be added to the batch: expected a TensorDict of {num_rows} rows, "
            f"got {found}; collate_fn has to keep the rows"
        )
    if not plain and -1 in batch.batch_size:  # a lazy stack of rows that differ in length
        for row, record in enumerate(batch.unbind(0)):
            size = record.batch_size
            for key, value in entries.items():
                repeated = value[row].expand(*size, *value.shape[1:])
                _add_entry(record, as_path(key), repeated, size, record.device)
        return
    plain = plain and (batch._device is None or batch._device.type == "cpu")
    for key, value in entries.items():
        if plain and type(key) is str:
            batch._tensordict[key] = value
            continue
        group = _plain_group(batch, key[:-1]) if plain and type(key) is tuple else None
        if group is not None:
            group._tensordict[key[-1]] = value
        else:
            _add_entry(batch, as_path(key), value, batch.batch_size, batch.device)


def mark_rows(records: Any, entries: Mapping[NestedKey, torch.Tensor], num_rows: int) -> None:
    """Put tensors ``(num_rows, ...)`` into fetched records, if the records have keys.

    TensorDicts and dictionaries get all entries in place, as in `add_entries`. A tensorclass gets the entries for which
    it has fields. Other records don't change.
    """
    if is_tensorclass(records):
        records = records._tensordict
        entries = {key: value for key, value in entries.items() if as_path(key) in records.keys(True)}
    if isinstance(records, TensorDictBase):
        add_entries(records, entries, num_rows)
    elif isinstance(records, dict):
        for key, value in entries.items():
            path, group = as_path(key), records
            for part in path[:-1]:
                group = group.setdefault(part, {})
            group[path[-1]] = value


def _plain_group(batch: Any, parts: Iterable[Any]) -> Any:
    """Return the plain TensorDict at the path `parts`; None if another object or nothing is there."""
    for part in parts:
        batch = batch._tensordict.get(part)
        if type(batch) is not TensorDict:
            return None
    return batch


def _add_entry(
    batch: TensorDictBase, path: Path, value: torch.Tensor, size: torch.Size, device: torch.device | None
) -> None:
    group: Any = batch
    for part in path[:-1]:
        below = group.get(part, None)
        if not isinstance(below, TensorDictBase):
            below = dict_batch({}, size, device)
            group.set(part, below)
            below = group.get(part)
        group = below
    if len(size) > 1 and value.shape[: len(size)] != size:
        value = value.view(size[0], *[1] * (len(size) - 1), *value.shape[1:])
        value = value.expand(*size, *value.shape[len(size) :])
    group.set(path[-1], value if device is None else value.to(device))
