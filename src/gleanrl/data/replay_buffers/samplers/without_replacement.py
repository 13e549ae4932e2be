"""Samplers that draw every stored unit once per epoch, in random order or in storage order."""

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
    """A running epoch: its items, and the position in them. Its tensors are never written again."""

    content: int | None
    """Content of the storage that it covers (see `Version`). None after a load: the first content with enough rows."""
    rows: int
    """Number of rows stored when it began."""
    size: int
    """Number of its items."""
    position: int
    """Number of items that were drawn or left out so far."""
    items: torch.Tensor | None
    """The slot of each unit, ``(size,)`` int64, in the order of the epoch; None for 0 to ``size - 1``."""
    generations: torch.Tensor | None
    """The items' generations when it began, only for units that are lost with their record (`by_generation`)."""

    def at(self, position: int) -> Epoch:
        """Return the same epoch at another position."""
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
        unit: kind of unit to draw.
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
        """End the epoch if the storage has another content; a loaded epoch adopts a content with enough rows."""
        self.unit.follow(storage)
        epoch = self.running
        if epoch.content is None:
            if epoch.size and epoch.rows <= len(storage):
                self.running = epoch._replace(content=storage.version.content)
        elif epoch.content != storage.version.content:
            self.new_epoch()

    def new_epoch(self) -> None:
        """Drop the rest of the epoch; the next draw begins a new one."""
        super().new_epoch()
        self.running = _NONE

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        epoch, start = self.running, self.running.position
        stop = start + batch_size
        if (
            stop < epoch.size
            and epoch.content == storage.version.content
            and not (self.unit.by_generation or self.unit.serves_more or storage.has_mask)
        ):  # nearly every draw: no item can be lost, and the epoch continues after this batch
            self.running = epoch.at(stop)
            self.ran_out = self.drop_last and epoch.size - stop < batch_size
            return Draw(_items_of(epoch, start, stop))
        count, length = self.unit.sizes(batch_size)
        self._meet(storage)
        fewest = count if self.drop_last else 1
        items, generations, position = self._next(storage, count, length)
        if len(items) < fewest:
            # The draw may still fail: then the running epoch has to continue, and no random number is used up.
            self.random.begin()
            before = self.snapshot()
            self._begin(storage, length)
            items, generations, position = self._next(storage, count, length)
            if len(items) < fewest:
                self.adopt(before)
                raise InvalidArgumentError(
                    f"batch_size={batch_size} with drop_last=True asks for {count} {self.unit.name(length)}, but only "
                    f"{len(items)} {self.unit.name(length)} are stored: no batch is left; use a "
                    "smaller batch_size, or drop_last=False"
                )
        self.running = self.running.at(position)
        self.ran_out = not self._has(storage, fewest, length)
        return self._served(storage, items, generations, batch_size, length)

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        """Serve the units that are still stored, and replace the others by the next units of the same epoch.

        If none is left, or too few with `drop_last`, the next batch is served instead, possibly of another epoch.
        """
        self._meet(storage)
        batch_size = draw.slots.shape[0] if draw.asked is None else draw.asked
        count, length = self.unit.sizes(batch_size)
        items, generations = (draw.slots, None) if draw.origin is None else (draw.origin[0], draw.origin[1])
        alive = self.unit.living(storage, items, generations, length)
        if alive is not None:
            items, generations = items[alive], None if generations is None else generations[alive]
        if len(items) < count and draw.epoch == self.epoch and draw.asked is not None:
            more, more_generations, position = self._next(storage, count - len(items), length)
            self.running = self.running.at(position)
            items = torch.cat([items, more])
            generations = (
                None
                if generations is None or more_generations is None
                else torch.cat([generations, more_generations])
            )
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
        if generations is None:  # the units outlive their records, so a redraw needs no generations
            return drawn
        return drawn._replace(origin=torch.stack([items, generations]), epoch=self.epoch)

    def _meet(self, storage: Storage) -> None:
        """Keep a loaded epoch that fits the storage; drop one that doesn't, and an epoch of another content."""
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
        """Return the next living items (at most `count`), their generations, and the position after them."""
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
        chunks = [generations for _, generations in found if generations is not None]
        return (
            torch.cat([items for items, _ in found]),
            torch.cat(chunks) if chunks else None,
            position,
        )

    def _has(self, storage: Storage, count: int, length: int) -> bool:
        """Return whether at least `count` items of the epoch are left."""
        left = self.running.size - self.running.position
        if left < count or not (self.unit.by_generation or self.unit.serves_more or storage.has_mask):
            return left >= count
        return len(self._next(storage, count, length)[0]) >= count

    def snapshot(self) -> SamplerState:
        """Return the position in the sequence of draws, and in the epoch."""
        state: SamplerState = super().snapshot()
        return state._replace(running=self.running)

    def parse(self, state: Any) -> SamplerState:
        """Return the value of a saved state (see `Sampler.parse`)."""
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
            expected = "one for each item" if self.unit.by_generation else "None"
            raise reader.wrong("generations", f"{expected}, as a {type(self).__name__} saves them")
        return value._replace(running=Epoch(None, rows, size, position, items, generations))

    def turned(self, value: SamplerState, by: int, rows: int) -> SamplerState:
        """Return the value with the units of its epoch at their new slots."""
        epoch = value.running
        items = torch.arange(epoch.size, device="cpu") if epoch.items is None else epoch.items
        rest: SamplerState = super().turned(value._replace(running=None), by, rows)
        return rest._replace(running=epoch._replace(rows=rows, items=(items - by) % rows))

    def adopt(self, value: SamplerState) -> None:
        """Continue from a position or a state; a loaded epoch covers the storage of the next draw."""
        super().adopt(value)
        self.running = value.running

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle; the copied epoch covers the storage of the copy's next draw."""
        return {**super().__getstate__(), "running": self.running._replace(content=None)}


class SamplerWithoutReplacement(EpochSampler):
    """Draws each slot exactly once per epoch.

    An epoch covers the slots that were filled when it began. Slots that are filled during an epoch join the next one. A
    slot that is overwritten during an epoch is still served once, with its new record. It is left out if the new record
    is masked out. The last batch of an epoch is short if fewer slots are left (with `drop_last` it is left out). It
    sets `ran_out`, and the following draw begins a new epoch.

    ``for batch in buffer`` is one whole epoch. It begins a new epoch, also after an earlier loop was left by ``break``.
    `sample` continues the running epoch, also in a restored buffer.

    An epoch belongs to one content of one storage. The next draw begins a new epoch after the storage was emptied or
    loaded, and after the sampler moved to another storage. A loaded state continues with the storage of the next draw,
    if that holds at least as many rows as the epoch.

    Memory: 8 bytes for each row of the epoch if shuffled, none otherwise.

    Args:
        drop_last: whether a rest smaller than a batch is left out.
        shuffle: whether the order is random; otherwise slots come in storage order.
        seed: see `Sampler`.

    Raises:
        InvalidTypeError: `drop_last` or `shuffle` is neither True nor False.
        InvalidArgumentError: at a draw with `drop_last`, fewer slots are stored than a batch has. The running epoch
            continues.
        EmptyBufferError: at a draw, every stored record is masked out.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(Transitions(), drop_last, shuffle, seed)


def _items_of(epoch: Epoch, start: int, stop: int) -> torch.Tensor:
    """Return items ``[start, stop)`` of an epoch in fresh memory."""
    if epoch.items is None:
        return torch.arange(start, stop, device="cpu")
    return epoch.items[start:stop].clone()


def _are_items(items: torch.Tensor, size: int, rows: int) -> bool:
    """Return whether `items` are `size` different slots of ``[0, rows)``."""
    if items.shape != (size,) or not size:
        return items.shape == (size,)
    return bool(items.min() >= 0 and items.max() < rows) and items.unique().shape[0] == size
