"""The lists of keys that transforms read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.envs.transforms.rows import Record
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError
from gleanrl.tree import NestedKey, as_key, as_path

Keys = NestedKey | Sequence[NestedKey]


class KeyList:
    """A list of a transform's keys: what it was set to, or, as long as that is None, the transform's default."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, transform: Any, owner: type | None = None) -> list[NestedKey]:
        if transform is None:
            return self  # type: ignore[return-value]
        given: list[NestedKey] | None = getattr(transform, f"_{self._name}")
        return getattr(transform, f"_default_{self._name}")() if given is None else given

    def __set__(self, transform: Any, keys: Keys | None) -> None:
        setattr(transform, f"_{self._name}", as_keys(self._name, keys))
        transform.empty_cache()


def as_keys(name: str, keys: Keys | None) -> list[NestedKey] | None:
    """Return `keys` as a list of keys in their shortest spelling; a string or a tuple of strings is one key."""
    if keys is None:
        return None
    if isinstance(keys, str) or (isinstance(keys, tuple) and keys and all(isinstance(k, str) for k in keys)):
        keys = [keys]
    if not isinstance(keys, Sequence):
        raise InvalidTypeError(f"{name}: expected a list of keys, got {keys!r}")
    return [as_key(as_path(key)) for key in keys]


def paired(
    transform: Any, name: str, ins: list[NestedKey], out_name: str, outs: list[NestedKey]
) -> list[tuple[NestedKey, NestedKey]]:
    """Return keys pair by pair; there must be as many of both."""
    if len(ins) != len(outs):
        raise InvalidArgumentError(
            f"{type(transform).__name__}: expected as many {out_name} as {name}, got {outs} for {ins}"
        )
    return list(zip(ins, outs, strict=True))


def missing_key(transform: Any, key: NestedKey, record: Record) -> MissingKeyError:
    """Return the error of a transform that doesn't find `key` in what it was given."""
    return MissingKeyError(
        f"{type(transform).__name__}: key {key!r} not found; there are {sorted(map(str, record.keys()))}"
    )
