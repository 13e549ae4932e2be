"""Rows of a storage's columns, wherever they are: what the forms are made of, piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.segments import Array, Source, rows_at, rows_of
from gleanrl.checkpoint.values import Pieces

Field = tuple[torch.dtype, tuple[int, ...]]
_BLOCK_BYTES = 1 << 22
_FEW_WORDS = 16  # of a row, compared one column of them after the other


class Rows(ABC):
    """Columns of equal length.

    Attributes:
        fields: dtype and shape of a row of each; None for what isn't a tensor.
    """

    fields: Sequence[Field | None]

    @abstractmethod
    def pick(self, place: int, rows: Array | slice) -> Array:
        """Return rows of a column, ``(k, bytes of a row)`` uint8, in memory of their own.

        Args:
            place: of the column.
            rows: their numbers, ``(k,)`` int64, or all from one to another.
        """

    @abstractmethod
    def whole(self, place: int) -> Any:
        """Return a column as it is."""

    def width(self, place: int) -> int:
        """Return the bytes of a row; 0 for what isn't a tensor."""
        field = self.fields[place]
        return 0 if field is None else field[0].itemsize * prod(field[1])

    def made(self, place: int, count: int, make: Callable[[int, int], Array]) -> Pieces:
        """Return a tensor of `count` rows like those of a column; `make` returns the bytes of ``[start, stop)``."""
        field = self.fields[place]
        assert field is not None
        return Pieces(field[0], (count, *field[1]), make)

    def taken(self, place: int, index: Array) -> Pieces:
        """Return rows of a column as a tensor."""
        return self.made(place, len(index), lambda start, stop: self.pick(place, run_of(index[start:stop])))

    def unlike(self, place: int, other: int, rows: Array, following: Array) -> Array:
        """Return where rows of one column aren't the rows of another one that follow, ``(k,)`` bool, byte for byte.

        Args:
            place: of the one.
            other: of the other one, with as many bytes in a row.
            rows: of the one, ``(k,)`` int64.
            following: of the other one, one for each.
        """
        found = np.zeros(len(rows), bool)
        size = max(1, _BLOCK_BYTES // self.width(place))
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            found[part] = _differ(
                self.pick(place, run_of(rows[part])), self.pick(other, run_of(following[part]))
            )
        return found


def run_of(rows: Array) -> Array | slice:
    """Return row numbers as a slice where they follow each other: such rows are copied at once."""
    if not len(rows) or rows[-1] - rows[0] != len(rows) - 1 or not (rows[1:] > rows[:-1]).all():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _differ(one: Array, other: Array) -> Array:
    """Return which rows of bytes differ, ``(k,)`` bool."""
    word = next(size for size in (8, 4, 2, 1) if one.shape[1] % size == 0)
    words = one.view(f"u{word}") != other.view(f"u{word}")
    if words.shape[1] > _FEW_WORDS:
        return np.asarray(words.any(1))
    found: Array = words[:, 0].copy()
    for column in range(1, words.shape[1]):
        found |= words[:, column]
    return found


class InMemory(Rows):
    """Columns that nobody writes on.

    Args:
        columns: ``[rows, *shape]`` each, on any device, and others.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns
        self._bytes: dict[int, Array] = {}
        self.fields = [
            (column.dtype, tuple(column.shape[1:])) if isinstance(column, torch.Tensor) else None
            for column in columns
        ]

    def pick(self, place: int, rows: Array | slice) -> Array:
        """Return rows of a column."""
        if place not in self._bytes:  # a copy, unless they follow each other on the CPU
            self._bytes[place] = rows_of(self._columns[place])
        return rows_at(self._bytes[place], rows)

    def whole(self, place: int) -> Any:
        """Return a column as it is."""
        return self._columns[place]


class AtMoment(Rows):
    """Columns as they are at one moment, whatever is written meanwhile.

    Args:
        source: generations, then the columns; somebody closes it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.fields = source.layout.fields[1:]
        source.begin()

    def pick(self, place: int, rows: Array | slice) -> Array:
        """Return rows of a column."""
        return self._source.pick(place + 1, rows)

    def whole(self, place: int) -> Pieces:
        """Return a column as it is."""
        return self.made(place, self._source.layout.rows, lambda *span: self.pick(place, slice(*span)))

    def generations(self) -> Pieces:
        """Return the generations."""
        pick = self._source.pick
        return Pieces(torch.int64, (self._source.layout.rows,), lambda *span: pick(0, slice(*span)))


def laid_out(state: Mapping[str, Any], lay: Callable[[Rows], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a storage's state with what a form makes of its columns.

    Args:
        state: from `Storage.state_dict`, or `Storage.moment_dict`, whose tensors are made when they are written.
        lay: returns entries of the state; `Pieces` in it, or in dictionaries and lists in it, are tensors.
    """
    columns = state["columns"]
    if isinstance(columns, Source):
        rows = AtMoment(columns)
        return {**state, "generations": rows.generations(), **lay(rows)}
    return {**state, **_with_tensors(lay(InMemory(columns)))}


def _with_tensors(value: Any) -> Any:
    if isinstance(value, Pieces):
        return value.tensor()
    if isinstance(value, dict):
        return {key: _with_tensors(part) for key, part in value.items()}
    return [_with_tensors(part) for part in value] if isinstance(value, list) else value


def typed(rows: Array, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the column of rows of bytes."""
    if not rows.size:
        return torch.empty(len(rows), *shape, dtype=dtype, device="cpu")
    return torch.from_numpy(rows).view(dtype).reshape(len(rows), *shape)
