"""Record formats: which one records have, and what is done to records before they have one.

A format is found in the first data that is written and frozen from then on. It knows the leaves' shapes and
dtypes (a `Schema`) and checks later data against them; the storage sees nothing but lists of leaves in a
fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch.utils import _pytree

from gleanrl.data.replay_buffers.storages.record_format import RecordFormat, check_storable, leading
from gleanrl.data.replay_buffers.storages.tensorclasses import from_names
from gleanrl.data.replay_buffers.storages.tensordict_format import TensorDictFormat, find_tensordict_format
from gleanrl.data.replay_buffers.storages.tree_format import (
    TreeFormat,
    as_tensor,
    find_tree_format,
    no_tensor,
    tree_path,
)
from gleanrl.errors import GleanError, SchemaError
from gleanrl.schema import Field, Schema
from gleanrl.tree import as_key, check_uniform, iter_leaves


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
