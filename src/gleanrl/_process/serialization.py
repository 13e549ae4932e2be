"""Serialization of data for another process: one pickle without the tensors, and separate buffers with their memory.

Shared memory and object stores accept the buffers of a pickle (protocol 5) without a copy. The receiver reads them in
the memory in which they arrived. Small tensors share one buffer, because a buffer for each would cost more than their
bytes.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.tensordicts import SLICE_ENDS, dict_batch, level_of
from gleanrl._os.interrupts import renew_in_child

_Buffer: TypeAlias = Any  # any object with the buffer protocol
_SMALL = 1 << 14
"""In bytes. Tensors up to this size share one buffer; other memory up to this size stays in the pickle."""
_ALIGNED = 16
_pool = BufferPool()
renew_in_child(_pool)


class PickledBatch:
    """Data that are packed when they are pickled, and unpickled as `Arrived`.

    CPU tensors travel as buffers, also inside TensorDicts, lists and tensorclasses. All other data are pickled with
    cloudpickle.

    Args:
        data: the data; they aren't copied before they are pickled.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and arguments of `Arrived` for pickle.

        The buffers share the memory of large contiguous tensors.
        """
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(self._data)
        return Arrived, (file.getvalue(), packer.buffers())


class Arrived:
    """The receiver's side of a `PickledBatch`.

    Args:
        pickled: the pickle without the content of `buffers`.
        buffers: the memory in which the data arrived, usually read-only.
    """

    def __init__(self, pickled: bytes, buffers: Sequence[_Buffer]) -> None:
        self._pickled, self._buffers = pickled, buffers

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, without the pickle."""
        return sum(memoryview(buffer).nbytes for buffer in self._buffers)

    def open(self) -> Any:
        """Return the data in fresh memory that belongs to the caller."""
        return pickle.loads(self._pickled, buffers=[_copied(buffer) for buffer in self._buffers])

    def view(self) -> Any:
        """Return the data in the memory in which they arrived, and keep it alive. The caller must not write to them."""
        return pickle.loads(self._pickled, buffers=self._buffers)


class _SharedBuffer:
    """Placeholder for the buffer of small tensors, which is complete only when everything is packed."""


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        buffers, placeholder = list[pickle.PickleBuffer](), pickle.PickleBuffer(b"")

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            """Keep a buffer out of the pickle, or return True to leave it in."""
            if buffer is not placeholder and buffer.raw().nbytes <= _SMALL:
                return True
            buffers.append(buffer)
            return False

        # The callback isn't a method of this object: a reference cycle would keep the data until the next garbage
        # collection.
        super().__init__(file, protocol=5, buffer_callback=keep_in_band)
        self._buffers, self._placeholder = buffers, placeholder
        self._shared, self._small, self._end = _SharedBuffer(), list[Any](), 0

    def buffers(self) -> list[pickle.PickleBuffer]:
        """Return the buffers outside of the pickle. Call it after `dump`."""
        small = pickle.PickleBuffer(b"".join(self._small))
        return [small if buffer is self._placeholder else buffer for buffer in self._buffers]

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is MemoryMappedTensor:
            if obj.device.type == "cpu" and obj.layout is torch.strided and not obj.requires_grad:
                return self._reduced_tensor(obj)
        elif kind is TensorDict:
            names = obj.names
            named = names if any(name is not None for name in names) else None
            return _level, (
                dict(level_of(obj)),
                tuple(obj.batch_size),
                obj.device,
                named,
                obj.is_locked,
                vars(obj).get(SLICE_ENDS),
            )
        elif kind is _SharedBuffer:
            return _memory, (self._placeholder,)
        return super().reducer_override(obj)

    def _reduced_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        name, shape, array = _NAMES[tensor.dtype], tuple(tensor.shape), _array(tensor)
        if array.nbytes > _SMALL:
            return _tensor_of, (pickle.PickleBuffer(array), name, shape)
        begin, padding = self._end, -array.nbytes % _ALIGNED
        self._end += array.nbytes + padding
        self._small += array, bytes(padding)
        return _tensor_at, (self._shared, name, shape, begin)


def _array(tensor: torch.Tensor) -> Any:
    try:
        return tensor.contiguous().numpy()
    except (
        TypeError,
        RuntimeError,
    ):  # NumPy lacks the dtype, or the tensor is a lazy conjugate or negative view.
        return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def _memory(buffer: _Buffer) -> np.ndarray[Any, Any]:
    """Return a buffer's bytes as an array."""
    if not memoryview(buffer).nbytes:  # An empty buffer may have no address.
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(buffer))


def _tensor_at(memory: np.ndarray[Any, Any], name: str, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    """Return the tensor that begins at byte `begin`. It uses the memory, but has a separate storage."""
    dtype = _DTYPES[name]
    numpy_dtype = _NUMPY_DTYPES.get(name)
    if numpy_dtype is not None:
        return torch.from_numpy(np.ndarray(shape, numpy_dtype, memory, begin))
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(memory[begin : begin + num_bytes]).view(dtype).view(shape)


def _tensor_of(buffer: _Buffer, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return _tensor_at(_memory(buffer), name, shape, 0)


class _Memory:
    """Presents a buffer to NumPy as writable memory.

    Torch warns of read-only memory, and can't mark a tensor as read-only.
    """

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


_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""The dtypes that NumPy has, too."""


def _level(
    entries: dict[str, Any], size: tuple[int, ...], device: Any, names: Any, locked: bool, ends: Any
) -> TensorDict:
    level = dict_batch(entries, torch.Size(size), device)
    if ends is not None:
        level.__dict__[SLICE_ENDS] = ends
    if names is not None:
        level.names = names
    return level.lock_() if locked else level


def _copied(buffer: _Buffer) -> _Buffer:
    if memoryview(buffer).nbytes < _pool.min_bytes:
        return bytearray(buffer)
    arrived = np.frombuffer(buffer, np.uint8)
    own = _pool.empty(arrived.shape, arrived.dtype)
    own[...] = arrived
    return own
