"""Detection of seams: writes whose first step doesn't follow the newest stored step, although no end flag is set.

Without ids of trajectories, only the content can show this. If the newest stored step leads to another observation than
the first written step begins with, there is a *seam* between them. Each row has the number of its *piece*. The number
is counted up at each seam, separately for each stream. The table of trajectories uses it as an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.results import Placement
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import FLAGS, Path
from gleanrl.data.replay_buffers.storages.columns import ColumnStore
from gleanrl.data.trajectories import EPISODE, MASK, STEPS, TRAJ_IDS, same_bits, telling, twins

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def flag_paths(schema: Schema) -> list[Path]:
    """Return the paths of all ``done``, ``terminated`` and ``truncated`` flags below ``next``."""
    return [path for path in schema.paths if path[0] == "next" and path[-1] in FLAGS]


class Pieces(NamedTuple):
    """The piece numbers of the rows of one write."""

    first: int
    """The first time step."""
    steps: int
    """The number of time steps, which may wrap around the end of the ring."""
    numbers: Numbers
    """The number of each stream's piece, ``(streams,)``, or ``(1,)`` if it is the same."""

    @classmethod
    def of_write(
        cls, placement: Placement, known: Numbers | None, stored: int, end: int, begins: bytes | None
    ) -> Pieces:
        """Return the numbers of the rows that a write changes.

        Args:
            placement: the time steps to write.
            known: the numbers before the write, ``(capacity, streams)``; None if rows have no numbers yet.
            stored: the number of stored steps before the write.
            end: the step after the newest one before the write.
            begins: the result of `Seams.find` for the write; None if it found no seam, or wasn't called.
        """
        start, count, _, _, length, capacity = placement
        if known is None or not stored or count == capacity:  # no numbers yet, or all are replaced
            numbers = np.zeros(1, np.int64)
        else:
            numbers = known[(end - 1) % capacity]
        if begins is not None:
            numbers = numbers + np.frombuffer(begins, np.uint8)
        elif stored and count < capacity and start != end:
            # A correction keeps the numbers of stored rows. Only rows by which the stored part grows get numbers.
            return cls(stored, length - stored, numbers)
        return cls(start, count, numbers)

    def put_into(self, known: Numbers) -> None:
        """Write the numbers into `known`, the numbers of all rows, ``(capacity, streams)``."""
        first, count, numbers = self
        known[first : first + count] = numbers
        if first + count > len(known):
            known[: first + count - len(known)] = numbers


Find = Callable[[int, int, int, list[torch.Tensor]], bytes | None]


class Seams:
    """Compares the first step of a write with the newest stored step, bit for bit.

    Args:
        columns: the columns of the records, one for each leaf.
        outcomes: columns below ``next`` for which the root has a column of the same name, shape and dtype.
        roots: these columns of the root.
        flags: columns of end flags.
    """

    def __init__(self, columns: ColumnStore, outcomes: list[int], roots: list[int], flags: list[int]) -> None:
        self._columns, self._flags = columns, flags
        self._pairs = [*zip(outcomes, roots, strict=True)]
        self.find: Find = columns.watched(outcomes, roots, flags) or self._find
        """Function that returns in which streams a write doesn't follow the newest step: bytes of 0 and 1, or None.

        A stream follows if its newest outcome equals the first root that is written. If the written steps don't follow
        each other either, the comparison proves nothing, and the result is None (see `telling`). The arguments are the
        first slot of the newest step, the number of written steps, the slots of a step, and the ready rows,
        ``[steps, *batch, *field]`` each.
        """

    @classmethod
    def of(cls, schema: Schema, columns: ColumnStore) -> Seams | None:
        """Return the comparison for records with one column for each leaf; None if content can't show seams.

        Records with ids of trajectories need no comparison. Rows of n-step data, and padding rows, don't follow each
        other. Records without an entry that exists both below ``next`` and at the root can't be compared.
        """
        outcomes = twins(dict(zip(schema.paths, schema.fields, strict=True)))
        if not outcomes or any(path in schema for path in (TRAJ_IDS, EPISODE, STEPS, MASK)):
            return None
        flags = [schema.index(path) for path in flag_paths(schema)]
        roots = [schema.index(path[1:]) for path in outcomes]
        return cls(columns, [schema.index(path) for path in outcomes], roots, flags)

    def _find(self, newest: int, steps: int, streams: int, leaves: list[torch.Tensor]) -> bytes | None:
        """Find seams with torch, on any device; the same as the core's function."""
        columns = [self._columns.view(position) for position in range(len(leaves))]
        at, device = slice(newest, newest + streams), columns[0].device
        rows = [leaf.reshape(steps, streams, -1) for leaf in leaves]
        over = torch.zeros(streams, dtype=torch.bool, device=device)
        for flag in self._flags:
            over |= columns[flag][at].reshape(streams, -1).bool().any(1)  # an end flag is set: not a seam
        differ = [
            ~same_bits(columns[outcome][at].reshape(streams, -1), rows[root][0], 1) & ~over
            for outcome, root in self._pairs
        ]
        if not any(bool(other.any()) for other in differ):
            return None
        ends = torch.zeros(steps, streams, dtype=torch.bool, device=device)
        for flag in self._flags:
            ends |= rows[flag].bool().any(-1)
        deciding = telling([(rows[outcome], rows[root]) for outcome, root in self._pairs], ends)
        begins = torch.stack([over & False, *(differ[number] for number in deciding)]).any(0)
        return begins.cpu().numpy().tobytes() if bool(begins.any()) else None


def seam_slots(pieces: Numbers, stored: int, end: int) -> torch.Tensor:
    """Return the slots of the rows that begin a piece, ``(n,)`` int64, without the rows of the oldest step.

    Args:
        pieces: the number of each row's piece, ``(capacity, streams)``.
        stored: the number of stored steps.
        end: the step after the newest one.
    """
    order = _by_age(len(pieces), stored, end)
    numbers = pieces[order]
    step, stream = np.nonzero(numbers[1:] != numbers[:-1])
    return torch.from_numpy(order[step + 1] * pieces.shape[1] + stream)


def numbered(slots: torch.Tensor, pieces: Numbers, stored: int, end: int) -> None:
    """Number the rows in `pieces`, in place, so that pieces begin at `slots`; the inverse of `seam_slots`."""
    begins = np.zeros_like(pieces)
    begins.reshape(-1)[slots.numpy()] = 1
    order = _by_age(len(pieces), stored, end)
    pieces[order] = begins[order].cumsum(0)


def _by_age(capacity: int, stored: int, end: int) -> Numbers:
    """Return the stored steps, the oldest first."""
    return (np.arange(stored, dtype=np.int64) + (end if stored == capacity else 0)) % capacity
