"""Fresh tensors, alike each time: what a sample is made of.

For tensors that are made at every sample. What is allocated once, or seldom, is by `gleanrl._arrays.schema.allocate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import FreshTensors
from gleanrl._arrays.schema import allocate, numpy_dtype

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""
Made = tuple[list[torch.Tensor], list[int]]
"""Tensors, and where their memory is."""

_Part = tuple[Callable[..., Any], tuple[int, ...], np.dtype[Any]]


def maker(forms: Sequence[Form], pool: BufferPool | None = None) -> Callable[[], Made]:
    """Return what makes uninitialised tensors on the CPU, again and again.

    The core makes them where torch shows how, in less than half of NumPy's time. NumPy makes them elsewhere, and where
    some are large or of a dtype that others than torch don't know. In torch they take longer still.

    Args:
        forms: of each tensor.
        pool: where the memory of large ones comes from; None for memory of their own.

    Returns:
        A function without arguments; any thread may call it.
    """
    large = [
        pool is not None and math.prod(shape) * dtype.itemsize >= pool.min_bytes for shape, dtype in forms
    ]
    by_core = None if any(large) else _maker_of_core(forms)
    if by_core is not None:
        return by_core
    parts: list[_Part] = [
        (pool.empty if pool is not None and is_large else np.empty, shape, numpy_dtype(dtype))
        for (shape, dtype), is_large in zip(forms, large, strict=True)
    ]
    return partial(_made_by_numpy, parts, [dtype for _, dtype in forms])


def _maker_of_core(forms: Sequence[Form]) -> Callable[[], Made] | None:
    """Return what makes them in the core; None if it can't, or would make others."""
    if EXCHANGE is None:
        return None
    try:
        make = FreshTensors(EXCHANGE, torch.Tensor, [allocate(*form) for form in forms]).make
        made, _ = make()
    except RuntimeError:  # a dtype that torch doesn't show
        return None
    alike = all(tensor.dtype == dtype for tensor, (_, dtype) in zip(made, forms, strict=True))
    return make if alike else None


def _made_by_numpy(parts: list[_Part], dtypes: list[torch.dtype]) -> Made:
    tensors = [torch.from_numpy(empty(shape, dtype)) for empty, shape, dtype in parts]
    for position, dtype in enumerate(dtypes):
        if tensors[position].dtype is not dtype:  # one that NumPy doesn't have
            tensors[position] = tensors[position].view(dtype)
    return tensors, [tensor.data_ptr() for tensor in tensors]
