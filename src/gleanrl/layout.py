"""Layouts: reading the leaves of one kind of batch in a fixed order, building batches around leaves, adding to them.

All without the container's per-key checks: what a layout hands out was checked against a schema before. Beside
`gleanrl.tree` the only module that knows TensorDict's internals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)

from gleanrl.errors import SchemaError
from gleanrl.objects import Leaf, Objects
from gleanrl.tree import NestedKey, Path, as_key, as_path, flatten, level_of


def record_of(leaves: Mapping[Path, Leaf], batch_size: torch.Size, device: torch.device | None = None) -> Any:
    """Return a TensorDict, or a lazy stack, around leaves by their paths; see `Layout.build`."""
    lists = [path for path, leaf in leaves.items() if isinstance(leaf, Objects)]
    return Layout(leaves, None, lists).build(list(leaves.values()), batch_size, device)


class Layout:
    """The nested structure of one kind of batch, for reading leaves and building TensorDicts quickly.

    The order of the leaves is the order of `paths`. Not thread-bound: a Layout is immutable.

    Args:
        paths: the leaves' paths; none may be a prefix of another.
        groups: the dimensions that the batch size of a nested TensorDict has behind the batch's own, for those that
            have any (the agents', say).
        lists: those of `paths` whose leaves are `Objects`.
        empty: groups that hold nothing.
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
        """Two layouts are equal if they name the same paths, in any order."""
        return isinstance(other, Layout) and set(self.paths) == set(other.paths)

    def __hash__(self) -> int:
        """Hash consistent with `__eq__`."""
        return hash(frozenset(self.paths))

    def __repr__(self) -> str:
        """Show the keys."""
        return f"Layout({[as_key(path) for path in self.paths]})"

    def read(self, batch: TensorDictBase, where: str = "batch") -> list[Any]:
        """Return the leaves of `batch` in the order of `paths`.

        Args:
            batch: a TensorDict (read through its internals) or any other tensor collection (read through
                its public interface).
            where: what the error message calls the place.

        Raises:
            SchemaError: on a missing or an extra key, naming it.
        """
        leaves = self.match(batch)
        if leaves is not None:
            return leaves
        found = flatten(batch)
        if found.keys() != set(self.paths):
            self._raise_difference(set(found), where)
        return [found[path] for path in self.paths]  # the same leaves, and groups without any

    def match(self, batch: Any) -> list[Any] | None:
        """Return the leaves of `batch` in the order of `paths`; None if they aren't just those, or not all tensors."""
        leaves: list[Any] = [None] * len(self.paths)
        return leaves if _read(self._root, batch, leaves, whole=True) else None

    def find(self, batch: Any) -> list[Any] | None:
        """Return the leaves of `batch` in the order of `paths`, whatever else it holds; None if not all are tensors."""
        leaves: list[Any] = [None] * len(self.paths)
        return leaves if _read(self._root, batch, leaves, whole=False) else None

    def build(
        self,
        leaves: Sequence[Leaf],
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Any:
        """Return a TensorDict around `leaves` (no copy, no check); see `groups` for the sizes of nested ones.

        With tensors of unlike shapes among them it is a lazy stack of the records, along the first dimension and the
        further ones.
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
            if position in unlike and batch_size:  # there is no record
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
        raise SchemaError(f"{where}: {' and '.join(parts)}; the keys were fixed as {expected}")


class _Node:
    """One level of a layout: where each key's value stands among the leaves, and the levels below."""

    __slots__ = ("leaves", "children", "size", "more")

    def __init__(self) -> None:
        self.leaves: list[tuple[str, int]] = []
        self.children: list[tuple[str, _Node]] = []
        self.size = 0
        self.more: tuple[int, ...] = ()  # dimensions of its batch size behind those of the level above

    def below(self, path: Path) -> _Node:
        """Return the level at `path` from this one; it is made if there is none."""
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
        """Note what each level's batch size has beyond that of the level `above`, which it begins with."""
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
                f"a key stands twice, or both as a leaf and as a group: {[as_key(p) for p in paths]}"
            )
        pending.extend(child for _, child in node.children)
    return root


def _read(node: _Node, batch: Any, leaves: list[Any], whole: bool) -> bool:
    try:
        entries = batch._tensordict if type(batch) is TensorDict else level_of(batch)
        if whole and len(entries) != node.size:
            return False
        for key, position in node.leaves:
            value = entries[key]
            if not isinstance(value, torch.Tensor):
                return False
            leaves[position] = value
        for key, child in node.children:
            below = entries[key]
            if type(below) is not TensorDict and not is_tensor_collection(below):
                return False
            if not _read(child, below, leaves, whole):
                return False
    except (KeyError, RuntimeError):  # the latter from lazy stacks, of entries that can't be stacked
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
    # Names are a list of the container's own: each level gets a copy.
    return dict_batch(entries, batch_size, device, None if names is None else list(names))


_new = object.__new__
_Entries: Any = type(vars(TensorDict())["_tensordict"])


def dict_batch(
    entries: Mapping[str, Any],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: list[str | None] | None = None,
) -> TensorDict:
    """Return a TensorDict around `entries`, tensors or TensorDicts of that size; no check, no copy.

    What the container's own constructor without checks does, in a third of its time: every batch is made here.
    """
    made: Any = _new(TensorDict)
    made._device, made._tensordict = device, _Entries(entries)
    made._batch_size, made._td_dim_names = batch_size, names
    return made


def shallow_copy(batch: Any) -> Any:
    """Return what TensorDict's own ``copy`` returns, which looks at each entry twice."""
    if type(batch) is not TensorDict:
        return batch.copy()
    entries = {
        key: value if isinstance(value, torch.Tensor) else shallow_copy(value)
        for key, value in level_of(batch).items()
    }
    names = batch.names
    return dict_batch(entries, batch.batch_size, batch.device, [*names] if any(names) else None)


def add_entries(batch: Any, entries: Mapping[NestedKey, torch.Tensor], num_rows: int) -> None:
    """Put tensors ``(num_rows, ...)`` into a batch of its own, replacing what stands at their keys.

    With more batch dimensions than one each row's value is repeated over the rest, also where rows differ in length.
    Tensors move to the batch's device; missing groups of nested keys are made.

    Args:
        batch: a TensorDict ``[num_rows, *item]`` that nobody else holds.
        entries: the tensors by key.
        num_rows: the size of their first dimension.

    Raises:
        SchemaError: the batch is no TensorDict of that many rows.
    """
    # Entries of a plain TensorDict with one batch dimension are put past its checks: this runs for each sample.
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
    """Put tensors ``(num_rows, ...)`` into fetched records, as far as these have keys.

    TensorDicts and dictionaries take all of them, tensorclasses those that they have fields for.
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
    """Return the plain TensorDict below those keys; None if there is another thing, or none."""
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
