"""What every storage keeps: its length, a write counter per slot, and the steps of a write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.arguments import positive
from gleanrl.data.replay_buffers.storages.access import Access
from gleanrl.data.replay_buffers.storages.indexing import ranges_of
from gleanrl.data.replay_buffers.storages.memory import zeroed
from gleanrl.data.replay_buffers.versions import (
    Change,
    ChangeLog,
    Version,
    Versioned,
    moved_past,
    version_from,
    version_state,
)
from gleanrl.errors import IndexRangeError, SchemaError, UnsupportedError
from gleanrl.native import bump, bump_at
from gleanrl.records import Placement, Selection
from gleanrl.tree import NestedKey, Path

_NO_SLOTS = torch.zeros(1, dtype=torch.int64, device="cpu")  # an address for counters that nobody looks at


class Prepared(NamedTuple):
    """Data that passed every check and can be copied into the slots of a storage without failing."""

    rows: Any
    """The leaves or items, in the storage's own form."""
    num_steps: int
    """Time steps in it."""


class Storage(Access, Versioned):
    """Slots for records: ``[steps, *batch]`` of them, time first.

    A slot's number counts over time and batch dimensions flattened. Each slot has a *generation*, the number
    of times that it was written or cleared: 0 for a slot that never was in use, and never the same again for
    another content.

    A write goes `prepare` (checks, changes nothing but makes room at the very first write), `write` (counts
    the generations up, then copies), `publish` (length). Generations move before the bytes do, so that
    whoever compares them after a fetch sees every write that may have overlapped it.

    A storage belongs to one buffer (see `Part`) and is the one place that knows what is stored: its first
    `num_steps` time steps, the newest of them before `end`. Writers and samplers derive what they do from
    that, so that a buffer may go on after `set`, `clear` or `load_state_dict` was called on its storage.

    Not thread-safe by itself: the buffer holds its lock over draws and writes; `get` may run beside both.

    Args:
        max_size: transitions that fit, at least 1.
        ndim: batch dimensions of a storage, at least 1; the first is time.
    """

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.ndim = positive("ndim", ndim)
        self._requested = positive("max_size", max_size)
        self._batch_shape: torch.Size | None = torch.Size(()) if self.ndim == 1 else None
        self._num_steps = 0
        self._end = 0
        self._log = ChangeLog()
        self.ordered = True
        """Whether neighbouring slots hold neighbouring steps; not after records were chosen by what they hold."""
        self._rows_written = 0
        self._generations: torch.Tensor | None = None
        self._generations_at = 0

    collate: Callable[[Any], Any] | None = None
    """What makes a batch of fetched records; None where `fetch` returns one."""

    # Shape

    @property
    def batch_shape(self) -> torch.Size:
        """Sizes of the batch dimensions after time; fixed by the first write if ``ndim > 1``, 0 before."""
        return torch.Size((0,) * (self.ndim - 1)) if self._batch_shape is None else self._batch_shape

    @property
    def rows_per_step(self) -> int:
        """Transitions in one time step."""
        return 1 if self.ndim == 1 else prod(self.batch_shape)

    @property
    def capacity_steps(self) -> int:
        """Time steps that fit: ``ceil(max_size asked for / transitions per step)``."""
        if self._batch_shape is None or self.ndim == 1:
            return self._requested
        return -(-self._requested // self.rows_per_step)

    @property
    def max_size(self) -> int:
        """Transitions that fit: the size asked for, rounded up to whole time steps once those are known."""
        return self._requested if self._batch_shape is None else self.capacity_steps * self.rows_per_step

    @property
    def num_steps(self) -> int:
        """Time steps stored."""
        return self._num_steps

    @property
    def end(self) -> int:
        """The time step after the newest one, around the ring: where a ring writer goes on.

        Before the storage is full that is `num_steps`; a full one may be told another step.
        """
        return self._end

    @end.setter
    def end(self, step: int) -> None:
        capacity = self.capacity_steps
        if not 0 <= step < capacity or (self._num_steps < capacity and step != self._num_steps):
            raise IndexRangeError(
                f"end: expected a step in [0, {capacity}) that leaves no gap behind the {self._num_steps} "
                f"steps stored, got {step}"
            )
        if step != self._end:
            self._log.note_ranges(
                [(0, len(self))], self.max_size, amended=True
            )  # trajectories are cut elsewhere
            self._end = step

    @property
    def shape(self) -> torch.Size:
        """The visible part, ``[time steps stored, *batch]``."""
        return torch.Size((self._num_steps, *self.batch_shape))

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return self._num_steps if self.ndim == 1 else self._num_steps * self.rows_per_step

    # Generations and versions

    @property
    def version(self) -> Version:
        """Which content the storage holds, and how much of it has changed; counted before the bytes move."""
        return self._log.version

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version` (see `ChangeLog.since`); None for another content."""
        return self._log.since(version)

    @property
    def origin(self) -> Version | None:
        """What this content began as a copy of, by loading or unpickling; None for nothing."""
        return self._log.origin

    @property
    def has_mask(self) -> bool:
        """Whether there may be rows that are no steps."""
        return False

    def masked(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which of `slots` hold rows that are no steps, ``(n,)`` bool; None without a mask."""
        return None

    @property
    def rows_written(self) -> int:
        """Transitions ever written."""
        return self._rows_written

    def generation(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generations of `slots` (``(n,)`` int64, in range), a fresh ``(n,)`` int64 tensor."""
        return self._counters().index_select(0, slots)

    @property
    def counters_at(self) -> int:
        """The address of all slots' generations, int64, for the native core; fixed for the storage's life."""
        return self._generations_at or self._counters().data_ptr()

    def _counters(self) -> torch.Tensor:
        if self._batch_shape is None:
            return _NO_SLOTS  # how many there are shows at the first write
        if self._generations is None:
            # Zeroed pages cost nothing until they are touched: 8 bytes for each row in use.
            self._generations = torch.from_numpy(zeroed(8 * self.max_size, self.max_size).view(np.int64))
            self._generations_at = self._generations.data_ptr()
        return self._generations

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: another content, whose counters have another address."""
        self.__dict__.update(state)
        self._log = ChangeLog(self._log.version)
        if self._generations is not None:
            self._generations_at = self._generations.data_ptr()

    # Writing

    @abstractmethod
    def join(self, records: list[Any], where: str) -> Any:
        """Return a list of single records (time steps) in the form of many, as `prepare` takes them."""

    @abstractmethod
    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Check `data` and return it in the storage's form; the first call also fixes schema and memory.

        Args:
            data: records, ``[steps, *batch]`` of them, or one time step, ``[*batch]``.
            single: whether `data` is one time step without its time dimension.
            dim_extend: the dimension of `data` that is time; it changes places with dimension 0 (not if
                `single`).
            where: the call that error messages name.

        Raises:
            SchemaError: data of another structure, shape or dtype, naming the key; nothing changed.
            CapacityError: the first write found too little memory or disk; nothing changed.
        """

    @abstractmethod
    def _copy_span(self, rows: Any, skipped: int, start: int, count: int) -> None:
        """Copy `count` steps of `rows`, from step `skipped` on, to the ring's step `start` and on."""

    @abstractmethod
    def _copy_slots(self, rows: Any, slots: torch.Tensor) -> None:
        """Copy the rows to `slots`, ``(n,)`` int64; of equal slots the last one wins."""

    @abstractmethod
    def _pick(self, rows: Any, positions: torch.Tensor) -> Any:
        """Return the rows at `positions`, ``(n,)`` int64, as `_copy_slots` takes them."""

    @abstractmethod
    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Check records ``[*shape]`` that are to go to a selection of slots of that shape; see `prepare`."""

    def write(self, prepared: Prepared, placement: Placement) -> None:
        """Copy prepared data to its placement and publish the new length and end."""
        per_step = self.rows_per_step
        count = placement.num_steps * per_step
        start, size = placement.start * per_step, placement.capacity * per_step
        if self._generations is None:
            self._counters()
        self._log.note(start, count, size)
        bump(self._generations_at, start, count, size)
        self._copy_span(prepared.rows, placement.skipped, placement.start, placement.num_steps)
        self._num_steps = placement.length
        self._end = placement.cursor
        self._rows_written += count
        if self._followers:
            self._announce(torch.arange(start, start + count, device="cpu") % size)

    def write_selected(self, prepared: Prepared, selection: Selection) -> None:
        """Copy some of the prepared records to slots of their own and publish the new length."""
        if selection.slots.shape[0]:
            self._put(Prepared(self._pick(prepared.rows, selection.rows), 0), selection.slots)
        self.ordered = False
        self._num_steps = selection.length
        self._end = selection.length % self.capacity_steps
        self._announce(selection.slots)

    def write_slots(self, prepared: Prepared, slots: torch.Tensor, amended: bool = False) -> None:
        """Copy prepared data to `slots`, ``(n,)`` int64, n >= 1; the length stays.

        Args:
            prepared: the rows.
            slots: where they go.
            amended: whether the records stay what they are, a column of theirs apart.
        """
        self._put(prepared, slots, amended)
        self._announce(slots)

    def _put(self, prepared: Prepared, slots: torch.Tensor, amended: bool = False) -> None:
        if self._generations is None:
            self._counters()
        self._log.note_ranges(ranges_of(slots), self.max_size, amended)
        bump_at(self._generations_at, slots.data_ptr(), slots.shape[0], self.max_size)
        self._copy_slots(prepared.rows, slots)
        self._rows_written += slots.shape[0]

    def set(self, start: int, data: Any) -> None:
        """Write the records of `data` to time step `start` and the following, without a writer.

        Records that replace stored ones are corrections: `end` moves only if the stored part grows.

        Args:
            start: first time step, in ``[0, num_steps]``: no gap is left.
            data: records ``[steps, *batch]``; they may not reach past the capacity.
        """
        prepared = self.prepare(data, single=False, dim_extend=0, where="set")
        stop = start + prepared.num_steps
        if not 0 <= start <= self._num_steps or stop > self.capacity_steps:
            raise IndexRangeError(
                f"set: steps [{start}, {stop}) don't lie within [0, {self.capacity_steps}), or leave a gap "
                f"after the {self._num_steps} steps stored"
            )
        before, end = self._num_steps, self._end
        evicted = min(stop, before) - start
        self.write(
            prepared,
            Placement(start, prepared.num_steps, 0, evicted, max(stop, before), self.capacity_steps),
        )
        if stop <= before:
            self._end = end

    def _publish_all(self, num_steps: int) -> None:
        """Count every slot of `num_steps` time steps as written, by a constructor that adopts records."""
        self._counters().fill_(1)
        self._num_steps = num_steps
        self._end = num_steps % self.capacity_steps
        self._rows_written = len(self)

    def clear(self) -> None:
        """Forget every record; memory and schema stay. Generations move on: earlier draws are recognised."""
        self._log.renew()
        if self._num_steps:
            bump(self._generations_at, 0, len(self), self.max_size)
        self._num_steps = self._end = 0
        self.ordered = True

    # Reading

    @abstractmethod
    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots` (``(n,)`` int64 on the CPU, contiguous, in range) in fresh memory.

        `paths` names the only columns to fetch, as `columns_of` found them; None for all.
        """

    def columns_of(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the columns that `keys` name; the key of a group stands for all below it.

        Raises:
            MissingKeyError: a key without a column.
            UnsupportedError: a storage without columns.
        """
        raise UnsupportedError(f"keys: a {type(self).__name__} has no columns to choose from")

    # State

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the stored records and their generations as copies; only the part in use is copied."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by a saved state; a state that doesn't fit raises and changes nothing."""

    def _base_state(self) -> dict[str, Any]:
        return {
            "max_size": self._requested,
            "ndim": self.ndim,
            "batch_shape": list(self.batch_shape),
            "num_steps": self._num_steps,
            "end": self._end,
            "rows_written": self._rows_written,
            "ordered": self.ordered,
            "version": version_state(self.version),
            "generations": self._counters()[: len(self)].clone(),
        }

    @staticmethod
    def steps_in(state: dict[str, Any]) -> tuple[int, int]:
        """Return the time steps stored in a storage which had saved `state`, and how many fit into it.

        Raises:
            SchemaError: not such a state, or its end leaves a gap.
        """
        try:
            max_size, num_steps, end = (state[name] for name in ("max_size", "num_steps", "end"))
            counts = (max_size, num_steps, end, state["rows_written"], *state["batch_shape"])
            if not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError("counts are integers of 0 or more")
            capacity = -(-max_size // max(prod(state["batch_shape"]), 1))
            if not 0 <= end < capacity or (num_steps < capacity and end != num_steps):
                raise SchemaError(
                    f"load_state_dict: the end {end} of {num_steps} steps stored, of {capacity}, leaves a gap"
                )
            return num_steps, capacity
        except (KeyError, TypeError, IndexError) as cause:
            raise SchemaError("load_state_dict: expected what a storage's state_dict() returned") from cause

    def _restore_base(self, state: dict[str, Any]) -> None:
        """Take length and generations from a checked state; the caller cleared, then copied the records."""
        counters = self._counters()
        saved = state["generations"]
        used = saved.shape[0]
        # Never back: clearing counted the old content out, and no generation may come again at another
        # content.
        saved = saved.to(torch.int64)
        counters[:used] = moved_past(saved, counters[:used])
        self._num_steps = int(state["num_steps"])
        self._end = int(state["end"])
        self._rows_written = int(state["rows_written"])
        self.ordered = state.get("ordered", True) is not False
        self._log.renew(version_from(state.get("version")))
