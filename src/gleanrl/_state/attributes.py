"""Plain values as objects' attributes again: a walk along the values and, beside it, along the objects.

Which values may take each other's places: what was a number isn't text after a load.
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


_TEXT = re.compile(r"[<>|=][SU][0-9]{1,9}")
"""NumPy's names of dtypes of text."""


@lasting
def parse(
    root: Any, state: Any, fixed: Fixed = NOTHING, settled: tuple[type, ...] = ()
) -> Callable[[], None]:
    """Return what lets an object go on from a state of `saved`; it can't fail, and twice has the result of once.

    Args:
        root: the object.
        state: of one like it.
        fixed: attributes that are left out.
        settled: classes of objects whose attributes are there from the beginning, in their shapes and with their
            numbers and names; only what arrays hold, and generators, change.

    Raises:
        SchemaError: the state isn't that of such an object; it says where. Nothing changed.
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
    """Let an object go on from a state of `saved`; see `parse`."""
    to_the_end(parse(root, state, fixed, settled))


class _Reader:
    """One walk along the nodes and, beside it, along the objects that are to get the values."""

    def __init__(self, nodes: list[dict[str, Any]], fixed: Fixed, settled: tuple[type, ...]) -> None:
        self._nodes, self._fixed, self._settled = nodes, fixed, settled
        self._made: dict[int, Any] = {}
        self.changes: list[Callable[[], None]] = []

    def child(self, child: Any, now: Any, where: str) -> Any:
        """Return the value that stands for `child`; `now` is what there is in its place."""
        if child is None or type(child) in (bool, str, float, int):
            return child
        number = child["node"]
        if type(number) is not int or not 0 <= number < len(self._nodes):
            raise SchemaError(f"load_state_dict: {where}: there's no node {number!r:.50}")
        node = self._nodes[number]
        if number not in self._made or node["kind"] in (
            "constant",
            "method",
        ):  # these are looked at in every place
            self._made[number] = _READS[node["kind"]](self, number, node, now, where)
        return self._made[number]

    def _fitting(self, child: Any, now: Any, where: str, default: Any = MISSING) -> Any:
        """Return the value that stands for `child`, which has to fit `now`, or `default` without it."""
        value, there = self.child(child, now, where), default if now is MISSING else now
        if not fits(value, there):
            raise self._wrong(where, f"a {class_name(value)}", there)
        return value

    def _item(self, child: Any, now: Any, where: str, others: Any) -> Any:
        """Return an item of a container that holds such `others`, in any order, and `now` in its place."""
        value = self.child(child, now, where)
        if not fits_among(value, others):
            raise self._wrong(where, f"a {class_name(value)}", now)
        return value

    def _wrong(self, where: str, expected: str, now: Any) -> SchemaError:
        found = "nothing" if now is MISSING else f"{now!r:.100}"
        return SchemaError(f"load_state_dict: {where}: the state has {expected}, there is {found}")

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
        others = of_each_kind(before)
        items = _listed(node["items"], "items")
        found = self._made[number] = np.empty(len(items), object)
        for place, item in enumerate(items):
            there = before[place] if place < len(before) else MISSING
            found[place] = self._item(item, there, f"{where}[{place}]", others)
        found.shape = tuple(_listed(node["shape"], "shape"))
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
        there = now if isinstance(now, Mapping) else {}
        if node["class"] == "defaultdict":
            if type(now) is not defaultdict:
                raise self._wrong(where, "a defaultdict", now)
            found: dict[Any, Any] = defaultdict(now.default_factory)
        else:
            found = OrderedDict() if node["class"] == "OrderedDict" else {}
        known = self._made[number] = found
        keys = list(there)
        others = of_each_kind(keys)
        for place, pair in enumerate(_listed(node["pairs"], "pairs")):
            key, value = _listed(pair, place)
            name = self._item(key, keys[place] if place < len(keys) else MISSING, where, others)
            known[name] = self._fitting(value, there.get(name, MISSING), f"{where}[{name!r:.50}]")
        return (
            found
            if node["class"] in ("dict", "OrderedDict", "defaultdict")
            else MAPPINGS[node["class"]](found)
        )

    def _sequence(self, number: int, node: Any, now: Any, where: str) -> Any:
        before = list(now) if isinstance(now, (list, tuple, deque)) else []
        others = of_each_kind(before)
        found = self._made[number] = []
        for place, item in enumerate(_listed(node["items"], "items")):
            there = before[place] if place < len(before) else MISSING
            found.append(self._item(item, there, f"{where}[{place}]", others))
        kind = SEQUENCES.get(node["class"])
        if kind is None:  # a tuple with names
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
        self._known(node, now, where)
        before = copy.deepcopy(now.get_state())
        state = self._fitting(node["state"], before, f"{where}.get_state()")
        try:  # it can't say beforehand what it would take
            now.set_state(copy.deepcopy(state))
        except Exception as cause:
            raise SchemaError(f"load_state_dict: {where}: set_state: {cause}") from cause
        finally:
            now.set_state(before)
        self.changes.append(lambda: now.set_state(copy.deepcopy(state)))
        return now

    def _object(self, number: int, node: Any, now: Any, where: str) -> Any:
        fixed = left_out(now, self._fixed)
        self._made[number] = self._known(node, now, where)
        there = attributes(now)
        found = {
            name: self._fitting(
                value, there.get(name, MISSING), f"{where}.{name}", inherited(type(now), name)
            )
            for name, value in node["attributes"].items()
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
    """Return what has to be a list: to iterate over a tensor takes what its shape says, not what it holds."""
    if not isinstance(value, (list, tuple)):
        raise SchemaError(f"load_state_dict: expected a list at {name!r}, got a {type(value).__name__}")
    return value


def _array_of(node: Any) -> Any:
    data = node["data"].numpy()
    if not node["text"]:
        return data
    text = str(node["text"])
    if not _TEXT.fullmatch(text):  # NumPy compiles parts of other ones
        raise SchemaError(f"load_state_dict: {text!r:.50} isn't a dtype of text")
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
