"""Records that are one tensor, or dictionaries, lists and tuples of tensors or NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl.data.replay_buffers.storages.record_format import (
    RecordFormat,
    check_storable,
    leading,
    plain_format,
)
from gleanrl.errors import InvalidTypeError, SchemaError
from gleanrl.schema import Field, Schema
from gleanrl.tree import Path, as_key


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
