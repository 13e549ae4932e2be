"""What a sampler is: it draws slots and never reads records."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._state.rng import GeneratorState, GivenGenerator, OwnedGenerator, RandomSource, Words
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import overridden
from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import slots_of_update
from gleanrl.data.trajectories import marks_among
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)

_MOST_REDRAWS = 2  # of slices that an end was written into


class SamplerState(NamedTuple):
    """Where a sampler stands in its sequence of draws, and the priorities that it keeps."""

    generator: Words | None
    """See `GeneratorState`."""
    ran_out: bool
    """See `Sampler.ran_out`."""
    epoch: int
    """See `Sampler.epoch`."""
    running: Any = None
    """What runs on from draw to draw: the epoch, of samplers with epochs, say."""
    priorities: Any = None
    """Rule and rows, of samplers with priorities; None for "as they are"."""


class Sampler(Part, Stateful[Any]):
    """Draws slots of a storage with a random generator of its own.

    The buffer calls every method under its lock. A sampler belongs to one buffer (see `Part`); only slots of
    the stored part of the storage that `draw` is given are ever drawn, whatever was drawn from before.

    A sampler of one's own overrides `sample`, and `follow` if it derives something from what is stored; one that was
    written for another release may have `add`, `extend`, `update_priority`, `mark_update`, `_empty` and `state_dict`
    instead (see `FamiliarSampler`, and the page on samplers).

    Args:
        seed: where the sampler's random sequence starts; None takes a seed from torch's global generator at
            the first draw.

    Raises:
        UnsupportedError: a class that doesn't override `sample`.
    """

    takes_priorities = False
    """Whether `prioritize` does something; it checks its slots then."""
    uses_up: ClassVar[bool] = False
    """Whether what was drawn isn't drawn again, in the same epoch at least."""
    cuts = False
    """Whether draws depend on where trajectories end, so that `is_whole` says something."""
    draws_ahead = True
    """Whether draws may be taken back (see `place`), so that batches can be drawn ahead."""
    reduction = "max"
    """How several priorities of one record become one."""
    ran_out = False
    """Whether the last draw ended an epoch; always False for samplers without epochs."""
    epoch = 0
    """Epochs begun so far; stays 0 for samplers without epochs."""
    _by_sample = False  # whether a user's class draws by `sample`
    _last: Draw | None = None  # what `sample` drew, for a user's class that builds on it
    _rng: torch.Generator | None = (
        None  # a user's generator, by the name that samplers of other releases know
    )
    _home: weakref.ref[Storage] | None = None  # what index numbers are of, where nobody says
    _early: tuple[tuple[Any, Any], ...] = ()  # priorities that came before any storage

    def __init_subclass__(cls, **options: Any) -> None:
        """Look whether the class draws by `sample`."""
        super().__init_subclass__(**options)
        cls._by_sample = bool(overridden(cls, "sample", of=Sampler))

    def __init__(self, seed: int | None = None) -> None:
        if not self._by_sample and not overridden(self, "_draw", of=Sampler):
            raise UnsupportedError(f"class {type(self).__name__}: a sampler has to override sample()")
        self.random: RandomSource = OwnedGenerator(seed)
        """The generator to draw with; part of the state."""

    def new_epoch(self) -> None:
        """Begin a new epoch with the next draw; samplers without epochs go on."""
        if self.ran_out:  # a user's class may forbid setting it
            self.ran_out = False

    def set_seed(self, seed: int) -> None:
        """Start the random sequence of `seed`."""
        self.random.seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator from now on (see `GivenGenerator`); None for one of the sampler's own."""
        self.random = OwnedGenerator() if generator is None else GivenGenerator(generator)
        self._rng = generator

    @property
    def room(self) -> int | None:
        """Rows that a storage may have at most; None for any number."""
        return None

    def check_storage(self, storage: Storage) -> None:
        """Raise if the sampler can't draw from `storage`; a buffer asks before it takes either."""

    def available(self, storage: Storage) -> int:
        """Return how many of the stored records can be drawn: what ``len(buffer)`` says."""
        return len(storage)

    @property
    def follows(self) -> bool:
        """Whether `follow` does anything; a buffer asks when it takes the sampler, not at every write."""
        return bool(overridden(self, "follow", of=Sampler))

    @property
    def weighs(self) -> bool:
        """Whether weights may come with its rows: batches carry generations beside them. Asked like `follows`."""
        return True

    def follow(self, storage: Storage) -> None:
        """Learn that `storage` changed, whatever happened; called after every change, and at every use at the latest.

        A sampler that derives something from what is stored brings that in step here (see `Follower`), and again
        in its other methods: this one needn't have been called.
        """

    # Draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return an index and what comes with it: what a user's sampler overrides, and callers without a buffer call.

        Args:
            storage: what to draw from.
            batch_size: transitions to draw, at least 1.

        Returns:
            The index, ``(n,)`` int64, or a tuple of ``ndim`` such tensors; what batches of TensorDict buffers and
            their info carry, ``(n, ...)`` each: weights, or the end flags of slices; and ``"generation"``.

        Raises:
            EmptyBufferError: if nothing is stored.
        """
        if batch_size < 1:
            raise InvalidArgumentError(f"batch_size: expected 1 or more, got {batch_size}")
        if not storage.num_steps:
            raise _nothing_stored()
        self.use_storage(storage)
        drawn = self._draw(storage, batch_size)
        if self.cuts and storage.exposed:
            drawn = self.mended(storage, drawn, lambda draw: self._redraw(storage, draw, all_rows(draw)))
        if drawn.generation is None:
            drawn = _stamped(drawn, storage)
        self._last = drawn
        self.on_serve(storage, drawn)
        paths = self.annotated_paths(storage)
        extras = self.annotate(drawn, storage.fetch(drawn.slots, paths) if paths else None)
        return coordinates(drawn.slots, storage), {**extras, "generation": drawn.generation}

    def draw(self, storage: Storage, batch_size: int, generations: bool = False) -> Draw:
        """Draw slots of the stored part of `storage`.

        Args:
            storage: what to draw from.
            batch_size: transitions to draw, at least 1.
            generations: whether the slots' generations come with them.

        Raises:
            EmptyBufferError: if nothing is stored.
        """
        if not storage.num_steps:
            raise _nothing_stored()
        drawn = (self._draw_by_sample if self._by_sample else self._draw)(storage, batch_size)
        if generations and drawn.generation is None:  # `_stamped`, in place
            return new_tuple(Draw, (*drawn[:2], storage.generation(drawn.slots), *drawn[3:]))
        return drawn

    def draw_served(self, storage: Storage, batch_size: int, generations: bool = False) -> Draw:
        """Draw a batch that is handed out before another one is drawn: `draw` and `on_serve` together."""
        drawn = self.draw(storage, batch_size, generations)
        self.on_serve(storage, drawn)
        return drawn

    def redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor, generations: bool = False) -> Draw:
        """Return `draw` with other slots where `stale` (bool, ``(n,)``): those were overwritten meanwhile."""
        if self._by_sample:
            return self.draw(storage, draw.slots.shape[0] if draw.asked is None else draw.asked, generations)
        drawn = self._redraw(storage, draw, stale)
        return _stamped(drawn, storage) if generations and drawn.generation is None else drawn

    def is_whole(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside of what was drawn, as ends and ids are stored now.

        They may be others than at the draw, or than the sampler knew: live views write without a change of the version.
        Where one does, the sampler looks at the whole storage at its next draw. Asked where `cuts` is True.
        """
        return True

    def mended(self, storage: Storage, draw: Draw, redraw: Callable[[Draw], Draw]) -> Draw:
        """Return a draw of which `is_whole` is True: the given one, or another that `redraw` makes of it.

        Raises:
            SchemaError: two more draws weren't whole, either.
        """
        for _ in range(_MOST_REDRAWS):
            if self.is_whole(storage, draw):
                return draw
            draw = redraw(draw)
        if self.is_whole(storage, draw):
            return draw
        raise SchemaError(
            f"sample: expected slices without the end of a trajectory inside, but {_MOST_REDRAWS + 1} draws in a "
            "row had one: end flags or ids are being written through live views meanwhile; write them by "
            "buffer[index] = ..., or between two calls of sample()"
        )

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        """Return slots and what else comes with each; the storage isn't empty."""
        raise NotImplementedError

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Return other slots for the stale rows, or for all; generations don't matter here."""
        raise NotImplementedError

    def _draw_by_sample(self, storage: Storage, batch_size: int) -> Draw:
        self._last = None
        index, info = self.sample(storage, batch_size)
        slots, _ = storage.slots_of(index)
        count, last = slots.shape[0], self._last
        extras = {
            key: self._per_row(key, value, count)
            for key, value in info.items()
            if key not in ("index", "generation")
        }
        if last is None or not torch.equal(last.slots, slots):
            return Draw(slots, extras, asked=batch_size)
        return last._replace(extras=extras, asked=batch_size if last.asked is None else last.asked)

    def _per_row(self, key: Any, value: Any, count: int) -> torch.Tensor:
        rows = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(rows, (bool, int, float)) or (isinstance(rows, torch.Tensor) and not rows.ndim):
            return torch.as_tensor(rows).expand(count).clone()  # one for all
        if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (count,):
            raise InvalidTypeError(
                f"{type(self).__name__}.sample: expected a tensor ({count}, ...) for {key!r}, one value for each "
                f"row, or a number for all, got {value!r}"
            )
        return rows

    def on_serve(self, storage: Storage, draw: Draw) -> None:
        """Learn that a batch is about to be handed out, in the order of the batches."""

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row; `records` are the rows as they were fetched."""
        return draw.extras

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return those entries by which transforms tell neighbouring rows apart: transforms of every buffer see them.

        Of a user's sampler these are the flags below ``"next"`` and the mask that it returns.
        """
        return marks_among(draw.extras)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` look at."""
        return ()

    # Priorities

    def prioritize(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Take new priorities; a sampler without priorities warns and goes on.

        Args:
            storage: what the slots are of.
            slots: ``(n,)`` int64 in the stored part, or -1 for "skip".
            priority: one number or one for each slot.
            generation: the slots' generations when they were drawn, or None.
        """
        warnings.warn(
            f"update_priority: a {type(self).__name__} has no priorities, the update is ignored", stacklevel=5
        )

    def mark(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new records; nothing to do without priorities."""

    def check_priorities(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless rows can have the priorities `values`, ``(n,)``."""

    @property
    def default_priority(self) -> float:
        """The priority of new records; 1 for samplers without priorities."""
        return 1.0

    @property
    def priorities_dropped(self) -> int:
        """Priority updates that came too late; 0 for samplers without priorities."""
        return 0

    # For callers without a buffer, and what a user's class may override instead of the native methods

    def use_storage(self, storage: Storage) -> None:
        """Take `storage` for what indices are of, and priorities that came before it."""
        if self._home is None or self._home() is not storage:
            self._home = weakref.ref(storage)
            early, self._early = self._early, ()
            for index, priority in early:
                self.update_priority(index, priority, storage=storage)

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """Take new priorities, for callers without a buffer; see `ReplayBuffer.update_priority`.

        Args:
            index: slots, as `sample` returned them.
            priority: one number, or one for each index.
            storage: what the index is of; None for the storage of the buffer or of the last `sample`. Priorities
                that come before any storage are kept for the first one.
            generation: the slots' generations when they were drawn; None for those at their last draw.
        """
        storage = self._home_of(storage)
        if storage is None:
            self._early += ((index, priority),)
            return
        with self.guard():
            slots = slots_of_update(index, storage.shape, check=not self.takes_priorities)
            self.prioritize(storage, slots, priority, generation)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give records the priority of new ones; those of no known storage are new when one is sampled from."""
        storage = self._home_of(storage)
        if storage is not None:
            with self.guard():
                slots = slots_of_update(index, storage.shape)
                self.mark(storage, slots[slots >= 0])

    def add(self, index: Any) -> None:
        """Learn that a record was written: nothing to do, samplers look at the storage's versions."""

    def extend(self, index: Any) -> None:
        """Learn that records were written: nothing to do, samplers look at the storage's versions."""

    def _empty(self) -> None:
        """Begin anew."""
        self.new_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the storage, and without what is known between two calls."""
        return {
            name: value for name, value in super().__getstate__().items() if name not in ("_home", "_last")
        }

    def _home_of(self, storage: Storage | None) -> Storage | None:
        return storage if storage is not None or self._home is None else self._home()

    # State

    def snapshot(self) -> Any:
        """Return the whole state, the random generator included, as of the storage of the last call of `follow`."""
        # Each draw ahead asks for its place.
        return new_tuple(
            SamplerState, (self.random.snapshot().generator, self.ran_out, self.epoch, None, None)
        )

    def parse(self, state: Any) -> Any:
        """Return the value that a saved state stands for; `SchemaError` for anything else, nothing changes."""
        reader = StateReader(state, f"a {type(self).__name__}")
        generator = self.random.parse(state).generator
        return SamplerState(generator, reader.flag("ran_out"), reader.integer("epoch"))

    def turned(self, value: Any, by: int, rows: int) -> Any:
        """Return a parsed state for a storage whose `rows` rows have all moved: from slot s to ``(s - by) % rows``.

        Raises:
            SchemaError: it may know slots, and nothing tells which.
        """
        if isinstance(value, SamplerState) and value.running is None and value.priorities is None:
            return value
        raise SchemaError(
            f"load_state_dict: a {type(self).__name__} can't go on where records moved, since the ring had come "
            "around: build the storage with the same max_size"
        )

    def place(self) -> Any:
        """Return the place in the sequence of draws, a value that is cheap to take: `adopt` goes back to it."""
        return self.snapshot()

    def parse_place(self, state: Any) -> Any:
        """Return the place that a saved one stands for (see `parse`)."""
        return self.parse(state)

    def adopt(self, value: Any) -> None:
        """Go on from a place or a state; priorities belong to the storage of the next draw or write."""
        self.random.adopt(GeneratorState(value.generator))
        self.epoch = value.epoch
        if self.ran_out != value.ran_out:
            self.ran_out = value.ran_out


def all_rows(draw: Draw) -> torch.Tensor:
    """Return a mark for each row of a draw, ``(n,)`` bool, all set."""
    return torch.ones(draw.slots.shape, dtype=torch.bool, device="cpu")


def _nothing_stored() -> EmptyBufferError:
    return EmptyBufferError("can't sample: the storage is empty; extend it first")


def _stamped(draw: Draw, storage: Storage) -> Draw:
    # Half of what `_replace` costs.
    return Draw(draw.slots, draw.extras, storage.generation(draw.slots), *draw[3:])


def coordinates(slots: torch.Tensor, storage: Storage) -> Any:
    """Return slots as users see them: themselves, or with ``ndim > 1`` one tensor per dimension."""
    if storage.ndim == 1:
        return slots
    return torch.unravel_index(slots, (storage.capacity_steps, *storage.batch_shape))
