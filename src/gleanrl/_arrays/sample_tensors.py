"""Repeated allocation of uninitialised tensors of fixed shapes, for samples.

Tensors that are allocated once or seldom come from `gleanrl._arrays.schema.allocate`.
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
"""Shape and dtype of one tensor."""
Made = tuple[list[torch.Tensor], list[int]]
"""The tensors and the addresses of their memory."""

_Part = tuple[Callable[..., Any], tuple[int, ...], np.dtype[Any]]


def maker(forms: Sequence[Form], pool: BufferPool | None = None) -> Callable[[], Made]:
    """Return a function that makes uninitialised CPU tensors of the given forms at each call.

    The core makes them, in less than half of NumPy's time, if torch offers its exchange interface. Otherwise NumPy
    makes them. NumPy makes all of them if one is large enough for the pool, or has a dtype that the core can't handle.
    Torch's own allocation functions are slower than both.

    Args:
        forms: shape and dtype of each tensor.
        pool: provides the memory of large tensors; None allocates all memory anew.

    Returns:
        A function without arguments; any thread may call it. Each call returns the tensors and the addresses of their
        memory.
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
    """Return a function that makes the tensors in the core, or None if the core can't make these dtypes."""
    if EXCHANGE is None:
        return None
    try:
        make = FreshTensors(EXCHANGE, torch.Tensor, [allocate(*form) for form in forms]).make
        made, _ = make()
    except RuntimeError:  # torch's exchange interface doesn't support the dtype
        return None
    alike = all(tensor.dtype == dtype for tensor, (_, dtype) in zip(made, forms, strict=True))
    return make if alike else None


def _made_by_numpy(parts: list[_Part], dtypes: list[torch.dtype]) -> Made:
    tensors = [torch.from_numpy(empty(shape, dtype)) for empty, shape, dtype in parts]
    for position, dtype in enumerate(dtypes):
        if tensors[position].dtype is not dtype:  # a dtype that NumPy lacks was made as an unsigned integer
            tensors[position] = tensors[position].view(dtype)
    return tensors, [tensor.data_ptr() for tensor in tensors]
