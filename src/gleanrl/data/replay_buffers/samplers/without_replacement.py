"""Epochs: every stored unit once, in random order or in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._state.state import StateReader
from gleanrl._util import flag
from gleanrl.data.replay_buffers.samplers.base import SamplerState
from gleanrl.data.replay_buffers.samplers.transitions import Transitions, Unit, UnitSampler
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import InvalidArgumentError


class Epoch(NamedTuple):
    """A running epoch: what it covers, and how much of it is over. Its tensors are never written again."""

    content: int | None
    """Which content it covers (see `Version`); None for the first one with enough rows: a state was loaded."""
    rows: int
    """Rows stored when it began."""
    size: int
    """Its items."""
    position: int
    """How many of them were drawn or left out."""
    items: torch.Tensor | None
    """The slot of each unit, ``(size,)`` int64, in the order of the epoch; None for 0 to ``size - 1``."""
    generations: torch.Tensor | None
    """Their generations when it began, of units that are gone with their record."""

    def at(self, position: int) -> Epoch:
        """Return the same epoch at another place."""
        content, rows, size, _, items, generations = self
        return new_tuple(Epoch, (content, rows, size, position, items, generations))

    def check_valid(self) -> None:
        """Raise AssertionError unless the items are different slots; for tests."""
        assert 0 <= self.position <= self.size
        assert self.items is None or _are_items(self.items, self.size, self.rows)


_NONE = Epoch(None, 0, 0, 0, None, None)


class EpochSampler(UnitSampler):
    """Draws each unit exactly once per epoch; see `SamplerWithoutReplacement`.

    Args:
        unit: what is drawn.
        drop_last: whether a rest smaller than a batch is left out.
        shuffle: whether the order is random.
        seed: see `Sampler`.

    Raises:
        InvalidTypeError: `drop_last` or `shuffle` is neither True nor False.
    """

    uses_up = True

    def __init__(self, unit: Unit, drop_last: bool, shuffle: bool, seed: int | None) -> None:
        super().__init__(unit, seed)
        self.drop_last = flag("drop_last", drop_last)
        self.shuffle = flag("shuffle", shuffle)
        self.running = _NONE

    def follow(self, storage: Storage) -> None:
        """End the epoch of another content; a loaded one covers this content, if that holds enough rows."""
        self.unit.follow(storage)
        epoch = self.running
        if epoch.content is None:
            if epoch.size and epoch.rows <= len(storage):
                self.running = epoch._replace(content=storage.version.content)
        elif epoch.content != storage.version.content:
            self.new_epoch()

    def new_epoch(self) -> None:
        """Drop what is left of the epoch; the next draw begins a new one."""
        super().new_epoch()
        self.running = _NONE

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        epoch, start = self.running, self.running.position
        stop = start + batch_size
        if (
            stop < epoch.size
            and epoch.content == storage.version.content
            and not (self.unit.by_generation or self.unit.serves_more or storage.has_mask)
        ):  # what nearly every draw is: nothing can be missing, and more follows
            self.running = epoch.at(stop)
            self.ran_out = self.drop_last and epoch.size - stop < batch_size
            return Draw(_items_of(epoch, start, stop))
        count, length = self.unit.sizes(batch_size)
        self._meet(storage)
        fewest = count if self.drop_last else 1
        items, generations, position = self._next(storage, count, length)
        if len(items) < fewest:
            self.random.begin()
            before = self.snapshot()
            self._begin(storage, length)
            items, generations, position = self._next(storage, count, length)
            if len(items) < fewest:
                self.adopt(before)  # the epoch goes on, with batches that it has enough for
                raise InvalidArgumentError(
                    f"batch_size={batch_size} with drop_last=True asks for {count} {self.unit.name(length)}, but only "
                    f"{len(items)} {self.unit.name(length)} are stored: no batch is left"
                )
        self.running = self.running.at(position)
        self.ran_out = not self._has(storage, fewest, length)
        return self._served(storage, items, generations, batch_size, length)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Serve those of its units that are still there, and, while its epoch runs, others instead of the rest.

        Where none is left the next batch comes instead, of another epoch perhaps.
        """
        self._meet(storage)
        batch_size = draw.slots.shape[0] if draw.asked is None else draw.asked
        count, length = self.unit.sizes(batch_size)
        items, generations = (draw.slots, None) if draw.origin is None else (draw.origin[0], draw.origin[1])
        alive = self.unit.living(storage, items, generations, length)
        if alive is not None:
            items, generations = items[alive], None if generations is None else generations[alive]
        if len(items) < count and draw.epoch == self.epoch and draw.asked is not None:
            more, theirs, position = self._next(storage, count - len(items), length)
            self.running = self.running.at(position)
            items = torch.cat([items, more])
            generations = None if generations is None or theirs is None else torch.cat([generations, theirs])
        if not len(items) or (self.drop_last and len(items) < count):
            return self._draw(storage, batch_size)
        self.ran_out = not self._has(storage, count if self.drop_last else 1, length)
        drawn = self._served(storage, items, generations, batch_size, length)
        return drawn if generations is None else drawn._replace(epoch=draw.epoch)

    def _served(
        self,
        storage: Storage,
        items: torch.Tensor,
        generations: torch.Tensor | None,
        batch_size: int,
        length: int,
    ) -> Draw:
        drawn = self.unit.serve(storage, items, batch_size, length, self.random)
        if generations is None:  # a unit that outlives its record can't be missing later
            return drawn
        return drawn._replace(origin=torch.stack([items, generations]), epoch=self.epoch)

    def _meet(self, storage: Storage) -> None:
        """Keep a loaded epoch that fits; drop one of another content."""
        content = self.running.content
        if content is None or content != storage.version.content or self.unit.by_generation:
            self.follow(storage)
        if self.running.content is None:
            self.running = _NONE._replace(content=storage.version.content)

    def _begin(self, storage: Storage, length: int) -> None:
        items = self.unit.items(storage, length)
        size = len(storage) if items is None else items.shape[0]
        if not size:
            raise self.unit.none_left(length)
        if self.shuffle:
            order = self.random.permutation(size)
            items = order if items is None else items[order]
        generations = None
        if self.unit.by_generation:
            generations = storage.generation(torch.arange(size, device="cpu") if items is None else items)
        self.running = Epoch(storage.version.content, len(storage), size, 0, items, generations)
        self.epoch += 1

    def _next(
        self, storage: Storage, count: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Return the next items that are still there, at most `count`, their generations, and the place after them."""
        epoch, position, missing = self.running, self.running.position, count
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if position == epoch.size:
            return torch.empty(0, dtype=torch.int64, device="cpu"), None, position
        while True:
            stop = min(position + missing, epoch.size)
            items = _items_of(epoch, position, stop)
            generations = None if epoch.generations is None else epoch.generations[position:stop]
            position = stop
            alive = self.unit.living(storage, items, generations, length)
            if alive is None:
                return items, generations, position
            found.append((items[alive], None if generations is None else generations[alive]))
            missing -= found[-1][0].shape[0]
            if not missing or position == epoch.size:
                break
        kept = [generations for _, generations in found if generations is not None]
        return torch.cat([items for items, _ in found]), torch.cat(kept) if kept else None, position

    def _has(self, storage: Storage, count: int, length: int) -> bool:
        """Return whether so many items are left of the epoch."""
        left = self.running.size - self.running.position
        if left < count or not (self.unit.by_generation or storage.has_mask):
            return left >= count
        return len(self._next(storage, count, length)[0]) >= count

    # State

    def snapshot(self) -> SamplerState:
        """Return the place in the sequence of draws, and in the epoch."""
        state: SamplerState = super().snapshot()
        return state._replace(running=self.running)

    def parse(self, state: Any) -> SamplerState:
        """Return the value that a saved state stands for (see `Sampler.parse`)."""
        value: SamplerState = super().parse(state)
        reader = StateReader(state, f"a {type(self).__name__}").part("running")
        rows = reader.integer("rows")
        size = reader.integer("size", 0, rows)
        position = reader.integer("position", 0, size)
        items = reader.optional("items", lambda name: reader.tensor(name, torch.int64, (size,)))
        if items is not None and not _are_items(items, size, rows):
            raise reader.wrong("items", f"different slots of [0, {rows})")
        generations = reader.optional("generations", lambda name: reader.tensor(name, torch.int64, (size,)))
        if self.unit.serves_more and not self.unit.by_generation:
            generations = None  # earlier releases saved them with goals in hindsight
        if size and (generations is not None) != self.unit.by_generation:
            raise reader.wrong("generations", "those of the units that such a sampler draws")
        return value._replace(running=Epoch(None, rows, size, position, items, generations))

    def turned(self, value: SamplerState, by: int, rows: int) -> SamplerState:
        """Return the value with its epoch's units in their new slots."""
        epoch = value.running
        items = torch.arange(epoch.size, device="cpu") if epoch.items is None else epoch.items
        rest: SamplerState = super().turned(value._replace(running=None), by, rows)
        return rest._replace(running=epoch._replace(rows=rows, items=(items - by) % rows))

    def adopt(self, value: SamplerState) -> None:
        """Go on from a place or a state; a loaded epoch is one of the storage of the next draw."""
        super().adopt(value)
        self.running = value.running

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the epoch as one of the storage of the copy's next draw."""
        return {**super().__getstate__(), "running": self.running._replace(content=None)}


class SamplerWithoutReplacement(EpochSampler):
    """Draws each slot exactly once per epoch.

    An epoch covers the slots that were filled when it began. Slots that are filled during an epoch join the
    next one; a slot that is overwritten during an epoch is still served once, with the record it holds at
    that moment (unless that is no step). The last batch of an epoch is short if the rest is (left out with
    `drop_last`) and sets `ran_out`; the following draw begins a new epoch. ``for batch in buffer`` is one whole
    epoch: it begins a new one, also after an earlier loop was left by ``break``. `sample` goes on in the
    running one, also in a restored buffer.

    An epoch belongs to one content of one storage: after the storage was emptied or loaded, and with another
    storage (because the sampler moved to another buffer, say), the next draw begins a new one. A state that
    was loaded goes on with the storage of the next draw, if that holds as many rows as the epoch has.

    Memory: 8 bytes for each row of the epoch if shuffled, none otherwise.

    Args:
        drop_last: whether a rest smaller than a batch is left out.
        shuffle: whether the order is random; otherwise slots come in storage order.
        seed: see `Sampler`.

    Raises:
        InvalidTypeError: `drop_last` or `shuffle` is neither True nor False.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(Transitions(), drop_last, shuffle, seed)


def _items_of(epoch: Epoch, start: int, stop: int) -> torch.Tensor:
    """Return some items of an epoch, in memory of their own."""
    if epoch.items is None:
        return torch.arange(start, stop, device="cpu")
    return epoch.items[start:stop].clone()


def _are_items(items: torch.Tensor, size: int, rows: int) -> bool:
    """Return whether `items` are `size` different slots of ``[0, rows)``."""
    if items.shape != (size,) or not size:
        return items.shape == (size,)
    return bool(items.min() >= 0 and items.max() < rows) and items.unique().shape[0] == size
