"""A dictionary of specs: the domain of TensorDicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from gleanrl.data.specs.base import DeviceLike, TensorSpec, make_device
from gleanrl.data.specs.geometry import Transform, as_size, shape_after
from gleanrl.data.specs.mapping import Entry, SpecMapping
from gleanrl.errors import InvalidTypeError, MissingKeyError, SchemaError, SpecError


class Composite(SpecMapping):
    """A domain of TensorDicts: one spec for each key; `shape` is their batch size.

    It is a mapping with nested keys (tuples of names). Setting `("a", "b")` makes the composite `"a"` if
    there is none; a dictionary becomes a composite. An entry None leaves the values under its key
    unspecified: they are neither drawn nor checked. TensorDicts may hold more keys than the spec.

    Examples:
        >>> from gleanrl.data.specs import Categorical, Unbounded
        >>> spec = Composite(obs=Unbounded((4, 3)), action=Categorical(2, shape=(4,)), shape=(4,))
        >>> spec.rand().batch_size
        torch.Size([4])

    Args:
        specs: a mapping from keys to specs, mappings or None.
        shape: the batch size; the shape of each entry starts with it.
        device: None: each entry keeps its own; otherwise the entries are moved there.
        entries: more entries, by keyword.

    Raises:
        InvalidArgumentError: if an entry's shape doesn't start with `shape`.
        InvalidTypeError: if an entry isn't a spec, a mapping or None.
    """

    def __init__(
        self,
        specs: Mapping[Any, Any] | SpecMapping | None = None,
        /,
        *,
        shape: Iterable[int] | int = (),
        device: DeviceLike | None = None,
        **entries: Any,
    ) -> None:
        self.shape = as_size((shape,))
        self.device = make_device(device)
        self._specs: dict[str, Entry] = {}
        if specs is not None and not isinstance(specs, (Mapping, SpecMapping)):
            raise InvalidTypeError(f"Composite: expected a mapping from keys to specs, got {specs!r}")
        for source in (specs or {}, entries):
            for key, spec in source.items():
                self.set(key, spec)

    @property
    def batch_ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def _entries(self) -> dict[str, Entry]:
        return dict(self._specs)

    def _assign(self, name: str, spec: Entry) -> None:
        self._specs[name] = spec

    def _remove(self, name: str) -> None:
        del self._specs[name]

    def _nested(self) -> Iterable[SpecMapping]:
        return [spec for spec in self._specs.values() if isinstance(spec, SpecMapping)]

    def empty(self) -> Composite:
        """Return a composite of the same shape and device without entries, unlocked."""
        return Composite(shape=self.shape, device=self.device)

    def _rebuilt(self, function: Callable[[TensorSpec], TensorSpec], **attributes: Any) -> Composite:
        """Return an unlocked composite with `function` applied to each entry."""
        new = self.empty()
        for name, value in attributes.items():
            setattr(new, name, value)
        for name, spec in self._specs.items():
            new._specs[name] = None if spec is None else function(spec)
        return new

    def _reshaped(self, transform: Transform) -> Composite:
        shape = shape_after(transform, self.shape)
        return self._rebuilt(lambda spec: spec._reshaped(transform), shape=shape)

    def clone(self) -> Composite:
        """Return an equal composite, unlocked, that shares nothing with this one."""
        return self._rebuilt(lambda spec: spec.clone())

    def to(self, dest: torch.dtype | DeviceLike) -> Composite:
        """Return the composite, unlocked, for another device; itself where that changes nothing."""
        if isinstance(dest, torch.dtype):
            raise InvalidTypeError(f"to: a composite can't be given a dtype, got {dest}; convert its entries")
        device = make_device(dest)
        if device == self.device:
            return self
        return self._rebuilt(lambda spec: spec.to(dest), device=device)

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> TensorDict:
        return self._collected(lead, lambda spec: spec.rand(lead, generator=generator))

    def _filled(self, lead: torch.Size, number: int) -> TensorDict:
        return self._collected(lead, lambda spec: spec.one(lead) if number else spec.zero(lead))

    def _collected(self, lead: torch.Size, function: Callable[[TensorSpec], Any]) -> TensorDict:
        made = {name: function(spec) for name, spec in self._specs.items() if spec is not None}
        return TensorDict(made, batch_size=(*lead, *self.shape), device=self.device)

    def _projected(self, value: TensorDictBase) -> TensorDictBase:
        new = value.copy()
        for name, spec in self._specs.items():
            if spec is not None:
                try:
                    new.set(name, spec.project(value.get(name)))
                except SpecError as error:
                    raise SpecError(f"key {name!r}: {error}") from error
        return new

    def encode(self, value: Mapping[str, Any] | TensorDictBase) -> TensorDict:
        """Return what an environment gave as a TensorDict; each entry is encoded by its spec.

        Values under a key whose spec is None may be missing, and are taken as they are.

        Raises:
            MissingKeyError: if a key of the spec is missing.
            SchemaError: if there is a key that the spec lacks, or a shape doesn't fit.
            SpecError: if an entry is outside its domain.
        """
        if not isinstance(value, Mapping) and not is_tensor_collection(value):
            raise InvalidTypeError(f"encode: expected a mapping with keys {list(self._specs)}, got {value!r}")
        extra = [key for key in value.keys() if key not in self._specs]
        if extra:
            raise SchemaError(f"encode: unexpected keys {extra}; the keys are {list(self._specs)}")
        encoded: dict[str, Any] = {}
        lead: torch.Size | None = None
        for name, spec in self._specs.items():
            if name not in value.keys():
                if spec is None:
                    continue
                raise MissingKeyError(f"encode: no key {name!r}; got {list(value.keys())}")
            encoded[name] = value[name] if spec is None else spec.encode(value[name])
            if spec is not None:
                got = encoded[name].shape[: encoded[name].ndim - spec.ndim]
                if lead is not None and got != lead:
                    raise SchemaError(
                        f"encode: key {name!r}: expected leading dimensions {tuple(lead)}, as before, "
                        f"got {tuple(got)}"
                    )
                lead = got
        return TensorDict(encoded, batch_size=(*(lead or ()), *self.shape), device=self.device)

    def to_numpy(self, value: TensorDictBase, safe: bool | None = None) -> dict[str, Any]:
        """Return the entries of a TensorDict that the spec knows, as a nested dictionary of arrays."""
        misfit = self._misfit(value)
        if misfit is not None:
            raise SchemaError(f"to_numpy: {misfit}")
        specs = self._specs.items()
        return {name: spec.to_numpy(value.get(name), safe) for name, spec in specs if spec is not None}

    def _check_types(self, value: TensorDictBase) -> None:
        for path, spec in self.items(True, True):
            if spec is not None and (entry := value.get(path, None)) is not None:
                spec.type_check(entry, path)

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity if an entry is unspecified."""
        counts = [math.inf if spec is None else spec.cardinality() for spec in self._specs.values()]
        if 0 in counts:
            return 0
        return math.inf if math.inf in counts else math.prod(counts)

    def _misfit(self, value: Any) -> str | None:
        if not is_tensor_collection(value):
            return f"expected a TensorDict, got {type(value).__name__}"
        shape = value.batch_size
        if shape[len(shape) - self.ndim :] != self.shape:
            return f"expected a batch size that ends with {tuple(self.shape)}, got {tuple(shape)}"
        missing = [
            name for name, spec in self._specs.items() if spec is not None and name not in value.keys()
        ]
        return f"missing keys {missing}; got {list(value.keys())}" if missing else None

    def _fault(self, value: Any) -> str | None:
        fault = self._misfit(value)
        if fault is not None:
            return fault
        for name, spec in self._specs.items():
            fault = None if spec is None else spec._fault(value.get(name))
            if fault is not None:
                return f"key {name!r}: {fault}"
        return None

    def __eq__(self, other: object) -> bool:
        """Compare by content, whatever the order of the keys."""
        if not isinstance(other, Composite):
            return NotImplemented
        return (self.shape, self.device) == (other.shape, other.device) and self._specs == other._specs

    def __repr__(self) -> str:
        """Return the entries, one in a line."""
        lines = [f"    {name}: {spec!r}".replace("\n", "\n    ") for name, spec in self._specs.items()]
        device = "" if self.device is None else f", device={str(self.device)!r}"
        return (
            "Composite(\n"
            + "".join(f"{line},\n" for line in lines)
            + f"    shape={tuple(self.shape)}{device})"
        )
