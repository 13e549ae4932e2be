"""The priorities of a storage's rows, kept in step with it."""

from __future__ import annotations

from typing import Any

import torch
from numpy import empty, float32, int64
from torch import from_numpy

from gleanrl.arguments import positive
from gleanrl.data.replay_buffers.samplers.priority_values import as_ours, check_priorities, number, per_slot
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import ranges_of
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.native import Priorities
from gleanrl.records import Placement

_NORMALISATIONS = ("buffer", "batch")
# The bits of a saved mark: whether the row was drawn, and the low end of its generation at that time.
_DRAWN, _GENERATION = 1 << 30, (1 << 29) - 1


class PriorityTable:
    """Raw priorities with the rule that turns them into probabilities and weights.

    A row is drawn with a probability in proportion to ``(priority + eps) ** alpha``; its importance weight is
    ``probability ** -beta``, divided by the largest weight that a stored row would have (``"buffer"``) or that
    a row of the batch has (``"batch"``). New rows get the largest priority that was ever given, or with
    `within_buffer` the largest one stored (1 if that is 0, or nothing is); 1 before the first.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        max_capacity: rows there is room for, at least; a storage that rounded its size up gets as many as it
            has.
        alpha: 0 draws uniformly, 1 in proportion; 0 or more, may be set at any time.
        beta: 0 makes all weights 1, 1 corrects the draw in full; 0 or more, may be set at any time.
        eps: what is added to every priority; 0 or more.
        dtype: what priorities are kept in, float32 or float64.
        within_buffer: see above.
        normalize: ``"buffer"`` or ``"batch"``.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float,
        dtype: torch.dtype,
        within_buffer: bool,
        normalize: str,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(f"dtype: priorities are kept in float32 or float64, got {dtype}")
        if normalize not in _NORMALISATIONS:
            raise InvalidArgumentError(f"normalize: expected one of {_NORMALISATIONS}, got {normalize!r}")
        self.max_capacity = positive("max_capacity", max_capacity)
        self.dtype = dtype
        self.within_buffer = bool(within_buffer)
        self.by_batch = normalize == "batch"
        self.dropped = 0
        self._alpha = number("alpha", alpha)
        self._beta = number("beta", beta)
        self._eps = number("eps", eps)
        self._native: Priorities | None = None
        self._saved: dict[str, Any] | None = None
        self._content: object | None = None
        self._changes = -1

    # The rule

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._set_rule(number("alpha", value), self._eps)

    @property
    def beta(self) -> float:
        """The exponent of importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = number("beta", value)

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self._eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._set_rule(self._alpha, number("eps", value))

    def _set_rule(self, alpha: float, eps: float) -> None:
        if self._native is not None:
            with as_ours():
                self._native.set_rule(alpha, eps)
        self._alpha, self._eps = alpha, eps

    @property
    def default(self) -> float:
        """The priority of new rows."""
        if self._native is None:
            return 1.0
        largest = self._native.default_priority(self.within_buffer)
        # Rows that are about to get it stand there with 0: alone they tell nothing.
        return largest or 1.0 if self.within_buffer else largest

    # Rows that come and go

    def on_write(self, storage: Storage, placement: Placement) -> None:
        """Give the rows of a ring write the priority of new ones."""
        native, per_step = self._native, storage.rows_per_step
        if (
            native is None
            or self._content is not storage.content
            or self._changes != storage.changes - 1
            # The first write rounded the storage's size up:
            or native.capacity < placement.capacity * per_step
        ):
            self.sync(storage)
            return
        self._enter(storage, placement.start * per_step, placement.num_steps * per_step)
        self._changes = storage.changes

    def on_update(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give replaced rows the priority of new ones."""
        if self._changes == storage.changes - 1:
            self._changes = storage.changes
        self.sync(storage)
        for start, count in ranges_of(slots):
            self._enter(storage, start, count)

    def reset(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new rows."""
        self.sync(storage)
        for start, count in ranges_of(slots):
            self._fill(storage, start, count)

    def on_column(self, storage: Storage) -> None:
        """Learn that rows changed that stay what they are; which of them are steps may be another matter."""
        if self._changes == storage.changes - 1:
            self._changes = storage.changes
        self.sync(storage)
        if storage.has_mask:
            self._mask_out(storage, 0, len(storage))

    def on_load(self, storage: Storage, generations: torch.Tensor | None) -> None:
        """Take the loaded rows as those of `storage`, whose generations were these when they were saved."""
        saved = self._saved
        if saved is not None and generations is not None and saved["mark"].shape == generations.shape:
            saved["mark"] = _translated(saved["mark"], generations, storage)
        self.sync(storage)

    def clear(self) -> None:
        """Forget every row."""
        if self._native is not None:
            self._native.clear()
        self._content = self._saved = None

    def sync(self, storage: Storage) -> Priorities:
        """Return the native table of what `storage` holds; rows written behind its back are new ones."""
        native = self._native
        if native is not None and self._content is storage.content:
            if self._changes == storage.changes:
                return native
            if native.capacity >= storage.max_size:
                self._catch_up(native, storage)
                return native
        if native is None or native.capacity < storage.max_size:
            native = self._native = self._make(storage)
        saved, self._saved = self._saved, None
        if saved is None or saved["raw"].shape[0] != len(storage):
            native.clear()
            self._content, self._changes = storage.content, storage.changes
            if len(storage):
                self._enter(storage, 0, len(storage))
        else:
            native.load(saved["raw"].data_ptr(), saved["mark"].data_ptr(), len(storage))
            native.max_seen = saved["max_seen"]
            self._content, self._changes = storage.content, storage.changes
        return native

    def check_room(self, storage: Storage) -> None:
        """Raise `InvalidArgumentError` if `storage` has more than `max_capacity` rows."""
        # A storage rounds its size up to whole time steps; anything else is a mistake.
        if storage.max_size - max(storage.rows_per_step, 1) >= self.max_capacity:
            raise InvalidArgumentError(
                f"max_capacity={self.max_capacity} is less than the {storage.max_size} rows of the storage"
            )

    def _make(self, storage: Storage) -> Priorities:
        self.check_room(storage)
        native = Priorities(max(storage.max_size, self.max_capacity), self.dtype == torch.float32)
        with as_ours():
            native.set_rule(self._alpha, self._eps)
        return native

    def _catch_up(self, native: Priorities, storage: Storage) -> None:
        stored = len(storage)
        for start, count in storage.changed_since(self._changes) or [(0, stored)]:
            count = min(count, storage.max_size)
            inside = min(count, stored - start) if start < stored else 0
            if inside > 0:
                self._enter(storage, start, inside)
            if start + count > storage.max_size:
                self._enter(storage, 0, min(start + count - storage.max_size, stored))
        self._changes = storage.changes

    def _enter(self, storage: Storage, start: int, count: int) -> None:
        """Take in `count` new rows from `start` on, around the end; those that are no steps are never drawn."""
        self._fill(storage, start, count)
        if storage.has_mask:
            self._mask_out(storage, start, count)

    def _mask_out(self, storage: Storage, start: int, count: int) -> None:
        slots = torch.arange(start, start + count, device="cpu") % storage.max_size
        masked = storage.masked(slots)
        assert masked is not None and self._native is not None
        self._native.block(slots.data_ptr(), count, masked.data_ptr())

    def _fill(self, storage: Storage, start: int, count: int) -> None:
        """Give `count` rows from `start` on, around the end, the priority of new rows."""
        native = self._native
        assert native is not None
        if native.capacity == storage.max_size:
            spans = [(start, count)]
        else:
            head = min(count, storage.max_size - start)
            spans = [(start, head), (0, count - head)]
        if self.within_buffer:
            for first, rows in spans:
                native.fill(first, rows, 0.0)  # what is overwritten doesn't count any more
        default = self.default
        for first, rows in spans:
            native.fill(first, rows, default)

    # Draws and updates

    def draw(
        self, storage: Storage, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw rows in proportion.

        Args:
            storage: what to draw from.
            uniforms: ``(n,)`` float64 in [0, 1).

        Returns:
            Slots ``(n,)`` int64, importance weights ``(n,)`` of `dtype`, generations ``(n,)`` int64.

        Raises:
            EmptyBufferError: every stored row has probability 0.
        """
        native = self.sync(storage)
        count = uniforms.shape[0]
        # In NumPy because that is cheaper than in torch.
        slots = from_numpy(empty(count, int64))
        weight = from_numpy(empty(count, float32))
        generation = from_numpy(empty(count, int64))
        if not native.total > 0.0:
            raise EmptyBufferError(
                "can't sample: all stored priorities are 0, and eps is; give some row a priority above 0"
            )
        native.draw(
            uniforms.data_ptr(),
            count,
            self._beta,
            self.by_batch,
            storage.counters_at,
            slots.data_ptr(),
            weight.data_ptr(),
            generation.data_ptr(),
        )
        return slots, weight if self.dtype == torch.float32 else weight.to(self.dtype), generation

    def remember(self, storage: Storage, slots: torch.Tensor, generation: torch.Tensor) -> None:
        """Take `slots`, ``(n,)`` int64, as drawn last when they had these generations, ``(n,)`` int64."""
        self.sync(storage).remember(slots.data_ptr(), slots.shape[0], generation.data_ptr())

    def block(self, storage: Storage, slots: torch.Tensor, blocked: torch.Tensor) -> None:
        """Never draw those of `slots`, ``(n,)`` int64, that are `blocked`, ``(n,)`` bool; draw the others again."""
        self.sync(storage).block(slots.data_ptr(), slots.shape[0], blocked.data_ptr())

    def check(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless rows can have the priorities ``(n,)``."""
        check_priorities(values, self._alpha, self._eps, self.dtype)

    def update(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Take priorities ``(n,)`` of slots ``(n,)`` (-1 for "skip") and drop those that come too late."""
        native = self.sync(storage)
        count = slots.shape[0]
        values = per_slot("priority", priority, count, torch.float64)
        expected = None if generation is None else per_slot("generation", generation, count, torch.int64)
        try:
            self.dropped += self._apply(native, storage, slots, values, expected)
        except IndexRangeError:
            # Records that were forgotten since their draw: too late as well, if they can have been drawn at all.
            gone = (slots >= len(storage)) & (slots < storage.max_size)
            if expected is None or not gone.any():
                raise
            self.dropped += self._apply(native, storage, torch.where(gone, -1, slots), values, expected)
            self.dropped += int(gone.sum())

    def _apply(
        self, native: Priorities, storage: Storage, slots: torch.Tensor, values: torch.Tensor, expected: Any
    ) -> int:
        """Update, all or nothing; return how many came too late."""
        with as_ours():
            return native.update(
                slots.data_ptr(),
                values.data_ptr(),
                slots.shape[0],
                len(storage),
                storage.counters_at,
                0 if expected is None else expected.data_ptr(),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return rule and rows as copies."""
        state: dict[str, Any] = {
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "dropped": self.dropped,
        }
        native = self._native
        if self._saved is not None:
            return state | {name: _copy(value) for name, value in self._saved.items()}
        rows = 0 if native is None else native.end
        raw = torch.empty(rows, dtype=torch.float64, device="cpu")
        mark = torch.empty(rows, dtype=torch.int32, device="cpu")
        if native is not None:
            native.save(raw.data_ptr(), mark.data_ptr())
        return {**state, "raw": raw, "mark": mark, "max_seen": None if native is None else native.max_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a saved state: the rule at once, the rows with the storage of the next draw or write.

        Raises:
            SchemaError: not such a state; nothing changed.
        """
        try:
            rule = tuple(number(name, state_dict[name]) for name in ("alpha", "beta", "eps"))
            raw = state_dict["raw"].to("cpu", torch.float64, copy=True).contiguous()
            mark = state_dict["mark"].to("cpu", torch.int32, copy=True).contiguous()
            dropped, seen = int(state_dict["dropped"]), state_dict["max_seen"]
            sound = raw.ndim == mark.ndim == 1 and raw.shape == mark.shape and bool((raw >= 0).all())
            sound = sound and bool(raw.isfinite().all()) and (seen is None or number("max_seen", seen) >= 0.0)
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise SchemaError(
                "load_state_dict: expected what a prioritized sampler's state_dict() returned"
            ) from cause
        if not sound:
            raise SchemaError("load_state_dict: the saved priorities are no finite numbers of 0 or more")
        self._set_rule(rule[0], rule[2])
        self._beta = rule[1]
        self.dropped = dropped
        self._saved = {"raw": raw, "mark": mark, "max_seen": seen}
        self._content = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rows as plain tensors."""
        state = self.state_dict()
        rows = {name: state[name] for name in ("raw", "mark", "max_seen")}
        return {**self.__dict__, "_native": None, "_saved": rows, "_content": None}

    def check_valid(self) -> None:
        """Raise if the native table contradicts itself; for tests."""
        if self._native is not None:
            self._native.check_valid()


def _translated(mark: torch.Tensor, before: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the marks of rows whose generations were `before`, ``(n,)`` each, with those of `storage`."""
    now = storage.generation(torch.arange(mark.shape[0], device="cpu"))
    wide = mark.long()
    timely = (wide ^ before) & _GENERATION == 0
    moved = wide & ~_GENERATION | torch.where(timely, now, now - 1) & _GENERATION
    return torch.where(wide & _DRAWN != 0, moved, wide).int()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
