"""Nested batches and flat leaves: beside `gleanrl.layout` the only module that knows TensorDict's internals.

A *path* is a tuple of strings, ``("next", "reward")``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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

from gleanrl.devices import device_of
from gleanrl.errors import InvalidTypeError, SchemaError
from gleanrl.objects import Leaf, Objects, as_entry, lazy_leaf, non_tensors

Path: TypeAlias = tuple[str, ...]
NestedKey: TypeAlias = str | tuple[str, ...]

FLAGS = ("done", "terminated", "truncated")
"""The flags of a step; each group of them stands side by side."""
SLICE_ENDS = "_gleanrl_slice_ends"
"""The attribute by which a batch remembers where its slices end, ``(n,)`` bool; see `gleanrl.data.boundaries`."""


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


def iter_leaves(batch: Any, prefix: Path = (), dims: int | None = None) -> Iterator[tuple[Path, Leaf]]:
    """Yield ``(path, leaf)`` for every leaf of `batch`, depth first, in insertion order.

    A leaf is a tensor, or `Objects`: what isn't a tensor, and tensors whose shapes differ in the parts of a lazy stack.

    Args:
        batch: a TensorDict or another tensor collection.
        prefix: what the paths begin with.
        dims: the batch dimensions of a record's place; None for those of `batch`.

    Raises:
        SchemaError: if an entry is of a kind that a TensorDict doesn't hold, or parts of a lazy stack differ in more
            than sizes.
    """
    dims = len(batch.batch_size) if dims is None else dims
    if is_tensorclass(batch):
        batch = batch._tensordict  # which wraps what isn't a tensor
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
                f"{as_key(path)!r} holds {type(sample).__name__}, which isn't part of a TensorDict"
            )


def flatten(batch: TensorDictBase) -> dict[Path, Leaf]:
    """Return the leaves of `batch` as a flat dictionary in insertion order (see `iter_leaves`)."""
    return dict(iter_leaves(batch))


def set_leaf(batch: Any, path: Path, leaf: Leaf) -> None:
    """Set an entry of a TensorDict to a leaf; tensors of unlike shapes only in a lazy stack."""
    if isinstance(leaf, Objects) and leaf.blank is not None and leaf.ndim:
        if not isinstance(batch, LazyStackedTensorDict):  # the lazy stack is one of its groups
            set_leaf(batch.get(path[0]), path[1:], leaf)
            return
        for part, piece in zip(batch.tensordicts, leaf.unbind(batch.stack_dim), strict=True):
            set_leaf(part, path, piece)
    else:
        batch.set(path, as_entry(leaf))


def group_sizes(batch: Any, dims: int, prefix: Path = ()) -> dict[Path, tuple[int, ...]]:
    """Return what the nested levels of a TensorDict, or of a spec, have beyond its own first `dims` dimensions.

    Only those are named that have anything; see `Layout`.
    """
    if isinstance(batch, LazyStackedTensorDict) and batch.stack_dim < dims:
        return group_sizes(batch.tensordicts[0], dims - 1, prefix)  # as it is in every part
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
    """Return the nested levels of a TensorDict that hold nothing at all."""
    if isinstance(batch, LazyStackedTensorDict):
        return empty_groups(batch.tensordicts[0], prefix)
    found: list[Path] = []
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            found += empty_groups(value, (*prefix, key)) or ([] if len(value.keys()) else [(*prefix, key)])
    return found


def outermost(groups: Iterable[Path]) -> list[Path]:
    """Return the `groups` that lie in no other one: the flags there say when the episode of all below ends.

    Examples:
        >>> outermost([(), ("agents",)]), outermost([("red",), ("blue",)])
        ([()], [('red',), ('blue',)])
    """
    known = list(dict.fromkeys(groups))
    return [g for g in known if not any(g[: len(other)] == other for other in known if other != g)]


def stand_apart(paths: Collection[Path]) -> bool:
    """Return whether none of `paths` lies in another one.

    Examples:
        >>> stand_apart([("a", "b"), ("a", "c")]), stand_apart([("a", "b"), ("a",)])
        (True, False)
    """
    known = set(paths)
    return not any(path[:end] in known for path in known for end in range(1, len(path)))


def place_of(batch: Any) -> torch.device:
    """Return where a batch is; see `device_of`."""
    return device_of(leaf for _, leaf in iter_leaves(batch))


def check_uniform(batch: Any, where: str) -> None:
    """Raise `SchemaError` if `batch` is a lazy stack of parts with unlike keys: it shows what they share alone."""
    if not isinstance(batch, LazyStackedTensorDict):
        return
    parts = [set(part.keys(True, True, is_leaf=_is_leaf)) for part in batch.tensordicts]
    for position, part in enumerate(parts):
        if part != parts[0]:
            raise SchemaError(
                f"{where}: expected the same keys in every part of the stacked batch, part {position} differs from "
                f"the first one in {sorted(part ^ parts[0], key=str)}"
            )


def _is_leaf(kind: type[Any]) -> bool:
    """Return whether values of a class are leaves, those that aren't tensors included."""
    return not is_tensor_collection(kind) or is_non_tensor(kind)


def is_private(path: Path) -> bool:
    """Return whether any part of `path` starts with an underscore."""
    return any(part.startswith("_") for part in path)


def level_of(batch: Any) -> Mapping[str, Any]:
    """Return the entries of one level: TensorDict's own dictionary, or one made by the public interface."""
    if type(batch) is TensorDict:
        return batch._tensordict
    return {key: batch.get(key) for key in batch.keys()}


def num_entries(batch: Any) -> int:
    """Return how many entries one level has, groups included."""
    return len(batch._tensordict if type(batch) is TensorDict else batch.keys())


def leaf_at(batch: Any, path: Path) -> torch.Tensor | None:
    """Return the tensor at `path`; None if there is none, or `batch` is no TensorDict."""
    found = _entry_at(batch, path)
    return found if isinstance(found, torch.Tensor) else None


def group_at(batch: Any, path: Path) -> Any:
    """Return the nested TensorDict at `path`, of a tensorclass that of its tensors; ``{}`` if there is none."""
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
    """Take an entry out of a TensorDict, if it's there."""
    if type(batch) is TensorDict and len(path) == 1 and not batch._is_locked:
        batch._tensordict.pop(path[0], None)
    else:
        batch.exclude(path, inplace=True)


def put_leaf(batch: Any, path: Path, value: Any) -> None:
    """Set an entry of a TensorDict, past its checks where they can't find anything."""
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
