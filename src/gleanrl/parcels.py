"""Data on its way to another process: one pickle of what isn't tensors, and beside it the tensors' own memory.

Buffers beside a pickle (protocol 5) are what shared memory and object stores take as they are: nothing is copied on the
way out, and whoever gets them looks straight at the memory in which they arrived.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict

from gleanrl.pool import BufferPool
from gleanrl.tree import dict_batch, level_of

_Buffer: TypeAlias = Any  # of the buffer protocol
_IN_BAND = 512
"""Bytes up to which memory goes into the pickle: a buffer of its own costs more than a copy."""
_pool = BufferPool()


class Parcel:
    """Data that are packed when they are pickled, and arrive as `Arrived`.

    Tensors on the CPU go as buffers, whatever holds them: TensorDicts, lists, tensorclasses. All else is pickled
    with cloudpickle.

    Args:
        data: isn't copied before it's pickled.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what arrives."""
        buffers: list[pickle.PickleBuffer] = []

        def beside(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes <= _IN_BAND:
                return True
            buffers.append(buffer)
            return False

        file = io.BytesIO()
        _Packer(file, protocol=5, buffer_callback=beside).dump(self._data)
        return Arrived, (file.getvalue(), buffers)


class Arrived:
    """A parcel that has arrived.

    Args:
        pickled: the data without what is in `buffers`.
        buffers: the memory in which it arrived, read-only as a rule.
    """

    def __init__(self, pickled: bytes, buffers: Sequence[_Buffer]) -> None:
        self._pickled, self._buffers = pickled, buffers

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors beside the pickle."""
        return sum(memoryview(buffer).nbytes for buffer in self._buffers)

    def open(self) -> Any:
        """Return the data in fresh memory, which is the caller's own."""
        return pickle.loads(self._pickled, buffers=[_fresh(buffer) for buffer in self._buffers])

    def view(self) -> Any:
        """Return the data in the memory in which it arrived, which lives as long as they do: only to be read."""
        return pickle.loads(self._pickled, buffers=self._buffers)


class _Packer(cloudpickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        kind = type(found)
        if kind is torch.Tensor or kind is MemoryMappedTensor:
            if found.device.type == "cpu" and found.layout is torch.strided and not found.requires_grad:
                return _rebuilt, _taken_apart(found)
        elif kind is TensorDict:
            names = found.names
            named = names if any(name is not None for name in names) else None
            return _level, (
                dict(level_of(found)),
                tuple(found.batch_size),
                found.device,
                named,
                found.is_locked,
            )
        return super().reducer_override(found)


def _taken_apart(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        array: Any = tensor.contiguous().numpy()
    except (
        TypeError,
        RuntimeError,
    ):  # dtypes that NumPy hasn't got, and views that aren't as they are in memory
        array = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return pickle.PickleBuffer(array), _NAMES[tensor.dtype], tuple(tensor.shape)


def _rebuilt(buffer: _Buffer, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not memoryview(buffer).nbytes:  # which torch refuses
        return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
    return torch.from_numpy(np.asarray(_Memory(buffer))).view(_DTYPES[dtype]).view(shape)


class _Memory:
    """A buffer as NumPy knows memory that may be written: torch warns of any other, and has no word for "read-only"."""

    def __init__(self, buffer: _Buffer) -> None:
        self._array = np.frombuffer(buffer, np.uint8)  # keeps the buffer alive
        address, _ = self._array.__array_interface__["data"]
        self.__array_interface__ = {**self._array.__array_interface__, "data": (address, False)}


_DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _level(
    entries: dict[str, Any], size: tuple[int, ...], device: Any, names: Any, locked: bool
) -> TensorDict:
    level = dict_batch(entries, torch.Size(size), device)
    if names is not None:
        level.names = names
    return level.lock_() if locked else level


def _fresh(buffer: _Buffer) -> _Buffer:
    if memoryview(buffer).nbytes < _pool.min_bytes:
        return bytearray(buffer)
    arrived = np.frombuffer(buffer, np.uint8)
    own = _pool.empty(arrived.shape, arrived.dtype)
    own[...] = arrived
    return own
