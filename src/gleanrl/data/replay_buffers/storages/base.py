"""What every storage does: the steps of a write, reading, and its state."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase, with_tensors
from gleanrl.data.replay_buffers.checkpointers.hooks import check_load_hook, save_form
from gleanrl.data.replay_buffers.checkpointers.whole import TensorStorageCheckpointer
from gleanrl.data.replay_buffers.familiar import make_concrete
from gleanrl.data.replay_buffers.storages.direct import Direct, Prepared
from gleanrl.data.replay_buffers.storages.indexing import ranges_of
from gleanrl.data.replay_buffers.storages.snapshots import Ahead, ContentCopy, Copying, StorageState
from gleanrl.data.replay_buffers.versions import Version, moved_past
from gleanrl.errors import GleanError, InvalidTypeError, SchemaError, UnsupportedError
from gleanrl.native import bump, bump_at
from gleanrl.overrides import overridden
from gleanrl.records import Placement, Selection
from gleanrl.state import Stateful, StateReader
from gleanrl.system.interrupts import to_the_end
from gleanrl.tree import NestedKey, Path


class Storage(Direct, Stateful[StorageState]):
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
        checkpointer: in which form records are written into checkpoints; None for as they are.
        compilable: has no effect: compiled programs call buffers, they don't contain them.
        ndim: batch dimensions of a storage, at least 1; the first is time.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a class with `get` and `set` of its own do without the native methods (see `FamiliarStorage`)."""
        super().__init_subclass__(**options)
        if len(overridden(cls, "get", "set", of=Storage)) == 2:
            make_concrete(cls, Storage.__abstractmethods__)

    def __init__(
        self, max_size: int, checkpointer: Any = None, compilable: bool = False, *, ndim: int = 1
    ) -> None:
        super().__init__(max_size, ndim)
        if checkpointer is not None:
            self.checkpointer = checkpointer

    _checkpointer: StorageCheckpointerBase = TensorStorageCheckpointer()

    @property
    def checkpointer(self) -> StorageCheckpointerBase:
        """In which form records are written into checkpoints; can be set."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: StorageCheckpointerBase) -> None:
        if not isinstance(checkpointer, StorageCheckpointerBase):
            raise InvalidTypeError(
                f"checkpointer: expected a StorageCheckpointerBase, got {checkpointer!r:.100}"
            )
        self._checkpointer = checkpointer

    def dumps(self, path: os.PathLike[str] | str) -> None:
        """Write a checkpoint of the storage alone, its records in the form of the `checkpointer`."""
        with self.guard():
            self.checkpointer.dumps(self, path)

    def loads(self, path: os.PathLike[str] | str) -> None:
        """Go on from the newest checkpoint of a storage, in whatever form; see `ReplayBuffer.loads`."""
        with self.guard():
            self.checkpointer.loads(self, path)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Any) -> None:
        """Write records into checkpoints as a hook of other releases does; see `save_form`."""
        self.checkpointer = save_form(hook)

    def register_load_hook(self, hook: Any) -> None:
        """Take the counterpart of such a hook: it has nothing to do, checkpoints in any form are read."""
        check_load_hook(hook)

    collate: Callable[[Any], Any] | None = None
    """What makes a batch of fetched records; None where `fetch` returns one."""
    # Writing

    @abstractmethod
    def _copy_span(self, rows: Any, skipped: int, start: int, count: int) -> None:
        """Copy `count` steps of `rows`, from step `skipped` on, to the ring's step `start` and on."""

    @abstractmethod
    def _copy_slots(self, rows: Any, slots: torch.Tensor) -> None:
        """Copy the rows to `slots`, ``(n,)`` int64; of equal slots the last one wins."""

    @abstractmethod
    def _pick(self, rows: Any, positions: torch.Tensor) -> Any:
        """Return the rows at `positions`, ``(n,)`` int64, as `_copy_slots` takes them."""

    def write(self, prepared: Prepared, placement: Placement, end: int | None = None) -> None:
        """Copy prepared data to its placement and publish the new length and end.

        What has begun ends: an interrupt is raised before the first byte moves or after everything is published.

        Args:
            prepared: the rows.
            placement: where they go.
            end: the new end; None for the step after the last one written.
        """
        if self._generations is None:
            self._counters()
        if self.moments:
            self._preserve([(placement.start * self.rows_per_step, placement.num_steps * self.rows_per_step)])
        start, num_steps, _, _, _, capacity = placement
        written = self._rows_written + num_steps * self.rows_per_step
        new_end = (start + num_steps) % capacity if end is None else end
        before = self._log.version
        # `to_the_end` in place: this is every write's way, and a function of its own costs as much as the checks.
        try:
            self._write(prepared.rows, placement, new_end, written, before)
        except BaseException:
            self._write(prepared.rows, placement, new_end, written, before)
            raise
        if self._followers:
            start, size = placement.start * self.rows_per_step, self.max_size
            self._announce(
                torch.arange(start, start + placement.num_steps * self.rows_per_step, device="cpu") % size
            )

    def _write(self, rows: Any, placement: Placement, end: int, written: int, before: Version) -> None:
        """Note the change after version `before`, copy, publish; can't fail, and may be done twice."""
        start, count, skipped, _, length, capacity = placement
        per_step = self.rows_per_step
        if self._log.version == before:
            self._log.note(start * per_step, count * per_step, capacity * per_step)
        bump(self._generations_at, start * per_step, count * per_step, capacity * per_step)
        self._copy_span(rows, skipped, start, count)
        self.num_steps, self._end, self._rows_written = length, end, written

    def write_selected(self, prepared: Prepared, selection: Selection) -> None:
        """Copy some of the prepared records to slots of their own and publish the new length."""
        rows = self._pick(prepared.rows, selection.rows)
        self._put(
            rows, selection.slots, False, selection.length, selection.length % self.capacity_steps, False
        )

    def write_slots(self, prepared: Prepared, slots: torch.Tensor, amended: bool = False) -> None:
        """Copy prepared data to `slots`, ``(n,)`` int64, n >= 1; the length stays.

        Args:
            prepared: the rows.
            slots: where they go.
            amended: whether the records stay what they are, a column of theirs apart.
        """
        self._put(prepared.rows, slots, amended, self.num_steps, self._end, self.ordered)

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        if self._generations is None:
            self._counters()
        count = slots.shape[0]
        rows_written = self._rows_written + (0 if amended else count)

        before, ranges = self.version, ranges_of(slots)
        if self.moments:
            self._preserve(ranges)

        def change() -> None:
            if count:
                if self.version == before:
                    self._log.note_ranges(ranges, self.max_size, amended)
                bump_at(self._generations_at, slots.data_ptr(), count, self.max_size)
                self._copy_slots(rows, slots)
            self.num_steps, self._end, self.ordered = num_steps, end, ordered
            self._rows_written = rows_written

        to_the_end(change)
        self._announce(slots)

    def _publish_all(self, num_steps: int) -> None:
        """Count every slot of `num_steps` time steps as written, by a constructor that adopts records."""
        self._counters().fill_(1)
        self.num_steps = num_steps
        self._end = num_steps % self.capacity_steps
        self._rows_written = len(self)

    def clear(self) -> None:
        """Forget every record; memory and schema stay. Generations move on: earlier draws are recognised."""

        def change() -> None:
            self._forget()
            self.num_steps = self._end = 0
            self.ordered = True

        self._preserve([(0, len(self))])
        self._log.renew()
        if self.num_steps:
            bump(self._generations_at, 0, len(self), self.max_size)
        to_the_end(change)

    def _forget(self) -> None:
        """Let go of records that nothing shows any more."""

    # Reading

    @property
    def has_mask(self) -> bool:
        """Whether there may be rows that are no steps."""
        return False

    def masked(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which of `slots` hold rows that are no steps, ``(n,)`` bool; None without a mask."""
        return None

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

    def moment_ahead(self) -> Ahead:
        """Begin a snapshot of much data that is saved while others write: see `copy_ahead`.

        Its content may be a moment, whose rows are copied when they are saved, or written on.
        """
        return self.copy_ahead()

    def copy_ahead(self) -> Copying:
        """Begin a snapshot of much data: copy, without the buffer's lock, what `snapshot` then takes over.

        For whoever takes a snapshot under the lock: what is written meanwhile is all that is copied there.
        """
        return Copying(self, self._start_copy).ahead()

    def snapshot(self, ahead: Ahead | None = None) -> StorageState:
        """Return what is stored, of one moment; writers wait only while what they wrote meanwhile is copied again.

        Args:
            ahead: what `copy_ahead` returned; None for copying everything here.
        """
        copying = ahead or self.copy_ahead()
        with self.guard():
            content, counted = copying.end()
            return StorageState(
                self._requested,
                self.ndim,
                tuple(self.batch_shape),
                self.num_steps,
                self._end,
                self._rows_written,
                self.ordered,
                self.version,
                self._counters()[:counted].clone(),
                content,
            )

    def _remember(self, content: Any) -> None:
        """Take note of which checkpoint holds what was just loaded."""

    @abstractmethod
    def _start_copy(self) -> ContentCopy | None:
        """Return an empty copy of the content that is here now; None where there isn't a schema yet."""

    @abstractmethod
    def _plain_content(self, content: Any) -> dict[str, Any]:
        """Return a snapshot's content as plain values, nothing copied."""

    @abstractmethod
    def _parse_content(self, reader: StateReader, state: StorageState) -> Any:
        """Return the content of a foreign state of these counts; `SchemaError` if it doesn't fit. Takes memory."""

    @abstractmethod
    def _take_content(self, content: Any, rows: int) -> None:
        """Hold a snapshot's content from now on; can't fail, and may be done twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return the stored records and their generations as copies; only the part in use is copied."""
        return self.plain_state(self.snapshot())

    def moment_dict(self) -> dict[str, Any]:
        """Return the state as checkpoints take it: its rows may be copied only when they are written."""
        if overridden(self, "state_dict", of=Storage):
            return self.state_dict()
        return self.plain_state(self.snapshot(self.moment_ahead()))

    def plain_state(self, value: StorageState) -> dict[str, Any]:
        """Return a snapshot as plain values and its own tensors."""
        return {**value.plain(), **self._plain_content(value.content)}

    def parse(self, state: Any) -> StorageState:
        """Return the value of a foreign state of the same schema; nothing changes.

        One of a storage of another size fits if its records do (see `StorageState.fitted`). Memory that `adopt` will
        need is taken here; the records aren't copied yet.

        Raises:
            SchemaError: too many records, another number of dimensions or schema, or a broken state.
            CapacityError: a storage without schema found too little memory or disk.
        """
        return self._parsed(with_tensors(state))

    def _parsed(self, state: Any) -> StorageState:
        """Return the value of a state whose columns are tensors."""
        reader = StateReader(state, f"a {type(self).__name__}")
        saved = StorageState.read(reader).counted(reader)
        value = self._fitted(saved)
        try:
            content = self._parse_content(reader, saved)
            return replace(value, content=self._turned(content, value.moved) if value.moved else content)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            if isinstance(cause, GleanError):
                raise
            raise SchemaError(
                f"load_state_dict: expected what state_dict() of a {type(self).__name__} returned"
            ) from cause

    def _fitted(self, saved: StorageState) -> StorageState:
        """Return a foreign state for this storage's size; `SchemaError` if it doesn't fit."""
        if saved.ndim != self.ndim:
            raise SchemaError(
                f"load_state_dict: the state has ndim={saved.ndim}, this storage {self.ndim}: build it with the same"
            )
        return saved.fitted(self._requested)

    def _turned(self, content: Any, rows: int) -> Any:
        """Return parsed content of which the first `rows` rows come last; `SchemaError` where that can't be."""
        raise SchemaError(
            f"load_state_dict: a {type(self).__name__} of another max_size can't put the records of a ring that came "
            "around in their order: build it with the same one"
        )

    def adopt(self, value: StorageState) -> None:
        """Hold what a snapshot holds. Generations never go back: earlier draws are recognised."""
        if value.content is not None and self._batch_shape is None:
            self._fix_batch(torch.Size(value.batch_shape))
        rows = value.generations.shape[0]
        after, as_saved = value.generations, self._generations is None  # nobody has drawn anything
        whole = as_saved and rows == self.max_size  # the value's own copy serves: it is adopted here alone
        counters = after if whole else self._counters(rows)
        if not as_saved:
            after = counters.clone()
            after[: len(self)] += 1
            after[:rows] = moved_past(value.generations, after[:rows])
            as_saved = torch.equal(after[:rows], value.generations)
        self._preserve([(0, self.max_size)])

        def change() -> None:
            self._log.renew(value.version)  # before the bytes move
            if whole:
                self._count_in(counters)
            else:
                counters[: after.shape[0]] = after
            self._take_content(value.content, rows)
            self.num_steps, self._end, self._rows_written = value.num_steps, value.end, value.rows_written
            self.ordered = value.ordered

        to_the_end(change)
        if as_saved:
            self._remember(value.content)
