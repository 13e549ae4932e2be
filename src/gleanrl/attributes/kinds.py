"""The kinds of values that attributes have: constants, containers, generators, and objects made of attributes."""

from __future__ import annotations

import functools
import random
import re
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from gleanrl.errors import SchemaError, UnsupportedError
from gleanrl.randomness import check_position

_CONSTANTS = (
    *(type, types.ModuleType, types.FunctionType, functools.partial, np.ufunc),
    *(Enum, PurePath, re.Pattern, range, slice, type(Ellipsis), np.dtype, torch.dtype, torch.device),
)
MAPPINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, types.MappingProxyType)
}
SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, torch.Size, bytes, bytearray)
}
_BITS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
        *(np.random.Philox, np.random.SFC64),
    )
}
Fixed = Mapping[type, Collection[str]]
"""Names of attributes that are left out, of objects of some classes: they never change, or follow from others."""
NOTHING: Fixed = types.MappingProxyType({})
_MANAGED_DICT, _MANAGED_WEAKREFS = 1 << 4, 1 << 3
_POINTER = 8


def is_constant(value: Any) -> bool:
    """Return whether a value never changes: a class, a function, a dtype; no method of an object."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    return isinstance(value, _CONSTANTS)


def has_hooks(value: Any) -> bool:
    """Return whether an object says what it lives by in methods ``get_state()`` and ``set_state(state)``."""
    return all(callable(getattr(type(value), name, None)) for name in ("get_state", "set_state"))


def left_out(value: Any, fixed: Fixed) -> set[str]:
    """Return the names of the attributes of `value` that are left out."""
    return {name for cls, names in fixed.items() if isinstance(value, cls) for name in names}


def class_name(value: Any) -> str:
    """Return the name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def constant_name(value: Any) -> str:
    """Return what a value that never changes is known by."""
    if isinstance(value, functools.partial):
        return f"partial {constant_name(value.func)}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (types.ModuleType, np.ufunc)):
        return str(value.__name__)
    text: str = f"{class_name(value)} {value!s}"
    return text


def slots(cls: type) -> list[str]:
    """Return the names of a class's slots."""
    each = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in each for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included.

    Raises:
        UnsupportedError: it holds more than its attributes: memory of C.
    """
    cls, names = type(value), slots(type(value))
    # As `pickle` finds out whether attributes are all there is.
    pointers = len(names)
    pointers += cls.__dictoffset__ != 0 and not cls.__flags__ & _MANAGED_DICT
    pointers += cls.__weakrefoffset__ != 0 and not cls.__flags__ & _MANAGED_WEAKREFS
    if cls.__itemsize__ or cls.__basicsize__ > object.__basicsize__ + _POINTER * pointers:
        raise UnsupportedError(
            f"a {class_name(value)} isn't made of attributes; define get_state() and set_state(state) where it's used"
        )
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def generator_state(value: Any) -> Any:
    """Return the place of a random generator in its sequence; None for anything else."""
    kind = type(value)
    if kind is np.random.Generator and type(value.bit_generator).__name__ in _BITS:
        return value.bit_generator.state
    if kind is np.random.RandomState:
        return value.get_state(legacy=False)
    if kind is random.Random:
        return value.getstate()
    if kind is torch.Generator:
        return {"device": str(value.device), "state": value.get_state()}
    return None


def generator(kind: str, state: Any) -> Any:
    """Return a new generator at a place that `generator_state` returned."""
    if kind == "numpy.random._generator.Generator":
        bits = _BITS[state["bit_generator"]]()
        bits.state = state
        check_position(bits.state)
        return np.random.Generator(bits)
    if kind == "numpy.random.mtrand.RandomState":
        legacy = np.random.RandomState()
        legacy.set_state(state)
        check_position(legacy.get_state(legacy=False))
        return legacy
    if kind == "random.Random":
        plain = random.Random()
        plain.setstate(state)
        return plain
    if kind != "torch._C.Generator":
        raise SchemaError(f"load_state_dict: {kind!r:.100} isn't a kind of generator")
    given = torch.Generator(state["device"])
    given.set_state(state["state"])
    return given
