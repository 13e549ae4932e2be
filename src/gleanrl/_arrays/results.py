"""Frozen results that components exchange: write placements, sampler draws and buffer counters.

`laid_out`, `text_table` and `html_table` return the texts by which results and parts show themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from gleanrl.errors import MissingKeyError

_NOTHING: Mapping[Any, torch.Tensor] = MappingProxyType({})

_INDENT = "\n    "

# Text and background come from the page, and gray lines show on light and dark pages alike.
_CELL = (
    "border: 1px solid rgba(128, 128, 128, 0.5); padding: 2px 8px; text-align: left; vertical-align: top; "
    "white-space: pre-wrap; color: inherit; background: none"
)


def laid_out(name: str, lines: Iterable[str]) -> str:
    """Return the repr of an object of class `name`, ``name(line, line)``, with each part on its own line."""
    return f"{name}({','.join(_INDENT + line.replace(chr(10), _INDENT) for line in lines)})"


def parts_text(name: str, parts: Mapping[str, object]) -> str:
    """Return the repr of an object of class `name`, ``name(part=value)``, with each part on its own line."""
    return laid_out(name, (f"{part}={_entries(value)}" for part, value in parts.items()))


def _entries(value: object) -> str:
    """Return the text of a value. A tuple of records has one record on a line."""
    if type(value) is tuple and value and all(hasattr(entry, "__match_args__") for entry in value):
        return laid_out("", map(str, value))
    return str(value)


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as lines of text, with aligned columns; the first column is aligned to the left."""
    cells = [[*header], *([_on_a_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if position else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _on_a_line(cell: object) -> str:
    text = str(cell)
    return text if text.isprintable() else repr(text)


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML for notebooks. All texts are escaped, because keys and values may contain markup."""

    def line(kind: str, cells: Iterable[object]) -> str:
        return (
            "<tr>"
            + "".join(f'<{kind} style="{_CELL}">{escape(str(cell))}</{kind}>' for cell in cells)
            + "</tr>"
        )

    body = "".join(line("td", row) for row in rows)
    return (
        '<table style="border-collapse: collapse; color: inherit">'
        f'<caption style="text-align: left; color: inherit">{escape(caption)}</caption>'
        f"<thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"
    )


def html_parts(name: str, parts: Mapping[str, object]) -> str:
    """Return the parts that `parts_text` shows as a table in HTML."""
    return html_table(name, ("part", "value"), ((part, _entries(value)) for part, value in parts.items()))


new_tuple = tuple.__new__
"""Makes a named tuple from all its fields in half the time of calling its class; for code that runs on every call."""


class Placement(NamedTuple):
    """The time steps of a ring that one write fills. All counts are time steps, not transitions.

    With one batch dimension a time step is one row. If a write is longer than the ring, its first `skipped` steps
    aren't stored, because later steps of the same write would overwrite them. The newest steps are kept, in order.
    """

    start: int
    """First time step to write, in ``[0, capacity)``."""
    num_steps: int
    """Number of time steps to write, at most `capacity`."""
    skipped: int
    """Number of leading time steps of the data that aren't stored."""
    evicted: int
    """Number of stored time steps that the write overwrites."""
    length: int
    """Number of time steps stored after the write is published."""
    capacity: int
    """Number of time steps in the ring."""

    @property
    def cursor(self) -> int:
        """The time step at which the next write starts."""
        return (self.start + self.num_steps) % self.capacity

    @property
    def wraps(self) -> bool:
        """Whether the write continues at time step 0 after the end of the ring."""
        return self.start + self.num_steps > self.capacity

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the written ranges as ``(start, stop)`` pairs, stop exclusive. A write that wraps has two ranges."""
        stop = self.start + self.num_steps
        if stop <= self.capacity:
            return ((self.start, stop),)
        return ((self.start, self.capacity), (0, stop - self.capacity))


class Selection(NamedTuple):
    """The records of a write that a writer keeps, and their slots; for writers that choose records by their content.

    Only storages with one batch dimension support it. A time step is then one record.
    """

    rows: torch.Tensor
    """Positions of the stored records in the data, ``(m,)`` int64."""
    slots: torch.Tensor
    """Slots of these records, ``(m,)`` int64, without duplicates."""
    returned: torch.Tensor
    """Return value of the write, ``(n,)`` int64: each record's slot, or -1 if the record isn't stored."""
    length: int
    """Number of records stored after the write is published."""


class Draw(NamedTuple):
    """The slots that a sampler chose for a batch. A draw never contains records."""

    slots: torch.Tensor
    """Slots, ``(n,)`` int64 on the CPU, numbered over the flattened time and batch dimensions."""
    extras: Mapping[Any, torch.Tensor] = _NOTHING
    """Further values for each row, ``(n, ...)`` each, by key; for example importance weights."""
    generation: torch.Tensor | None = None
    """Each slot's number of writes at the time of the draw, ``(n,)`` int64; None if the caller didn't request it."""
    last: torch.Tensor | None = None
    """For slices: whether a row is the last of its slice, ``(n,)`` bool."""
    asked: int | None = None
    """For slices: the requested batch size; short slices give a smaller batch."""
    origin: torch.Tensor | None = None
    """For epochs of slices: the last slot of each slice's trajectory and the slot's generation, ``(2, m)`` int64."""
    epoch: int = 0
    """For epochs: the number of this epoch, counted from 1."""


class RateCounts(NamedTuple):
    """The counts that a buffer's rate limiter compares, since the buffer was made or emptied."""

    inserted: int
    """Number of rows that `add` and `extend` stored, without writes by index."""
    sampled: int
    """Number of rows that were handed out."""
    free: int
    """Number of rows at the start that the ratio ignores, because sampling is allowed only after them."""


class BufferStats(NamedTuple):
    """Counters of a replay buffer since it was made."""

    rows: int
    """Number of transitions stored now."""
    capacity: int
    """Number of transitions that fit."""
    rows_written: int
    """Number of transitions ever stored, including overwritten ones.

    Writes by index count too, unless they change a single column.
    """
    batches_sampled: int
    """Number of batches that `sample` handed out."""
    rows_redrawn: int
    """Number of rows that were drawn again, because a writer overwrote them before their fetch ended."""
    priorities_dropped: int = 0
    """Number of priority updates that were dropped, because their records had been overwritten."""
    rate_limiter: RateCounts | None = None
    """Counts of the rate limiter; None if the buffer has no rate limiter."""
    stored_apart: int | None = None
    """Number of next observations and stacks that a compact storage holds whole; None for other storages.

    A compact storage saves memory only while these are few.
    """

    @property
    def size(self) -> int:
        """An alias of `rows`, for programs of other TorchRL releases."""
        return self.rows

    @property
    def utilization(self) -> float:
        """Stored fraction of the capacity, 0 to 1."""
        return self.rows / self.capacity

    def __repr__(self) -> str:
        """Return the counters, one on a line."""
        return parts_text("BufferStats", self._asdict())

    def _repr_html_(self) -> str:
        return html_parts("BufferStats", self._asdict())

    def keys(self) -> tuple[str, ...]:
        """Return the names by which ``stats[name]`` reads a counter."""
        return (*self._fields, "size", "utilization")

    def __getitem__(self, name: Any) -> Any:
        """Return a counter by its name or by its position.

        Raises:
            MissingKeyError: no counter has that name.
        """
        if not isinstance(name, str):
            return tuple.__getitem__(self, name)
        if name not in self.keys():
            raise MissingKeyError(f"{name!r} isn't a counter of a buffer; there are {', '.join(self.keys())}")
        return getattr(self, name)
