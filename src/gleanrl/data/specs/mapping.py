"""`SpecMapping`, the base class of composite specs: nested keys, views of the entries, and locks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import is_tensor_collection, unravel_key
from typing_extensions import Self

from gleanrl.data.specs.base import TensorSpec
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    ReservedNameError,
    UnsupportedError,
)


class Changes:
    """The version of all specs of this process; readers compare it to reuse results computed from specs.

    Attributes:
        latest: an object that each change replaces. A change is a new mask (also a removed one), or a new entry of a
            composite. Removing an entry isn't a change. A call of an environment in another process counts as a change,
            since that process may have set masks.
    """

    latest = object()

    @classmethod
    def note(cls) -> None:
        """Record a change: replace `latest`."""
        cls.latest = object()


def require_unlocked(composite: SpecMapping, key: Any) -> None:
    """Check that the entry under a key of a composite may change.

    Raises:
        UnsupportedError: if the composite is locked, or is a copy of a part of another spec.
    """
    composite.require_own(f"key {key!r}")
    if composite.is_locked:
        raise UnsupportedError(f"key {key!r}: can't change a locked composite; call unlock_() first")


Key = str | tuple[str, ...]
Entry = TensorSpec | None
LeafTest = Callable[[type], bool]
RESERVED = ("shape", "device", "dtype", "space")
"""Names that no entry can have, because specs have attributes with these names."""
_ABSENT: Any = object()
_MISSING: Any = object()


def as_path(key: Any) -> tuple[str, ...]:
    """Return a key as a tuple of names.

    Raises:
        InvalidTypeError: if it isn't a string or a tuple of strings.
    """
    if not is_key(key):
        raise InvalidTypeError(f"key: expected a string or a tuple of strings, got {key!r}")
    flat = unravel_key(key)
    return (flat,) if isinstance(flat, str) else tuple(flat)


def is_key(index: Any) -> bool:
    """Return whether `index` is a key, as opposed to positions along the dimensions."""
    return isinstance(index, str) or (isinstance(index, tuple) and bool(index) and all(map(is_key, index)))


def projected(spec: TensorSpec, value: Any) -> Any:
    """Return the result of `spec.project` for a part of a value, without changing the part."""
    return spec.project(value.copy() if isinstance(spec, SpecMapping) else value)


class SpecKeys(KeysView[Key]):
    """The keys of a composite; `in` accepts each spelling of a key: ``("a",)`` is ``"a"``."""

    def __contains__(self, key: object) -> bool:
        """Return whether the composite has this key."""
        if not is_key(key):
            return False
        path = as_path(key)
        return super().__contains__(path[0] if len(path) == 1 else path)

    def __repr__(self) -> str:
        """Return the keys."""
        return f"{type(self).__name__}({list(self)})"


def _changeable(spec: Any) -> Any:
    """Return `spec`, or a clone if it is a read-only part; the caller changes the result and stores it again."""
    return spec.clone() if spec.is_part else spec


class SpecMapping(TensorSpec):
    """Base class of specs whose entries are specs under names; a tuple of names is a path into nested entries."""

    all_locks = object()
    """An object that each `lock_` and `unlock_` in this process replaces.

    While it is the same object, a spec for which `is_fixed` was True keeps its entries.
    """
    _locked = False
    _locked_from_above = False

    dtype = None
    domain = "composite"
    data_cls: Any = None
    step_mdp_static = False

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the values: the shape."""
        return self.shape

    def listed(self) -> dict[Any, Any]:
        """Return the specs of all leaves by key, a tuple for a nested one."""
        return dict(self.items(True, True))

    @abstractmethod
    def _entries(self) -> dict[str, Entry]:
        """Return the entries by name, in a new dictionary."""

    @abstractmethod
    def _assign(self, name: str, spec: Entry) -> None:
        """Set the entry under one name; the caller has checked its shape."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Remove the entry under one name, which exists."""

    def _restorer(self) -> Callable[[], None]:
        """Return a function that undoes later changes of entries, here and in nested composites."""
        nested: Any = self._nested()
        each = [spec._restorer() for spec in nested]

        def restore() -> None:
            for undo in each:
                undo()

        return restore

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo all changes of entries in a ``with`` block that raises."""
        restore = self._restorer()
        try:
            yield
        except BaseException:
            restore()
            raise

    @abstractmethod
    def empty(self) -> SpecMapping:
        """Return an unlocked spec of the same shape and device without entries."""

    def _with_shape(self, shape: torch.Size) -> SpecMapping:
        """Return a copy with the batch size `shape`; classes whose shape is fixed return themselves.

        Raises:
            InvalidArgumentError: if the shape of an entry doesn't start with `shape`.
        """
        return self

    @abstractmethod
    def _check_types(self, value: Any) -> None:
        """Check the dtypes of a TensorDict's entries."""

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        """Check the dtypes of the entries and nothing else; missing entries aren't checked.

        Args:
            value: a TensorDict, or the value of one entry.
            selected_keys: the key or the sequence of keys to check; None: all. If `value` is the value of one entry,
                the key of this entry.

        Raises:
            InvalidTypeError: if a dtype isn't that of the spec.
            MissingKeyError: if the spec has no entry under a selected key.
        """
        if selected_keys is None:
            self._check_types(value)
        elif is_tensor_collection(value):
            keys = [selected_keys] if is_key(selected_keys) else selected_keys
            self.select(*keys).type_check(value)
        else:
            self.get(selected_keys).type_check(value, selected_keys)

    def project(self, val: Any) -> Any:
        """Replace the entries of `val` that are outside the domain by close ones inside; see `TensorSpec.project`.

        If an entry can't be replaced, the call raises, and `val` doesn't change.

        Returns:
            `val` itself.
        """
        projected = super().project(val)
        if projected is not val:
            val.update(projected)
        return val

    def set(self, name: Key, spec: Entry | Mapping[Any, Any]) -> Self:
        """Set the spec under a key; missing composites on the path of a nested key are created.

        The entry is the object `spec` itself, so that later changes of it take effect here. It is a copy if `spec` is
        read-only, on another device than the composite, or a composite with fewer dimensions. The latter gets the batch
        size of this composite.

        Args:
            name: the key: a name or a tuple of names.
            spec: a spec, a mapping (it becomes a composite), or None (the values stay unspecified).

        Returns:
            the composite itself.

        Raises:
            InvalidArgumentError: if the spec's shape doesn't start with the composite's.
            InvalidTypeError: if it isn't a spec, a mapping or None, or a name on the path belongs to a leaf.
            ReservedNameError: if the first name is an attribute of every spec (also an AttributeError).
            UnsupportedError: if the composite is locked, or a copy of a part of another spec.
        """
        first, *rest = as_path(name)
        if first in RESERVED:
            raise ReservedNameError(
                f"set: key {name!r}: {first!r} is an attribute of specs, not a name for an entry; choose another name"
            )
        require_unlocked(self, name)
        if not rest:
            self._assign(first, self._admitted(first, spec))
            return self
        child = self._entries().get(first)
        if child is not None and not isinstance(child, SpecMapping):
            raise InvalidTypeError(f"set: key {name!r}: {first!r} is a leaf, {child!r}")
        branch = self.empty() if child is None else _changeable(child)
        branch.set(tuple(rest), spec)
        self._assign(first, branch)
        return self

    def get(self, item: Key, default: Any = _ABSENT) -> Any:
        """Return the spec under the key `item`; the default if the key is missing.

        Raises:
            MissingKeyError: if the key is missing and no default is given.
            InvalidTypeError: if `item` is neither a string nor a tuple of strings.
        """
        node: Any = self
        for name in as_path(item):
            entries = node._entries() if isinstance(node, SpecMapping) else {}
            if name not in entries:
                if default is not _ABSENT:
                    return default
                raise MissingKeyError(f"get: no key {item!r}; the keys are {list(self.keys(True, True))}")
            node = entries[name]
        return node

    def pop(self, key: Key, default: Any = _ABSENT) -> Any:
        """Remove the spec under `key` and return it; return the default if the key is missing.

        Raises:
            MissingKeyError: if the key is missing and no default is given.
            UnsupportedError: if the key exists, and the composite is locked or a copy of a part of another spec.
        """
        spec = self.get(key, default)
        if key in self:
            del self[key]
        return spec

    def separates(self, *keys: Key, default: Any = None) -> SpecMapping | None:
        """Move the entries under `keys` from the composite to a new one.

        Args:
            keys: the keys to move; missing keys are skipped, unless there is a default. An unspecified entry (None) is
                removed, but not added to the new composite.
            default: the spec for missing keys; None: skip them.

        Returns:
            a composite with the entries; None if it would be empty.

        Raises:
            UnsupportedError: if the composite is locked, or a copy of a part of another spec.
        """
        with self._all_or_nothing():
            separated = {key: spec for key in keys if (spec := self.pop(key, default)) is not None}
            return self.empty().update(separated) if separated else None

    def update(self, dict_or_spec: Mapping[Any, Any] | SpecMapping) -> Self:
        """Set the given entries; mappings under the name of a composite are merged into it.

        The call raises the errors of `set`. After an error nothing has changed.

        Returns:
            the composite itself.
        """
        with self._all_or_nothing():
            for key, spec in dict_or_spec.items():
                present = self.get(key, None)
                if isinstance(present, SpecMapping) and isinstance(spec, (Mapping, SpecMapping)):
                    require_unlocked(self, key)
                    self.set(key, _changeable(present).update(spec))
                else:
                    self.set(key, spec)
        return self

    def _walk(
        self, nested: bool, leaves_only: bool, is_leaf: LeafTest | None, static: bool
    ) -> Iterator[tuple[Key, Entry]]:
        for name, spec in self._entries().items():
            inner = spec if isinstance(spec, SpecMapping) and not (static and spec.step_mdp_static) else None
            if inner is None or not leaves_only or (is_leaf is not None and is_leaf(type(spec))):
                yield name, spec
            if nested and inner is not None:
                for path, leaf in inner._walk(True, leaves_only, is_leaf, static):
                    yield (name, *as_path(path)), leaf

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: LeafTest | None = None,
        step_mdp_static_only: bool = False,
    ) -> KeysView[Key]:
        """Return the keys in the order of insertion; the result doesn't show later changes.

        Args:
            include_nested: include the keys of nested composites, as tuples.
            leaves_only: leave out composites.
            is_leaf: a function of a composite's class; if it returns True, `leaves_only` keeps such composites. Their
                entries are included as before.
            step_mdp_static_only: treat composites made with `step_mdp_static` as leaves, and leave out their entries.
        """
        return SpecKeys(dict(self._walk(include_nested, leaves_only, is_leaf, step_mdp_static_only)))

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: LeafTest | None = None,
        step_mdp_static_only: bool = False,
    ) -> ValuesView[Any]:
        """Return the specs in the order of `keys`; see there for the arguments. The view shows no later changes."""
        return dict(self._walk(include_nested, leaves_only, is_leaf, step_mdp_static_only)).values()

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: LeafTest | None = None,
        step_mdp_static_only: bool = False,
    ) -> ItemsView[Key, Any]:
        """Return keys and specs in the order of `keys`; see there for the arguments. They don't show later changes."""
        return dict(self._walk(include_nested, leaves_only, is_leaf, step_mdp_static_only)).items()

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether the composite has no entry, or with `recurse` no leaf at any depth."""
        return not (self.keys(True, True) if recurse else self._entries())

    def select(self, *keys: Key, strict: bool = True) -> SpecMapping:
        """Return an unlocked composite with only the entries under `keys`; it shares the leaves with this one.

        Raises:
            MissingKeyError: if `strict` is True and a key is missing.
        """
        new = self.empty()
        for key in keys:
            if strict or key in self:
                spec = self.get(key)
                new.set(key, spec.exclude() if isinstance(spec, SpecMapping) else spec)
        return new

    def exclude(self, *keys: Key) -> SpecMapping:
        """Return an unlocked composite without the entries under `keys`; missing keys are ignored.

        The result shares the leaves with this composite. Nested composites are copied.
        """
        paths = {as_path(key) for key in keys}
        new = self.empty()
        for name, spec in self._entries().items():
            if (name,) in paths:
                continue
            below = [path[1:] for path in paths if path[0] == name]
            new._assign(name, spec.exclude(*below) if isinstance(spec, SpecMapping) else spec)
        return new

    def _admitted(self, name: str, spec: Any) -> Entry:
        """Return `spec` as an entry of this composite, with its shape checked and moved to the composite's device."""
        if spec is None:
            return None
        if not isinstance(spec, TensorSpec):
            if not isinstance(spec, Mapping):
                raise InvalidTypeError(f"set: key {name!r}: expected a spec, a mapping or None, got {spec!r}")
            spec = self.empty().update(spec)
        if isinstance(spec, SpecMapping) and spec.ndim < self.ndim:
            # The batch size of the nested composite is too short, but its leaves may have all dimensions
            spec = spec._with_shape(self.shape)
        if spec.shape[: self.ndim] != self.shape:
            raise InvalidArgumentError(
                f"set: key {name!r}: expected a shape that starts with {tuple(self.shape)}, got {spec!r}"
            )
        spec = spec.as_entry()
        return spec if self.device is None else spec.to(self.device)

    def __getitem__(self, index: Any) -> Any:
        """Return the spec under a key; for any other index, the composite of the indexed batch, a read-only copy.

        Raises:
            MissingKeyError: if the key is missing.
            IndexRangeError: if the index is out of range.
        """
        return self.get(index) if is_key(index) else super().__getitem__(index)

    def __setitem__(self, key: Key, spec: Entry | Mapping[Any, Any]) -> None:
        """Set the spec under `key`, like `set`."""
        self.set(key, spec)

    def __delitem__(self, key: Key) -> None:
        """Remove the spec under `key`.

        Raises:
            MissingKeyError: if the key is missing.
            UnsupportedError: if the composite is locked, or a copy of a part of another spec.
        """
        self.get(key)
        name, *rest = as_path(key)
        require_unlocked(self, key)
        if not rest:
            self._remove(name)
            return
        branch: Any = _changeable(self._entries()[name])
        del branch[tuple(rest)]
        self._assign(name, branch)

    def __contains__(self, key: object) -> bool:
        """Return whether the composite has an entry under `key`."""
        return is_key(key) and self.get(key, _MISSING) is not _MISSING  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys, without nested ones."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return the number of keys, without nested ones."""
        return len(self._entries())

    def __bool__(self) -> bool:
        """Return whether the composite has an entry."""
        return bool(self._entries())

    @abstractmethod
    def _nested(self) -> Iterable[SpecMapping]:
        """Return the nested specs that are locked and unlocked together with this one."""

    @property
    def is_locked(self) -> bool:
        """Whether entries can't be set or removed."""
        return self._locked

    @property
    def locked(self) -> bool:
        """The same as `is_locked`."""
        return self._locked

    @property
    def is_fixed(self) -> bool:
        """Whether entries can't be set or removed, here or in any nested spec."""
        return self._locked and all(part.is_fixed for part in self._nested())

    def lock_(self, recurse: bool | None = None) -> Self:
        """Forbid setting and removing entries, here and, unless `recurse` is False, in nested composites.

        Returns:
            the composite itself.

        Raises:
            UnsupportedError: if the composite is a copy of a part of another spec.
        """
        self.require_own("lock_")
        self._set_lock(True, False, recurse is not False)
        return self

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow setting and removing entries again, here and, unless `recurse` is False, in nested composites.

        Returns:
            the composite itself.

        Raises:
            UnsupportedError: if this composite was locked as part of an enclosing composite.
        """
        if self._locked_from_above:
            raise UnsupportedError(
                "unlock_: this composite was locked with the one it is part of; unlock that one"
            )
        self._set_lock(False, False, recurse is not False)
        return self

    def _set_lock(self, locked: bool, from_above: bool, recurse: bool) -> None:
        SpecMapping.all_locks = object()
        self._locked, self._locked_from_above = locked, locked and from_above
        for spec in self._nested() if recurse else ():
            spec._set_lock(locked, True, True)
