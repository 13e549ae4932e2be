"""Which values may take each other's places: what was a number isn't text after a load."""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gleanrl.attributes.kinds import MAPPINGS, SEQUENCES, generator_state, is_constant

MISSING = object()
"""Stands for an attribute, or an entry, that isn't there."""
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_NUMERIC = "biufc"


def fits(value: Any, now: Any) -> bool:
    """Return whether a value that was read may take the place of `now`.

    Anything may follow None, or nothing, and None may follow data. Numbers become arrays or tensors as a program goes
    on, and these become rows of numbers, lists or tuples; so they stand for each other. All else keeps its class.
    """
    if now is None or now is MISSING:
        return True
    if value is None:
        return is_data(now)
    if isinstance(value, np.ndarray) and isinstance(now, np.ndarray):
        return value.dtype.kind == now.dtype.kind or _is_numeric(value) and _is_numeric(now)
    if type(value) is type(now) or isinstance(value, str) and isinstance(now, str):
        return True
    if isinstance(value, _NUMBERS):
        return isinstance(now, _NUMBERS) or _is_numeric(now)
    if isinstance(now, _NUMBERS):
        return _is_numeric(value)
    if _is_row(value):
        return _is_numeric(now) or _is_row(now)
    return _is_numeric(value) and _is_row(now)


def of_each_kind(items: Iterable[Any]) -> list[Any]:
    """Return one item of each kind: what fits it fits the others. O(items), so once for a container."""
    return list({(type(item), getattr(item, "dtype", None)): item for item in items}.values())


def fits_among(value: Any, others: Collection[Any]) -> bool:
    """Return whether a value may be an item beside `others`: it fits one of them, or there are none."""
    return not others or any(fits(value, item) for item in others)


def is_data(value: Any) -> bool:
    """Return whether a value is made anew when a state is read; objects, functions and parameters stay."""
    kind = type(value)
    if is_constant(value):
        return not callable(value) and kind is not types.ModuleType
    if kind is torch.nn.Parameter:
        return False
    known = isinstance(value, (*_NUMBERS, str, np.ndarray, torch.Tensor, tuple, deque, Mapping))
    made = kind in SEQUENCES.values() or kind in MAPPINGS.values()
    return value is None or known or made or generator_state(value) is not None


def inherited(cls: type, name: str) -> Any:
    """Return what an object without an attribute of its own has by that name: its class's, or nothing."""
    found = inspect.getattr_static(cls, name, MISSING)
    unset = (functools.cached_property, types.MemberDescriptorType)
    return MISSING if isinstance(found, unset) else found


def is_like(value: Any, now: Any) -> bool:
    """Return whether a value is the same as `now`, but for what arrays hold, and what changes within containers."""
    if now is None:
        return True
    if isinstance(now, (np.ndarray, torch.Tensor)):
        return type(value) is type(now) and (value.shape, value.dtype) == (now.shape, now.dtype)
    if isinstance(now, (*_NUMBERS, str, bytes, tuple)):
        return type(value) is type(now) and bool(repr(value) == repr(now))
    return value is not None


def may_go(now: Any, cls: type, name: str, settled: bool = False) -> bool:
    """Return whether an attribute `now` of an object may be gone after a load: data, or what its class has, too.

    Of `settled` objects data stay.
    """
    return (
        inspect.getattr_static(cls, name, MISSING) is not MISSING
        or now is None
        or (not settled and is_data(now))
    )


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in _NUMERIC
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _is_row(value: Any) -> bool:
    return type(value) in (list, tuple) and all(isinstance(v, _NUMBERS) or _is_row(v) for v in value)
