"""What every storage does: the steps of a write, reading, and its state.

Storages without a buffer: records go where a caller says.
"""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from gleanrl._arrays.native import bump, bump_at
from gleanrl._arrays.results import Placement, Selection
from gleanrl._arrays.tensordicts import NestedKey, Path
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
from gleanrl.data.replay_buffers.storages.copy_on_write import CowSnapshot, preserve
from gleanrl.data.replay_buffers.storages.indexing import is_position, ranges_of, steps_at
from gleanrl.data.replay_buffers.storages.slots import Slots, announce, living
from gleanrl.data.replay_buffers.storages.snapshots import Ahead, ContentCopy, Copying, StorageState
from gleanrl.errors import GleanError, IndexRangeError, InvalidTypeError, SchemaError, UnsupportedError


class Prepared(NamedTuple):
    """Data that passed every check and can be copied into the slots of a storage without failing."""

    rows: Any
    """The leaves or items, in the storage's own form."""
    num_steps: int
    """Time steps in it."""
    kept: torch.Tensor | None = None
    """Which of the given steps they are, ``(given,)`` bool; None for all of them."""


class Direct(Slots):
    """Writing to a storage by itself, by int, range, slice, list or tensor of time steps; see `Storage`."""

    takes_one = False
    """Whether `set` at an int takes one record, whatever it looks like: for writers of other releases."""

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
    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Check records ``[*shape]`` that are to go to a selection of slots of that shape; see `prepare`."""

    @abstractmethod
    def write(self, prepared: Prepared, placement: Placement, end: int | None = None) -> None:
        """Copy prepared data to its placement and publish the new length and end (see `Storage.write`)."""

    @abstractmethod
    def write_slots(
        self,
        prepared: Prepared,
        slots: torch.Tensor,
        amended: bool = False,
        *,
        num_steps: int | None = None,
        end: int | None = None,
    ) -> None:
        """Copy prepared data to `slots` and publish length and end (see `Storage.write_slots`)."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every record."""

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write records to time steps of one's choice, without a writer.

        A run of steps that begins at `end` goes on with the ring. Other records that replace stored ones are
        corrections: `end` moves only if the stored part grows.

        Args:
            cursor: an int for one record, or for records ``[steps, *batch]`` that go to this step and the following;
                a range, slice, list or tensor of steps, one for each record, around the end of the ring perhaps; a
                tuple with one index for each batch dimension, of stored records. No gap is left behind what is stored.
            data: the records.
            set_cursor: False keeps `end`, wherever the run begins.

        Raises:
            IndexRangeError: steps outside of the storage, or a gap.
            SchemaError: other records than are stored, or another number.
        """
        with self.guard():
            if isinstance(cursor, tuple) and len(cursor) == self.ndim > 1:
                slots, shape = self.slots_of(cursor)
                self.write_slots(self.prepare_selection(data, shape, "set"), slots)
            elif is_position(cursor):
                self._set_at(int(cursor), data, set_cursor)
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
            raise self._no_place([start, stop - 1])
        self._set_run(start, prepared, stop, set_cursor and single and start == self.end)

    def _set_steps(self, steps: torch.Tensor, prepared: Prepared, set_cursor: bool) -> None:
        count, stored, capacity = steps.shape[0], self.num_steps, self.capacity_steps
        if count != prepared.num_steps:
            raise SchemaError(f"set: the cursor names {count} time steps, the data hold {prepared.num_steps}")
        first, top = int(steps[0]), int(steps.max()) + 1
        if int(steps.min()) < 0 or top > capacity or len(set(steps[steps >= stored].tolist())) < top - stored:
            raise self._no_place(steps.tolist())
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
        """Write to `start` and the following steps, around the end perhaps; `stop`: behind the highest of them."""
        count, before = prepared.num_steps, self.num_steps
        fresh = max(stop - before, 0)
        placement = Placement(start, count, 0, count - fresh, before + fresh, self.capacity_steps)
        self.write(prepared, placement, None if fresh or moves else self.end)

    def _no_place(self, steps: list[int]) -> IndexRangeError:
        return IndexRangeError(
            f"set: steps {steps[0]} to {steps[-1]} don't lie within [0, {self.capacity_steps}), or leave a gap after "
            f"the {self.num_steps} steps stored"
        )

    def _is_one(self, data: Any) -> bool:
        """Return whether `data` are one time step, not many of them."""
        return True

    def note_written(self, index: Any) -> None:
        """Learn that a writer wrote to what a view stands for; storages of ours know it by themselves."""

    # What samplers and writers of other releases ask for

    def _empty(self) -> None:
        """Forget every record; see `clear`."""
        with self.guard():
            self.clear()

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        """Return how many time steps fit, given what is written first, one time step or many."""
        data = batched_data if single_data is None else single_data
        if not self.rows_per_step and data is not None:
            shape = data.shape if hasattr(data, "shape") else _pytree.tree_leaves(data)[0].shape
            batch = shape[: self.ndim - 1] if batched_data is None else shape[1 : self.ndim]
            return self.steps_that_fit(batch)
        return self.capacity_steps

    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Return an index of `batch_size` stored transitions, by torch's global generator."""
        drawn = tuple(torch.randint(size, (batch_size,), device="cpu") for size in self.shape)
        return drawn[0] if self.ndim == 1 else drawn

    @property
    def _is_full(self) -> bool:
        return self.num_steps == self.capacity_steps

    @property
    def _last_cursor_index(self) -> int | None:
        """The newest time step."""
        return (self.end - 1) % self.capacity_steps if self.num_steps else None

    @property
    def _last_cursor(self) -> torch.Tensor | None:
        return None if not self.num_steps else torch.tensor([self._last_cursor_index], device="cpu")

    @property
    def _mutation_revision(self) -> Version:
        return self.version

    def _attached_entities_iter(self) -> Iterator[Any]:
        """Yield who is told of writes."""
        return iter(living(self.attached))


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

    def collated_by(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes a batch of fetched records by a user's function."""
        return collate_fn

    moments: tuple[weakref.ref[CowSnapshot], ...] = ()
    """What it held at moments that are being saved; these copy what a write is about to change."""

    def preserve_next(self, num_steps: int) -> None:
        """Let what is being saved copy the slots of so many steps from the end on, where a ring writer goes on.

        Any thread may call it, without the buffer's lock, so that nobody but the writer waits for the copies. A guess
        does: the write itself preserves the rest, and waits for copies that are being made.
        """
        if self.ordered:
            per_step = self.rows_per_step
            preserve(self.moments, [(self.end * per_step, num_steps * per_step)], self.max_size)

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
        if not self.generations.at:
            self.generations.of_all()
        start, num_steps, _, _, _, capacity = placement
        first, count = start * self.rows_per_step, num_steps * self.rows_per_step
        if self.moments:
            self.moments = preserve(self.moments, [(first, count)], self.max_size)
        written = self._rows_written + count
        pieces = begins = None
        if self.find_seams is not None:
            if 1 < num_steps < capacity and start == self._end and self.num_steps:
                newest = (start - 1) % capacity * self.rows_per_step
                begins = self.find_seams(newest, num_steps, self.rows_per_step, prepared.rows)
            if begins is not None or self._pieces is not None:
                pieces = self._pieces_of(placement, begins)
        new_end = (start + num_steps) % capacity if end is None else end
        before = self.change_log.version
        # `to_the_end` in place: this is every write's way, and a function of its own costs as much as the checks.
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
    """Finds seams between writes (see `Seams.find`); None where there is nothing to find."""

    @property
    def pieces(self) -> Any:
        """The number of each row's piece (see `Seams`), ``(steps, streams)`` int64; None while there was no seam."""
        return self._pieces

    _pieces: Any = None

    def _pieces_of(self, placement: Placement, begins: bytes | None) -> Any:
        """Return which pieces the rows of a write belong to, for `_number`.

        Args:
            placement: where they go.
            begins: what `Seams.find` says of the write; None where it says nothing, or wasn't asked.
        """

    def _number(self, pieces: Any) -> None:
        """Number the pieces of written rows, as `_pieces_of` said."""

    def _number_as_saved(self, value: StorageState) -> None:
        """Number the pieces of a snapshot's rows."""

    def _seam_slots(self) -> torch.Tensor:
        """Return the slots of rows that begin a piece at a seam, ``(n,)`` int64."""
        return torch.empty(0, dtype=torch.int64, device="cpu")

    def _write(
        self, rows: Any, placement: Placement, end: int, written: int, before: Version, pieces: Any
    ) -> None:
        """Note the change after version `before`, copy, publish; can't fail, and may be done twice."""
        start, count, skipped, _, length, capacity = placement
        per_step = self.rows_per_step
        if self.change_log.version == before:
            self.change_log.note(start * per_step, count * per_step, capacity * per_step)
        bump(self.generations.at, start * per_step, count * per_step, capacity * per_step)
        self._copy_span(rows, skipped, start, count)
        if pieces is not None:
            self._number(pieces)
        self.num_steps, self._end, self._rows_written = length, end, written

    def write_selected(self, prepared: Prepared, selection: Selection) -> None:
        """Copy some of the prepared records to slots of their own and publish the new length."""
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

        Args:
            prepared: the rows.
            slots: where they go.
            amended: whether the records stay what they are, a column of theirs apart.
            num_steps: time steps that are stored then; None for as many as before.
            end: the new end; None for that of before.
        """
        length = self.num_steps if num_steps is None else num_steps
        self._put(prepared.rows, slots, amended, length, self._end if end is None else end, self.ordered)

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        if not self.generations.at:
            self.generations.of_all()
        count = slots.shape[0]
        rows_written = self._rows_written + (0 if amended else count)

        before, ranges = self.version, ranges_of(slots)
        if self.moments:
            self.moments = preserve(self.moments, ranges, self.max_size)

        def change() -> None:
            if count:
                if self.version == before:
                    self.change_log.note_ranges(ranges, self.max_size, amended)
                bump_at(self.generations.at, slots.data_ptr(), count, self.max_size)
                self._copy_slots(rows, slots)
            self.num_steps, self._end, self.ordered = num_steps, end, ordered
            self._rows_written = rows_written

        to_the_end(change)
        if self.attached:
            announce(self, slots)

    def clear(self) -> None:
        """Forget every record; memory and schema stay. Generations move on: earlier draws are recognised."""

        def change() -> None:
            self._forget()
            self.num_steps = self._end = 0
            self.ordered = True

        self.moments = preserve(self.moments, [(0, len(self))], self.max_size)
        self.change_log.renew()
        if self.num_steps:
            bump(self.generations.at, 0, len(self), self.max_size)
        to_the_end(change)

    def _forget(self) -> None:
        """Let go of records that nothing shows any more."""

    # Reading

    @property
    def exposed(self) -> bool:
        """Whether records may change without a change of the version: through live views, files, or another process."""
        return False

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

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> Any:
        """Return what `fetch` does, by the records that it returned before, which may be written.

        Args:
            records: those fetched, of the same columns.
            slots: ``(n,)`` int64.
            renewed: ``(n,)`` bool, which of them have to be fetched.
            paths: see `fetch`.
        """
        return self.fetch(slots, paths)

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
                num_steps=self.num_steps,
                end=self._end,
                rows_written=self._rows_written,
                ordered=self.ordered,
                seams=self._seam_slots(),
                max_size=self.requested_size,
                ndim=self.ndim,
                batch_shape=tuple(self.batch_shape),
                version=self.version,
                generations=self.generations.of_all()[:counted].clone(),
                vacated=self.generations.vacated(len(self)),
                content=content,
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
        """Return parsed content of which the first `rows` rows come last; `SchemaError` where that can't be."""
        raise SchemaError(
            f"load_state_dict: a {type(self).__name__} of another max_size can't put the records of a ring that came "
            "around in their order: build it with the same one"
        )

    def adopt(self, value: StorageState) -> None:
        """Hold what a snapshot holds. Generations never go back: earlier draws are recognised."""
        if value.content is not None and not self.rows_per_step and 0 not in value.batch_shape:
            self.fix_batch(torch.Size(value.batch_shape))
        rows, saved = value.generations.shape[0], value.counters(self.max_size)
        counted, after, as_saved = saved.shape[0], saved, not self.generations.at  # nobody has drawn anything
        whole = as_saved and counted == self.max_size  # the value's own copy serves: it is adopted here alone
        counters = after if whole else self.generations.of_all(counted)
        if not as_saved:
            after = counters.clone()
            after[: len(self)] += 1
            after[:counted] = moved_past(saved, after[:counted])
            as_saved = torch.equal(after[:counted], saved)
        self.moments = preserve(self.moments, [(0, self.max_size)], self.max_size)

        def change() -> None:
            self.change_log.renew(value.version)  # before the bytes move
            if whole:
                self.generations.hold(counters)
            else:
                counters[: after.shape[0]] = after
            self._take_content(value.content, rows)
            self.num_steps, self._end, self._rows_written = value.num_steps, value.end, value.rows_written
            self.ordered = value.ordered
            self._number_as_saved(value)

        to_the_end(change)
        if as_saved:
            self._remember(value.content)


def count_all_as_written(storage: Storage, num_steps: int) -> None:
    """Have a new storage, which adopts records, hold `num_steps` time steps of them."""
    storage.generations.of_all().fill_(1)
    storage.num_steps = num_steps
    storage._end = num_steps % storage.capacity_steps
    storage._rows_written = len(storage)
