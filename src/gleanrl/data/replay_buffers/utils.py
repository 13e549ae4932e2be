"""Stacking of samples, and loading of several parts' states together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.tensordicts import Path, as_key, iter_leaves
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import Stateful
from gleanrl.compat import bind_unserved
from gleanrl.errors import InvalidArgumentError, SchemaError


def stack_tensors(list_of_tensor_iterators: Iterable[Iterable[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Stack the first tensors of all iterators, the second ones, and so on.

    Args:
        list_of_tensor_iterators: iterators of equal length. Tensors at the same position have the same shape.

    Returns:
        One tensor per position, with a new first dimension as long as the list.

    Raises:
        InvalidArgumentError: iterators of different lengths.

    Examples:
        >>> import torch
        >>> a, b = stack_tensors([[torch.ones(3), torch.zeros(1, 2)] for _ in range(4)])
        >>> a.shape, b.shape
        (torch.Size([4, 3]), torch.Size([4, 1, 2]))
    """
    rows = [list(row) for row in list_of_tensor_iterators]
    if len({len(row) for row in rows}) > 1:
        raise InvalidArgumentError(
            f"stack_tensors: expected iterators of one length, got lengths {[len(row) for row in rows]}"
        )
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


class InPlaceSampler:
    """A `collate_fn` that stacks records into the memory of the last batch, which it overwrites.

    This saves an allocation, but a caller who keeps a batch sees it change. A batch of another size or structure gets
    new memory.

    Args:
        device: the device of the batch; None for the device of the records.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> collate = InPlaceSampler()
        >>> first = collate([TensorDict({"x": torch.ones(())}), TensorDict({"x": torch.zeros(())})])
        >>> second = collate([TensorDict({"x": torch.zeros(())}), TensorDict({"x": torch.zeros(())})])
        >>> first is second, first["x"]
        (True, tensor([0., 0.]))
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self.device = None if device is None else torch.device(device)
        self.out: Any = None

    def __call__(self, list_of_tds: Sequence[TensorDictBase]) -> Any:
        """Return the records as one batch ``[n, ...]``, in the memory of the last batch if size and structure fit."""
        stacked = torch.stack(list(list_of_tds))
        if self.device is not None:
            stacked = stacked.to(self.device)
        if self.out is None or describe(self.out) != describe(stacked):
            self.out = stacked.contiguous()
        else:
            self.out.update_(stacked)
        return self.out


def stack_samples(samples: Sequence[Any], names: Sequence[str]) -> Any:
    """Return samples as one, ``[len(samples), ...]``; TensorDicts that differ in their keys only become a lazy stack.

    Args:
        samples: TensorDicts, tensorclasses, tensors, or trees of tensors.
        names: the name of each sample in error messages.

    Raises:
        SchemaError: samples differ in a shape, a dtype or a device, trees or tensorclasses differ in a key, or a sample
            is another object. The message names the keys.
    """
    descriptions = [describe(sample) for sample in samples]
    if any(found != descriptions[0] for found in descriptions) and _can_be_lazy(samples, descriptions):
        return LazyStackedTensorDict(*samples, stack_dim=0)
    for name, found in zip(names, descriptions, strict=True):
        if found != descriptions[0]:
            raise SchemaError(
                f"sample: the samples of {names[0]} and {name} can't be stacked: "
                f"{_difference(descriptions[0], found)}; make them equal by a transform of each member, or "
                "give the ensemble a collate_fn, which gets the list of samples"
            )
    if isinstance(samples[0], LazyStackedTensorDict):
        return LazyStackedTensorDict.lazy_stack(list(samples))
    if is_tensor_collection(samples[0]):
        return torch.stack(list(samples))
    try:
        return _pytree.tree_map(lambda *leaves: torch.stack(leaves), *samples)
    except TypeError as cause:
        raise SchemaError(
            f"sample: samples of {type(samples[0]).__name__} can't be stacked: {cause}; give the ensemble a "
            "collate_fn, which gets the list of samples"
        ) from cause


def _can_be_lazy(samples: Sequence[Any], descriptions: Sequence[dict[Path, str]]) -> bool:
    """Return whether samples are TensorDicts that differ only in their keys."""
    if not all(isinstance(sample, TensorDictBase) for sample in samples):
        return False
    known: dict[Path, str] = {}
    return all(known.setdefault(path, kind) == kind for found in descriptions for path, kind in found.items())


def describe(sample: Any) -> dict[Path, str]:
    """Return the type of each entry by path, with the shape, dtype and device of a tensor."""
    if not is_tensor_collection(sample):
        pairs, spec = _pytree.tree_flatten_with_path(sample)
        leaves: dict[Path, str] = {(_pytree.keystr(key_path),): _kind(leaf) for key_path, leaf in pairs}
        return leaves if len(leaves) == 1 and ("",) in leaves else {**leaves, (): str(spec)}
    found: dict[Path, str] = {}
    _describe_groups(sample, (), found)
    return found


def _describe_groups(group: Any, path: Path, found: dict[Path, str]) -> None:
    found[path] = f"a {_class_of(group)} {tuple(group.batch_size)}"
    if isinstance(group, LazyStackedTensorDict):
        found |= {own: _lazy_kind(leaf, group.ndim) for own, leaf in iter_leaves(group, path)}
        return
    for key in group.keys():
        value = group.get(key)
        if is_tensor_collection(value) and not is_non_tensor(value):
            _describe_groups(value, (*path, key), found)
        else:
            found[(*path, key)] = _kind(value)


def _class_of(group: Any) -> str:
    return "TensorDict" if isinstance(group, TensorDictBase) else type(group).__name__


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return f"a {type(leaf).__name__}"


def _lazy_kind(leaf: Leaf, dims: int) -> str:
    """Return the properties that lazily stacked records must have in common, which exclude the sizes of tensors."""
    if isinstance(leaf, ObjectColumn):
        return "objects" if leaf.blank is None else f"{leaf.blank.ndim} dimensions of {leaf.blank.dtype}"
    return f"{leaf.ndim - dims} dimensions of {leaf.dtype}"


def _difference(first: dict[Path, str], other: dict[Path, str]) -> str:
    """Return text that says where two descriptions differ: at common keys, or in keys that only one has."""
    differing = [path for path in first if path in other and first[path] != other[path]]
    parts = [f"{as_key(path)!r} is {first[path]} and {other[path]}" for path in differing if path]
    if parts:
        return "; ".join(parts)
    for which, entries, compared in (("first", first, other), ("second", other, first)):
        only = [as_key(path) for path in entries if path and path not in compared]
        if only:
            parts.append(f"only the {which} has {only}")
    return "; ".join(parts or [f"{first[()]} and {other[()]}"])


def states_in(state_dict: Any, name: str, count: int) -> list[Any]:
    """Return the list of `count` states under `name`; `SchemaError` for any other value."""
    states = state_dict.get(name) if isinstance(state_dict, dict) else None
    if not isinstance(states, list) or len(states) != count:
        raise SchemaError(f"load_state_dict: expected the states of {count} members under {name!r}")
    return states


def loading_all(parts: Sequence[Stateful[Any]], states: Sequence[Any]) -> Callable[[], None]:
    """Parse each part's state and return the callback that loads all of them.

    All states are parsed here, so a wrong one raises `SchemaError` and changes nothing. The callback raises an
    interrupt only after all states are loaded.
    """
    values = [part.parse(state) for part, state in zip(parts, states, strict=True)]

    def adopt() -> None:
        for part, value in zip(parts, values, strict=True):
            part.adopt(value)

    return partial(to_the_end, adopt)


def load_all(parts: Sequence[Stateful[Any]], states: Sequence[Any]) -> None:
    """Load each part's state, or raise `SchemaError` and load none; see `loading_all`."""
    loading_all(parts, states)()


bind_unserved(__name__, globals())
