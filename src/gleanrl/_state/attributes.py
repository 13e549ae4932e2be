"""Loading of an object's attributes from the plain values that `attribute_kinds.saved` returned.

The walk follows the saved nodes and the live objects in parallel. Change the rules of `fits` if a load should accept
other replacements for a value.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.allocate import lasting
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.attribute_kinds import (
    MAPPINGS,
    NOTHING,
    SEQUENCES,
    Fixed,
    attributes,
    class_name,
    constant_name,
    generator,
    generator_state,
    is_constant,
    left_out,
    present_name,
    slots,
)
from gleanrl.errors import GleanError, SchemaError

MISSING = object()
"""Marks an attribute or entry that doesn't exist."""
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_NUMERIC = "biufc"


def fits(value: Any, now: Any) -> bool:
    """Return whether a loaded value may replace the current value `now`.

    Any value may replace None or a missing value, and None may replace data. Numbers, numeric arrays, numeric tensors
    and rows of numbers (lists or tuples) may replace each other, because programs convert between them as they run. Any
    other value must keep its class.
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


def one_per_kind(items: Iterable[Any]) -> list[Any]:
    """Return one item of each kind, where class and dtype make the kind. A value that fits one item of a kind fits all.

    Takes O(items), so callers do it once for a container.
    """
    return list({(type(item), getattr(item, "dtype", None)): item for item in items}.values())


def fits_among(value: Any, existing: Collection[Any]) -> bool:
    """Return whether a value may join a container with the items `existing`: it fits one of them, or there are none."""
    return not existing or any(fits(value, item) for item in existing)


def is_data(value: Any) -> bool:
    """Return whether a load replaces a value by a new one. Objects, functions and parameters keep their identity."""
    kind = type(value)
    if is_constant(value):
        return not callable(value) and kind is not types.ModuleType
    if kind is torch.nn.Parameter:
        return False
    known = isinstance(value, (*_NUMBERS, str, np.ndarray, torch.Tensor, tuple, deque, Mapping))
    made = kind in SEQUENCES.values() or kind in MAPPINGS.values()
    return value is None or known or made or generator_state(value) is not None


def inherited(cls: type, name: str) -> Any:
    """Return the class attribute that an instance without this attribute would show, or `MISSING`."""
    found = inspect.getattr_static(cls, name, MISSING)
    # These descriptors compute or store a value of the instance, so the class itself has no value to show.
    unset = (functools.cached_property, types.MemberDescriptorType)
    return MISSING if isinstance(found, unset) else found


def is_like(value: Any, now: Any) -> bool:
    """Return whether a value equals `now`, apart from array contents and changes within containers and objects.

    Any value is like None. None is like a random generator, which may be made at the first draw.
    """
    if now is None:
        return True
    if isinstance(now, (np.ndarray, torch.Tensor)):
        return type(value) is type(now) and (value.shape, value.dtype) == (now.shape, now.dtype)
    if isinstance(now, (*_NUMBERS, str, bytes, tuple)):
        return type(value) is type(now) and bool(repr(value) == repr(now))
    return value is not None or generator_state(now) is not None


def may_go(now: Any, cls: type, name: str, settled: bool = False) -> bool:
    """Return whether a load may delete the attribute `now` of an object.

    It may if the class provides an attribute of the same name, or if `now` is None. Data may be deleted too, unless the
    object is `settled`.
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


_TEXT = re.compile(r"[<>|=][SU][0-9]{1,9}")
"""Matches NumPy's names for dtypes of text."""


@lasting
def parse(
    root: Any, state: Any, fixed: Fixed = NOTHING, settled: tuple[type, ...] = ()
) -> Callable[[], None]:
    """Check a state that `saved` returned, and return a function that loads it into the object.

    Nothing changes until the caller calls that function, except that the check gives an object with hooks the new state
    for trial and then the old one again. The function can't fail. It is idempotent, so `to_the_end` may call it again
    after an interrupt.

    Args:
        root: the object.
        state: the state of an object like `root`.
        fixed: attributes to leave out.
        settled: classes whose instances have all attributes from the start, with fixed shapes, numbers and names. Only
            array contents and generators of such instances may change.

    Raises:
        SchemaError: the state doesn't belong to such an object; the message names the path. Nothing changed.
    """
    try:
        reader = _Reader(state["nodes"], fixed, settled)
        found = reader.child({"node": 0}, root, type(root).__name__)
    except GleanError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
        raise SchemaError(f"load_state_dict: the attributes of a {type(root).__name__}: {cause}") from cause
    if found is not root:
        raise SchemaError("load_state_dict: expected the attributes of an object")

    @lasting
    def adopt() -> None:
        for change in reader.changes:
            change()

    return adopt


def adopt(root: Any, state: Any, fixed: Fixed = NOTHING, settled: tuple[type, ...] = ()) -> None:
    """Load a state that `saved` returned into an object; see `parse` for the arguments and errors."""
    to_the_end(parse(root, state, fixed, settled))


class _Reader:
    """One parallel walk over the saved nodes and the live objects that receive the values.

    The walk collects `changes` and applies none, so that an error leaves every object unchanged.
    """

    def __init__(self, nodes: list[dict[str, Any]], fixed: Fixed, settled: tuple[type, ...]) -> None:
        self._nodes, self._fixed, self._settled = nodes, fixed, settled
        self._made: dict[int, Any] = {}
        self.changes: list[Callable[[], None]] = []

    def child(self, child: Any, now: Any, where: str) -> Any:
        """Return the value of a reference `child`; `now` is the current value in its place."""
        if child is None or type(child) in (bool, str, float, int):
            return child
        number = child["node"]
        if type(number) is not int or not 0 <= number < len(self._nodes):
            raise SchemaError(f"load_state_dict: {where}: there's no node {number!r:.50}")
        node = self._nodes[number]
        if number not in self._made or node["kind"] in (
            "constant",
            "method",
        ):  # Constants and methods are compared with the current value in each place that refers to them.
            self._made[number] = _READS[node["kind"]](self, number, node, now, where)
        return self._made[number]

    def _fitting(self, child: Any, now: Any, where: str, default: Any = MISSING) -> Any:
        """Return the value of `child` after checking that it fits `now`, or `default` if `now` is missing."""
        value, there = self.child(child, now, where), default if now is MISSING else now
        if not fits(value, there):
            raise self._wrong(where, f"a {class_name(value)}", there)
        return value

    def _item(self, child: Any, now: Any, where: str, existing: Any) -> Any:
        """Return an item of a container after checking it against the current items `existing`, in any order.

        `now` is the current item at the same position. Order isn't checked because items may have moved.
        """
        value = self.child(child, now, where)
        if not fits_among(value, existing):
            raise self._wrong(where, f"a {class_name(value)}", now)
        return value

    def _wrong(self, where: str, expected: str, now: Any) -> SchemaError:
        found = "nothing" if now is MISSING else f"{now!r:.100}"
        return SchemaError(f"load_state_dict: {where}: expected {found}, the state has {expected}")

    def _constant(self, number: int, node: Any, now: Any, where: str) -> Any:
        if isinstance(now, Enum):
            match = [member for member in type(now) if constant_name(member) == present_name(node["is"])]
            if match:
                return match[0]
        if not is_constant(now) or constant_name(now) != present_name(node["is"]):
            raise self._wrong(where, str(node["is"]), now)
        return now

    def _scalar(self, number: int, node: Any, now: Any, where: str) -> Any:
        value = _array_of(node)[()]
        if not isinstance(value, np.generic):
            raise self._wrong(where, "one number", now)
        return complex(value) if node["plain"] else value

    def _array(self, number: int, node: Any, now: Any, where: str) -> Any:
        return np.array(_array_of(node), order="F" if node["turned"] else "C")

    def _objects(self, number: int, node: Any, now: Any, where: str) -> Any:
        before = list(now.flat) if isinstance(now, np.ndarray) and now.dtype == object else []
        existing = one_per_kind(before)
        items = _listed(node["items"], "items")
        flat = np.empty(len(items), object)
        found = self._made[number] = flat.reshape(tuple(_listed(node["shape"], "shape")))
        for index, item in enumerate(items):
            there = before[index] if index < len(before) else MISSING
            flat[index] = self._item(item, there, f"{where}[{index}]", existing)
        return found

    def _tensor(self, number: int, node: Any, now: Any, where: str) -> Any:
        data = node["data"]
        if not isinstance(now, torch.nn.Parameter):
            if torch.device(node["device"]).type == "meta":
                raise self._wrong(where, "a tensor without values", now)
            return data.to(node["device"], copy=True)
        if (now.shape, now.dtype) != (data.shape, data.dtype):
            raise self._wrong(where, f"a parameter {tuple(data.shape)} {data.dtype}", now)
        target, value = now.detach(), data.clone()

        def change() -> None:
            target.copy_(value)

        self.changes.append(change)
        return now

    def _method(self, number: int, node: Any, now: Any, where: str) -> Any:
        if not isinstance(now, types.MethodType) or now.__name__ != node["name"]:
            raise self._wrong(where, f"a method {node['name']}", now)
        if self.child(node["owner"], now.__self__, f"{where}.__self__") is not now.__self__:
            raise self._wrong(where, f"a method {node['name']} of another object", now)
        return now

    def _generator(self, number: int, node: Any, now: Any, where: str) -> Any:
        return generator(node["class"], self.child(node["state"], MISSING, where))

    def _mapping(self, number: int, node: Any, now: Any, where: str) -> Any:
        """Return the mapping of a node.

        A `defaultdict` takes its factory from the current value, because a factory isn't data.
        """
        there = now if isinstance(now, Mapping) else {}
        if node["class"] == "defaultdict":
            if type(now) is not defaultdict:
                raise self._wrong(where, "a defaultdict", now)
            found: dict[Any, Any] = defaultdict(now.default_factory)
        else:
            found = OrderedDict() if node["class"] == "OrderedDict" else {}
        # Registered before its items are read, so that a cycle finds it.
        known = self._made[number] = found
        keys = list(there)
        existing = one_per_kind(keys)
        for index, pair in enumerate(_listed(node["pairs"], "pairs")):
            key, value = _listed(pair, index)
            name = self._item(key, keys[index] if index < len(keys) else MISSING, where, existing)
            known[name] = self._fitting(value, there.get(name, MISSING), f"{where}[{name!r:.50}]")
        return (
            found
            if node["class"] in ("dict", "OrderedDict", "defaultdict")
            else MAPPINGS[node["class"]](found)
        )

    def _sequence(self, number: int, node: Any, now: Any, where: str) -> Any:
        before = list(now) if isinstance(now, (list, tuple, deque)) else []
        existing = one_per_kind(before)
        found = self._made[number] = []
        for index, item in enumerate(_listed(node["items"], "items")):
            there = before[index] if index < len(before) else MISSING
            found.append(self._item(item, there, f"{where}[{index}]", existing))
        kind = SEQUENCES.get(node["class"])
        if kind is None:  # a named tuple, which has its class from the current value
            if not isinstance(now, tuple) or type(now).__name__ != node["class"]:
                raise self._wrong(where, f"a {node['class']}", now)
            return type(now)(*found)
        if kind is deque:
            return deque(found, now.maxlen if isinstance(now, deque) else None)
        return found if kind is list else kind(found)

    def _stateful(self, number: int, node: Any, now: Any, where: str) -> Any:
        value = self._known(node, now, where).parse(node["state"])
        self.changes.append(lambda: now.adopt(value))
        return now

    def _hooks(self, number: int, node: Any, now: Any, where: str) -> Any:
        """Check the state of an object with hooks, and note the call of ``set_state``."""
        self._known(node, now, where)
        before = copy.deepcopy(now.get_state())
        state = self._fitting(node["state"], before, f"{where}.get_state()")
        # The hooks offer no way to check a state, so it is set for trial. The old state is set again in any case.
        try:
            now.set_state(copy.deepcopy(state))
        except Exception as cause:
            raise SchemaError(f"load_state_dict: {where}: set_state: {cause}") from cause
        finally:
            now.set_state(before)
        self.changes.append(lambda: now.set_state(copy.deepcopy(state)))
        return now

    def _object(self, number: int, node: Any, now: Any, where: str) -> Any:
        """Check the attributes of an object and note their assignment.

        The object is registered before its attributes are read, because an attribute may refer back to it.
        """
        fixed = left_out(now, self._fixed)
        self._made[number] = self._known(node, now, where)
        there = attributes(now)
        found = {
            name: self._fitting(
                value, there.get(name, MISSING), f"{where}.{name}", inherited(type(now), name)
            )
            for name, value in node["attributes"].items()
            if name not in fixed  # of a state of an earlier release
        }
        is_settled = isinstance(now, self._settled)
        for name in there.keys() - found.keys() - fixed:
            if not may_go(there[name], type(now), name, is_settled):
                raise self._wrong(f"{where}.{name}", "nothing", there[name])
        for name in there.keys() & found.keys() if is_settled else ():
            if not is_like(found[name], there[name]):
                raise self._wrong(f"{where}.{name}", repr(found[name])[:100], there[name])
        slotted = set(slots(type(now)))

        def change() -> None:
            own = getattr(now, "__dict__", {})
            for name in own.keys() - found.keys() - fixed:
                del own[name]
            own.update((name, value) for name, value in found.items() if name not in slotted)
            for name in slotted & found.keys():
                object.__setattr__(now, name, found[name])

        self.changes.append(change)
        return now

    def _known(self, node: Any, now: Any, where: str) -> Any:
        if now is MISSING or class_name(now) != present_name(node["class"]):
            raise self._wrong(where, f"a {node['class']}", now)
        return now


def _listed(value: Any, name: str | int) -> Sequence[Any]:
    """Return `value` if it is a list or tuple, or raise `SchemaError`.

    A tensor is refused because iterating over one takes as many steps as its shape says, however few values it stores.
    """
    if not isinstance(value, (list, tuple)):
        raise SchemaError(f"load_state_dict: expected a list at {name!r}, got a {type(value).__name__}")
    return value


def _array_of(node: Any) -> Any:
    data = node["data"].numpy()
    if not node["text"]:
        return data
    text = str(node["text"])
    # NumPy compiles parts of other dtype strings as Python source, which must not happen to foreign text.
    if not _TEXT.fullmatch(text):
        raise SchemaError(f"load_state_dict: expected NumPy's name of a dtype of text, got {text!r:.50}")
    return np.frombuffer(data.tobytes(), text).reshape(_listed(node["shape"], "shape"))


_READS: dict[str, Callable[[_Reader, int, Any, Any, str], Any]] = {
    "integer": lambda reader, number, node, now, where: int(node["digits"]),
    "constant": _Reader._constant,
    "scalar": _Reader._scalar,
    "array": _Reader._array,
    "objects": _Reader._objects,
    "tensor": _Reader._tensor,
    "method": _Reader._method,
    "generator": _Reader._generator,
    "mapping": _Reader._mapping,
    "sequence": _Reader._sequence,
    "stateful": _Reader._stateful,
    "hooks": _Reader._hooks,
    "object": _Reader._object,
}
