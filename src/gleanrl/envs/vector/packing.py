"""TensorDicts on their way through a pipe: flat arrays where that is possible, pickled whole where it isn't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.layout import Layout
from gleanrl.schema import numpy_twin, numpy_view
from gleanrl.tree import Path, flatten


@dataclass(frozen=True)
class Packed:
    """A TensorDict without tensors.

    Attributes:
        arrays: its leaves.
        dtypes: the dtypes of those that NumPy doesn't have.
        batch_size: its batch size, which those below share.
        device: its device.
    """

    arrays: dict[Path, np.ndarray[Any, Any]]
    dtypes: dict[Path, torch.dtype]
    batch_size: tuple[int, ...]
    device: torch.device | None


def pack(batch: TensorDictBase | None) -> Any:
    """Return what `unpack` makes an equal TensorDict of; its tensors are copied when that is pickled."""
    if batch is None:
        return None
    if isinstance(batch, LazyStackedTensorDict):
        return [batch.stack_dim, [pack(part) for part in batch.unbind(batch.stack_dim)]]
    leaves = flatten(batch)
    plain = all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())
    if not leaves or not plain or not _is_plain(batch):
        return batch.cpu()
    on_cpu = {path: leaf.detach().cpu().contiguous() for path, leaf in leaves.items()}
    arrays = {path: numpy_view(leaf) for path, leaf in on_cpu.items()}
    odd = {p: leaf.dtype for p, leaf in on_cpu.items() if numpy_twin(leaf.dtype) is not leaf.dtype}
    return Packed(arrays, odd, tuple(batch.batch_size), batch.device)


def unpack(packed: Any) -> Any:
    """Return the TensorDict that was packed, or None."""
    if packed is None or isinstance(packed, TensorDictBase):
        return packed
    if isinstance(packed, list):
        dim, parts = packed
        return LazyStackedTensorDict.lazy_stack([unpack(part) for part in parts], dim)
    leaves = [_tensor(array, packed.dtypes.get(path)) for path, array in packed.arrays.items()]
    batch = Layout(packed.arrays).build(leaves, torch.Size(packed.batch_size))
    return batch if packed.device is None else batch.to(packed.device)


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor if dtype is None else tensor.view(dtype)


def _is_plain(batch: TensorDictBase) -> bool:
    """Return whether all nested TensorDicts have the batch size of `batch`, and none is empty or a stack."""
    for value in batch.values():
        if isinstance(value, TensorDictBase):
            if value.batch_size != batch.batch_size or isinstance(value, LazyStackedTensorDict):
                return False
            if value.is_empty() or not _is_plain(value):
                return False
    return True
