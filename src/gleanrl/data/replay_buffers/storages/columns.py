"""Columns: the memory of a tensor storage, one tensor per leaf, and the ways in and out of it.

Rows are slots with time and batch dimensions flattened. On the CPU the native core copies all leaves in one
call (`host_columns.py`); on other devices torch does it leaf by leaf.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gleanrl.data.replay_buffers.storages.record_format import in_memory
from gleanrl.data.replay_buffers.storages.stored import Source, Sources
from gleanrl.devices import InTurn
from gleanrl.objects import Leaf, Objects
from gleanrl.schema import Field


class Lent:
    """What is known of views that were given to others, who may write into them, and nobody notices.

    Attributes:
        count: how often some were given.
        always: whether others hold the memory in any case.
    """

    def __init__(self, always: bool = False) -> None:
        self.count = 0
        self.always = always
        self._views: list[weakref.ref[Any]] = []
        self._most = 64

    def note(self, views: Iterable[Any]) -> None:
        """Note arrays that are given."""
        self.count += 1
        self._views.extend(map(weakref.ref, views))
        if len(self._views) > self._most:
            self._views = [view for view in self._views if view() is not None]
            self._most = max(64, 2 * len(self._views))

    @property
    def alive(self) -> bool:
        """Whether somebody may be holding one."""
        return self.always or any(view() is not None for view in self._views)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle none: they are views of other memory."""
        return {**self.__dict__, "_views": []}


class ColumnStore(ABC):
    """Columns ``[num_rows, *field]``, one for each field, all rows in slot order.

    `gather` may run in any thread beside anything else (rows written meanwhile come out torn: compare
    generations); the writing calls one at a time.

    Args:
        fields: the leaves.
        columns: their memory, contiguous, ``[num_rows, *field]`` each. Kept alive and never replaced, and not for
            handing out (see `views`).
    """

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        self.fields = tuple(fields)
        self.columns = list(columns)
        self.num_rows = columns[0].shape[0]
        self.lent = Lent(always=True)

    @abstractmethod
    def begin(self) -> None:
        """Say that the columns are about to be used past the calls below: see `InTurn`."""

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Return whether `leaves` are known to be ``[*lead, *field]`` of the fields' dtypes, and what `ready` returns.

        Where they are, neither `Schema.check` nor `ready` is asked. False also where nobody can tell, as here.
        """
        return False

    @abstractmethod
    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `leaves` as the copies need them: on the right device, contiguous. May copy.

        Raises:
            RuntimeError: a leaf without memory.
        """

    @abstractmethod
    def part(self, leaves: list[torch.Tensor]) -> None:
        """Put copies in the place of those leaves that are views of these very columns; `write` and `put` do."""

    @abstractmethod
    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy `count` rows of ready leaves to row `start` and the following, around the end."""

    @abstractmethod
    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy ready leaves to `slots`, ``(n,)`` int64; of equal slots the last one wins."""

    @abstractmethod
    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Return rows of columns as fresh contiguous tensors ``[n, *field]``.

        Args:
            indices: index arrays, ``(n,)`` int64 on the CPU, of one length.
            wanted: the leaves, each a column and the index array that it is read at; None for all columns in order at
                the first array.
        """

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None] | None:
        """Return what finds seams in the core (see `Seams.find`), by pairs of columns and those of flags; or None."""
        return None

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return live views of the first rows, seen as ``[*lead, *field]``, at a basic index of `lead`."""
        self.begin()
        rows = lead.numel()
        return [column[:rows].view(*lead, *column.shape[1:])[(*index, ...)] for column in self.columns]

    def view(self, position: int) -> torch.Tensor:
        """Return a live view of one column, ``[num_rows, *field]``."""
        self.begin()
        return self.columns[position]


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Stand-ins of dtypes that torch's indexing doesn't know."""


def _indexable(column: torch.Tensor) -> torch.Tensor:
    """Return `column`, or a view of its bits in a dtype that torch can index."""
    twin = _SIGNED.get(column.dtype)
    return column if twin is None else column.view(twin)


class DeviceColumns(ColumnStore):
    """Columns on an accelerator, or on any device that torch knows."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.device = columns[0].device
        self._in_turn = InTurn(self.device)

    def begin(self) -> None:
        """Come after what was asked for before."""
        self._in_turn.begin()

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves on the columns' device."""
        return [in_memory(leaf).detach().to(self.device) for leaf in leaves]

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Look at the leaves' torch storages."""
        mine = {column.untyped_storage().data_ptr() for column in self.columns}
        for position, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() in mine:
                leaves[position] = leaf.clone()

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy at most two ranges per column."""
        self.begin()
        self.part(leaves)
        head = min(count, self.num_rows - start)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(count, *field.shape)
            column[start : start + head].copy_(rows[:head])
            if head < count:
                column[: count - head].copy_(rows[head:])

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy with one indexed write per column."""
        self.begin()
        self.part(leaves)
        # On a device the order of equal indices is open: keep the last of each slot.
        last = {slot: position for position, slot in enumerate(slots.tolist())}
        where = torch.tensor(list(last), dtype=torch.int64, device=self.device)
        which = torch.tensor(list(last.values()), dtype=torch.int64, device=self.device)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(slots.shape[0], *field.shape)
            _indexable(column)[where] = _indexable(rows)[which]

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Fetch with one `index_select` per leaf on the device."""
        self.begin()
        where = [index.to(self.device) for index in indices]
        if wanted is None:
            wanted = tuple(Source(number) for number in range(len(self.columns)))
        found = [(self.columns[column], where[array]) for column, array in wanted]
        return [_indexable(column).index_select(0, rows).view(column.dtype) for column, rows in found]


class NoColumns(ColumnStore):
    """No column at all: records that are lists, or hold nothing."""

    def __init__(self, num_rows: int) -> None:
        self.fields, self.columns, self.num_rows = (), [], num_rows
        self.lent = Lent()

    def begin(self) -> None:
        """Do nothing."""

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return nothing."""
        return []

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Return nothing."""
        return []


def plain(leaf: Leaf, device: torch.device) -> Leaf:
    """Return `leaf` on `device`, contiguous, with lazy conjugations and negations carried out."""
    if isinstance(leaf, Objects):
        return leaf.on(device)
    return leaf.detach().to(device).resolve_conj().resolve_neg().contiguous()


def apart(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous `columns`, with copies of those that lie in another one's memory.

    What is written into one column must not show in another.
    """
    found = list(columns)
    end = 0
    for position in sorted(range(len(found)), key=lambda position: found[position].data_ptr()):
        start = found[position].data_ptr()
        if start < end and found[position].nbytes:
            found[position] = found[position].clone()
        else:
            end = max(end, start + found[position].nbytes)
    return found
