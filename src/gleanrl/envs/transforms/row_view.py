"""`Row`: one row of a block's columns, with the part of TensorDict's interface that transforms need."""

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
"""What a transform's hooks get: a TensorDict, or a `Row`, which has `get`, `set`, `pop`, `batch_size`, `device`."""


class TransformRows(Protocol):
    """The values at one key."""

    def __getitem__(self, t: int, /) -> torch.Tensor:
        """Return that in row `t`."""


class TransformColumns(Protocol):
    """Values by key, each for many rows."""

    def get(self, key: NestedKey, /) -> TransformRows | None:
        """Return what stands at `key` in row 0, 1, …; None if there is no such key."""

    def row(self, key: NestedKey, t: int, /) -> torch.Tensor | None:
        """Return what stands at `key` in row `t`, without opening the others; None if there is no such key."""

    def __iter__(self) -> Iterator[NestedKey]:
        """Iterate over the keys."""


class Leaves:
    """The values of a single row by key, whatever number the row has.

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
    """The values of one step: columns of a block at row `t`, and over them what transforms have `set`.

    A step costs a dictionary look-up for each value, where a TensorDict costs microseconds. `made` holds what was
    set since it was last cleared; columns are never written here. Keys are strings, or tuples for nested ones.

    Args:
        batch_size: the environments' batch dimensions.
        device: what a TensorDict of these values would say of its device.

    Attributes:
        t: which row.
        made: what was set.
        seldom: whether what is read now isn't read in every row: a column of many rows isn't opened for that, which
            costs as much as reading a hundred of them one by one.
        copies: whether what is read may be kept by whoever reads it: the memory of rows is written again.
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
        """Read from `columns` from now on; returns the row itself."""
        self._columns = columns
        self._opened = {}
        return self

    def clear(self, t: int, seldom: bool = False) -> dict[NestedKey, torch.Tensor]:
        """Forget what was set and go to row `t`; returns what will hold what is set."""
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
            raise MissingKeyError(f"key {key!r} not found; there are {sorted(map(str, self.keys()))}")
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
        """Set the value at `key`; returns the row itself."""
        self.made[key] = value
        return self

    def pop(self, key: NestedKey, default: Any = _REQUIRED) -> Any:
        """Return the value at `key`, or `default`; the row has none afterwards."""
        value = self.get(key, default)
        self.made.pop(key, None)
        self._hidden.add(key)
        return value

    def keys(self) -> list[NestedKey]:
        """Return the keys of all values."""
        return [*dict.fromkeys((*self.made, *(key for key in self._columns if key not in self._hidden)))]


def on_copies(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a transform's hook that gets copies of what it reads of rows, and may keep them."""

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
    """Return which environments are reset, ``(*batch,)`` bool; None for all of them.

    Args:
        record: what the reset was asked with; its ``"_reset"`` masks may be absent.
        reset_keys: where they stand.
    """
    size = record.batch_size
    found = [mask for key in reset_keys if (mask := record.get(key, None)) is not None]
    if not found:
        return None
    rows = any_of(found, size)
    return None if bool(rows.all()) else rows


def trailing(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `mask` with dimensions of size 1 behind, as many as `value` has more."""
    return mask.reshape((*mask.shape, *[1] * (value.ndim - mask.ndim)))


def leaf_keys(record: Record) -> list[NestedKey]:
    """Return the keys of all tensors in `record`."""
    if isinstance(record, Row):
        return record.keys()
    assert isinstance(record, TensorDictBase)
    return list(record.keys(True, True))


def sibling(key: NestedKey, name: str) -> NestedKey:
    """Return the key `name` beside `key`: ``sibling(("agents", "done"), "x")`` is ``("agents", "x")``."""
    path: Path = as_path(key)
    return as_key((*path[:-1], name))
