"""Objects' attributes as plain values: a walk from an object to everything that it reaches."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from gleanrl.attributes.kinds import (
    MAPPINGS,
    NOTHING,
    SEQUENCES,
    Fixed,
    attributes,
    class_name,
    constant_name,
    generator_state,
    has_hooks,
    is_constant,
    left_out,
)
from gleanrl.errors import UnsupportedError
from gleanrl.state import Stateful

_LARGEST = 2**63


def saved(root: Any, fixed: Fixed = NOTHING) -> dict[str, Any]:
    """Return what an object lives by, as `torch.load(weights_only=True)` takes it.

    Args:
        root: the object.
        fixed: attributes that are left out.

    Raises:
        UnsupportedError: something isn't data; it says where.
    """
    saver = _Saver(fixed)
    try:
        saver.child(root, type(root).__name__)
        saver.check_apart()
    except RecursionError as cause:
        raise UnsupportedError(f"{type(root).__name__}: its attributes are nested too deeply") from cause
    return {"nodes": saver.nodes}


class _Saver:
    """One walk. Everything that isn't a number or text is a node; whoever holds it has the node's number."""

    def __init__(self, fixed: Fixed) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._fixed = fixed
        self._met: dict[int, tuple[int, Any]] = {}  # values are kept, so that no other one gets their ids
        self._spans: list[tuple[int, int, str]] = []  # memory of arrays

    def child(self, value: Any, where: str) -> Any:
        """Return what stands for a value where it's held."""
        if value is None or type(value) in (bool, str, float):
            return value
        if type(value) is int and -_LARGEST <= value < _LARGEST:
            return value
        if id(value) not in self._met:
            number = len(self.nodes)
            self._met[id(value)] = number, value
            self.nodes.append({})
            self.nodes[number] = self._node(value, where)
        return {"node": self._met[id(value)][0]}

    def _node(self, value: Any, where: str) -> dict[str, Any]:
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
            found = [self.child(item, f"{where}[{place}]") for place, item in enumerate(items)]
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
            items = [self.child(item, f"{where}[{place}]") for place, item in enumerate(array.flat)]
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
                f"{where}: a {class_name(tensor)}, or one of a graph or without values, can't be saved"
            )
        found = tensor.detach()
        if found.device.type == "cpu" and found.numel():
            storage = found.untyped_storage()
            self._spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), where))
        return found.cpu().clone(memory_format=torch.contiguous_format)

    def check_apart(self) -> None:
        """Raise unless every array has memory of its own: what is written through one must not show in another."""
        end, before = 0, ""
        for start, stop, where in sorted(self._spans):
            if start < end and stop > start:
                raise UnsupportedError(f"{before} and {where} share memory; let one of them be a copy")
            if stop > end:
                end, before = stop, where


def _bounds(array: Any) -> tuple[int, int]:
    """Return the first address of an array's memory and the one after the last."""
    first = array.__array_interface__["data"][0]
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    if not array.size:
        return first, first
    return first + sum(min(0, r) for r in reach), first + sum(max(0, r) for r in reach) + array.itemsize
