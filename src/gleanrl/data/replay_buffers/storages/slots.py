"""The slots of a storage: how many there are, and how many are in use."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from gleanrl.arguments import positive
from gleanrl.data.replay_buffers.storages.access import Access
from gleanrl.data.replay_buffers.storages.generations import Generations
from gleanrl.data.replay_buffers.versions import Change, ChangeLog, Version, Versioned
from gleanrl.errors import IndexRangeError, InvalidArgumentError

UNBOUNDED = 2**63 - 1  # the size of a storage that takes whatever comes


class Slots(Access, Versioned):
    """A ring of time steps, ``[steps, *batch]`` slots, with a generation for each slot and a log of changes.

    Args:
        max_size: transitions that fit, at least 1; `UNBOUNDED` for any number.
        ndim: batch dimensions of a storage, at least 1; the first is time.
    """

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.ndim = positive("ndim", ndim)
        self.requested_size = positive("max_size", max_size)
        """Transitions that were asked for."""
        # The sizes are plain attributes, read-only for others: every write and every draw asks for them.
        self.rows_per_step = 0
        """Transitions in one time step; with ``ndim > 1`` 0 before the first write."""
        self.batch_shape = torch.Size((0,) * (ndim - 1))
        """Sizes of the batch dimensions after time; fixed by the first write if ``ndim > 1``, 0 before."""
        self.capacity_steps = self.requested_size
        """Time steps that fit: ``ceil(requested_size / transitions per step)``."""
        self.max_size = self.requested_size
        """Transitions that fit: the size asked for, rounded up to whole time steps once those are known."""
        self.num_steps = 0
        """Time steps stored."""
        self._end = 0
        self.change_log = ChangeLog()
        """What changed since which version; whoever writes notes it there before the bytes move."""
        self.generations = Generations()
        """How often each slot was written or cleared."""
        self.ordered = True
        """Whether neighbouring slots hold neighbouring steps; not after records were chosen by what they hold."""
        self._rows_written = 0
        if self.ndim == 1:
            self.fix_batch(torch.Size(()))

    # Shape

    def fix_batch(self, shape: torch.Size) -> None:
        """Fix the batch dimensions after time, and the sizes that follow from them; may be done twice.

        For `prepare` of a storage with ``ndim > 1``, at the first write, once nothing can fail any more.

        Args:
            shape: ``ndim - 1`` sizes, none of them 0.
        """
        self.capacity_steps = self.steps_that_fit(shape)
        self.max_size = self.capacity_steps * shape.numel()
        self.batch_shape = shape
        self.generations.resize(None if self.max_size == UNBOUNDED else self.max_size)
        self.rows_per_step = shape.numel()  # last: it says that all of this is known

    def steps_that_fit(self, batch: torch.Size) -> int:
        """Return how many time steps fit if the batch dimensions after time are these."""
        return -(-self.requested_size // batch.numel())

    def bound(self, max_size: int) -> None:
        """Give a storage that takes any number of transitions a size; nothing to do for others.

        Raises:
            InvalidArgumentError: it holds more already.
        """
        if self.requested_size != UNBOUNDED:
            return
        if len(self) > max_size:
            raise InvalidArgumentError(
                f"max_size: {max_size} is less than the {len(self)} transitions stored"
            )
        self.requested_size = max_size
        self.fix_batch(self.batch_shape)
        self._end = self.num_steps % self.capacity_steps
        self.change_log.renew()  # it counts around another ring
        if self.generations.at:
            self.generations.of_all(max_size)

    def _go_on_at(self, step: int) -> None:
        capacity = self.capacity_steps
        if not 0 <= step < capacity or (self.num_steps < capacity and step != self.num_steps):
            raise IndexRangeError(
                f"end: expected a step in [0, {capacity}) that leaves no gap behind the {self.num_steps} "
                f"steps stored, got {step}"
            )
        if step != self._end:
            # Trajectories are cut elsewhere.
            self.change_log.note_ranges([(0, len(self))], self.max_size, amended=True)
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
        return torch.Size((self.num_steps, *self.batch_shape))

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return self.num_steps * self.rows_per_step

    _len = property(__len__)  # a private name that programs do use

    # Generations and versions

    # Every write, draw and follower asks: read without a call.
    version = property(
        attrgetter("change_log.version"),
        doc="Which content the storage holds, and how much of it has changed; counted before the bytes move.",
    )

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version` (see `ChangeLog.since`); None for another content."""
        return self.change_log.since(version)

    @property
    def origin(self) -> Version | None:
        """What this content began as a copy of, by loading or unpickling; None for nothing."""
        return self.change_log.origin

    @property
    def rows_written(self) -> int:
        """Transitions ever written."""
        return self._rows_written

    def generation(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generations of `slots` (``(n,)`` int64, in range), a fresh ``(n,)`` int64 tensor."""
        counters = self.generations.counters
        return (self.generations.of_all() if counters is None else counters).index_select(0, slots)

    @property
    def counters_at(self) -> int:
        """The address of all slots' generations, int64, for the native core; fixed for the life of a size."""
        return self.generations.at or self.generations.of_all().data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: another content."""
        self.__dict__.update(state)
        self.change_log = ChangeLog(self.change_log.version)
