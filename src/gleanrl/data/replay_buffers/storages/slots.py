"""The slots of a storage: how many there are, how many are in use, and how often each was written."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gleanrl.arguments import positive
from gleanrl.data.replay_buffers.storages.access import Access
from gleanrl.data.replay_buffers.storages.memory import zeroed
from gleanrl.data.replay_buffers.storages.moments import Moment
from gleanrl.data.replay_buffers.versions import Change, ChangeLog, Version, Versioned, ring_spans
from gleanrl.errors import IndexRangeError, InvalidArgumentError
from gleanrl.system.interrupts import to_the_end

UNBOUNDED = 2**63 - 1  # the size of a storage that takes whatever comes
_FIRST_COUNTERS = 1024
NO_SLOTS = torch.zeros(1, dtype=torch.int64, device="cpu")  # an address for counters that nobody looks at


class Slots(Access, Versioned):
    """A ring of time steps, ``[steps, *batch]`` slots, with a generation for each slot and a log of changes.

    Args:
        max_size: transitions that fit, at least 1; `UNBOUNDED` for any number.
        ndim: batch dimensions of a storage, at least 1; the first is time.
    """

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.ndim = positive("ndim", ndim)
        self._requested = positive("max_size", max_size)
        self._batch_shape: torch.Size | None = None
        # The sizes are plain attributes, read-only for others: every write and every draw asks for them.
        self.rows_per_step = 0
        """Transitions in one time step; with ``ndim > 1`` 0 before the first write."""
        self.capacity_steps = self._requested
        """Time steps that fit: ``ceil(max_size asked for / transitions per step)``."""
        self.max_size = self._requested
        """Transitions that fit: the size asked for, rounded up to whole time steps once those are known."""
        self.num_steps = 0
        """Time steps stored."""
        self._end = 0
        self._log = ChangeLog()
        self.ordered = True
        """Whether neighbouring slots hold neighbouring steps; not after records were chosen by what they hold."""
        self._rows_written = 0
        self._generations: torch.Tensor | None = None
        self._generations_at = 0
        if self.ndim == 1:
            self._fix_batch(torch.Size(()))

    # Shape

    def _fix_batch(self, shape: torch.Size) -> None:
        """Fix the batch dimensions after time, and the sizes that follow from them; may be done twice."""
        self.rows_per_step = shape.numel()
        self.capacity_steps = -(-self._requested // self.rows_per_step)
        self.max_size = self.capacity_steps * self.rows_per_step
        self._batch_shape = shape

    def bound(self, max_size: int) -> None:
        """Give a storage that takes any number of transitions a size; nothing to do for others.

        Raises:
            InvalidArgumentError: it holds more already.
        """
        if self._requested != UNBOUNDED:
            return
        if len(self) > max_size:
            raise InvalidArgumentError(
                f"max_size: {max_size} is less than the {len(self)} transitions stored"
            )
        self._requested = max_size
        self._fix_batch(self.batch_shape)
        self._end = self.num_steps % self.capacity_steps
        self._log.renew()  # it counts around another ring
        if self._generations is not None:
            self._counters(max_size)

    @property
    def batch_shape(self) -> torch.Size:
        """Sizes of the batch dimensions after time; fixed by the first write if ``ndim > 1``, 0 before."""
        return torch.Size((0,) * (self.ndim - 1)) if self._batch_shape is None else self._batch_shape

    def _go_on_at(self, step: int) -> None:
        capacity = self.capacity_steps
        if not 0 <= step < capacity or (self.num_steps < capacity and step != self.num_steps):
            raise IndexRangeError(
                f"end: expected a step in [0, {capacity}) that leaves no gap behind the {self.num_steps} "
                f"steps stored, got {step}"
            )
        if step != self._end:
            # Trajectories are cut elsewhere.
            self._log.note_ranges([(0, len(self))], self.max_size, amended=True)
            self._end = step

    # Every write asks: read without a call.
    end = property(
        attrgetter("_end"),
        lambda self, step: self._go_on_at(step),
        doc="""The time step after the newest one, around the ring: where a ring writer goes on.

        Before the storage is full that is `num_steps`; a full one may be told another step.
        """,
    )

    @property
    def shape(self) -> torch.Size:
        """The visible part, ``[time steps stored, *batch]``."""
        batch = self._batch_shape  # most often known
        return torch.Size((self.num_steps, *(self.batch_shape if batch is None else batch)))

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return self.num_steps * self.rows_per_step

    _len = property(__len__)  # a private name that programs do use

    # Moments

    moments: tuple[weakref.ref[Moment], ...] = ()
    """Of what is being saved."""

    def _preserve(self, ranges: list[tuple[int, int]]) -> None:
        """Let what is being saved copy slots that are about to change: first slot and count of each range."""
        living = [(moment, found) for moment in self.moments if (found := moment()) is not None]
        self.moments = tuple(moment for moment, found in living if found.open)
        if living:
            spans = [span for start, count in ranges for span in ring_spans(start, count, self.max_size)]
            for _, found in living:
                found.before(spans)

    def preserve_next(self, num_steps: int) -> None:
        """Let what is being saved copy the slots of so many steps from the end on, where a ring writer goes on.

        Any thread may call it, without the buffer's lock, so that nobody but the writer waits for the copies. A guess
        does: the write itself preserves the rest, and waits for copies that are being made.
        """
        if self.ordered:
            per_step = self.rows_per_step
            spans = ring_spans(self._end * per_step, num_steps * per_step, self.max_size)
            for moment in self.moments:
                if (found := moment()) is not None:
                    found.before(spans)

    # Generations and versions

    # Every write, draw and follower asks: read without a call.
    version = property(
        attrgetter("_log.version"),
        doc="Which content the storage holds, and how much of it has changed; counted before the bytes move.",
    )

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version` (see `ChangeLog.since`); None for another content."""
        return self._log.since(version)

    @property
    def origin(self) -> Version | None:
        """What this content began as a copy of, by loading or unpickling; None for nothing."""
        return self._log.origin

    @property
    def rows_written(self) -> int:
        """Transitions ever written."""
        return self._rows_written

    def generation(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generations of `slots` (``(n,)`` int64, in range), a fresh ``(n,)`` int64 tensor."""
        counters = self._generations
        return (self._counters() if counters is None else counters).index_select(0, slots)

    @property
    def counters_at(self) -> int:
        """The address of all slots' generations, int64, for the native core; fixed for the life of a size."""
        return self._generations_at or self._counters().data_ptr()

    def _counters(self, rows: int = 0) -> torch.Tensor:
        """Return the generations of all slots; of a storage without a size those of `rows` slots at least."""
        if self._batch_shape is None:
            return NO_SLOTS  # how many there are shows at the first write
        counters = self._generations
        if counters is None or rows > counters.shape[0]:
            # Zeroed pages cost nothing until they are touched: 8 bytes for each row in use.
            size = max(2 * rows, _FIRST_COUNTERS) if self.max_size == UNBOUNDED else self.max_size
            grown = torch.from_numpy(zeroed(8 * size, size).view(np.int64))
            if counters is not None:
                grown[: counters.shape[0]] = counters
            counters = grown
            to_the_end(lambda: self._count_in(grown))
        return counters

    def _count_in(self, counters: torch.Tensor) -> None:
        """Count in this memory from now on."""
        self._generations, self._generations_at = counters, counters.data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: another content, whose counters have another address."""
        self.__dict__.update(state)
        self._log = ChangeLog(self._log.version)
        if self._generations is not None:
            self._generations_at = self._generations.data_ptr()
