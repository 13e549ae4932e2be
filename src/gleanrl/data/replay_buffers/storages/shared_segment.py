"""The shared memory of a storage: metadata, change log, generations, columns and a journal.

The metadata are authoritative. They are stored twice, and one atomic word, the state, selects the valid copy. A change
fills the other copy and then switches the word by one store.

The state word has a second bit, `_CHANGING`. It says that rows are about to be overwritten, and that the journal holds
their old values. If a process is killed in the middle of a write, the bit stays set. The next process that takes the
lock restores the rows from the journal, so the write never happened.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path as KeyPath
from gleanrl._os import fault_points
from gleanrl._os.hugepages import ALIGNMENT
from gleanrl._os.shared_memory import SharedMemory, fence
from gleanrl.data.replay_buffers.change_log import SharedLog
from gleanrl.data.replay_buffers.storages.allocators import as_column, check_room
from gleanrl.errors import CapacityError, SchemaError

_WORDS, _RUNS, _SCHEMA_BYTES = 64, 1024, 1 << 20
_HEAD_BYTES = 8 * (_WORDS + SharedLog.RUN_WORDS * _RUNS) + _SCHEMA_BYTES
# Positions in the head, in units of int64.
_STATE, _READY, _SCHEMA_SIZE, _ROWS, _COPIES, _JOURNALED, _PIECES = range(7)
_METADATA_STARTS = (8, 16)
_LOG = slice(32, 32 + SharedLog.HEAD_WORDS)
_CHANGING = 2  # a bit of the state word; bit 0 selects the valid copy of the metadata


_PIECE = Field(torch.Size(()), torch.int64)  # the last column: piece numbers, not part of the records

ORDERED, OVERWRITTEN = 1, 2  # bits of `SharedMetadata.flags`


class SharedMetadata(NamedTuple):
    """The counters that a storage keeps about its records."""

    num_steps: int
    end: int
    rows_written: int
    flags: int
    """`ORDERED` and `OVERWRITTEN`; see these attributes of `Slots`."""


class StorageSegment:
    """The shared memory of one storage.

    The caller holds the storage's lock, except for reading the log's version and the columns. A pickled or deep copy
    uses the same memory. It must be made while the process of the original lives.

    Args:
        folder: the directory of the file that holds the memory; None for anonymous memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.memory = SharedMemory(_HEAD_BYTES, folder)
        self._meet()
        self.log.renew()
        self.commit(SharedMetadata(0, 0, 0, ORDERED))

    def _meet(self) -> None:
        words = np.frombuffer(self.memory.map, np.int64, _WORDS + SharedLog.RUN_WORDS * _RUNS)
        self._head = words[:_WORDS]
        self.log = SharedLog(words[_LOG], words[_WORDS:].reshape(_RUNS, SharedLog.RUN_WORDS))
        self._bytes: list[torch.Tensor] = []
        self._journal: list[torch.Tensor] = []

    def __getstate__(self) -> SharedMemory:
        """Return the memory. Its pickle refers to a descriptor of this process, which must live until the load."""
        return self.memory

    def __setstate__(self, memory: SharedMemory) -> None:
        """Use the same memory."""
        self.memory = memory
        self._meet()

    def next_copy(self) -> int:
        """Return a number that no other copy has."""
        self._head[_COPIES] += 1
        return int(self._head[_COPIES])

    @property
    def is_ready(self) -> bool:
        """Whether the columns exist and are valid."""
        return bool(self._head[_READY])

    def make(self, schema: Any, fields: Sequence[Field], num_rows: int) -> list[torch.Tensor]:
        """Return new columns, ``[num_rows, *field]`` each. They become valid when `ready` is called.

        Raises:
            CapacityError: there is too little memory or disk space.
            SchemaError: the pickled schema is larger than a megabyte.
        """
        described = pickle.dumps(schema)
        if len(described) > _SCHEMA_BYTES:
            raise SchemaError(
                f"a shared storage keeps a schema of at most {_SCHEMA_BYTES} bytes, got {len(described)}"
            )
        needed = 2 * _length_of([*fields, _PIECE], num_rows)[-1]
        resource = "memory" if self.memory.folder is None else f"disk at {self.memory.folder}"
        check_room(resource, needed, self.memory.free_bytes(), num_rows, "share a smaller storage")
        start = _HEAD_BYTES - _SCHEMA_BYTES
        self.memory.map[start : start + len(described)] = described
        self._head[_SCHEMA_SIZE], self._head[_ROWS] = len(described), num_rows
        try:
            return self.columns(fields)
        except OSError as cause:
            raise CapacityError(
                f"can't reserve {needed:,} bytes of {resource} for {num_rows} rows: {cause}"
            ) from cause

    def ready(self) -> None:
        """Mark the columns as valid."""
        self._head[_READY] = 1

    def schema(self) -> Any:
        """Return the schema that `make` stored."""
        start = _HEAD_BYTES - _SCHEMA_BYTES
        return pickle.loads(self.memory.map[start : start + int(self._head[_SCHEMA_SIZE])])

    def columns(self, fields: Sequence[Field]) -> list[torch.Tensor]:
        """Return the columns for `fields`, and set `generations` and `pieces`. The journal is located behind them."""
        num_rows, fields = int(self._head[_ROWS]), [*fields, _PIECE]
        starts = _length_of(fields, num_rows)
        self.memory.resize(_HEAD_BYTES + 2 * starts[-1])
        data = np.frombuffer(self.memory.map, np.uint8)[_HEAD_BYTES:]
        halves = data[: starts[-1]], data[starts[-1] :]
        counters = Field(torch.Size(()), torch.int64)
        raw = [Field(torch.Size([field.row_bytes]), torch.uint8) for field in fields]
        columns, self._bytes, journal = (
            [
                as_column(half[start : start + num_rows * field.row_bytes], field, num_rows)
                for start, field in zip(starts, (counters, *described), strict=False)
            ]
            for half, described in ((halves[0], fields), (halves[0], raw), (halves[1], raw))
        )
        self.generations = columns[0]
        """How often each slot was written, ``(num_rows,)`` int64."""
        self._slots, self._bytes, self._journal = journal[0], self._bytes[1:], journal[1:]
        self.pieces = columns[-1].numpy()
        """The number of each row's piece, ``(num_rows,)`` int64, valid if `numbers_pieces` is True."""
        return columns[1:-1]

    @property
    def numbers_pieces(self) -> bool:
        """Whether the piece numbers are valid (see `Seams`)."""
        return bool(self._head[_PIECES])

    def number_pieces(self, count: bool) -> None:
        """Reset the piece numbers to 0 and mark them as valid, or mark them as invalid."""
        if count:
            self.pieces[:] = 0
            fence()  # all numbers are 0 before another process may see that they are valid
        self._head[_PIECES] = count

    @property
    def changing(self) -> bool:
        """Whether a change has begun and not ended."""
        return bool(self._head[_STATE] & _CHANGING)

    def metadata(self) -> SharedMetadata:
        """Return the valid copy of the metadata."""
        start = _METADATA_STARTS[int(self._head[_STATE]) & 1]
        return SharedMetadata(*self._head[start : start + 4].tolist())

    def begin(self, slots: torch.Tensor | None) -> None:
        """Begin a change, and save the rows that it will overwrite in the journal.

        Args:
            slots: the slots of these rows, ``(n,)`` int64 without duplicates; None if the change overwrites no rows.
        """
        count = 0 if slots is None else slots.shape[0]
        fault_points.point("segment.journal")
        if slots is not None and count:
            self._slots[:count] = slots
            for column, journal in zip(self._bytes, self._journal, strict=True):
                torch.index_select(column, 0, slots, out=journal[:count])
        self._head[_JOURNALED] = count
        fence()  # the journal is complete before the bit says so: `undo` would restore garbage otherwise
        self._head[_STATE] |= _CHANGING
        fault_points.point("segment.begun")

    def commit(self, metadata: SharedMetadata) -> None:
        """End a change: `metadata` become the valid metadata."""
        fault_points.point("segment.commit")
        other = (int(self._head[_STATE]) & 1) ^ 1
        start = _METADATA_STARTS[other]
        self._head[start : start + 4] = metadata
        fence()  # rows and metadata are complete before the state word selects them
        self._head[_STATE] = other  # one store that also clears `_CHANGING`
        fault_points.point("segment.committed")

    def undo(self) -> None:
        """Take back a change that wasn't committed. If this process is killed meanwhile, the next one repeats it.

        Rows and piece numbers are restored. Generations keep their new values, and the log marks all slots as changed.
        """
        slots = self._slots[: int(self._head[_JOURNALED])] if self._bytes else torch.empty(0, device="cpu")
        self.log.forget()
        fence()  # the version changes before the rows do, so that readers notice
        if slots.shape[0]:
            for column, journal in zip(self._bytes, self._journal, strict=True):
                column.index_copy_(0, slots, journal[: slots.shape[0]])
        fence()  # all rows are restored before the bit is cleared
        fault_points.point("segment.undo")
        self._head[_STATE] &= 1


class SegmentAllocator:
    """Provides the columns of a segment to a storage; see `Allocator`."""

    exclusive = True
    shared = False  # a forked child may write these columns, so they needn't become read-only
    lists: Sequence[Any] = ()

    def __init__(self, segment: StorageSegment, schema: Any) -> None:
        self._segment, self._schema = segment, schema

    def __call__(
        self, paths: Sequence[KeyPath], fields: Sequence[Field], num_rows: int
    ) -> list[torch.Tensor]:
        """Return the segment's columns, and make them if there are none (see `StorageSegment.make`)."""
        if self._segment.is_ready:
            return self._segment.columns(fields)
        return self._segment.make(self._schema, fields, num_rows)

    def settle(self) -> None:
        """Do nothing, because there is only one segment."""

    def discard(self) -> None:
        """Do nothing, because unused columns were never marked as valid."""


def _length_of(fields: Sequence[Field], num_rows: int) -> list[int]:
    """Return the offsets of the generations, of each field's column, and of the end."""
    sizes = [8, *(field.row_bytes for field in fields)]
    return [*accumulate((-(-num_rows * size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
