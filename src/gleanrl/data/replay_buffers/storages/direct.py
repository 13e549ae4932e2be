"""Storages without a buffer: records go where a caller says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from gleanrl.data.replay_buffers.storages.access import living
from gleanrl.data.replay_buffers.storages.indexing import is_position, steps_at
from gleanrl.data.replay_buffers.storages.slots import Slots
from gleanrl.data.replay_buffers.versions import Version
from gleanrl.errors import IndexRangeError, SchemaError
from gleanrl.records import Placement


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
