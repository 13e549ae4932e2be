"""Hooks of other releases that convert TensorDicts to trajectories, each observation once, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, flatten
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.flat import (
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    flags_of,
)
from gleanrl.data.replay_buffers.checkpointers.h5 import H5StorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.trajectories import DONE, InMemory, Path, Streams, join, split
from gleanrl.errors import CheckpointError, CorruptCheckpointError, UnsupportedError

_OFFSETS, _LENGTHS, _SIZES = (("trajectories", name) for name in ("offsets", "lengths", "sizes"))


class _Hook:
    """The keys that hooks use, and the conversions that they share; see `TED2Flat`."""

    def __init__(
        self,
        done_key: NestedKey = ("next", "done"),
        shift_key: NestedKey = "shift",
        is_full_key: NestedKey = "is_full",
        done_keys: Sequence[NestedKey] = DONE,
        reward_keys: Sequence[NestedKey] = ("reward",),
    ) -> None:
        self.done_key, self.shift_key, self.is_full_key = done_key, shift_key, is_full_key
        self.done_keys, self.reward_keys = done_keys, reward_keys
        self.shift, self.is_full = 0, False

    def _own(self) -> tuple[Path, ...]:
        return _OFFSETS, _LENGTHS, _SIZES, as_path(self.shift_key), as_path(self.is_full_key)

    def _flat(self, data: TensorDictBase) -> TensorDict:
        leaves = flatten(data)
        for path, leaf in leaves.items():
            if not isinstance(leaf, torch.Tensor) or path in self._own():
                raise CheckpointError(
                    f"{as_key(path)!r}: expected a tensor, under another key than {self._own()}, which the hook adds"
                )
        if not data.ndim:
            raise CheckpointError("expected steps in the last batch dimension, got a TensorDict without any")
        rows, paths = data.batch_size.numel(), list(leaves)
        columns = [leaf.reshape(rows, *leaf.shape[data.ndim :]) for leaf in leaves.values()]
        streams = _streams(data.batch_size, self.shift)
        values, offsets = split(paths, InMemory(columns), streams, flags_of(self.done_keys))
        flat = TensorDict({}, [])
        for path, value in zip(paths, values, strict=True):
            if value is not None:
                flat.set(path, value.tensor())
        own = (offsets, torch.tensor(data.batch_size), torch.tensor(self.shift), torch.tensor(self.is_full))
        for key, part in zip((_OFFSETS, *self._own()[2:]), own, strict=True):
            flat.set(key, part)
        return flat

    def _ted(self, flat: TensorDictBase, out: TensorDictBase | None) -> TensorDictBase:
        leaves = flatten(flat)
        try:
            offsets, sizes, shift, _ = (leaves.pop(key) for key in (_OFFSETS, *self._own()[2:]))
            shape = torch.Size(sizes.tolist())
            rows = shape.numel() + len(offsets) - 1
            columns: dict[Path, Any] = dict(leaves)
            for path, leaf in leaves.items():
                if path[0] != "next" and len(leaf) == rows > shape.numel():
                    columns[("next", *path)] = None
            found = join(list(columns), list(columns.values()), _streams(shape, int(shift)), offsets)
        except (KeyError, IndexError, ValueError, AttributeError) as cause:
            raise CorruptCheckpointError(
                f"expected data that TED2Flat or TED2Nested made: {cause}"
            ) from cause
        made = TensorDict({}, shape)
        for path, column in zip(columns, found, strict=True):
            made.set(path, column.reshape(*shape, *column.shape[1:]))
        return made if out is None else out.update_(made)


def _streams(shape: torch.Size, shift: int) -> Streams:
    steps = shape[-1]
    times = (np.arange(steps) + shift) % max(steps, 1)
    return Streams((np.arange(prod(shape[:-1]))[:, None] * steps + times).reshape(-1), steps)


class TED2Flat(_Hook):
    """Puts trajectories one after the other, each observation once; see `NestedStorageCheckpointer`.

    The result is on the CPU and has no batch dimensions. It has one row for each step. A key that also exists under
    ``"next"`` has one more row for each trajectory, unless most rows under ``"next"`` differ from the following step.
    ``("trajectories", "offsets")`` holds where trajectories begin. `Flat2TED` restores tensors and batch size exactly
    for any data, on the CPU.

    Args:
        done_key: has no effect: all of `done_keys` are read.
        shift_key: key of the result that holds the position of the oldest step. The attribute `shift` sets it, 0 by
            default.
        is_full_key: key of the result that holds whether the data are a full ring. The attribute `is_full` sets it,
            False by default.
        done_keys: flags under ``"next"`` that end trajectories. The restored data don't depend on them.
        reward_keys: has no effect: rewards are kept unchanged.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> after = {"x": torch.tensor([1, 2, 8, 9]), "done": torch.tensor([0, 1, 0, 0]).bool()}
        >>> data = TensorDict({"x": torch.tensor([0, 1, 7, 8]), "next": after}, [4])
        >>> flat = TED2Flat()(data)
        >>> flat["x"], flat["trajectories", "offsets"]
        (tensor([0, 1, 2, 7, 8, 9]), tensor([0, 2, 4]))
        >>> bool((Flat2TED()(flat) == data).all())
        True
    """

    def __call__(self, data: TensorDictBase, path: File | None = None) -> TensorDictBase:
        """Return the trajectories of ``[*batch, steps]``.

        Args:
            data: a TensorDict that holds only tensors.
            path: a folder for the result as memory maps; None for memory. It is not a checkpoint: nothing is synced.

        Raises:
            CheckpointError: an entry isn't a tensor or has a key that the hook adds, or there is no batch dimension.
        """
        flat = self._flat(data)
        return flat if path is None else flat.memmap(path)


class Flat2TED(_Hook):
    """Restores the data given to `TED2Flat`; use the same arguments.

    `done_key`, `done_keys` and `reward_keys` have no effect: the rows show which ones were left out.
    """

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return the steps, ``[*batch, steps]``; in `out` if that is given, which needs the same keys and shapes.

        Raises:
            CorruptCheckpointError: `TED2Flat` didn't make the data.
        """
        return self._ted(data, out)


class TED2Nested(_Hook):
    """Makes nested tensors of trajectories, ``[trajectories]``, each observation once; see `TED2Flat`."""

    def __call__(self, data: TensorDictBase, path: File | None = None) -> TensorDictBase:
        """Return the trajectories of ``[*batch, steps]``; see `TED2Flat`. No step at all raises `CheckpointError`."""
        flat = self._flat(data)
        leaves = flatten(flat)
        offsets, count = leaves.pop(_OFFSETS), len(flat[_OFFSETS]) - 1
        if not count:
            raise CheckpointError("expected at least one step to make nested tensors of, got none")
        ends = {data.numel(): offsets, data.numel() + count: offsets + torch.arange(count + 1)}
        own = {key: leaves.pop(key) for key in self._own()[2:]}
        nested = TensorDict({}, [count])
        nested.set(_LENGTHS, offsets.diff())
        for path_, leaf in own.items():
            nested.set(path_, leaf.expand(count, *leaf.shape).clone())
        for path_, leaf in leaves.items():
            nested.set(path_, torch.nested.nested_tensor_from_jagged(leaf, ends[len(leaf)]))
        return nested if path is None else nested.memmap(path)


class Nested2TED(_Hook):
    """Restores the data given to `TED2Nested`; see `Flat2TED`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return the steps, ``[*batch, steps]``; in `out` if that is given, which needs the same keys and shapes.

        Raises:
            CorruptCheckpointError: `TED2Nested` didn't make the data.
        """
        flat, own = TensorDict({}, []), self._own()[2:]
        for path, leaf in _leaves(data).items():
            if path == _LENGTHS:
                flat.set(_OFFSETS, torch.cat([leaf.new_zeros(1), leaf.cumsum(0)]))
            else:
                flat.set(path, leaf[0].clone() if path in own else leaf.values())
        return self._ted(flat, out)


class H5Split(_Hook):
    """Makes one entry of each trajectory in the result of `TED2Nested`: ``"traj_0000"`` and so on, as views."""

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """Return the trajectories, without batch dimensions."""
        digits = max(4, len(str(len(data) - 1)))
        split_ = {f"traj_{number:0{digits}d}": TensorDict({}, []) for number in range(len(data))}
        for path, leaf in _leaves(data).items():
            for part, row in zip(split_.values(), leaf.unbind(0), strict=True):
                part.set(path, row)
        return TensorDict(split_, [])


class H5Combine(_Hook):
    """Restores the data given to `H5Split`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return the nested tensors, ``[trajectories]``, as copies; in `out` if that is given."""
        parts = [flatten(data[name]) for name in sorted(data.keys())]
        own, made = (_LENGTHS, *self._own()[2:]), TensorDict({}, [len(parts)])
        for path in parts[0]:
            rows = [part[path] for part in parts]
            if path in own:
                made.set(path, torch.stack(rows))
            else:
                ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
                made.set(path, torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends))
        return made if out is None else out.update(made)


def _leaves(data: TensorDictBase) -> dict[Path, torch.Tensor]:
    """Return the leaves by path, nested tensors included."""
    return {as_path(key): data.get(key) for key in data.keys(include_nested=True, leaves_only=True)}


_SAVING: dict[type[_Hook], Callable[..., StorageCheckpointerBase]] = {
    TED2Flat: FlatStorageCheckpointer,
    TED2Nested: NestedStorageCheckpointer,
    H5Split: H5StorageCheckpointer,
}
_LOADING = (Flat2TED, Nested2TED, H5Combine)


def save_form(hook: Any) -> StorageCheckpointerBase:
    """Return the checkpointer that writes records in the form of a `TED2Flat`, `TED2Nested` or `H5Split`.

    It takes over `done_keys` and `reward_keys`. All other options of the hook have no effect.

    Raises:
        UnsupportedError: any other object, also one of a derived class, whose overrides would have no effect.
    """
    if type(hook) not in _SAVING:
        raise _no_hook("register_save_hook", hook, _SAVING)
    return _SAVING[type(hook)](done_keys=hook.done_keys, reward_keys=hook.reward_keys)


def check_load_hook(hook: Any) -> None:
    """Raise `UnsupportedError` unless the hook is a `Flat2TED`, `Nested2TED` or `H5Combine`; see `save_form`."""
    if type(hook) not in _LOADING:
        raise _no_hook("register_load_hook", hook, _LOADING)


def _no_hook(call: str, hook: Any, known: Iterable[type[_Hook]]) -> UnsupportedError:
    names = ", ".join(kind.__name__ for kind in known)
    return UnsupportedError(
        f"{call}: expected one of {names}, got {type(hook).__name__}; for a form of your own derive from "
        "StorageCheckpointerBase, and set the storage's checkpointer"
    )
