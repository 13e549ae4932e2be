"""The bits of records, to compare storages."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl._checkpoint.row_segments import bytes_of


def bits_of(value: Any) -> dict[Any, Any]:
    """Return the bits of all tensors in a result, by key."""
    if isinstance(value, torch.Tensor):
        return {(): (value.dtype, value.shape, bytes_of(value).tobytes())}
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        return {(key, *rest): bits for key, part in value.items() for rest, bits in bits_of(part).items()}
    if isinstance(value, (list, tuple)):
        return {(key, *rest): bits for key, part in enumerate(value) for rest, bits in bits_of(part).items()}
    return {(): value}
