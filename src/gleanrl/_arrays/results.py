"""Frozen results that pass between parts: what a write did, what a sampler chose, what a buffer counted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from gleanrl.errors import MissingKeyError

_NOTHING: Mapping[Any, torch.Tensor] = MappingProxyType({})

new_tuple = tuple.__new__
"""Makes a named tuple of all its fields in half the time that its class takes: for what every call makes."""


class Placement(NamedTuple):
    """Where a writer puts rows in a ring of time steps; counts are time steps, not transitions.

    With one batch dimension a time step is one row. `skipped` steps at the head of the data are not stored,
    because the same call overwrites them (a write longer than the ring): the newest steps win, in order.
    """

    start: int
    """First time step written, in ``[0, capacity)``."""
    num_steps: int
    """Time steps written, at most `capacity`."""
    skipped: int
    """Leading time steps of the data that are not stored."""
    evicted: int
    """Stored time steps that are overwritten."""
    length: int
    """Time steps stored once the write is published."""
    capacity: int
    """Time steps of the ring."""

    @property
    def cursor(self) -> int:
        """The time step that the next write starts at."""
        return (self.start + self.num_steps) % self.capacity

    @property
    def wraps(self) -> bool:
        """Whether the write goes on at time step 0."""
        return self.start + self.num_steps > self.capacity

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the written ranges as ``(start, stop)`` pairs, stop exclusive: two where the write wraps."""
        stop = self.start + self.num_steps
        if stop <= self.capacity:
            return ((self.start, stop),)
        return ((self.start, self.capacity), (0, stop - self.capacity))


class Selection(NamedTuple):
    """Which records of a write are kept, and where: for writers that choose by what a record holds.

    Only for storages with one batch dimension, where a time step is one record.
    """

    rows: torch.Tensor
    """Positions in the data of the records that are stored, ``(m,)`` int64."""
    slots: torch.Tensor
    """Their slots, ``(m,)`` int64, each once."""
    returned: torch.Tensor
    """What the write returns: each record's slot, -1 where it isn't stored, ``(n,)`` int64."""
    length: int
    """Records stored once the write is published."""


class Draw(NamedTuple):
    """What a sampler chose; it names slots and never holds payload."""

    slots: torch.Tensor
    """Slots, ``(n,)`` int64 on the CPU, counted over time and batch dimensions flattened."""
    extras: Mapping[Any, torch.Tensor] = _NOTHING
    """What else the sampler delivers with each row, by key, ``(n, ...)`` each: weights, say."""
    generation: torch.Tensor | None = None
    """How often each slot had been written at the draw, ``(n,)`` int64, if it was asked for."""
    last: torch.Tensor | None = None
    """Of slices: whether a row is the last one of its slice, ``(n,)`` bool."""
    asked: int | None = None
    """Of slices: the batch size that was asked for; short slices make a smaller batch."""
    origin: torch.Tensor | None = None
    """Of epochs of slices: last slot and its generation of each slice's trajectory, ``(2, m)`` int64."""
    epoch: int = 0
    """Of epochs: which one, counted from 1."""


class RateCounts(NamedTuple):
    """What a buffer's rate limiter goes by, since the buffer was made or emptied."""

    inserted: int
    """Rows that `add` and `extend` stored; writes by index don't count."""
    sampled: int
    """Rows handed out."""
    free: int
    """The first rows inserted, which weren't to be sampled before there were enough; the ratio is that of the rest."""


class BufferStats(NamedTuple):
    """Counters of a replay buffer since it was made."""

    rows: int
    """Transitions stored now."""
    capacity: int
    """Transitions that fit."""
    rows_written: int
    """Transitions ever stored, overwritten ones included; writes by index count too, but for those of a column."""
    batches_sampled: int
    """Batches handed out by `sample`."""
    rows_redrawn: int
    """Rows that were overwritten between their draw and the end of their fetch, so that they were drawn again."""
    priorities_dropped: int = 0
    """Priority updates that came too late, for records that had been overwritten."""
    rate_limiter: RateCounts | None = None
    """What the rate limiter goes by, if there is one."""

    @property
    def size(self) -> int:
        """`rows`, by the name of other releases."""
        return self.rows

    @property
    def utilization(self) -> float:
        """The part of the capacity that is stored, 0 to 1."""
        return self.rows / self.capacity

    def keys(self) -> tuple[str, ...]:
        """Return the names that counters can be read by, as in a dictionary."""
        return (*self._fields, "size", "utilization")

    def __getitem__(self, name: Any) -> Any:
        """Return a counter by its name, or by its position."""
        if not isinstance(name, str):
            return tuple.__getitem__(self, name)
        if name not in self.keys():
            raise MissingKeyError(f"{name!r} is no counter of a buffer; there are {', '.join(self.keys())}")
        return getattr(self, name)
