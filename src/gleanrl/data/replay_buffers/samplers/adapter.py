"""Adapter for samplers that follow the protocol of other releases."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.replay_buffers.adapters import Adapter, SavedAttributes, view_of
from gleanrl.data.replay_buffers.change_log import Change, Follower, slots_in
from gleanrl.data.replay_buffers.samplers.base import Sampler, coordinates
from gleanrl.data.replay_buffers.samplers.priority_table import per_slot
from gleanrl.data.replay_buffers.storages.base import Storage

_METHODS = dict.fromkeys(
    ("sample", "add", "extend", "mark_update", "update_priority", "_empty", "state_dict", "load_state_dict")
)
_NOTIFIED = {"add", "extend", "mark_update", "_empty"}
_NEEDED = ("sample", "add", "extend", "_empty", "state_dict", "load_state_dict")


def as_sampler(sampler: Any) -> Any:
    """Return a sampler in the form that buffers use (see `view_of`); return any other object unchanged."""
    return view_of(sampler, Sampler, SamplerAdapter, _METHODS, _NEEDED)


class SamplerAdapter(Adapter, Sampler):
    """Adapter that draws by a user's `sample` and reports writes by the user's `mark_update`, `add` and `extend`.

    It reports a new content by `_empty`. The adapter knows from the storage's versions which slots were written. It
    reports them in the order of time, at the latest at the next draw. Batches aren't drawn ahead, because such a
    sampler can't take a draw back.
    """

    __slots__ = ("_news",)
    _news: _News

    def opened(self) -> None:
        """Begin to follow the storage."""
        if self.foreign:
            Sampler.__init__(self)
        elif "random" not in vars(self.part):  # the user's constructor didn't call `Sampler.__init__`
            Sampler.__init__(self.part)
        object.__setattr__(self, "_news", _News(self))

    @property
    def _by_sample(self) -> bool:  # type: ignore[override]
        return "sample" in self.own

    @property
    def draws_ahead(self) -> bool:  # type: ignore[override]
        """Whether batches may be drawn ahead: only if the user's class defines no other method than `sample`."""
        return self.own <= {"sample"} and not self.foreign

    @property
    def takes_priorities(self) -> bool:  # type: ignore[override]
        """Whether `prioritize` has an effect."""
        return "update_priority" in self.own or super().takes_priorities

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return bool(self.part.ran_out)

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self.part.ran_out = value

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator; a part of another library finds it as `_rng`."""
        super().set_rng(generator)
        if self.foreign:
            vars(self.part)["_rng"] = generator

    def use_storage(self, storage: Storage) -> None:
        """Follow another storage; its present records aren't reported."""
        super().use_storage(storage)
        self._news.sync(storage)

    def follow(self, storage: Storage) -> None:
        """Report the slots that were written."""
        super().follow(storage)
        if not _NOTIFIED.isdisjoint(self.own):
            self._news.sync(storage)

    def draw(self, storage: Storage, batch_size: int, generations: bool = False) -> Any:
        """Draw slots, after all writes have been reported."""
        if not _NOTIFIED.isdisjoint(self.own):
            self._news.sync(storage)
        return super().draw(storage, batch_size, generations)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return the index and the info of the user's `sample`."""
        return self.part.sample(self._storage_for_part(storage), batch_size)

    def prioritize(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Pass priorities to the user's method; skip records that were overwritten since their draw.

        These records are known only if `generation` is given.
        """
        if "update_priority" not in self.own:
            super().prioritize(storage, slots, priority, generation)
            return
        if generation is not None:
            expected = per_slot("generation", generation, slots.shape[0], torch.int64)
            inside = (slots >= 0) & (slots < len(storage))
            same = inside & (storage.generation(torch.where(inside, slots, 0)) == expected)
            if isinstance(priority, torch.Tensor) and priority.ndim:
                priority = priority[same]
            slots = slots[same]
        self.call(
            "update_priority", coordinates(slots, storage), priority, storage=self._storage_for_part(storage)
        )

    def mark(self, storage: Storage, slots: torch.Tensor) -> None:
        """Report the records that get the priority of new ones."""
        if "mark_update" in self.own:
            self.call("mark_update", coordinates(slots, storage), storage=self._storage_for_part(storage))
        else:
            super().mark(storage, slots)

    def tell(self, storage: Storage, slots: torch.Tensor) -> None:
        """Report slots, ``(n,)`` int64, that hold new records; the oldest comes first."""
        own, index = self.own, slots
        if storage.ndim > 1:
            index = torch.stack(coordinates(slots, storage), -1)
        if "mark_update" in own:
            self.call("mark_update", index, storage=self._storage_for_part(storage))
        if "add" in own and slots.shape[0] == 1 == storage.ndim:
            self.part.add(int(index))
        elif "extend" in own:
            self.part.extend(index)

    def forget(self) -> None:
        """Report that the storage has a new content."""
        if "_empty" in self.own:
            self.call("_empty")

    def _storage_for_part(self, storage: Storage) -> Any:
        """Return the storage in the form that the part knows.

        A part of another library gets its own library's storage.
        """
        return storage.unwrapped if self.foreign else storage

    # State

    def snapshot(self) -> Any:
        """Return the state: the user's own state if its class defines one."""
        return self.saved() if "state_dict" in self.own else super().snapshot()

    def parse(self, state: Any) -> Any:
        """Return the value of a saved state."""
        return self.parsed(state) if "load_state_dict" in self.own else super().parse(state)

    def adopt(self, value: Any) -> None:
        """Continue from a value; the records stored then aren't reported."""
        if isinstance(value, SavedAttributes):
            self.restore(value)
        else:
            super().adopt(value)
        self._news.silent = True


class _News(Follower[Storage]):
    """Reports the slots that were written since the last call to a sampler."""

    def __init__(self, sampler: SamplerAdapter) -> None:
        self._sampler = sampler
        self.silent = True  # whether to skip the next content: the sampler's state covers it already

    def _look_at_all(self, storage: Storage) -> None:
        if self.silent:
            self.silent = False
            return
        self._sampler.forget()
        self._look_at(storage, [Change(0, len(storage), False)])

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        # Amended slots hold the same records: as new records they would lose their priorities.
        changes = [change for change in changes if not change.amended]
        if not changes:
            return
        slots = slots_in(changes)
        slots = slots[slots < len(storage)]
        # Oldest first: in a ring, the slots before its end were written last.
        newest = slots < storage.end * storage.rows_per_step
        slots = torch.cat([slots[~newest], slots[newest]])
        if slots.shape[0]:
            self._sampler.tell(storage, slots)
