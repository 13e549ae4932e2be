"""Seams between writes: where a write doesn't go on with the step before it, though nothing but the content tells.

Rows have the number of their *piece*. It counts up, stream by stream, at each seam where the newest stored step leads
to another observation than the written one begins with. The table of trajectories takes it for an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import FLAGS, Path
from gleanrl.data.replay_buffers.storages.columns import ColumnStore
from gleanrl.data.trajectories import EPISODE, MASK, STEPS, TRAJ_IDS, same_bits, telling, twins

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def flag_paths(schema: Schema) -> list[Path]:
    """Return every ``done``, ``terminated`` and ``truncated`` below ``next``."""
    return [path for path in schema.paths if path[0] == "next" and path[-1] in FLAGS]


class Pieces(NamedTuple):
    """The pieces of written rows."""

    first: int
    """The first time step."""
    steps: int
    """Time steps, around the end."""
    numbers: Numbers
    """The number of each stream's piece, ``(streams,)``."""


Find = Callable[[int, int, int, list[torch.Tensor]], bytes | None]


class Seams:
    """Compares the first step of a write with the newest one stored, bit for bit.

    Args:
        columns: of the records, one for each leaf.
        outcomes: columns below ``next`` whose twins are beside it.
        roots: those twins.
        flags: columns of end flags.
    """

    def __init__(self, columns: ColumnStore, outcomes: list[int], roots: list[int], flags: list[int]) -> None:
        self._columns, self._flags = columns, flags
        self._pairs = [*zip(outcomes, roots, strict=True)]
        self.find: Find = columns.watched(outcomes, roots, flags) or self._find
        """Returns in which streams a write doesn't go on with the newest step, bytes of 0 and 1; None for none.

        They do where its outcome is their first root, and where they don't chain themselves: then nothing is known
        (see `telling`). It is given the first slot of the newest step, the steps of the write, the slots of a step,
        and the ready rows, ``[steps, *batch, *field]`` each.
        """

    @classmethod
    def of(cls, schema: Schema, columns: ColumnStore) -> Seams | None:
        """Return what compares records with a column for each leaf; None where the content tells nothing.

        With ids nothing is to be found out. The rows of n-step data, and rows that are no steps, don't follow each
        other; neither do records without an entry that stands both below ``next`` and beside it.
        """
        outcomes = twins(dict(zip(schema.paths, schema.fields, strict=True)))
        if not outcomes or any(path in schema for path in (TRAJ_IDS, EPISODE, STEPS, MASK)):
            return None
        flags = [schema.index(path) for path in flag_paths(schema)]
        roots = [schema.index(path[1:]) for path in outcomes]
        return cls(columns, [schema.index(path) for path in outcomes], roots, flags)

    def _find(self, newest: int, steps: int, streams: int, leaves: list[torch.Tensor]) -> bytes | None:
        """Do what the core does, on any device."""
        columns = [self._columns.view(position) for position in range(len(leaves))]
        at, device = slice(newest, newest + streams), columns[0].device
        rows = [leaf.reshape(steps, streams, -1) for leaf in leaves]
        over = torch.zeros(streams, dtype=torch.bool, device=device)
        for flag in self._flags:
            over |= columns[flag][at].reshape(streams, -1).bool().any(1)  # it says so itself
        differ = [
            ~same_bits(columns[outcome][at].reshape(streams, -1), rows[root][0], 1) & ~over
            for outcome, root in self._pairs
        ]
        if not any(bool(other.any()) for other in differ):
            return None
        ends = torch.zeros(steps, streams, dtype=torch.bool, device=device)
        for flag in self._flags:
            ends |= rows[flag].bool().any(-1)
        told_by = telling([(rows[outcome], rows[root]) for outcome, root in self._pairs], ends)
        begins = torch.stack([over & False, *(differ[number] for number in told_by)]).any(0)
        return begins.cpu().numpy().tobytes() if bool(begins.any()) else None


def seam_slots(pieces: Numbers, stored: int, end: int) -> torch.Tensor:
    """Return the slots of the rows that begin a piece, ``(n,)`` int64, but for those of the oldest step.

    Args:
        pieces: ``(capacity, streams)``.
        stored: steps stored.
        end: the step after the newest one.
    """
    order = _by_age(len(pieces), stored, end)
    numbers = pieces[order]
    step, stream = np.nonzero(numbers[1:] != numbers[:-1])
    return torch.from_numpy(order[step + 1] * pieces.shape[1] + stream)


def numbered(slots: torch.Tensor, pieces: Numbers, stored: int, end: int) -> None:
    """Number the rows of pieces that begin at `slots`; see `seam_slots`."""
    begins = np.zeros_like(pieces)
    begins.reshape(-1)[slots.numpy()] = 1
    order = _by_age(len(pieces), stored, end)
    pieces[order] = begins[order].cumsum(0)


def _by_age(capacity: int, stored: int, end: int) -> Numbers:
    """Return the stored steps, the oldest first."""
    return (np.arange(stored, dtype=np.int64) + (end if stored == capacity else 0)) % capacity
