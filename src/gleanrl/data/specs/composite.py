"""`Composite`: a dictionary of specs, which describes TensorDicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from typing_extensions import Self

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import (
    DeviceLike,
    TensorSpec,
    Transform,
    as_size,
    blank,
    combinations,
    concrete,
    fits,
    outcome,
)
from gleanrl.data.specs.mapping import Changes, Entry, SpecMapping, projected, require_unlocked
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, SchemaError, SpecError

Names = tuple[str | None, ...]


def names_after(names: Names | None, shape: torch.Size, transform: Transform) -> Names | None:
    """Return the names of the dimensions after a shape operation, which an empty TensorDict computes."""
    if names is None:
        return None
    untyped_names: Any = names  # its items may be None
    named: Any = TensorDict({}, blank(shape).shape, names=untyped_names)
    after: Any = transform(named)
    return tuple(after.names)


def names_of_values(names: Names | None, ndim: int) -> Any:
    """Return names for values with `ndim` dimensions: None for leading ones, then `names`; None without names."""
    return None if names is None else [*[None] * (ndim - len(names)), *names]


class Composite(SpecMapping):
    """A domain of TensorDicts: one spec for each key; `shape` is their batch size.

    It is a mapping with nested keys (tuples of names). Setting `("a", "b")` creates the composite `"a"` if it doesn't
    exist. A dictionary becomes a composite. An entry that is None leaves the values under its key unspecified: they
    are neither drawn nor checked. TensorDicts may hold more keys than the spec.

    Examples:
        >>> from gleanrl.data.specs import Categorical, Unbounded
        >>> spec = Composite(obs=Unbounded((4, 3)), action=Categorical(2, shape=(4,)), shape=(4,))
        >>> spec.rand().batch_size
        torch.Size([4])

    Args:
        specs: a mapping from keys to specs, mappings or None.
        shape: the batch size; the shape of each entry starts with it.
        device: the device to which the entries are moved; None: each entry keeps its own.
        data_cls: the class of the values, a tensorclass; None: TensorDict.
        step_mdp_static: whether `keys(step_mdp_static_only=True)` takes this composite as a leaf.
        names: names of the dimensions, which the values get; None: no names.
        entries: more entries, by keyword.

    Raises:
        InvalidArgumentError: if an entry's shape doesn't start with `shape`, or the names don't fit the dimensions.
        InvalidTypeError: if an entry isn't a spec, a mapping or None.
        ReservedNameError: if an entry has the name of an attribute of specs (see `set`).
    """

    _names: Names | None = None

    def __init__(
        self,
        specs: Mapping[Any, Any] | SpecMapping | None = None,
        /,
        *,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        data_cls: Any = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **entries: Any,
    ) -> None:
        self._shape = as_size(((() if shape is None else shape),))
        self.device = as_device(device)
        self.data_cls, self.step_mdp_static = data_cls, step_mdp_static
        self._specs: dict[str, Entry] = {}
        if specs is not None and not isinstance(specs, (Mapping, SpecMapping)):
            raise InvalidTypeError(f"Composite: expected a mapping from keys to specs, got {specs!r}")
        for source in (specs or {}, entries):
            for key, spec in source.items():
                self.set(key, spec)
        if names is not None:
            self.names = names

    @property
    def shape(self) -> torch.Size:
        """The batch size; assigning another one checks that the shapes of all entries start with it.

        Nested composites with fewer dimensions get the same batch size.

        Raises:
            InvalidArgumentError: if the shape of an entry doesn't start with the new batch size.
            UnsupportedError: if the composite is locked, or a copy of a part of another spec.
        """
        return self._shape

    @shape.setter
    def shape(self, shape: Iterable[int] | int) -> None:
        require_unlocked(self, "shape")
        new = self._with_shape(as_size((shape,)))
        self._shape, self._specs, self._names = new._shape, new._specs, new._names

    def _with_shape(self, shape: torch.Size) -> Composite:
        names = None if self._names is None else (*self._names, *[None] * len(shape))[: len(shape)]
        new = self._mapped(lambda spec: spec, _shape=shape, _names=names)
        for name, spec in self._specs.items():
            new.set(name, spec)
        return new

    @property
    def batch_ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    def _entries(self) -> dict[str, Entry]:
        return dict(self._specs)

    def _assign(self, name: str, spec: Entry) -> None:
        self._specs[name] = spec
        Changes.note()

    def _remove(self, name: str) -> None:
        del self._specs[name]

    def _restorer(self) -> Callable[[], None]:
        nested, specs = super()._restorer(), dict(self._specs)

        def restore() -> None:
            nested()
            self._specs = specs
            Changes.note()

        return restore

    def _nested(self) -> Iterable[SpecMapping]:
        return [spec for spec in self._specs.values() if isinstance(spec, SpecMapping)]

    def empty(self) -> Composite:
        """Return an unlocked composite without entries, with the same shape, device, class of values and names."""
        return Composite(
            shape=self._shape,
            device=self.device,
            data_cls=self.data_cls,
            step_mdp_static=self.step_mdp_static,
            names=self._names,
        )

    def _mapped(self, function: Callable[[TensorSpec], TensorSpec], **attributes: Any) -> Composite:
        """Return an unlocked composite with `function` applied to each entry, and with the given attributes."""
        new = self.empty()
        for name, value in attributes.items():
            setattr(new, name, value)
        for name, spec in self._specs.items():
            new._specs[name] = None if spec is None else function(spec)
        return new

    def _parts(self) -> Sequence[TensorSpec]:
        """Return the entries, without unspecified ones."""
        return [spec for spec in self._specs.values() if spec is not None]

    def _reshaped(self, transform: Transform) -> Composite:
        for name, spec in self._specs.items():
            if spec is not None and spec.batch_ndim < self.batch_ndim:
                raise InvalidArgumentError(
                    f"key {name!r}: dimensions of {self!r} encode one value there, so that they can't change"
                )
        shape, names = (
            outcome(transform(blank(self._shape))),
            names_after(self._names, self._shape, transform),
        )
        return self._mapped(lambda spec: spec._reshaped(transform), _shape=shape, _names=names)

    def clear_device_(self) -> Composite:
        """Drop the device, here and in nested composites, also in a locked composite. The leaf specs keep theirs.

        Returns:
            the composite itself.

        Raises:
            UnsupportedError: if the composite is a copy of a part of another spec.
        """
        self.require_own("clear_device_")
        self.device = None
        for spec in self._nested():
            spec.clear_device_()
        return self

    def to(self, dest: torch.dtype | DeviceLike) -> Composite:
        """Return the composite for another device or dtype, unlocked; itself if it is on the device already."""
        if isinstance(dest, torch.dtype):
            return self._mapped(lambda spec: spec.to(dest))
        device = as_device(dest)
        if device == self.device:
            return self
        return self._mapped(lambda spec: spec.to(dest), device=device)

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        return self._collected(lead, lambda spec: spec.rand(lead, generator=generator))

    def _filled(self, lead: torch.Size, number: int) -> Any:
        return self._collected(lead, lambda spec: spec.one(lead) if number else spec.zero(lead))

    def _collected(self, lead: torch.Size, function: Callable[[TensorSpec], Any]) -> Any:
        made = {name: function(spec) for name, spec in self._specs.items() if spec is not None}
        return self._wrapped(made, lead + concrete(self._shape), self.device)

    def _wrapped(self, entries: dict[str, Any], batch: Sequence[int], device: torch.device | None) -> Any:
        """Return the entries as a TensorDict, or as an instance of `data_cls`."""
        made = TensorDict(
            entries, batch_size=batch, device=device, names=names_of_values(self._names, len(batch))
        )
        return made if self.data_cls in (None, TensorDict) else self.data_cls.from_tensordict(made)

    def _updated(self, val: Any, function: Callable[[Self, torch.Size], Any]) -> Any:
        return val.update(function(self, val.batch_size[: val.batch_dims - self.ndim]))

    def zeros_update(self, val: Any) -> Any:
        """Set the entries of the spec in a TensorDict to zeros, in place, and return the TensorDict."""
        return self._updated(val, Composite.zero)

    def ones_update(self, val: Any) -> Any:
        """Set the entries of the spec in a TensorDict to ones, in place, and return the TensorDict."""
        return self._updated(val, Composite.one)

    def rand_update(self, val: Any) -> Any:
        """Set the entries of the spec in a TensorDict to drawn values, in place, and return the TensorDict.

        The values come from torch's global generator.
        """
        return self._updated(val, Composite.rand)

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all combinations of the entries' values, `(count, *shape)`; see `TensorSpec.enumerate`.

        The values of the last entry change fastest. Unspecified entries are left out. Without other entries the count
        is 0.
        """
        names = [name for name, spec in self._specs.items() if spec is not None]
        values = combinations([self._specs[name].enumerate(use_mask) for name in names])  # type: ignore[union-attr]
        count = len(values[0]) if values else 0
        batch = (count, *concrete(self._shape))
        return self._wrapped(dict(zip(names, values, strict=True)), batch, self.device)

    def _projected(self, value: Any) -> Any:
        new = value.copy()
        for name, spec in self._specs.items():
            if spec is not None:
                try:
                    new[name] = projected(spec, value.get(name))
                except SpecError as error:
                    raise SpecError(f"key {name!r}: {error}") from error
        return new

    def encode(self, val: Mapping[str, Any] | TensorDictBase, *, ignore_device: bool = False) -> Any:
        """Convert values of an environment to a TensorDict; each entry is encoded by its spec.

        If the spec of a key is None, its value may be missing, and is stored unchanged.

        Args:
            val: a value for each key.
            ignore_device: leave each entry on the device of its input.

        Raises:
            MissingKeyError: if a key of the spec is missing.
            SchemaError: if there is a key that the spec lacks, a shape doesn't fit, or the leading dimensions of two
                entries differ.
            SpecError: if an entry is outside its domain, unless it is `Bounded` (see `LeafSpec.encode`).
            InvalidTypeError: if `val` isn't a mapping or a TensorDict, or an entry doesn't consist of numbers.
        """
        if not isinstance(val, Mapping) and not is_tensor_collection(val):
            raise InvalidTypeError(f"encode: expected a mapping with keys {list(self._specs)}, got {val!r}")
        extra = [key for key in val.keys() if key not in self._specs]
        if extra:
            raise SchemaError(f"encode: unexpected keys {extra}; the keys are {list(self._specs)}")
        encoded: dict[str, Any] = {}
        lead: torch.Size | None = None
        batch = concrete(self._shape)
        for name, spec in self._specs.items():
            if name not in val.keys():
                if spec is None:
                    continue
                raise MissingKeyError(f"encode: no key {name!r}; got {list(val.keys())}")
            encoded[name] = val[name] if spec is None else spec.encode(val[name], ignore_device=ignore_device)
            if spec is not None:
                # Dimensions in front of the spec's become batch dimensions, which a TensorDict shares among entries.
                got = encoded[name].shape[: encoded[name].ndim - spec.ndim]
                if lead is not None and got != lead:
                    raise SchemaError(
                        f"encode: key {name!r}: expected leading dimensions {tuple(lead)}, as before, "
                        f"got {tuple(got)}"
                    )
                lead, batch = got, encoded[name].shape[: len(got) + self.ndim]
        return self._wrapped(encoded, batch, None if ignore_device else self.device)

    def to_numpy(self, val: TensorDictBase, safe: bool | None = None) -> dict[str, Any]:
        """Convert the entries that the spec has to a nested dictionary of arrays; see `TensorSpec.to_numpy`.

        Unspecified entries are left out.

        Raises:
            SchemaError: if a key is missing, or the batch size doesn't fit.
            SpecError: if an entry is checked and doesn't fit its spec (see `LeafSpec.to_numpy`).
        """
        misfit = self._misfit(val)
        if misfit is not None:
            raise SchemaError(f"to_numpy: {misfit}")
        specs = self._specs.items()
        return {name: spec.to_numpy(val.get(name), safe) for name, spec in specs if spec is not None}

    def _check_types(self, value: TensorDictBase) -> None:
        for path, spec in self.items(True, True):
            if spec is not None and (entry := value.get(path, None)) is not None:
                spec.type_check(entry, path)

    def cardinality(self) -> int | float:
        """Return the number of combinations of the entries' values; 0 if the domain of an entry is empty.

        If no domain is empty, an unspecified or a continuous entry makes it infinity.
        """
        counts = [math.inf if spec is None else spec.cardinality() for spec in self._specs.values()]
        if 0 in counts:
            return 0
        return math.inf if math.inf in counts else math.prod(counts)

    def _misfit(self, value: Any) -> str | None:
        if is_tensor_collection(value):
            wrong = self.data_cls is not None and not isinstance(value, self.data_cls)
            if not fits(value.batch_size, self._shape):
                return f"expected a batch size that ends with {tuple(self._shape)}, got {tuple(value.batch_size)}"
        else:
            wrong = not isinstance(value, Mapping)  # a mapping has no batch size to check
        if wrong:
            return f"expected a {(self.data_cls or TensorDict).__name__}, got {type(value).__name__}"
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
        """Compare by content, without regard to the order of the keys and the names of dimensions."""
        if not isinstance(other, Composite):
            return NotImplemented
        own_fields = (self._shape, self.device, self.data_cls, self.step_mdp_static)
        other_fields = (other._shape, other.device, other.data_cls, other.step_mdp_static)
        return own_fields == other_fields and self._specs == other._specs

    def __repr__(self) -> str:
        """Return the entries, each on its own line."""
        lines = [f"    {name}: {spec!r}".replace("\n", "\n    ") for name, spec in self._specs.items()]
        device = "" if self.device is None else f", device={str(self.device)!r}"
        return (
            "Composite(\n"
            + "".join(f"{line},\n" for line in lines)
            + f"    shape={tuple(self.shape)}{device})"
        )

    @property
    def names(self) -> list[str | None]:
        """The names of the dimensions, which the values get; None for a dimension without a name.

        Assigning names also sets them in nested composites. Assigning None removes all names. Names aren't part of the
        domain.

        Raises:
            InvalidArgumentError: if the number of names isn't the number of dimensions, or a name occurs twice.
        """
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        new_names = [None] * self.ndim if names is None else list(names)
        named = [name for name in new_names if name is not None]
        if len(new_names) != self.ndim or len(set(named)) < len(named):
            raise InvalidArgumentError(f"names: expected {self.ndim} different names or None, got {names!r}")
        self._names = tuple(new_names) if named else None
        for spec in self.values():
            if isinstance(spec, Composite):
                spec.names = [*new_names, *spec.names[self.ndim :]]

    def refine_names(self, *names: Any) -> Self:
        """Set names of dimensions without a name, in place.

        Args:
            names: one name for each dimension; None keeps the present name. ``...`` means None for all dimensions that
                the other names leave.

        Returns:
            the composite itself.

        Raises:
            InvalidArgumentError: if a dimension has another name already, or the number of names isn't the number of
                dimensions.
        """
        new_names = list(names)
        if new_names.count(...) == 1:
            at = new_names.index(...)
            new_names[at : at + 1] = [None] * (self.ndim - len(new_names) + 1)
        both = list(zip(self.names, new_names, strict=False))
        if len(new_names) != self.ndim or any(None not in pair and pair[0] != pair[1] for pair in both):
            raise InvalidArgumentError(f"refine_names: {names} don't refine the names {self.names}")
        self.names = [old if new is None else new for old, new in both]
        return self
