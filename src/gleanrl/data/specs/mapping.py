"""The mapping side of composite specs: nested keys, views of the entries, locks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from tensordict import unravel_key
from typing_extensions import Self

from gleanrl.data.specs.base import TensorSpec
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, UnsupportedError

Key = str | tuple[str, ...]
Entry = TensorSpec | None
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
    """Return whether `index` names an entry, rather than positions along the dimensions."""
    return isinstance(index, str) or (isinstance(index, tuple) and bool(index) and all(map(is_key, index)))


class SpecMapping(TensorSpec):
    """A spec whose entries are specs under names; a tuple of names leads into nested ones."""

    dtype = None
    _locked = False
    _locked_from_above = False

    @abstractmethod
    def _entries(self) -> dict[str, Entry]:
        """Return the entries by name; changing the dictionary changes nothing else."""

    @abstractmethod
    def _assign(self, name: str, spec: Entry) -> None:
        """Set the entry under one name, its shape being checked already."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Remove the entry under one name, which exists."""

    @abstractmethod
    def empty(self) -> SpecMapping:
        """Return a spec of the same shape and device without entries, unlocked."""

    @abstractmethod
    def _nested(self) -> Iterable[SpecMapping]:
        """Return the composites that are locked and unlocked together with this one."""

    @abstractmethod
    def _check_types(self, value: Any) -> None:
        """Check the dtypes of a TensorDict's entries."""

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtypes of the entries and nothing else; entries that are missing are not checked.

        Args:
            value: a TensorDict, or the value under `key`.
            key: None, or the key of the entry that `value` is to be checked against.

        Raises:
            InvalidTypeError: if a dtype isn't that of the spec.
        """
        if key is None:
            self._check_types(value)
        else:
            self.get(key).type_check(value, key)

    def set(self, key: Key, spec: Entry | Mapping[Any, Any]) -> Self:
        """Set the spec under `key`; composites that are missing on the way to a nested key are made.

        Args:
            key: a name or a tuple of names.
            spec: a spec, a mapping (it becomes a composite), or None (the values stay unspecified).

        Returns:
            the composite itself.

        Raises:
            InvalidArgumentError: if the spec's shape doesn't start with the composite's.
            InvalidTypeError: if it isn't a spec, a mapping or None, or a name on the way belongs to a leaf.
            UnsupportedError: if the composite is locked.
        """
        name, *rest = as_path(key)
        self._require_unlocked(key)
        if not rest:
            self._assign(name, self._admitted(name, spec))
            return self
        child = self._entries().get(name)
        if child is not None and not isinstance(child, SpecMapping):
            raise InvalidTypeError(f"set: key {key!r}: {name!r} is a leaf, {child!r}")
        branch = self.empty() if child is None else child
        branch.set(tuple(rest), spec)
        self._assign(name, branch)
        return self

    def get(self, key: Key, default: Any = _ABSENT) -> Any:
        """Return the spec under `key`.

        Raises:
            MissingKeyError: if there is none and no default is given.
        """
        node: Any = self
        for name in as_path(key):
            entries = node._entries() if isinstance(node, SpecMapping) else {}
            if name not in entries:
                if default is not _ABSENT:
                    return default
                raise MissingKeyError(f"get: no key {key!r}; the keys are {list(self.keys(True, True))}")
            node = entries[name]
        return node

    def pop(self, key: Key, default: Any = _ABSENT) -> Any:
        """Remove the spec under `key` and return it; return the default if there is none.

        Raises:
            MissingKeyError: if there is none and no default is given.
        """
        spec = self.get(key, default)
        if key in self:
            del self[key]
        return spec

    def update(self, other: Mapping[Any, Any] | SpecMapping) -> Self:
        """Set the entries of `other`; mappings under the name of a composite are merged into it.

        Returns:
            the composite itself.
        """
        for key, spec in other.items():
            mine = self.get(key, None)
            if isinstance(mine, SpecMapping) and isinstance(spec, (Mapping, SpecMapping)):
                self._require_unlocked(key)
                self.set(key, mine.update(spec))
            else:
                self.set(key, spec)
        return self

    def _walk(self, include_nested: bool, leaves_only: bool) -> Iterator[tuple[Key, Entry]]:
        for name, spec in self._entries().items():
            nested = isinstance(spec, SpecMapping)
            if not (nested and leaves_only):
                yield name, spec
            if include_nested and isinstance(spec, SpecMapping):
                for path, leaf in spec._walk(True, leaves_only):
                    yield (name, *as_path(path)), leaf

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Key]:
        """Return the keys, in the order of insertion; they don't follow later changes.

        Args:
            include_nested: also those of nested composites, as tuples.
            leaves_only: without the composites themselves.
        """
        return dict(self._walk(include_nested, leaves_only)).keys()

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> ValuesView[Any]:
        """Return the specs; the arguments are those of `keys`."""
        return dict(self._walk(include_nested, leaves_only)).values()

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> ItemsView[Key, Any]:
        """Return keys and specs; the arguments are those of `keys`."""
        return dict(self._walk(include_nested, leaves_only)).items()

    def is_empty(self) -> bool:
        """Return whether there is no leaf, at any depth."""
        return not self.keys(True, True)

    def select(self, *keys: Key, strict: bool = True) -> SpecMapping:
        """Return a composite with the entries under `keys` only; it shares the leaves.

        Raises:
            MissingKeyError: if `strict` and a key is absent.
        """
        new = self.empty()
        for key in keys:
            if strict or key in self:
                spec = self.get(key)
                new.set(key, spec.exclude() if isinstance(spec, SpecMapping) else spec)
        return new

    def exclude(self, *keys: Key) -> SpecMapping:
        """Return a composite without the entries under `keys`; absent keys are fine. It shares the leaves."""
        paths = {as_path(key) for key in keys}
        new = self.empty()
        for name, spec in self._entries().items():
            if (name,) in paths:
                continue
            below = [path[1:] for path in paths if path[0] == name]
            new._assign(name, spec.exclude(*below) if isinstance(spec, SpecMapping) else spec)
        return new

    @property
    def is_locked(self) -> bool:
        """Whether entries can't be set or removed."""
        return self._locked

    def lock_(self) -> Self:
        """Forbid setting and removing entries, here and in nested composites.

        Returns:
            the composite itself.
        """
        self._set_lock(True, False)
        return self

    def unlock_(self) -> Self:
        """Allow setting and removing entries again, here and in nested composites.

        Returns:
            the composite itself.

        Raises:
            UnsupportedError: if the lock is that of a composite around this one.
        """
        if self._locked_from_above:
            raise UnsupportedError(
                "unlock_: this composite was locked with the one it is part of; unlock that one"
            )
        self._set_lock(False, False)
        return self

    def _set_lock(self, locked: bool, from_above: bool) -> None:
        self._locked, self._locked_from_above = locked, locked and from_above
        for spec in self._nested():
            spec._set_lock(locked, True)

    def _require_unlocked(self, key: Key) -> None:
        if self._locked:
            raise UnsupportedError(f"key {key!r}: can't change a locked composite; call unlock_() first")

    def _admitted(self, name: str, spec: Any) -> Entry:
        """Return `spec` as an entry of this composite, after checking that it can be one."""
        if spec is None:
            return None
        if not isinstance(spec, TensorSpec):
            if not isinstance(spec, Mapping):
                raise InvalidTypeError(f"set: key {name!r}: expected a spec, a mapping or None, got {spec!r}")
            spec = self.empty().update(spec)
        if spec.batch_shape[: self.ndim] != self.shape:
            raise InvalidArgumentError(
                f"set: key {name!r}: expected a shape that starts with {tuple(self.shape)}, got {spec!r}"
            )
        return spec if self.device is None else spec.to(self.device)

    def __getitem__(self, index: Any) -> Any:
        """Return the spec under a key, or, for any other index, the composite of the indexed batch."""
        return self.get(index) if is_key(index) else self._indexed(index)

    def __setitem__(self, key: Key, spec: Entry | Mapping[Any, Any]) -> None:
        """Set the spec under `key`, as `set`."""
        self.set(key, spec)

    def __delitem__(self, key: Key) -> None:
        """Remove the spec under `key`.

        Raises:
            MissingKeyError: if there is none.
            UnsupportedError: if the composite is locked.
        """
        self.get(key)
        name, *rest = as_path(key)
        self._require_unlocked(key)
        if not rest:
            self._remove(name)
            return
        branch = self._entries()[name]
        assert isinstance(branch, SpecMapping)
        del branch[tuple(rest)]
        self._assign(name, branch)

    def __contains__(self, key: object) -> bool:
        """Return whether there is an entry under `key`."""
        return is_key(key) and self.get(key, _MISSING) is not _MISSING  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys, without nested ones."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return the number of keys, without nested ones."""
        return len(self._entries())
