"""Tensor storage in memory, taken at the first write."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers.storages.memory import HeapAllocator
from gleanrl.data.replay_buffers.storages.tabled import TabledStorage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.devices import usable_device
from gleanrl.errors import UnsupportedError


class LazyTensorStorage(TensorStorage):
    """A tensor storage in memory, allocated zeroed at the first write.

    Args:
        max_size: transitions that fit.
        device: where the records are kept and come back; ``"auto"`` for the device of the first data.
        ndim: leading batch dimensions of the data that are slots; the first is time.
        compilable: has no effect, see `ListStorage`.
        consolidated: has no effect: the columns lie in one region of memory anyway.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> storage = LazyTensorStorage(100, ndim=2)
        >>> storage.set(slice(4), TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
        >>> storage.max_size, storage.shape, len(storage)
        (102, torch.Size([4, 3]), 12)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
    ) -> None:
        place = usable_device("cpu" if device == "auto" else device)
        if place.type == "meta":
            raise UnsupportedError("device: meta tensors hold no data; use a real device")
        TabledStorage.__init__(self, max_size, HeapAllocator(place), place, ndim, device == "auto")
