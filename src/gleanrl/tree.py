"""Nested batches and flat leaves: the only module that knows TensorDict's internals.

A *path* is a tuple of strings, ``("next", "reward")``. A `Layout` is the fixed set of paths of one kind of
batch; it reads the leaves of a TensorDict in a fixed order and builds a TensorDict around a list of leaves,
both without the container's per-key checks. Everything that it hands out was checked against a schema
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from gleanrl.errors import InvalidTypeError, SchemaError

Path: TypeAlias = tuple[str, ...]
NestedKey: TypeAlias = str | tuple[str, ...]

FLAGS = ("done", "terminated", "truncated")
"""The flags of a step; each group of them stands side by side."""


def as_path(key: NestedKey) -> Path:
    """Return `key` as a path: ``"a"`` gives ``("a",)``, ``(("a", "b"), "c")`` gives ``("a", "b", "c")``."""
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for piece in key for part in as_path(piece))
    raise SchemaError(f"a key is a string or a tuple of strings, got {key!r}")


def key_argument(name: str, key: Any) -> Path:
    """Return a user's key as a path.

    Args:
        name: the argument that the message names.
        key: a string or a (nested) tuple of strings.

    Raises:
        InvalidTypeError: anything else.
    """
    try:
        return as_path(key)
    except SchemaError as cause:
        raise InvalidTypeError(
            f"{name}: expected a key, a string or a tuple of strings, got {key!r}"
        ) from cause


def as_key(path: Path) -> NestedKey:
    """Return the shortest spelling of `path`: a string for one level, the tuple itself for more."""
    return path[0] if len(path) == 1 else path


def iter_leaves(batch: TensorDictBase, prefix: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield ``(path, tensor)`` for every leaf of `batch`, depth first, in insertion order.

    Raises:
        SchemaError: if a leaf isn't a tensor (a string, say): columns hold tensors only.
    """
    for key in batch.keys():
        value = batch.get(key)
        path = (*prefix, key)
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (NonTensorData, NonTensorStack)) or not is_tensor_collection(value):
            raise SchemaError(
                f"{as_key(path)!r} holds {type(value).__name__}, not a tensor; "
                "tensor columns can't keep it: drop the key or encode it as numbers"
            )
        else:
            yield from iter_leaves(value, path)


def flatten(batch: TensorDictBase) -> dict[Path, torch.Tensor]:
    """Return the leaves of `batch` as a flat dictionary in insertion order (see `iter_leaves`)."""
    return dict(iter_leaves(batch))


def group_sizes(batch: Any, dims: int, prefix: Path = ()) -> dict[Path, tuple[int, ...]]:
    """Return what the nested levels of a TensorDict, or of a spec, have beyond its own first `dims` dimensions.

    Only those are named that have anything; see `Layout`.
    """
    found: dict[Path, tuple[int, ...]] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) or not hasattr(value, "keys"):
            continue
        path = (*prefix, key)
        if len(value.shape) > dims:
            found[path] = tuple(value.shape[dims:])
        found |= group_sizes(value, dims, path)
    return found


def outermost(groups: Iterable[Path]) -> list[Path]:
    """Return the `groups` that lie in no other one: the flags there say when the episode of all below ends.

    Examples:
        >>> outermost([(), ("agents",)]), outermost([("red",), ("blue",)])
        ([()], [('red',), ('blue',)])
    """
    known = list(dict.fromkeys(groups))
    return [g for g in known if not any(g[: len(other)] == other for other in known if other != g)]


def check_uniform(batch: Any, where: str) -> None:
    """Raise `SchemaError` if `batch` is a lazy stack of TensorDicts that differ: it shows what they share alone."""
    if not isinstance(batch, LazyStackedTensorDict):
        return
    parts = [{path: leaf.shape for path, leaf in iter_leaves(part)} for part in batch.tensordicts]
    for position, part in enumerate(parts):
        if part != parts[0]:
            differing = sorted({as_key(path) for path, _ in part.items() ^ parts[0].items()}, key=str)
            raise SchemaError(
                f"{where}: expected the same keys and shapes in every part of the stacked batch, part {position} "
                f"differs from the first one in {differing}"
            )


def is_private(path: Path) -> bool:
    """Return whether any part of `path` starts with an underscore."""
    return any(part.startswith("_") for part in path)


class Layout:
    """The nested structure of one kind of batch, for reading leaves and building TensorDicts quickly.

    The order of the leaves is the order of `paths`. Not thread-bound: a Layout is immutable.

    Args:
        paths: the leaves' paths; none may be a prefix of another.
        groups: the dimensions that the batch size of a nested TensorDict has behind the batch's own, for those that
            have any (the agents', say).
    """

    def __init__(self, paths: Iterable[Path], groups: Mapping[Path, Sequence[int]] | None = None) -> None:
        self.paths: tuple[Path, ...] = tuple(paths)
        self.groups: dict[Path, tuple[int, ...]] = {
            group: tuple(map(int, size)) for group, size in (groups or {}).items() if group and size
        }
        self._root = _node(self.paths)
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
        leaves: list[Any] = [None] * len(self.paths)
        if _read(self._root, batch, leaves):
            return leaves
        found = flatten(batch)
        if found.keys() != set(self.paths):
            self._raise_difference(set(found), where)
        return [found[path] for path in self.paths]  # the same leaves, and groups without any

    def build(
        self,
        leaves: Sequence[torch.Tensor],
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Sequence[str | None] | None = None,
    ) -> TensorDict:
        """Return a TensorDict around `leaves` (no copy, no check); see `groups` for the sizes of nested ones."""
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

    def widen(
        self, groups: Mapping[Path, tuple[int, ...]], path: Path = (), above: tuple[int, ...] = ()
    ) -> None:
        """Note what each level's batch size has beyond that of the level `above`, which it begins with."""
        own = groups.get(path, above)
        own = own if own[: len(above)] == above else above
        self.more = own[len(above) :]
        for key, child in self.children:
            child.widen(groups, (*path, key), own)


def _node(paths: Sequence[Path]) -> _Node:
    root = _Node()
    for position, path in enumerate(paths):
        node = root
        for part in path[:-1]:
            child = next((below for key, below in node.children if key == part), None)
            if child is None:
                child = _Node()
                node.children.append((part, child))
            node = child
        node.leaves.append((path[-1], position))
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


def _entries(batch: Any) -> Mapping[str, Any]:
    """Return the entries of one level: TensorDict's own dictionary, or one made by the public interface."""
    if type(batch) is TensorDict:
        return batch._tensordict
    return {key: batch.get(key) for key in batch.keys()}


def _read(node: _Node, batch: Any, leaves: list[Any]) -> bool:
    entries = _entries(batch)
    if len(entries) != node.size:
        return False
    try:
        for key, position in node.leaves:
            value = entries[key]
            if not isinstance(value, torch.Tensor):
                return False
            leaves[position] = value
        for key, child in node.children:
            below = entries[key]
            if not is_tensor_collection(below) or not _read(child, below, leaves):
                return False
    except KeyError:
        return False
    return True


_new_unsafe: Any = TensorDict._new_unsafe  # its annotations don't allow what it takes


def _build(
    node: _Node,
    leaves: Sequence[torch.Tensor],
    batch_size: torch.Size,
    device: torch.device | None,
    names: Sequence[str | None] | None,
) -> TensorDict:
    entries: dict[str, Any] = {key: leaves[position] for key, position in node.leaves}
    if node.more:
        batch_size = torch.Size((*batch_size, *node.more))
        names = None if names is None else [*names, *[None] * len(node.more)]
    for key, child in node.children:
        entries[key] = _build(child, leaves, batch_size, device, names)
    # Names are a list of the container's own: each level gets a copy.
    return _new_unsafe(
        entries,
        batch_size=batch_size,
        device=device,
        names=None if names is None else list(names),
        nested=False,
    )


def dict_batch(
    entries: Mapping[str, Any], batch_size: torch.Size, device: torch.device | None = None
) -> TensorDict:
    """Return a TensorDict around `entries`, tensors or TensorDicts of that size; no check, no copy."""
    return _new_unsafe(dict(entries), batch_size=batch_size, device=device, nested=False)


def leaf_at(batch: Any, path: Path) -> torch.Tensor | None:
    """Return the tensor at `path`; None if there is none, or `batch` is no TensorDict."""
    for part in path:
        if type(batch) is TensorDict:
            batch = batch._tensordict.get(part)
        elif isinstance(batch, TensorDictBase):
            batch = batch.get(part, None)
        else:
            return None
    return batch if isinstance(batch, torch.Tensor) else None


def add_entries(batch: Any, entries: Mapping[NestedKey, torch.Tensor], num_rows: int) -> None:
    """Put tensors ``(num_rows, ...)`` into a batch of its own, replacing what stands at their keys.

    With more batch dimensions than one each row's value is repeated over the rest. Tensors move to the batch's
    device; missing groups of nested keys are made.

    Args:
        batch: a TensorDict ``[num_rows, *item]`` that nobody else holds.
        entries: the tensors by key.
        num_rows: the size of their first dimension.

    Raises:
        SchemaError: the batch is no TensorDict of that many rows.
    """
    if not isinstance(batch, TensorDictBase) or batch.batch_size[:1] != (num_rows,):
        found = (
            f"batch size {tuple(batch.batch_size)}"
            if isinstance(batch, TensorDictBase)
            else type(batch).__name__
        )
        raise SchemaError(
            f"{sorted(map(str, entries))} can't be added to the batch: expected a TensorDict of {num_rows} rows, "
            f"got {found}; collate_fn has to keep the rows"
        )
    size, device = batch.batch_size, batch.device
    # Entries of a plain TensorDict with one batch dimension are put past its checks: this runs for each sample.
    plain = type(batch) is TensorDict and len(size) == 1 and (device is None or device.type == "cpu")
    for key, value in entries.items():
        group: Any = batch
        last: Any = key
        if plain and type(key) is tuple:
            *parts, last = key
            for part in parts:
                group = group._tensordict.get(part) if type(group) is TensorDict else None
        if plain and type(group) is TensorDict:
            group._tensordict[last] = value
        else:
            _add_entry(batch, as_path(key), value, size, device)


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
