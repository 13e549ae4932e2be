"""The interface of samplers: a sampler draws slots and never reads records."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._state.rng import GeneratorState, OwnedGenerator, RandomSource, UserGenerator, Words
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

# The most redraws of slices in which a trajectory ends by now. There is a limit because a thread that keeps writing
# through live views would otherwise keep `sample` in its loop for ever.
_MOST_REDRAWS = 2


class SamplerState(NamedTuple):
    """A sampler's position in its sequence of draws, and its priorities."""

    generator: Words | None
    """See `GeneratorState`."""
    ran_out: bool
    """See `Sampler.ran_out`."""
    epoch: int
    """See `Sampler.epoch`."""
    running: Any = None
    """State that spans several draws: the running epoch or the records left, for example."""
    priorities: Any = None
    """Rule and rows of samplers with priorities; None leaves the present ones unchanged."""


class Sampler(Part, Stateful[Any]):
    """Draws slots of a storage with its own random generator.

    The buffer calls every method under its lock. A sampler belongs to one buffer (see `Part`). A draw holds only slots
    of the stored part of the given storage, even if earlier draws were from another storage.

    A user's class overrides `sample`. It also overrides `follow` if it derives data from the stored records. A class
    written for another release may define `add`, `extend`, `update_priority`, `mark_update`, `_empty` and `state_dict`
    instead (see `SamplerAdapter`, and the page on samplers).

    Args:
        seed: seed of the sampler's random sequence. None takes a seed from torch's global generator at the first draw.

    Raises:
        UnsupportedError: the class doesn't override `sample`.
    """

    takes_priorities = False
    """Whether `prioritize` has an effect. If True, `prioritize` checks its slots itself."""
    uses_up: ClassVar[bool] = False
    """Whether a drawn record isn't drawn again, at least within the same epoch."""
    cuts = False
    """Whether draws depend on where trajectories end. If False, `is_unbroken` is never called."""
    episode_table: Any = None
    """The `EpisodeTable` of a sampler that draws slices; None for other samplers."""
    draws_ahead = True
    """Whether draws can be taken back (see `place`), so that the buffer may draw batches ahead."""
    reduction = "max"
    """How several priorities of one record are reduced to one."""
    ran_out = False
    """Whether the last draw ended an epoch; always False for samplers without epochs."""
    epoch = 0
    """Epochs begun so far; stays 0 for samplers without epochs."""
    _by_sample = False  # whether a user's class overrides `sample`
    _last: Draw | None = None  # the last draw of `sample`, for a user's class that calls it by super()
    # A user's generator, under the name that samplers of other releases read.
    _rng: torch.Generator | None = None
    _home: weakref.ref[Storage] | None = None  # the storage that indices refer to if the caller names none
    _early: tuple[tuple[Any, Any], ...] = ()  # priorities that were set before any storage was known

    def __init_subclass__(cls, **options: Any) -> None:
        """Note whether the class overrides `sample`."""
        super().__init_subclass__(**options)
        cls._by_sample = bool(overridden(cls, "sample", of=Sampler))

    def __init__(self, seed: int | None = None) -> None:
        if not self._by_sample and not overridden(self, "_draw", of=Sampler):
            raise UnsupportedError(f"class {type(self).__name__}: a sampler has to override sample()")
        self.random: RandomSource = OwnedGenerator(seed)
        """The generator to draw with; part of the state."""

    def new_epoch(self) -> None:
        """Begin a new epoch with the next draw, and reset `ran_out`. Without epochs, this has no effect."""
        if self.ran_out:  # a user's class may define `ran_out` as a property without a setter
            self.ran_out = False

    def set_seed(self, seed: int) -> None:
        """Restart the random sequence from `seed`. A generator given to `set_rng` is seeded, too."""
        self.random.seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator from now on (see `UserGenerator`); None creates a private, unseeded one."""
        self.random = OwnedGenerator() if generator is None else UserGenerator(generator)
        self._rng = generator

    @property
    def room(self) -> int | None:
        """The most rows that a storage may have; None for any number."""
        return None

    def check_storage(self, storage: Storage) -> None:
        """Raise if the sampler can't draw from `storage`; a buffer calls this before it takes either of them."""

    def available(self, storage: Storage) -> int:
        """Return how many of the stored records can be drawn; ``len(buffer)`` returns this number."""
        return len(storage)

    @property
    def follows(self) -> bool:
        """Whether `follow` has an effect. A buffer reads this when it takes the sampler, not at every write."""
        return bool(overridden(self, "follow", of=Sampler))

    @property
    def weighs(self) -> bool:
        """Whether draws may include importance weights; batches then carry generations, too. Read like `follows`."""
        return True

    def follow(self, storage: Storage) -> None:
        """Update data that the sampler derives from `storage`; the buffer calls this after every change.

        A call can be missed, after an interrupt for example. Therefore a sampler that derives data compares versions
        (see `Follower`) here and in each of its other methods.
        """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return an index and the entries that come with each row.

        A user's sampler overrides this method. Callers without a buffer call it directly. The call counts as a delivery
        (see `on_serve`), and makes `storage` the one that indices refer to (see `use_storage`).

        Args:
            storage: storage to draw from.
            batch_size: transitions to draw, at least 1.

        Returns:
            The index and a dictionary of entries. The index is ``(n,)`` int64, or a tuple of ``ndim`` such tensors. The
            entries are ``(n, ...)`` each: weights, or the end flags of slices, and ``"generation"``. Batches of
            TensorDict buffers and their info carry them.

        Raises:
            EmptyBufferError: nothing is stored, or the sampler can't draw any of the stored records.
            InvalidArgumentError: `batch_size` is below 1.
            SchemaError: slices stayed broken in several draws (see `mended`).
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
        """Draw slots of the stored part of `storage`. The draw doesn't count as delivered (see `on_serve`).

        Args:
            storage: storage to draw from.
            batch_size: transitions to draw, at least 1.
            generations: whether the draw includes the slots' generations.

        Raises:
            EmptyBufferError: nothing is stored, or the sampler can't draw any of the stored records.
        """
        if not storage.num_steps:
            raise _nothing_stored()
        drawn = (self._draw_by_sample if self._by_sample else self._draw)(storage, batch_size)
        if generations and drawn.generation is None:  # `_stamped` inlined: this runs for every batch
            return new_tuple(Draw, (*drawn[:2], storage.generation(drawn.slots), *drawn[3:]))
        return drawn

    def draw_served(self, storage: Storage, batch_size: int, generations: bool = False) -> Draw:
        """Draw a batch that is delivered before another one is drawn: `draw`, then `on_serve`."""
        drawn = self.draw(storage, batch_size, generations)
        self.on_serve(storage, drawn)
        return drawn

    def redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor, generations: bool = False) -> Draw:
        """Return `draw` with new slots where `stale`, ``(n,)`` bool, is set: those slots were overwritten meanwhile.

        Many samplers draw all rows again, for example all slices. A user's `sample` is called for a whole new batch.
        """
        if self._by_sample:
            return self.draw(storage, draw.slots.shape[0] if draw.asked is None else draw.asked, generations)
        drawn = self._redraw(storage, draw, stale)
        return _stamped(drawn, storage) if generations and drawn.generation is None else drawn

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends inside a drawn slice, according to the ends and ids stored now.

        The stored ends may differ from the ends at the draw, because writes through live views don't change the
        version. If a trajectory does end inside, the sampler reads the whole storage again at its next draw. Called
        only if `cuts` is True.
        """
        return True

    def mended(self, storage: Storage, draw: Draw, redraw: Callable[[Draw], Draw]) -> Draw:
        """Return a draw for which `is_unbroken` is True: `draw` itself, or one that `redraw` returned.

        Raises:
            SchemaError: two further draws weren't whole either.
        """
        for _ in range(_MOST_REDRAWS):
            if self.is_unbroken(storage, draw):
                return draw
            draw = redraw(draw)
        if self.is_unbroken(storage, draw):
            return draw
        raise SchemaError(
            f"sample: expected slices without the end of a trajectory inside, but {_MOST_REDRAWS + 1} draws in a "
            "row had one: end flags or ids are being written through live views meanwhile; write them by "
            "buffer[index] = ..., or between two calls of sample()"
        )

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        """Return slots and the entries that come with each; the storage isn't empty."""
        raise NotImplementedError

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Return a draw with other slots for the stale rows, or for all rows; generations may be left out."""
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
        # A user's class may return the rows of `super().sample()`. Only that draw knows the ends of its slices and the
        # items of its epoch, so it is kept if the rows are the same.
        if last is None or not torch.equal(last.slots, slots):
            return Draw(slots, extras, asked=batch_size)
        return last._replace(extras=extras, asked=batch_size if last.asked is None else last.asked)

    def _per_row(self, key: Any, value: Any, count: int) -> torch.Tensor:
        rows = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(rows, (bool, int, float)) or (isinstance(rows, torch.Tensor) and not rows.ndim):
            return torch.as_tensor(rows).expand(count).clone()  # one value for all rows
        if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (count,):
            raise InvalidTypeError(
                f"{type(self).__name__}.sample: expected a tensor ({count}, ...) for {key!r}, one value for each "
                f"row, or a number for all, got {value!r}"
            )
        return rows

    def on_serve(self, storage: Storage, draw: Draw) -> None:
        """Note that a batch is about to be delivered; called in order of delivery, and again for redrawn rows."""

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that are delivered with each row.

        Args:
            draw: the draw.
            records: the fetched rows, with at least the columns of `annotated_paths`; may be None if there are none.
        """
        return draw.extras

    def marks(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the entries that show transforms where slices begin and end.

        Transforms of every buffer see these entries, also where batches carry no others. By default they are the flags
        below ``"next"`` and the mask among the draw's entries.
        """
        return marks_among(draw.extras)

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` and `marks` read."""
        return ()

    def prioritize(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Set new priorities; a sampler without priorities ignores them with a warning.

        Args:
            storage: storage that the slots belong to.
            slots: ``(n,)`` int64 in the stored part; -1 skips a row.
            priority: one number, or one for each slot.
            generation: the slots' generations when they were drawn, or None.
        """
        warnings.warn(
            f"update_priority: a {type(self).__name__} has no priorities, the update is ignored", stacklevel=5
        )

    def mark(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new records; without priorities, this has no effect."""

    def check_priorities(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless `values`, ``(n,)``, are valid priorities; without priorities, never."""

    @property
    def default_priority(self) -> float:
        """The priority of new records; 1 for samplers without priorities."""
        return 1.0

    @property
    def priorities_dropped(self) -> int:
        """Number of priority updates that came too late; 0 for samplers without priorities."""
        return 0

    # For callers without a buffer, and for users' classes that override these instead of the native methods

    def use_storage(self, storage: Storage) -> None:
        """Make `storage` the one that indices refer to, and apply priorities that were set before it was known.

        After an error of one of these updates the later ones are lost.
        """
        if self._home is None or self._home() is not storage:
            self._home = weakref.ref(storage)
            early, self._early = self._early, ()
            for index, priority in early:
                self.update_priority(index, priority, storage=storage)

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """Set new priorities, for callers without a buffer; see `ReplayBuffer.update_priority`.

        Args:
            index: slots, as `sample` returned them.
            priority: one number, or one for each index.
            storage: storage that the index refers to; None for the storage of the buffer or of the last `sample`.
                Priorities that are set before any storage is known are kept for the first one.
            generation: the slots' generations when they were drawn; None for the generations at their last draw.

        Raises:
            IndexRangeError: an index is outside the stored part.
            InvalidArgumentError: a priority is out of range. No priority changed.
            InvalidTypeError: `index` isn't an index, or a priority or generation isn't a number. No priority changed.
            SchemaError: the number of priorities or generations differs from the indices. No priority changed.
        """
        storage = self._home_of(storage)
        if storage is None:
            self._early += ((index, priority),)
            return
        with self.guard():
            slots = slots_of_update(index, storage.shape, check=not self.takes_priorities)
            self.prioritize(storage, slots, priority, generation)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give the records at `index` the priority of new ones; -1 skips a row.

        Before any storage is known, this has no effect: a sampler takes all records of its first storage for new ones.
        """
        storage = self._home_of(storage)
        if storage is not None:
            with self.guard():
                slots = slots_of_update(index, storage.shape)
                self.mark(storage, slots[slots >= 0])

    def add(self, index: Any) -> None:
        """Do nothing: samplers find new records by comparing the storage's versions."""

    def extend(self, index: Any) -> None:
        """Do nothing: samplers find new records by comparing the storage's versions."""

    def _empty(self) -> None:
        """Begin a new epoch."""
        self.new_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the storage and without the last draw."""
        return {
            name: value for name, value in super().__getstate__().items() if name not in ("_home", "_last")
        }

    def _home_of(self, storage: Storage | None) -> Storage | None:
        return storage if storage is not None or self._home is None else self._home()

    def snapshot(self) -> Any:
        """Return the whole state, random generator included, as of the last storage given to `follow`."""
        # `new_tuple` rather than the constructor, which takes longer: each batch drawn ahead takes its position.
        return new_tuple(
            SamplerState, (self.random.snapshot().generator, self.ran_out, self.epoch, None, None)
        )

    def parse(self, state: Any) -> Any:
        """Return the value of a saved state and change nothing; raise `SchemaError` for any other state."""
        reader = StateReader(state, f"a {type(self).__name__}")
        generator = self.random.parse(state).generator
        return SamplerState(generator, reader.flag("ran_out"), reader.integer("epoch"))

    def turned(self, value: Any, by: int, rows: int) -> Any:
        """Return a parsed state for a storage whose `rows` rows have all moved from slot s to ``(s - by) % rows``.

        Raises:
            SchemaError: the state may refer to slots in a form that this class doesn't know.
        """
        if isinstance(value, SamplerState) and value.running is None and value.priorities is None:
            return value
        raise SchemaError(
            "load_state_dict: the state was saved with a storage of another max_size, so its records move to other "
            f"slots, and the state of a {type(self).__name__} may refer to the old ones: build the storage with the "
            "same max_size"
        )

    def draw_position(self) -> Any:
        """Return the position in the sequence of draws, a cheap value that `adopt` takes to draw there again."""
        return self.snapshot()

    def parse_draw_position(self, state: Any) -> Any:
        """Return the value of a saved position (see `parse`)."""
        return self.parse(state)

    def adopt(self, value: Any) -> None:
        """Continue from a position or a state; its priorities apply to the storage of the next draw or write."""
        self.random.adopt(GeneratorState(value.generator))
        self.epoch = value.epoch
        if self.ran_out != value.ran_out:
            self.ran_out = value.ran_out


def all_rows(draw: Draw) -> torch.Tensor:
    """Return a mask that selects each row of a draw, ``(n,)`` bool."""
    return torch.ones(draw.slots.shape, dtype=torch.bool, device="cpu")


def _nothing_stored() -> EmptyBufferError:
    return EmptyBufferError("can't sample: the storage is empty; extend it first")


def _stamped(draw: Draw, storage: Storage) -> Draw:
    # `_replace` would take twice the time.
    return Draw(draw.slots, draw.extras, storage.generation(draw.slots), *draw[3:])


def coordinates(slots: torch.Tensor, storage: Storage) -> Any:
    """Return slots in the form of an index: unchanged, or with ``ndim > 1`` one tensor for each dimension."""
    if storage.ndim == 1:
        return slots
    return torch.unravel_index(slots, (storage.capacity_steps, *storage.batch_shape))
