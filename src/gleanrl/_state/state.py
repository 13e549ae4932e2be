"""The protocol of stateful parts (`Stateful`), and the reader that checks a foreign state (`StateReader`).

A part keeps state between calls, for example a generator, a cursor, an epoch or a transform's counters. It implements
three methods:

- `snapshot` returns the state as one immutable value.
- `parse` reads a foreign state into such a value, or raises and changes nothing.
- `adopt` takes over a value by assignments that can't fail.

Saving, loading, returning to an earlier state, pickling and checkpoints use only these three. A caller that loads
several parts parses all of them before the first one adopts. So a state that doesn't fit changes nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl.errors import SchemaError

Value = TypeVar("Value")


class Stateful(ABC, Generic[Value]):
    """A part whose state is one value. `Value` is a frozen dataclass or a NamedTuple.

    The tensors of a value are never written again, neither by the part that returned it nor by a part that adopted it.
    A part that changes its tensors in place therefore copies them in `snapshot` and in `adopt`.
    """

    learns: ClassVar[bool] = False
    """Whether a module keeps learning in use: it stays in training mode in environments and buffers."""

    @abstractmethod
    def snapshot(self) -> Value:
        """Return the state of the part. Later calls of the part don't change the returned value."""

    @abstractmethod
    def parse(self, state: Any) -> Value:
        """Return the value in a `state` that `state_dict` returned, and change nothing.

        Raises:
            SchemaError: the state doesn't belong to such a part; the message names the field.
        """

    @abstractmethod
    def adopt(self, value: Value) -> None:
        """Continue from a value that `snapshot` or `parse` of such a part returned; can't fail."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and copied tensors."""
        state: dict[str, Any] = plain(self.snapshot())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a saved state and continue from it.

        Raises:
            SchemaError: the state doesn't fit; nothing changed.
        """
        self.adopt(self.parse(state_dict))


def plain(value: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """Return a value as dictionaries, lists and copied tensors, which `torch.load(weights_only=True)` accepts.

    NumPy arrays become tensors. Tuples and named tuples become lists and dictionaries. Other objects aren't converted.

    Args:
        value: the value to convert.
        copies: copies made before, by the ids of the original tensors. One tensor in several places gets one copy.
    """
    copies = {} if copies is None else copies
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]
    if isinstance(value, ObjectColumn):
        return {"items": plain(value.items(), copies), "shape": list(value.shape)}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), copies) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(part, copies) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, Mapping):
        return {key: plain(part, copies) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part, copies) for part in value]
    return value


def objects_from(saved: Any) -> ObjectColumn:
    """Return the object column that `plain` converted; raise an error of any kind for data of another form."""
    items = saved["items"]
    if not isinstance(items, list):
        raise TypeError(f"expected a list of objects, got {type(items).__name__}")
    blank = items[0].new_zeros(0) if items and isinstance(items[0], torch.Tensor) else None
    return ObjectColumn.of(items, saved["shape"], blank).clone()


class StateReader:
    """Reads a foreign state field by field; a value that doesn't fit raises `SchemaError` with the field's name.

    Args:
        state: the foreign state.
        of: the owner of the state, for messages: ``"SamplerWithoutReplacement"``.

    Examples:
        >>> reader = StateReader({"position": 3}, "an epoch")
        >>> reader.integer("position", 0, 10)
        3
        >>> reader.integer("position", 0, 2)
        Traceback (most recent call last):
        gleanrl.errors.SchemaError: load_state_dict: 'position' of an epoch: expected an integer in [0, 2], got 3
    """

    def __init__(self, state: Any, of: str) -> None:
        if not isinstance(state, Mapping):
            raise SchemaError(f"load_state_dict: expected the state of {of}, got {type(state).__name__}")
        self._state, self._of = state, of

    def __contains__(self, name: str) -> bool:
        """Return whether the state has such a field."""
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields."""
        return iter(self._state)

    def wrong(self, name: str, expected: str, got: Any = None) -> SchemaError:
        """Return the error for a field. The message shows `got`, or the field's value if `got` is None."""
        found = self._state.get(name) if got is None else got
        return SchemaError(
            f"load_state_dict: {name!r} of {self._of}: expected {expected}, got {_as_text(found)}"
        )

    def get(self, name: str) -> Any:
        """Return the field unchecked; raise `SchemaError` if it is missing."""
        try:
            return self._state[name]
        except KeyError:
            raise SchemaError(
                f"load_state_dict: expected the state of {self._of}, {name!r} is missing"
            ) from None

    def integer(self, name: str, least: int = 0, most: int | None = None) -> int:
        """Return an integer in ``[least, most]``, both inclusive."""
        value = self.get(name)
        if type(value) is not int or value < least or (most is not None and value > most):
            bounds = f"of {least} or more" if most is None else f"in [{least}, {most}]"
            raise self.wrong(name, f"an integer {bounds}", value)
        return value

    def number(self, name: str, least: float = -math.inf) -> float:
        """Return a finite number that is at least `least`."""
        value = self.get(name)
        if type(value) not in (int, float) or not math.isfinite(value) or value < least:
            raise self.wrong(
                name, "a finite number" + (f" of {least} or more" if least > -math.inf else ""), value
            )
        return float(value)

    def flag(self, name: str) -> bool:
        """Return True or False."""
        value = self.get(name)
        if type(value) is not bool:
            raise self.wrong(name, "True or False", value)
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        value = self.get(name)
        if type(value) is not str:
            raise self.wrong(name, "a string", value)
        return value

    def numbers(self, name: str, kind: type[Value]) -> tuple[Value, ...]:
        """Return a list or tuple whose items all have the type `kind`, as a tuple; floats may be NaN or infinite."""
        values = self.get(name)
        if not isinstance(values, (list, tuple)) or any(type(value) is not kind for value in values):
            raise self.wrong(name, f"a list of {kind.__name__}", values)
        return tuple(values)

    def tensor(
        self, name: str, dtype: torch.dtype, shape: Sequence[int | None], copy: bool = True
    ) -> torch.Tensor:
        """Return a tensor of that dtype and shape on the CPU. None in `shape` allows any size.

        With `copy` false, the result may share memory with the state.
        """
        value = self.get(name)
        fits = isinstance(value, torch.Tensor) and value.dtype is dtype and value.ndim == len(shape)
        if not fits or any(want not in (None, size) for want, size in zip(shape, value.shape, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.wrong(name, f"a tensor ({wanted}) {dtype}", value)
        copied: torch.Tensor = value.detach().to("cpu", copy=copy).contiguous()
        return copied

    def objects(self, name: str, blank: torch.Tensor | None, shape: Sequence[int]) -> ObjectColumn:
        """Return a column ``[*shape]`` of objects, or of copied tensors if `blank` is a tensor (see `ObjectColumn`)."""
        reader = self.part(name)
        items, size = reader.get("items"), reader.numbers("shape", int)
        alike = isinstance(items, list) and len(items) == math.prod(shape) and size == tuple(shape)
        if not alike or (blank is not None and not all(isinstance(item, torch.Tensor) for item in items)):
            raise self.wrong(name, f"{tuple(shape)} {'objects' if blank is None else 'tensors'}")
        return ObjectColumn.of(items, shape, blank).clone()

    def optional(self, name: str, read: Callable[[str], Value]) -> Value | None:
        """Return the result of `read` for the field, or None if the field is None."""
        return None if self.get(name) is None else read(name)

    def part(self, name: str) -> StateReader:
        """Return a reader of a state within the state."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "the state of a part", value)
        return StateReader(value, f"{name!r} of {self._of}")

    def parts(self, name: str, count: int | None = None) -> list[StateReader]:
        """Return readers for a list of states; with `count`, the list must have that length."""
        value = self.get(name)
        if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
            raise self.wrong(
                name, "a list of states" if count is None else f"a list of {count} states", value
            )
        return [StateReader(state, f"{name}[{index}] of {self._of}") for index, state in enumerate(value)]


def _as_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
