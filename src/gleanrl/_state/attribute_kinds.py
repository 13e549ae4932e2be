"""Conversion of an object's attributes to plain values (`saved`), and the kinds of values that it knows.

The walk reaches every object that the root object refers to. Add a kind of value here and in `attributes`, which reads
the values back.
"""

from __future__ import annotations

import functools
import random
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from gleanrl._state.rng import check_position
from gleanrl._state.state import Stateful
from gleanrl.compat.moved import MOVED, RENAMED
from gleanrl.errors import SchemaError, UnsupportedError

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
"""For each class, the attributes to leave out: they never change, or they follow from other attributes."""
NOTHING: Fixed = types.MappingProxyType({})
_MANAGED_DICT, _MANAGED_WEAKREFS = 1 << 4, 1 << 3
_POINTER = 8


def is_constant(value: Any) -> bool:
    """Return whether a value never changes, like a class, a function or a dtype.

    A bound method of an object isn't constant.
    """
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    return isinstance(value, _CONSTANTS)


def has_hooks(value: Any) -> bool:
    """Return whether an object's class defines ``get_state()`` and ``set_state(state)``.

    These then cover its whole state.
    """
    return all(callable(getattr(type(value), name, None)) for name in ("get_state", "set_state"))


def left_out(value: Any, fixed: Fixed) -> set[str]:
    """Return the names of the attributes of `value` that `fixed` leaves out."""
    return {name for cls, names in fixed.items() if isinstance(value, cls) for name in names}


def class_name(value: Any) -> str:
    """Return the qualified name of a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def present_name(saved: str) -> str:
    """Return the current name of a class or constant that a state names; earlier releases had other module paths."""
    return re.sub(r"gleanrl(\.\w+)+", lambda found: _moved(found[0]), str(saved))


def _moved(name: str) -> str:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module, first = ".".join(parts[:end]), parts[end]
        renamed = RENAMED.get(f"{module}.{first}", first)
        if module in MOVED or renamed != first:
            return ".".join([MOVED.get(module, module), renamed, *parts[end + 1 :]])
    return name


def constant_name(value: Any) -> str:
    """Return the name that identifies a constant in a saved state."""
    if isinstance(value, functools.partial):
        return f"partial {constant_name(value.func)}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (types.ModuleType, np.ufunc)):
        return str(value.__name__)
    text: str = f"{class_name(value)} {value!s}"
    return text


def slots(cls: type) -> list[str]:
    """Return the names of a class's slots, including inherited ones."""
    each = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in each for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including the attributes in slots.

    Raises:
        UnsupportedError: the object also has C-level data that isn't an attribute.
    """
    cls, names = type(value), slots(type(value))
    # `pickle` makes the same test: an instance larger than its header and slots holds data of a C type.
    pointers = len(names)
    pointers += cls.__dictoffset__ != 0 and not cls.__flags__ & _MANAGED_DICT
    pointers += cls.__weakrefoffset__ != 0 and not cls.__flags__ & _MANAGED_WEAKREFS
    if cls.__itemsize__ or cls.__basicsize__ > object.__basicsize__ + _POINTER * pointers:
        raise UnsupportedError(
            f"a {class_name(value)} has state outside of its attributes; "
            "define get_state() and set_state(state) on the object that uses it"
        )
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def generator_state(value: Any) -> Any:
    """Return a random generator's position in its sequence, or None if `value` isn't a known kind of generator."""
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
    """Return a new generator at a position that `generator_state` returned.

    Raises:
        SchemaError: `kind` isn't the name of a known class. Another form of `state` raises an error of any kind.
    """
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
    made = torch.Generator(state["device"])
    made.set_state(state["state"])
    return made


_LARGEST = 2**63


def saved(root: Any, fixed: Fixed = NOTHING) -> dict[str, Any]:
    """Return the state of an object as plain values, in the form that `torch.load(weights_only=True)` accepts.

    Args:
        root: the object.
        fixed: attributes to leave out.

    Returns:
        ``{"nodes": [...]}``, a flat list of nodes that refer to each other by number. The first node is the root.

    Raises:
        UnsupportedError: a value can't be saved; the message names its path.
    """
    saver = _Saver(fixed)
    try:
        saver.child(root, type(root).__name__)
        saver.check_apart()
    except RecursionError as cause:
        raise UnsupportedError(f"{type(root).__name__}: its attributes are nested too deeply") from cause
    return {"nodes": saver.nodes}


class _Saver:
    """One walk over an object.

    Each value except short numbers and text becomes a node; holders store the node's number.

    Numbers keep shared references and cycles: a value that is reached twice is saved once.
    """

    def __init__(self, fixed: Fixed) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._fixed = fixed
        # By id. The reference keeps each value alive, so that no later value reuses its id.
        self._met: dict[int, tuple[int, Any]] = {}
        self._spans: list[tuple[int, int, str]] = []  # memory ranges of arrays and tensors

    def child(self, value: Any, where: str) -> Any:
        """Return the plain form of a value inside its holder.

        Short values are stored themselves, other values as a reference to their node.
        """
        if value is None or type(value) in (bool, str, float):
            return value
        if type(value) is int and -_LARGEST <= value < _LARGEST:
            return value
        if id(value) not in self._met:
            number = len(self.nodes)
            self._met[id(value)] = number, value
            # The number is reserved before the walk descends, so that a cycle finds it.
            self.nodes.append({})
            self.nodes[number] = self._node(value, where)
        return {"node": self._met[id(value)][0]}

    def _node(self, value: Any, where: str) -> dict[str, Any]:
        """Return the node of a value.

        The order of the tests matters, because most values also have attributes. A plain object is therefore the last
        kind. A part's own protocol (`Stateful`, then hooks) comes just before it.
        """
        kind = type(value)
        if kind is int:
            return {"kind": "integer", "digits": str(value)}
        if is_constant(value):
            return {"kind": "constant", "is": constant_name(value)}
        if kind is complex or isinstance(value, np.generic):
            return {**self._array(np.asarray(value), where), "kind": "scalar", "plain": kind is complex}
        if kind is np.ndarray:
            return self._array_node(value, where)
        if isinstance(value, torch.Tensor):
            return {"kind": "tensor", "data": self._tensor(value, where), "device": str(value.device)}
        if isinstance(value, types.MethodType):
            owner = self.child(value.__self__, f"{where}.__self__")
            return {"kind": "method", "name": value.__name__, "owner": owner}
        found = generator_state(value)
        if found is not None:
            return {"kind": "generator", "class": class_name(value), "state": self.child(found, where)}
        if kind.__name__ in MAPPINGS and kind is MAPPINGS[kind.__name__] or kind is defaultdict:
            pairs = [[self.child(k, where), self.child(v, f"{where}[{k!r:.50}]")] for k, v in value.items()]
            return {"kind": "mapping", "class": kind.__name__, "pairs": pairs}
        if SEQUENCES.get(kind.__name__) is kind or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            found = [self.child(item, f"{where}[{index}]") for index, item in enumerate(items)]
            return {"kind": "sequence", "class": kind.__name__, "items": found}
        if isinstance(value, Stateful) and not isinstance(value, torch.nn.Module):
            return {"kind": "stateful", "class": class_name(value), "state": value.state_dict()}
        if has_hooks(value):
            return {
                "kind": "hooks",
                "class": class_name(value),
                "state": self.child(value.get_state(), where),
            }
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        fixed = left_out(value, self._fixed)
        try:
            found = attributes(value)
        except UnsupportedError as cause:
            raise UnsupportedError(f"{where}: {cause}") from None
        children = {
            name: self.child(part, f"{where}.{name}") for name, part in found.items() if name not in fixed
        }
        return {"kind": "object", "class": class_name(value), "attributes": children}

    def _array_node(self, array: Any, where: str) -> dict[str, Any]:
        if array.dtype == object:
            items = [self.child(item, f"{where}[{index}]") for index, item in enumerate(array.flat)]
            return {"kind": "objects", "items": items, "shape": list(array.shape)}
        self._spans.append((*_bounds(array), where))
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        return {**self._array(array, where), "kind": "array", "turned": turned}

    def _array(self, array: Any, where: str) -> dict[str, Any]:
        array, text = np.array(array, order="C"), array.dtype.kind in "SU"
        data = np.frombuffer(array.tobytes(), np.uint8).copy() if text else array
        try:
            found = torch.from_numpy(data)
        except TypeError as cause:
            raise UnsupportedError(f"{where}: an array of {array.dtype} can't be saved") from cause
        return {"data": found, "text": array.dtype.str if text else "", "shape": list(array.shape)}

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        alone = tensor.is_leaf and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not alone or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedError(
                f"{where}: expected a dense torch.Tensor with values and without a graph (detach() it), "
                f"got a {class_name(tensor)}"
            )
        found = tensor.detach()
        if found.device.type == "cpu" and found.numel():
            storage = found.untyped_storage()
            self._spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), where))
        return found.cpu().clone(memory_format=torch.contiguous_format)

    def check_apart(self) -> None:
        """Raise `UnsupportedError` if the address ranges of two arrays or CPU tensors overlap.

        A tensor counts with its whole storage. Writes to shared elements would not show in both after a load.
        """
        end, before = 0, ""
        for start, stop, where in sorted(self._spans):
            if start < end and stop > start:
                raise UnsupportedError(f"{before} and {where} share memory; let one of them be a copy")
            if stop > end:
                end, before = stop, where


def _bounds(array: Any) -> tuple[int, int]:
    """Return the first address of an array's memory and the address just past its last byte."""
    first = array.__array_interface__["data"][0]
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    if not array.size:
        return first, first
    return first + sum(min(0, r) for r in reach), first + sum(max(0, r) for r in reach) + array.itemsize
