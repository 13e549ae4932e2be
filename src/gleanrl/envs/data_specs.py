"""Specs from data: what a TensorDict looks like, as a Composite."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from gleanrl.data.specs import Composite, TensorSpec, Unbounded
from gleanrl.tree import as_key, iter_leaves


def make_composite_from_td(data: TensorDictBase, unsqueeze_null_shapes: bool = True) -> Composite:
    """Return a spec with an Unbounded leaf for every leaf of `data`, of its shape, dtype and device.

    Args:
        data: the TensorDict; its batch size becomes the spec's shape.
        unsqueeze_null_shapes: whether leaves of shape ``()`` are declared as ``(1,)``.

    Raises:
        SchemaError: if a leaf isn't a tensor.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> spec = make_composite_from_td(TensorDict({"x": torch.zeros(3), "y": torch.tensor(1)}, []))
        >>> spec["x"].shape, spec["y"].shape
        (torch.Size([3]), torch.Size([1]))
    """
    leaves: dict[Any, TensorSpec] = {
        as_key(path): Unbounded(
            (1,) if unsqueeze_null_shapes and not leaf.shape else leaf.shape,
            device=leaf.device,
            dtype=leaf.dtype,
        )
        for path, leaf in iter_leaves(data)
    }
    return Composite(leaves, shape=data.batch_size)
