"""The state of modules (environments and transforms) as one flat, immutable value.

The state of a module includes the modules within it. Its keys are the names that `torch.nn.Module` gives. For example,
in a chain of transforms ``"transforms.0.loc"`` is a buffer, and ``"transforms.1.carried"`` holds the second transform's
carried values. Each entry is a `Stateful`, so that a load can check all entries before it changes the first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._state.state import Stateful
from gleanrl._util import overridden
from gleanrl.compat.unserved import TellingModule
from gleanrl.errors import MissingKeyError, SchemaError

State = Mapping[str, Any]


class StatefulModule(Stateful[State], TellingModule):
    """A module whose state is a value.

    The state holds registered parameters and persistent buffers, and the optional `carried` values and `parts`. A
    subclass with `carried` values declares them in `carries`. If a subclass defines torch's `get_extra_state` and
    `set_extra_state`, the state includes that, too.
    """

    late_buffers: ClassVar[tuple[str, ...]] = ()  # buffers that may be None, or floats of any shape

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.carried: dict[NestedKey, Tensor] = {}

    def carries(self) -> Mapping[NestedKey, Field]:
        """Return the shape (with batch dimensions) and dtype of each value carried from step to step, by key."""
        return {}

    def parts(self) -> Mapping[str, Stateful[Any]]:
        """Return the parts that have their own states, by name."""
        return {}

    def carry(self, values: Mapping[NestedKey, Tensor]) -> None:
        """Carry `values` from now on. They must match `carries`; this can't fail."""
        self.carried = dict(values)

    def home(self) -> torch.device | str | None:
        """Return the device of the carried values; None if there are none, or outside an environment."""
        return None

    def clone(self) -> Any:
        """Return an independent copy."""
        return copy.deepcopy(self)

    # ----------------------------------------------------------------- value
    def snapshot(self) -> State:
        """Return a copy of the state of this module and of the modules within, by flat names."""
        return MappingProxyType({name: entry.snapshot() for name, entry in _entries(self).items()})

    def parse(self, state: Any, strict: bool = True) -> State:
        """Check a saved state and return its value, copied; change nothing.

        Args:
            state: the result of `state_dict`.
            strict: whether missing and unexpected names are errors; if False, they are ignored.

        Raises:
            SchemaError: if the state doesn't fit; the message names the entry.
        """
        return parse_entries(self, state, strict)

    def adopt(self, value: State) -> None:
        """Take over a value that `parse` returned."""
        adopt_entries(self, value)

    # ------------------------------------------------------- torch's own ways
    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state as plain values and copied tensors, by flat names.

        Args:
            *args: `destination`, `prefix` and `keep_vars` by position, as torch allows.
            destination: the dictionary to add the state to; None for a new one.
            prefix: put before the names.
            keep_vars: no effect: the tensors are copies.
        """
        destination, prefix = (*args, *(destination, prefix)[len(args) :])[:2]
        out = OrderedDict() if destination is None else destination
        for name, value in Stateful.state_dict(self).items():
            out[prefix + name] = value
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Restore a saved state, which is copied.

        Args:
            state_dict: the result of `state_dict`.
            strict: whether missing and unexpected names are errors.
            assign: no effect.

        Raises:
            SchemaError: if the state doesn't fit; then nothing has changed.
        """
        self.adopt(self.parse(state_dict, strict))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        """Load this module's own entries. Torch calls this when a foreign module around this one is loaded.

        Missing names and errors are appended to torch's lists. All other entries are loaded nevertheless.
        """
        missing, _, errors = problems
        for name, entry in _own_entries(self).items():
            if prefix + name not in state_dict:
                missing.append(prefix + name)
                continue
            try:
                entry.adopt(entry.parse(state_dict[prefix + name]))
            except SchemaError as error:
                errors.append(str(error))


def parse_entries(module: nn.Module, state: Any, strict: bool = True) -> State:
    """Check a module's saved state and return its value, copied; see `StatefulModule.parse`."""
    kind = type(module).__name__
    if not isinstance(state, Mapping):
        raise SchemaError(f"load_state_dict: expected the state of a {kind}, got {type(state).__name__}")
    entries = _entries(module)
    missing = sorted(entries.keys() - state.keys())
    unexpected = sorted(state.keys() - entries.keys(), key=str)
    if strict and (missing or unexpected):
        raise SchemaError(
            f"load_state_dict: the state of this {kind} has {sorted(entries)}; missing {missing}, "
            f"unexpected {unexpected}"
        )
    return MappingProxyType(
        {name: _parsed(name, entry, state[name]) for name, entry in entries.items() if name in state}
    )


def adopt_entries(module: nn.Module, value: State) -> None:
    """Take over a value that `parse_entries` returned."""
    entries = _entries(module)
    for name, part in value.items():
        entries[name].adopt(part)


def _entries(module: nn.Module) -> dict[str, Stateful[Any]]:
    return {
        f"{path}.{name}" if path else name: entry
        for path, inner in module.named_modules(remove_duplicate=False)  # the names that torch uses
        for name, entry in _own_entries(inner).items()
    }


def _own_entries(module: nn.Module) -> dict[str, Stateful[Any]]:
    tensors = (*module._parameters, *(name for name in module._buffers if name in _persistent(module)))
    found: dict[str, Stateful[Any]] = {name: _TensorEntry(module, name) for name in tensors}
    if isinstance(module, StatefulModule):
        if overridden(module, "carries", of=StatefulModule):
            found["carried"] = _Carried(module)
        found.update(module.parts())
    if overridden(module, "get_extra_state", of=nn.Module):
        found["_extra_state"] = _Extra(module)
    return found


def _persistent(module: nn.Module) -> set[str]:
    return module._buffers.keys() - module._non_persistent_buffers_set


def _parsed(name: str, entry: Stateful[Any], state: Any) -> Any:
    try:
        return entry.parse(state)
    except (SchemaError, MissingKeyError) as error:
        raise SchemaError(
            f"load_state_dict: {name!r}: {str(error).removeprefix('load_state_dict: ')}"
        ) from error


class _TensorEntry(Stateful[Tensor | None]):
    """A parameter or a buffer of a module. A load overwrites its memory; a late buffer is replaced."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._tensors: Any = module._parameters if name in module._parameters else module._buffers
        self._is_late = isinstance(module, StatefulModule) and name in module.late_buffers

    def snapshot(self) -> Tensor | None:
        own = self._tensors[self._name]
        return None if own is None else own.detach().clone()

    def parse(self, state: Any) -> Tensor | None:
        own = self._tensors[self._name]
        if self._is_late:
            fits = state is None or (isinstance(state, Tensor) and state.is_floating_point())
        elif own is None:
            fits = state is None
        else:
            fits = isinstance(state, Tensor) and (state.shape, state.dtype) == (own.shape, own.dtype)
        if not fits:
            expected = "floating-point numbers or None" if self._is_late else _as_text(own)
            raise SchemaError(f"expected {expected}, got {_as_text(state)}")
        return None if state is None else state.detach().clone()

    def adopt(self, value: Tensor | None) -> None:
        own = self._tensors[self._name]
        if self._is_late:
            self._tensors[self._name] = None if value is None else value.clone()
        elif own is not None:
            own.detach().copy_(value)


class _Carried(Stateful[Mapping[NestedKey, Tensor]]):
    """The values that a transform carries from step to step: empty before its first reset, complete afterwards."""

    def __init__(self, module: StatefulModule) -> None:
        self._module = module

    def snapshot(self) -> Mapping[NestedKey, Tensor]:
        return MappingProxyType({key: value.clone() for key, value in self._module.carried.items()})

    def parse(self, state: Any) -> Mapping[NestedKey, Tensor]:
        if not isinstance(state, Mapping):
            raise SchemaError(f"expected tensors by key, got {_as_text(state)}")
        if not state:
            return {}
        device = self._module.home()
        if device is None:
            raise SchemaError(
                "a transform without an environment can't load carried values; append it to its environment first"
            )
        fields = self._module.carries()
        if state.keys() != fields.keys():
            raise SchemaError(f"expected the keys {list(fields)}, got {list(state)}")
        for key, field in fields.items():
            value = state[key]
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (field.shape, field.dtype):
                raise SchemaError(f"{key!r}: expected {field}, got {_as_text(value)}")
        return MappingProxyType({key: state[key].detach().to(device, copy=True) for key in fields})

    def adopt(self, value: Mapping[NestedKey, Tensor]) -> None:
        self._module.carry(value)


class _Extra(Stateful[Any]):
    """The extra state of a module that defines torch's `get_extra_state`.

    Only the module's `set_extra_state` can check a state, so `parse` tries it on a copy of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def snapshot(self) -> Any:
        return copy.deepcopy(self._module.get_extra_state())

    def parse(self, state: Any) -> Any:
        state = copy.deepcopy(state)
        try:
            twin = (
                self._module.clone()
                if isinstance(self._module, StatefulModule)
                else copy.deepcopy(self._module)
            )
            twin.set_extra_state(copy.deepcopy(state))
        except Exception as error:
            raise SchemaError(f"{type(self._module).__name__}.set_extra_state: {error}") from error
        return state

    def adopt(self, value: Any) -> None:
        self._module.set_extra_state(copy.deepcopy(value))


def _as_text(value: Any) -> str:
    return str(Field(value.shape, value.dtype)) if isinstance(value, Tensor) else f"{value!r:.100}"
