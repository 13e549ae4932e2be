"""Base class of all storages: the steps of a write, direct writes, reading, and the saved state."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree

from gleanrl._arrays.native import bump, bump_at
from gleanrl._arrays.results import Placement, Selection
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import overridden
from gleanrl.data.replay_buffers.adapters import make_concrete
from gleanrl.data.replay_buffers.change_log import Version, moved_past
from gleanrl.data.replay_buffers.checkpointers.base import (
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
    with_tensors,
)
from gleanrl.data.replay_buffers.checkpointers.hooks import check_load_hook, save_form
from gleanrl.data.replay_buffers.component_base import living
from gleanrl.data.replay_buffers.storages.indexing import is_position, position, ranges_of, steps_at
from gleanrl.data.replay_buffers.storages.seams import Numbers, Pieces, numbered, seam_slots
from gleanrl.data.replay_buffers.storages.slots import Slots, announce, preserve
from gleanrl.data.replay_buffers.storages.snapshots import LiveRecords, StorageState
from gleanrl.errors import GleanError, IndexRangeError, InvalidTypeError, SchemaError, UnsupportedError

_NO_SEAMS = torch.empty(0, dtype=torch.int64, device="cpu")


class Prepared(NamedTuple):
    """Data that passed every check: copying them into the slots of a storage can't fail."""

    rows: Any
    """The leaves or objects, in the storage's own form."""
    num_steps: int
    """Number of prepared time steps; 0 if all given ones are padding."""
    kept: torch.Tensor | None = None
    """For each given step, whether it is among the prepared ones, ``(given,)`` bool; None if all are."""


class Storage(Slots, Stateful[StorageState]):
    """Slots for records ``[steps, *batch]``, with time first.

    Slot numbers count over the flattened time and batch dimensions. Each slot has a *generation*, which every write and
    every `clear` of the slot increments. A load may raise it. It is 0 for a slot that was never used. A slot never has
    the same generation again with another content.

    A write has two steps. `prepare` checks the data; it changes no record, but the first call fixes the schema and
    allocates memory. `write` counts the generations up, copies the rows, and then publishes the new length.
    Generations change before the bytes do. A reader that compares generations after its fetch therefore notices every
    write that may have overlapped the fetch.

    One buffer writes to a storage. Other buffers that share its lock may read it (see `claim`). The storage
    alone knows which records are stored: its first `num_steps` time steps, of which the step before `end` is the
    newest. Writers and samplers derive their state from that. A buffer therefore keeps working after a call of `set`,
    `clear` or `load_state_dict` on its storage.

    The storage isn't thread-safe by itself. The buffer holds its lock during draws and writes. `get` may run at the
    same time as both.

    Args:
        max_size: the number of transitions that fit, at least 1.
        checkpointer: the form of the records in checkpoints; None keeps the storage's own form.
        compilable: has no effect, because compiled programs call buffers and never contain them.
        ndim: the number of batch dimensions, at least 1; the first is time.
    """

    takes_one = False
    """Whether `set` at an int takes one record of any shape. Writers of other TorchRL releases rely on that."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Allow a class that overrides `get` and `set` to omit the native methods (see `StorageAdapter`)."""
        super().__init_subclass__(**options)
        if len(overridden(cls, "get", "set", of=Storage)) == 2:
            make_concrete(cls, Storage.__abstractmethods__)

    @property
    def stored_apart(self) -> int | None:
        """See `BufferStats.stored_apart`; None unless the storage is compact."""
        return None

    def __init__(
        self, max_size: int, checkpointer: Any = None, compilable: bool = False, *, ndim: int = 1
    ) -> None:
        super().__init__(max_size, ndim)
        if checkpointer is not None:
            self.checkpointer = checkpointer

    _checkpointer: StorageCheckpointerBase = TensorStorageCheckpointer()

    @property
    def checkpointer(self) -> StorageCheckpointerBase:
        """The form of the records in checkpoints. It can be set; other types raise `InvalidTypeError`."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: StorageCheckpointerBase) -> None:
        if not isinstance(checkpointer, StorageCheckpointerBase):
            raise InvalidTypeError(
                f"checkpointer: expected a StorageCheckpointerBase, got {checkpointer!r:.100}"
            )
        self._checkpointer = checkpointer

    def dumps(self, path: os.PathLike[str] | str) -> None:
        """Write a checkpoint of this storage alone, with its records in the form of the `checkpointer`.

        The buffer's lock is held until the checkpoint is on the disk. See `ReplayBuffer.dumps` for errors.
        """
        with self.guard():
            self.checkpointer.dumps(self, path)

    def loads(self, path: os.PathLike[str] | str) -> None:
        """Replace the content by the newest checkpoint of a storage in `path`, of any form; see `ReplayBuffer.loads`.

        The buffer's lock is held meanwhile.
        """
        with self.guard():
            self.checkpointer.loads(self, path)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Any) -> None:
        """Replace the `checkpointer` by the form of a save hook of other TorchRL releases; see `save_form`."""
        self.checkpointer = save_form(hook)

    def register_load_hook(self, hook: Any) -> None:
        """Check and ignore the load hook that belongs to a save hook: the storage reads checkpoints in any form."""
        check_load_hook(hook)

    collate: Callable[[Any], Any] | None = None
    """Function that makes a batch of fetched records; None if `fetch` returns a batch."""

    def collated_by(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes a batch of fetched records by the user's `collate_fn`."""
        return collate_fn

    open_snapshots: tuple[weakref.ref[CowSnapshot], ...] = ()
    """Copy-on-write snapshots that are being saved. Each copies rows that a write is about to change."""

    def preserve_next(self, num_steps: int) -> None:
        """Let open snapshots copy the slots that the next `num_steps` steps of a ring writer will overwrite.

        It does nothing if the slots aren't in the order of time (see `ordered`), and may wait for memory.
        Any thread may call it without the buffer's lock, so that only the writer waits for the copies. The slots are a
        guess. The write itself copies the rest, and waits for copies in progress.
        """
        if self.ordered:
            per_step = self.rows_per_step
            preserve(self.open_snapshots, [(self.end * per_step, num_steps * per_step)], self.max_size)

    @abstractmethod
    def _copy_span(self, rows: Any, skipped: int, start: int, count: int) -> None:
        """Copy `count` steps of `rows`, starting with step `skipped`, to the ring's steps from `start` on."""

    @abstractmethod
    def _copy_slots(self, rows: Any, slots: torch.Tensor) -> None:
        """Copy the rows to `slots`, ``(n,)`` int64. If a slot occurs twice, the last row is kept."""

    @abstractmethod
    def _pick(self, rows: Any, positions: torch.Tensor) -> Any:
        """Return the rows at `positions`, ``(n,)`` int64, in the form that `_copy_slots` takes."""

    def write(self, prepared: Prepared, placement: Placement, end: int | None = None) -> None:
        """Copy prepared data to its placement and publish the new length and end.

        A write that has begun is completed. An interrupt is raised before the first byte moves, or after everything is
        published. Attached objects are called last, and not after an interrupt.

        Args:
            prepared: the rows.
            placement: the time steps to write.
            end: the new end; None for the step after the last one written.
        """
        if not self.generations.at:
            self.generations.of_all()
        start, num_steps, _, _, _, capacity = placement
        first, count = start * self.rows_per_step, num_steps * self.rows_per_step
        if self.open_snapshots:  # before the bytes change: snapshots copy the rows that this write overwrites
            self.open_snapshots = preserve(self.open_snapshots, [(first, count)], self.max_size)
        written = self._rows_written + count
        pieces = begins = None
        if self.find_seams is not None:
            if 1 < num_steps < capacity and start == self._end and self.num_steps:
                newest = (start - 1) % capacity * self.rows_per_step
                begins = self.find_seams(newest, num_steps, self.rows_per_step, prepared.rows)
            if begins is not None or self._pieces is not None:
                pieces = Pieces.of_write(placement, self._pieces, self.num_steps, self._end, begins)
        new_end = (start + num_steps) % capacity if end is None else end
        before = self.change_log.version
        # `to_the_end`, written out: every write passes here, and the extra call would cost as much as the checks.
        try:
            self._write(prepared.rows, placement, new_end, written, before, pieces)
        except BaseException:
            try:
                self._write(prepared.rows, placement, new_end, written, before, pieces)
            except BaseException:  # a second interrupt
                to_the_end(lambda: self._write(prepared.rows, placement, new_end, written, before, pieces))
            raise
        if self.attached:
            announce(self, torch.arange(first, first + count, device="cpu") % self.max_size)

    find_seams: Any = None
    """Function that finds seams between writes (see `Seams.find`); None if the schema allows no comparison."""

    @property
    def pieces(self) -> Numbers | None:
        """The number of each row's piece (see `Seams`), ``(steps, streams)`` int64; None before the first seam."""
        return self._pieces

    _pieces: Numbers | None = None

    def _new_pieces(self) -> Numbers:
        """Begin to number pieces: all rows get the number 0."""
        self._pieces = np.zeros((self.capacity_steps, self.rows_per_step), np.int64)
        return self._pieces

    def _forget_pieces(self) -> None:
        self._pieces = None

    def _write(
        self, rows: Any, placement: Placement, end: int, written: int, before: Version, pieces: Pieces | None
    ) -> None:
        """Log the change, copy the rows, and publish. It can't fail, and an interrupted call may be repeated.

        A repetition doesn't log the change again, because the version is then no longer `before`. It counts the
        generations up once more, which readers merely take for another write.

        Args:
            rows: the prepared rows.
            placement: the time steps to write.
            end: the new end.
            written: the new count of all rows ever written.
            before: the version before the change.
            pieces: the numbers of the rows' pieces; None if rows aren't numbered.
        """
        start, count, skipped, _, length, capacity = placement
        per_step = self.rows_per_step
        if self.change_log.version == before:
            self.change_log.note(start * per_step, count * per_step, capacity * per_step)
        # Before the copy, so that a reader who compares generations after its fetch notices torn rows.
        bump(self.generations.at, start * per_step, count * per_step, capacity * per_step)
        self._copy_span(rows, skipped, start, count)
        if pieces is not None:
            pieces.put_into(self._new_pieces() if self._pieces is None else self._pieces)
        overwritten = self.overwritten or skipped > 0
        if self._rows_written != written:  # not a repetition after the line below
            overwritten = overwritten or self.num_steps + count > length
        # After the copy, so that no reader sees a row that isn't there yet.
        self.num_steps, self._end, self._rows_written, self.overwritten = length, end, written, overwritten

    def write_selected(self, prepared: Prepared, selection: Selection) -> None:
        """Copy the selected records to their slots and publish the new length. `ordered` becomes False."""
        rows = self._pick(prepared.rows, selection.rows)
        self._put(
            rows, selection.slots, False, selection.length, selection.length % self.capacity_steps, False
        )

    def write_slots(
        self,
        prepared: Prepared,
        slots: torch.Tensor,
        amended: bool = False,
        *,
        num_steps: int | None = None,
        end: int | None = None,
    ) -> None:
        """Copy prepared data to `slots`, ``(n,)`` int64, and publish length and end.

        If a slot occurs twice, the last row is kept. Attached objects are called last, and not after an interrupt.

        Args:
            prepared: the rows.
            slots: the slots to write.
            amended: whether the write changes only a column of stored records. Its rows don't count in `rows_written`.
            num_steps: the number of stored time steps after the write; None if it doesn't change.
            end: the new end; None if it doesn't change.
        """
        length = self.num_steps if num_steps is None else num_steps
        self._put(prepared.rows, slots, amended, length, self._end if end is None else end, self.ordered)

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        """Copy rows to `slots` and publish the counters, in the same order of steps as `_write`."""
        if not self.generations.at:
            self.generations.of_all()
        count = slots.shape[0]
        rows_written = self._rows_written + (0 if amended else count)

        before, ranges = self.version, ranges_of(slots)
        if self.open_snapshots:
            self.open_snapshots = preserve(self.open_snapshots, ranges, self.max_size)

        def change() -> None:
            if count:
                if self.version == before:  # not logged again when an interrupt made `to_the_end` repeat this
                    self.change_log.note_ranges(ranges, self.max_size, amended)
                bump_at(self.generations.at, slots.data_ptr(), count, self.max_size)
                self._copy_slots(rows, slots)
            self.num_steps, self._end, self.ordered = num_steps, end, ordered
            self._rows_written = rows_written

        to_the_end(change)
        if self.attached:
            announce(self, slots)

    def clear(self) -> None:
        """Remove every record, and keep columns and schema.

        The content gets a new version. Generations are counted up, so that draws from before the call are recognised as
        outdated. Attached objects aren't called, and `rows_written` doesn't change.
        """

        def change() -> None:
            self._forget()
            if self._pieces is not None:
                self._forget_pieces()
            self.num_steps = self._end = 0
            self.ordered, self.overwritten = True, False

        self.open_snapshots = preserve(self.open_snapshots, [(0, len(self))], self.max_size)
        self.change_log.renew()
        if self.num_steps:
            bump(self.generations.at, 0, len(self), self.max_size)
        to_the_end(change)

    def _forget(self) -> None:
        """Release records that the storage doesn't show any more."""

    @property
    def exposed(self) -> bool:
        """Whether records may change without a new version: through live views, files, or another process."""
        return False

    @property
    def has_mask(self) -> bool:
        """Whether some rows may be padding, as opposed to steps."""
        return False

    def masked(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which of `slots` hold padding rows, ``(n,)`` bool; None without a mask."""
        return None

    @abstractmethod
    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots` in fresh memory.

        Args:
            slots: ``(n,)`` int64 on the CPU, contiguous and in range.
            paths: the columns to fetch, as `columns_of` returned them; None for all columns.
        """

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> Any:
        """Return the same as `fetch`, and reuse `records`, which may be overwritten.

        Args:
            records: the result of an earlier fetch of the same columns.
            slots: the slots, ``(n,)`` int64.
            renewed: which rows have to be fetched again, ``(n,)`` bool.
            paths: see `fetch`.
        """
        return self.fetch(slots, paths)

    def columns_of(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the columns that `keys` name. The key of a nested TensorDict names all columns below it.

        Raises:
            EmptyBufferError: there is no schema yet.
            MissingKeyError: a key names no column.
            InvalidArgumentError: there is no key.
            UnsupportedError: the storage has no columns, or its records have no keys.
        """
        raise UnsupportedError(
            f"keys: a {type(self).__name__} has no columns; leave out keys, or use a tensor storage"
        )

    def snapshot(self) -> StorageState:
        """Return the stored records and counters at one moment.

        Writers wait only for a few instructions, if the storage's class can refer to its records. Tensor storages
        return a copy-on-write snapshot. Storages that processes share, and storages of users with their own
        `state_dict`, copy all records in this call.
        """
        with self.guard():
            content, pieces = self._current_content(), self._pieces
            counted = 0 if isinstance(content, LiveRecords) else len(self)
            return StorageState(
                num_steps=self.num_steps,
                end=self._end,
                rows_written=self._rows_written,
                ordered=self.ordered,
                overwritten=self.overwritten,
                seams=_NO_SEAMS if pieces is None else seam_slots(pieces, self.num_steps, self._end),
                max_size=self.requested_size,
                ndim=self.ndim,
                batch_shape=tuple(self.batch_shape),
                version=self.version,
                generations=self.generations.of_all()[:counted].clone(),
                vacated=self.generations.vacated(len(self)),
                content=content,
            )

    def _remember(self, content: Any) -> None:
        """Record which checkpoint holds the content that was just loaded."""

    @abstractmethod
    def _current_content(self) -> Any:
        """Return the present records as a snapshot's content; None if there is no schema yet.

        The caller holds the buffer's lock. Later writes must not change the content.
        """

    def copied(self, value: StorageState) -> StorageState:
        """Return a snapshot with its records in private memory, which the caller may change. May be called once.

        Call it without the buffer's lock, because it copies all records.
        """
        return value

    @abstractmethod
    def _plain_content(self, content: Any) -> dict[str, Any]:
        """Return a snapshot's content as plain values, without copying tensors."""

    @abstractmethod
    def _parse_content(self, reader: StateReader, state: StorageState) -> Any:
        """Return the content of a foreign state with these counts. It allocates memory.

        Raises:
            SchemaError: the content doesn't fit this storage.
        """

    @abstractmethod
    def _take_content(self, content: Any, rows: int) -> None:
        """Replace the content by a snapshot's content. It can't fail, and an interrupted call may be repeated."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored records, with generations and counters. Records of unused slots aren't copied."""
        return self.plain_state(self.snapshot())

    def checkpoint_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Its rows may be copied only when they are written to disk.

        If a subclass overrides `state_dict`, that is called instead.
        """
        if overridden(self, "state_dict", of=Storage):
            return self.state_dict()
        return self.plain_state(self.snapshot(), live=True)

    def plain_state(self, value: StorageState, live: bool = False) -> dict[str, Any]:
        """Return a snapshot as plain values and tensors.

        Args:
            value: the snapshot, which is used up.
            live: whether the state is for a checkpoint. Its rows and objects may then be copied later, while they are
                saved. Otherwise they are copied in this call (see `copied`).
        """
        value = value if live else self.copied(value)
        return {**value.plain(), **self._plain_content(value.content)}

    def parse(self, state: Any) -> StorageState:
        """Return a foreign state of the same schema as a value for `adopt`, and change no record.

        A state of a storage of another size fits if its records do (see `StorageState.fitted`). The memory that `adopt`
        needs is allocated here. The records are copied later.

        Raises:
            SchemaError: the state has too many records, another number of dimensions, another schema, or is broken.
            CapacityError: a storage without schema found too little memory or disk space.
        """
        return self._parsed(with_tensors(state))

    def _parsed(self, state: Any) -> StorageState:
        """Return the value of a state whose columns are tensors."""
        reader = StateReader(state, f"a {type(self).__name__}")
        saved = StorageState.read(reader).counted(reader)
        value = saved.fitted_to(self)
        try:
            content = self._parse_content(reader, saved)
            return replace(value, content=self._turned(content, value.moved) if value.moved else content)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            if isinstance(cause, GleanError):
                raise
            raise SchemaError(
                f"load_state_dict: expected what state_dict() of a {type(self).__name__} returned"
            ) from cause

    def _turned(self, content: Any, rows: int) -> Any:
        """Return parsed content with its first `rows` rows moved to the end.

        Raises:
            SchemaError: this class of storage can't reorder records.
        """
        raise SchemaError(
            f"load_state_dict: the state is of a ring that wrapped around with another max_size, and a "
            f"{type(self).__name__} can't reorder its records: build the storage with the max_size of the state"
        )

    def adopt(self, value: StorageState) -> None:
        """Replace content and counters by the values in a snapshot.

        The content gets a new version. Generations never go back, so draws from before the load are recognised as
        outdated. Attached objects aren't called. The storage may keep the value's tensors, so adopt a value only once.
        """
        if value.content is not None and not self.rows_per_step and 0 not in value.batch_shape:
            self.fix_batch(torch.Size(value.batch_shape))
        rows, saved = value.generations.shape[0], value.counters(self.max_size)
        # Without counters no sampler has drawn anything, so the saved generations can be used unchanged.
        counted, after, as_saved = saved.shape[0], saved, not self.generations.at
        # The value's counters can be used without a copy, because only this storage adopts the value.
        takes_counters = as_saved and counted == self.max_size
        counters = after if takes_counters else self.generations.of_all(counted)
        if not as_saved:
            after = counters.clone()
            after[: len(self)] += 1
            after[:counted] = moved_past(saved, after[:counted])
            as_saved = torch.equal(after[:counted], saved)
        if self.open_snapshots:
            self.open_snapshots = preserve(self.open_snapshots, [(0, self.max_size)], self.max_size)

        def change() -> None:
            self.change_log.renew(value.version)  # before the bytes change, so that readers notice
            if takes_counters:
                self.generations.hold(counters)
            else:
                counters[: after.shape[0]] = after
            self._take_content(value.content, rows)
            self.num_steps, self._end, self._rows_written = value.num_steps, value.end, value.rows_written
            self.ordered, self.overwritten = value.ordered, value.overwritten
            if self._pieces is not None:
                self._forget_pieces()
            if self.find_seams is not None and value.seams.numel():
                numbered(value.seams, self._new_pieces(), value.num_steps, value.end)

        to_the_end(change)
        if as_saved:
            self._remember(value.content)

    @abstractmethod
    def join(self, records: list[Any], where: str) -> Any:
        """Return a list of single records (time steps) as one batch, in the form that `prepare` takes."""

    @abstractmethod
    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Check `data` and return it in the storage's form. The first call also fixes the schema and allocates memory.

        The schema and the memory stay even if no write follows. Padding rows may be dropped (see `Prepared.kept`).

        Args:
            data: records ``[steps, *batch]``, or one time step ``[*batch]``.
            single: whether `data` is one time step without its time dimension.
            dim_extend: the time dimension of `data`; it is exchanged with dimension 0, unless `single` is True.
            where: the call that error messages name.

        Raises:
            SchemaError: the data have another structure, shape or dtype. The message names the key, and nothing
                changed.
            InvalidTypeError: the data are of another type than the stored records, or of one that can't be stored.
            CapacityError: the first write found too little memory or disk space. Nothing changed.
        """

    @abstractmethod
    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Check records ``[*shape]`` that will be written to a selection of slots of that shape; see `prepare`."""

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write records to time steps that the caller chooses, without a writer.

        One step, or a range of steps, that starts at `end` continues the ring. A range of all steps moves `end` to its
        start. Any other write is a correction, also a batch at an int. It moves `end` only if the stored part grows.

        After an error no record has changed, but a first call may have fixed the schema and allocated the memory.

        Args:
            cursor: an int for one record, or for records ``[steps, *batch]`` that are written from this step on. They
                may not wrap around the end of the ring. A range, slice, list or tensor of steps names one step for each
                record, in any order. With ``ndim > 1``, a tuple with one index for each batch dimension selects stored
                records. The write must leave no gap after the stored steps.
            data: the records.
            set_cursor: False leaves `end` unchanged, unless the stored part grows.

        Raises:
            IndexRangeError: the steps are outside of the storage, or leave a gap.
            SchemaError: the records differ from the stored ones in structure, or their number differs from the steps.
                Padding rows don't count.
            InvalidTypeError: `cursor` isn't an index, or the storage can't hold records of this type.
            CapacityError: the first write found too little memory or disk space.
        """
        with self.guard():
            if isinstance(cursor, tuple) and len(cursor) == self.ndim > 1:
                slots, shape = self.slots_of(cursor)
                self.write_slots(self.prepare_selection(data, shape, "set"), slots)
            elif is_position(cursor):
                self._set_at(position(cursor), data, set_cursor)
            else:
                data = self.join(data, "set") if isinstance(data, list) else data
                prepared = self.prepare(data, single=False, dim_extend=0, where="set")
                self._set_steps(steps_at(cursor, self.capacity_steps), prepared, set_cursor)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write records to time steps; see `set`."""
        self.set(index, value)

    def _set_at(self, start: int, data: Any, set_cursor: bool) -> None:
        single = self.takes_one or self._is_one(data)
        prepared = self.prepare(data, single=single, dim_extend=0, where="set")
        stop, stored = start + prepared.num_steps, self.num_steps
        if not 0 <= start <= stored or stop > self.capacity_steps:
            raise self._out_of_range([start, stop - 1])
        self._set_run(start, prepared, stop, set_cursor and single and start == self.end)

    def _set_steps(self, steps: torch.Tensor, prepared: Prepared, set_cursor: bool) -> None:
        count, stored, capacity = steps.shape[0], self.num_steps, self.capacity_steps
        if count != prepared.num_steps:
            raise SchemaError(
                f"set: expected {count} time steps, as many as the cursor names, got {prepared.num_steps}"
            )
        first, top = int(steps[0]), int(steps.max()) + 1
        if int(steps.min()) < 0 or top > capacity or len(set(steps[steps >= stored].tolist())) < top - stored:
            raise self._out_of_range(steps.tolist())
        run = torch.arange(first, first + count, device="cpu") % capacity
        if count <= capacity and torch.equal(steps, run):
            self._set_run(first, prepared, top, set_cursor and (first == self.end or count == capacity))
            return
        per_step = self.rows_per_step
        slots = (steps[:, None] * per_step + torch.arange(per_step, device="cpu")).reshape(-1)
        if top > stored:
            self.write_slots(prepared, slots, num_steps=top, end=top % capacity)
        else:
            self.write_slots(prepared, slots)

    def _set_run(self, start: int, prepared: Prepared, stop: int, moves: bool) -> None:
        """Write to the steps from `start` on, which may wrap around the end of the ring.

        Args:
            start: the first step.
            prepared: the rows.
            stop: the step after the highest step that is written.
            moves: whether `end` moves behind the written steps, even if the stored part doesn't grow. If it grows,
                `end` moves in any case.
        """
        count, before = prepared.num_steps, self.num_steps
        num_new = max(stop - before, 0)
        placement = Placement(start, count, 0, count - num_new, before + num_new, self.capacity_steps)
        self.write(prepared, placement, None if num_new or moves else self.end)

    def _out_of_range(self, steps: list[int]) -> IndexRangeError:
        return IndexRangeError(
            f"set: expected steps in [0, {self.capacity_steps}) that leave no gap after the {self.num_steps} steps "
            f"stored, got steps {steps[0]} to {steps[-1]}"
        )

    def _is_one(self, data: Any) -> bool:
        """Return whether `data` is one time step, as opposed to a batch of time steps."""
        return True

    def note_written(self, index: Any) -> None:
        """Record a write by a foreign writer. Native storages record their writes themselves and ignore this call."""

    # Methods and properties that samplers and writers of other TorchRL releases use

    def _empty(self) -> None:
        """Remove every record; see `clear`."""
        with self.guard():
            self.clear()

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        """Return how many time steps fit, given the first data to be written: one time step or a batch of them."""
        data = batched_data if single_data is None else single_data
        if not self.rows_per_step and data is not None:
            shape = data.shape if hasattr(data, "shape") else _pytree.tree_leaves(data)[0].shape
            batch = shape[: self.ndim - 1] if batched_data is None else shape[1 : self.ndim]
            return self.steps_that_fit(batch)
        return self.capacity_steps

    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Return an index of `batch_size` stored transitions, drawn with repetition from torch's global generator.

        With ``ndim > 1`` it is a tuple of one ``(batch_size,)`` tensor for each dimension.
        """
        drawn = tuple(torch.randint(size, (batch_size,), device="cpu") for size in self.shape)
        return drawn[0] if self.ndim == 1 else drawn

    @property
    def _is_full(self) -> bool:
        return self.num_steps == self.capacity_steps

    @property
    def _last_cursor_index(self) -> int | None:
        """The newest time step; None if the storage is empty."""
        return (self.end - 1) % self.capacity_steps if self.num_steps else None

    @property
    def _last_cursor(self) -> torch.Tensor | None:
        return None if not self.num_steps else torch.tensor([self._last_cursor_index], device="cpu")

    @property
    def _mutation_revision(self) -> Version:
        return self.version

    def _attached_entities_iter(self) -> Iterator[Any]:
        """Yield the attached objects that are called after each write."""
        return iter(living(self.attached))


def count_all_as_written(storage: Storage, num_steps: int) -> None:
    """Mark the first `num_steps` time steps of a new storage, which took over existing records, as written.

    All slots get the generation 1.
    """
    storage.generations.of_all().fill_(1)
    storage.num_steps = num_steps
    storage._end = num_steps % storage.capacity_steps
    storage._rows_written = len(storage)
