"""Epochs: every stored transition once, in random order or in order."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.replay_buffers.samplers.base import Sampler, check_any_step
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import InvalidArgumentError, SchemaError
from gleanrl.records import Draw


class SamplerWithoutReplacement(Sampler):
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
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(seed)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._rows = 0  # rows stored when it began
        self._size = 0  # slots of the running epoch; 0 before it began
        self._position = 0  # how many of them were drawn or left out
        self._order: torch.Tensor | None = None  # (size,) int64, None if not shuffled
        self._content: int | None = None  # what the epoch covers; None if a state was loaded since

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        self.follow(storage)
        if self._content is None:
            if self._rows > len(storage):
                self.new_epoch()
            self._content = storage.version.content
        if storage.has_mask:
            self._leave_out_masked(storage)
        left = self._size - self._position
        if left < (batch_size if self.drop_last else 1):
            self._begin(storage, batch_size)
            left = self._size
        start = self._position
        stop = start + min(batch_size, left)
        index = (
            torch.arange(start, stop, device="cpu")
            if self._order is None
            else self._order[start:stop].clone()
        )
        self._position = stop
        self.ran_out = self._size - stop < (batch_size if self.drop_last else 1)
        return Draw(index)

    def follow(self, storage: Storage) -> None:
        """End the epoch of another content."""
        if self._content not in (None, storage.version.content):
            self.new_epoch()

    def _begin(self, storage: Storage, batch_size: int) -> None:
        slots = _unmasked(storage)
        size = len(storage) if slots is None else slots.shape[0]
        if self.drop_last and size < batch_size:
            raise InvalidArgumentError(
                f"batch_size={batch_size} with drop_last=True, but only {size} transitions are stored: "
                "no batch is left"
            )
        self._order = self._random.permutation(size) if self.shuffle else None
        if slots is not None:
            self._order = slots if self._order is None else slots[self._order]
        self._rows, self._size = len(storage), size
        self.epoch += 1
        self._position = 0

    def _leave_out_masked(self, storage: Storage) -> None:
        """Take what is no step any more out of what is left of the epoch."""
        due = torch.arange(self._size, device="cpu") if self._order is None else self._order
        masked = storage.masked(due[self._position :])
        if masked is not None and masked.any():
            self._order = torch.cat([due[: self._position], due[self._position :][~masked]])
            self._size = self._order.shape[0]

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        # Each slot is due once in the epoch, whatever it holds by now, as long as that is a step.
        masked = storage.masked(draw.slots)
        if masked is None or not masked.any():
            return Draw(draw.slots)
        if masked.all():
            return self._draw(storage, draw.slots.shape[0])
        return Draw(draw.slots[~masked])

    def mark(self) -> tuple[Any, ...]:
        """Return the present place in the sequence of draws, for `rewind`."""
        return super().mark(), self._rows, self._size, self._position, self._order, self._content

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to a place that `mark` returned, as if nothing had been drawn since."""
        base, self._rows, self._size, self._position, self._order, self._content = mark
        super().rewind(base)

    def new_epoch(self) -> None:
        """Drop what is left of the epoch; the next draw begins a new one."""
        super().new_epoch()
        self._rows = self._size = self._position = 0
        self._order = None
        self._content = None

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's order and position, and the random generator."""
        order = None if self._order is None else self._order.clone()
        return {
            **super().state_dict(),
            "rows": self._rows,
            "size": self._size,
            "position": self._position,
            "order": order,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in a saved epoch."""
        try:
            rows, size, position, order = (state_dict[key] for key in ("rows", "size", "position", "order"))
            order = None if order is None else order.to("cpu", torch.int64, copy=True)
            sound = 0 <= position <= size <= rows and (order is None or _is_order(order, size, rows))
        except (KeyError, TypeError, AttributeError) as cause:
            raise SchemaError(
                "load_state_dict: expected what SamplerWithoutReplacement.state_dict() returned"
            ) from cause
        if not sound:
            raise SchemaError(f"load_state_dict: position {position} and order don't fit an epoch of {size}")
        super().load_state_dict(state_dict)
        self._rows, self._size, self._position, self._order = rows, size, position, order
        self._content = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the epoch as one of the storage of the copy's next draw."""
        return {**super().__getstate__(), "_content": None}

    def check_valid(self) -> None:
        """Raise AssertionError unless the order holds each slot once; for tests."""
        assert 0 <= self._position <= self._size
        assert self._order is None or _is_order(self._order, self._size, self._rows)


def _unmasked(storage: Storage) -> torch.Tensor | None:
    """Return the slots that hold steps, or None if all do."""
    if not storage.has_mask:
        return None
    slots = torch.arange(len(storage), device="cpu")
    masked = storage.masked(slots)
    assert masked is not None
    check_any_step(storage)
    return slots[~masked] if masked.any() else None


def _is_order(order: torch.Tensor, size: int, rows: int) -> bool:
    """Return whether `order` holds `size` different slots of ``[0, rows)``."""
    if order.shape != (size,) or not size:
        return order.shape == (size,)
    return bool(order.min() >= 0 and order.max() < rows) and order.unique().shape[0] == size
