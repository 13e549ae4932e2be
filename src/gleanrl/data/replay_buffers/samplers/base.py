"""What a sampler is: it draws slots and never reads records."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gleanrl.data.replay_buffers.ownership import Part
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import EmptyBufferError, InvalidArgumentError
from gleanrl.records import Draw
from gleanrl.seeding import OwnedGenerator
from gleanrl.tree import NestedKey, Path

MOST_TRIES = 20  # draws of masked rows in a row, before a look whether there are others


class Sampler(Part, ABC):
    """Draws slots of a storage with a random generator of its own.

    The buffer calls every method under its lock. A sampler belongs to one buffer (see `Part`); only slots of
    the stored part of the storage that `draw` is given are ever drawn, whatever was drawn from before.

    Args:
        seed: where the sampler's random sequence starts; None takes a seed from torch's global generator at
            the first draw.
    """

    takes_priorities = False
    """Whether `update_priority` does something; it checks its slots then."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = OwnedGenerator(seed)
        self.ran_out = False
        """Whether the last draw ended an epoch; always False for samplers without epochs."""
        self.epoch = 0
        """Epochs begun so far; stays 0 for samplers without epochs."""

    def new_epoch(self) -> None:
        """Begin a new epoch with the next draw; samplers without epochs go on."""
        self.ran_out = False

    def set_seed(self, seed: int) -> None:
        """Start the random sequence of `seed`."""
        self._random.seed(seed)

    def check_storage(self, storage: Storage) -> None:
        """Raise if the sampler can't draw from `storage`; a buffer asks before it takes either."""

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
            raise EmptyBufferError("can't sample: the storage is empty; extend it first")
        return _stamped(self._draw(storage, batch_size), storage, generations)

    @abstractmethod
    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        """Return slots and what else comes with each; the storage isn't empty."""

    def redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor, generations: bool = False) -> Draw:
        """Return `draw` with other slots where `stale` (bool, ``(n,)``): those were overwritten meanwhile."""
        return _stamped(self._redraw(storage, draw, stale), storage, generations)

    @abstractmethod
    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Return other slots for the stale rows, or for all; generations don't matter here."""

    def on_serve(self, storage: Storage, draw: Draw) -> None:
        """Learn that a batch is about to be handed out, in the order of the batches."""

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return what else is delivered with each row; `records` are the rows as they were fetched."""
        return draw.extras

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns that `annotate` looks at."""
        return ()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return an index and what comes with it, for callers without a buffer.

        Returns:
            The index, ``(n,)`` int64, or a tuple of ``ndim`` such tensors; the extras and ``"generation"``.
        """
        if batch_size < 1:
            raise InvalidArgumentError(f"batch_size: expected 1 or more, got {batch_size}")
        drawn = self.draw(storage, batch_size, generations=True)
        self.on_serve(storage, drawn)
        return coordinates(drawn.slots, storage), {**drawn.extras, "generation": drawn.generation}

    def mark(self) -> tuple[Any, ...]:
        """Return the present place in the sequence of draws, for `rewind`."""
        return self._random.state_dict(), self.ran_out

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to a place that `mark` returned, as if nothing had been drawn since."""
        generator, self.ran_out = mark
        self._random.load_state_dict(generator)

    def follow(self, storage: Storage) -> None:
        """Learn that `storage` changed, whatever happened; called after every change, and at every use at the latest.

        A sampler that derives something from what is stored brings that in step here (see `Follower`), and again
        in its other methods: this one needn't have been called.
        """

    def update_priority(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Take new priorities; a sampler without priorities warns and goes on.

        Args:
            storage: what the slots are of.
            slots: ``(n,)`` int64 in the stored part, or -1 for "skip".
            priority: one number or one for each slot.
            generation: the slots' generations when they were drawn, or None.
        """
        warnings.warn(
            f"update_priority: a {type(self).__name__} has no priorities, the update is ignored", stacklevel=3
        )

    def mark_update(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new records; nothing to do without priorities."""

    @property
    def default_priority(self) -> float:
        """The priority of new records; 1 for samplers without priorities."""
        return 1.0

    @property
    def priorities_dropped(self) -> int:
        """Priority updates that came too late; 0 for samplers without priorities."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, the random generator included."""
        return {**self._random.state_dict(), "ran_out": self.ran_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._random.load_state_dict(state_dict)
        self.ran_out = bool(state_dict["ran_out"])


def _stamped(draw: Draw, storage: Storage, generations: bool) -> Draw:
    if generations and draw.generation is None:
        return draw._replace(generation=storage.generation(draw.slots))
    return draw


def check_any_step(storage: Storage) -> None:
    """Raise `EmptyBufferError` if every stored row is masked out."""
    masked = storage.masked(torch.arange(len(storage), device="cpu"))
    if masked is not None and masked.all():
        raise EmptyBufferError("can't sample: every stored row is masked out, none is a step")


def redrawn_masked(
    storage: Storage, slots: torch.Tensor, draw: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """Return `slots` with those that hold no steps replaced by what `draw` gives, so many at a time."""
    if not storage.has_mask:
        return slots
    tries = 0
    while (masked := storage.masked(slots)) is not None and masked.any():
        if tries == MOST_TRIES:
            check_any_step(storage)
        slots = slots.masked_scatter(masked, draw(int(masked.sum())))
        tries += 1
    return slots


def coordinates(slots: torch.Tensor, storage: Storage) -> Any:
    """Return slots as users see them: themselves, or with ``ndim > 1`` one tensor per dimension."""
    if storage.ndim == 1:
        return slots
    return torch.unravel_index(slots, (storage.capacity_steps, *storage.batch_shape))
