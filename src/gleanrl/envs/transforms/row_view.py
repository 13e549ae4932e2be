"""`Row`: one row of a block's columns, with the part of TensorDict's interface that transforms use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path
from gleanrl.envs.outcomes import any_of
from gleanrl.errors import MissingKeyError

_REQUIRED: Any = object()

Record = Any
"""Argument of a transform's hooks: a TensorDict or a `Row`. Both have `get`, `set`, `pop`, `batch_size`, `device`."""


class TransformRows(Protocol):
    """The values at one key, by row."""

    def __getitem__(self, t: int, /) -> torch.Tensor:
        """Return the value in row `t`."""


class TransformColumns(Protocol):
    """The values of many rows, by key."""

    def get(self, key: NestedKey, /) -> TransformRows | None:
        """Return the values at `key` in all rows; None if there is no such key."""

    def row(self, key: NestedKey, t: int, /) -> torch.Tensor | None:
        """Return the value at `key` in row `t`, without opening other rows; None if there is no such key."""

    def __iter__(self) -> Iterator[NestedKey]:
        """Iterate over the keys."""


class Leaves:
    """The values of a single row by key; every row index returns them.

    Args:
        leaves: the values by path.
    """

    def __init__(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        self._leaves = {as_key(path): leaf for path, leaf in leaves.items()}

    def get(self, key: NestedKey) -> TransformRows | None:
        """Return the value at `key` in every row; None if there is none."""
        leaf = self._leaves.get(key)
        return None if leaf is None else _Everywhere(leaf)

    def row(self, key: NestedKey, t: int) -> torch.Tensor | None:
        """Return the value at `key`; None if there is none."""
        return self._leaves.get(key)

    def __iter__(self) -> Iterator[NestedKey]:
        """Iterate over the keys."""
        return iter(self._leaves)


class _Everywhere(NamedTuple):
    value: torch.Tensor

    def __getitem__(self, t: Any) -> Any:
        return tuple.__getitem__(self, 0)


class Row:
    """The values of one step: row `t` of a block's columns, and values that transforms have `set`.

    A read costs one dictionary lookup; a TensorDict would cost microseconds. `set` stores a value in `made`, which
    hides the column. Columns are never written here. Keys are strings, or tuples for nested entries.

    Args:
        batch_size: the environments' batch dimensions.
        device: the device that a TensorDict of these values would declare.

    Attributes:
        t: index of the row.
        made: the values that were set since the last `clear`, by key.
        seldom: whether reads are rare. Opening a column costs as much as a hundred reads of single rows, so rare reads
            don't open it.
        copies: whether `get` returns copies, which the reader may keep. The memory of rows is used again.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self.batch_size = batch_size
        self.device = device
        self.t, self.seldom, self.copies = 0, False, False
        self.made: dict[NestedKey, torch.Tensor] = {}
        self._hidden: set[NestedKey] = set()
        self._columns: TransformColumns = Leaves({})
        self._opened: dict[NestedKey, TransformRows] = {}

    def over(self, columns: TransformColumns) -> Row:
        """Read from `columns` from now on; return the row itself. Values that were set stay."""
        self._columns = columns
        self._opened = {}
        return self

    def clear(self, t: int, seldom: bool = False) -> dict[NestedKey, torch.Tensor]:
        """Drop the values that were set and move to row `t`; return the new, empty `made`."""
        self.t, self.seldom = t, seldom
        made: dict[NestedKey, torch.Tensor] = {}
        self.made = made
        if self._hidden:
            self._hidden = set()
        return made

    def get(self, key: NestedKey, default: Any = _REQUIRED) -> Any:
        """Return the value at `key`, or `default`.

        Raises:
            MissingKeyError: if there is none and no default is given (also a KeyError).
        """
        if self.copies:
            value = self._get(key, default)
            return value.clone() if isinstance(value, torch.Tensor) else value
        return self._get(key, default)

    def _get(self, key: NestedKey, default: Any) -> Any:
        value = self.made.get(key)
        if value is not None:
            return value
        column = self._opened.get(key)
        if column is not None and not self._hidden:
            return column[self.t]
        if key not in self._hidden and (value := self._read(key)) is not None:
            return value
        if not isinstance(key, str) and as_key(as_path(key)) != key:
            return self._get(as_key(as_path(key)), default)
        if default is _REQUIRED:
            raise MissingKeyError(f"key {key!r} not found among {sorted(map(str, self.keys()))}")
        return default

    def _read(self, key: NestedKey) -> torch.Tensor | None:
        if self.seldom:
            return self._columns.row(key, self.t)
        column = self._columns.get(key)
        if column is None:
            return None
        self._opened[key] = column
        return column[self.t]

    def set(self, key: NestedKey, value: torch.Tensor) -> Row:
        """Set the value at `key`, without a copy; return the row itself."""
        self.made[key] = value
        return self

    def pop(self, key: NestedKey, default: Any = _REQUIRED) -> Any:
        """Remove the value at `key` until `set` or `clear`, and return it, or `default`. The column isn't changed.

        Raises:
            MissingKeyError: if there is none and no default is given (also a KeyError).
        """
        value = self.get(key, default)
        self.made.pop(key, None)
        self._hidden.add(key)
        return value

    def keys(self) -> list[NestedKey]:
        """Return the keys of all values."""
        return [*dict.fromkeys((*self.made, *(key for key in self._columns if key not in self._hidden)))]


def on_copies(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return `hook` such that it reads copies of the values in rows, and may keep them."""

    def apart(*rows: Row) -> Any:
        for row in rows:
            row.copies = True
        try:
            return hook(*rows)
        finally:
            for row in rows:
                row.copies = False

    return apart


def reset_rows(record: Record, reset_keys: Sequence[NestedKey]) -> torch.Tensor | None:
    """Return which environments a request resets, ``(*batch,)`` bool; None for all of them.

    Args:
        record: the request; its ``"_reset"`` masks may be absent.
        reset_keys: keys of the masks.
    """
    size = record.batch_size
    found = [mask for key in reset_keys if (mask := record.get(key, None)) is not None]
    if not found:
        return None
    rows = any_of(found, size)
    return None if bool(rows.all()) else rows


def trailing(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `mask` with trailing dimensions of size 1, so that it has as many dimensions as `value`."""
    return mask.reshape((*mask.shape, *[1] * (value.ndim - mask.ndim)))


def leaf_keys(record: Record) -> list[NestedKey]:
    """Return the keys of all leaves in `record`."""
    if isinstance(record, Row):
        return record.keys()
    assert isinstance(record, TensorDictBase)
    return list(record.keys(True, True))


def sibling(key: NestedKey, name: str) -> NestedKey:
    """Return the key `name` in the group of `key`: ``sibling(("agents", "done"), "x")`` is ``("agents", "x")``."""
    path: Path = as_path(key)
    return as_key((*path[:-1], name))
