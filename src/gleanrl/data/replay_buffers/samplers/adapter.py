"""Samplers by the protocol that other releases have."""

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
_TOLD = {"add", "extend", "mark_update", "_empty"}
_NEEDED = ("sample", "add", "extend", "_empty", "state_dict", "load_state_dict")


def as_sampler(sampler: Any) -> Any:
    """Return a sampler as buffers use it (see `view_of`); what is none stays as it is."""
    return view_of(sampler, Sampler, FamiliarSampler, _METHODS, _NEEDED)


class FamiliarSampler(Adapter, Sampler):
    """Draws by `sample`, and tells of writes by `mark_update`, `add` and `extend`, of other contents by `_empty`.

    What was written is known from the storage's versions: in the order of time, at the latest at the next draw. Batches
    aren't drawn ahead, because such a sampler can't take a draw back.
    """

    __slots__ = ("_news",)
    _news: _News

    def opened(self) -> None:
        """Begin to follow."""
        if self.foreign:
            Sampler.__init__(self)
        elif "random" not in vars(self.part):  # its constructor didn't call ours
            Sampler.__init__(self.part)
        object.__setattr__(self, "_news", _News(self))

    @property
    def _by_sample(self) -> bool:  # type: ignore[override]
        return "sample" in self.own

    @property
    def draws_ahead(self) -> bool:  # type: ignore[override]
        """Whether batches may be drawn ahead: where nothing but the draw is the user's."""
        return self.own <= {"sample"} and not self.foreign

    @property
    def takes_priorities(self) -> bool:  # type: ignore[override]
        """Whether `prioritize` does something."""
        return "update_priority" in self.own or super().takes_priorities

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return bool(self.part.ran_out)

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self.part.ran_out = value

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator, where the part asks for it."""
        super().set_rng(generator)
        if self.foreign:
            vars(self.part)["_rng"] = generator

    def use_storage(self, storage: Storage) -> None:
        """Follow another storage; what it holds by now isn't told."""
        super().use_storage(storage)
        self._news.sync(storage)

    def follow(self, storage: Storage) -> None:
        """Tell what was written."""
        super().follow(storage)
        if not _TOLD.isdisjoint(self.own):
            self._news.sync(storage)

    def draw(self, storage: Storage, batch_size: int, generations: bool = False) -> Any:
        """Draw slots, after whatever was written was told."""
        if not _TOLD.isdisjoint(self.own):
            self._news.sync(storage)
        return super().draw(storage, batch_size, generations)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return what the user's `sample` draws."""
        return self.part.sample(self._shown(storage), batch_size)

    def prioritize(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Pass priorities on, but for records that were overwritten since their draw, where that is known."""
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
        self.call("update_priority", coordinates(slots, storage), priority, storage=self._shown(storage))

    def mark(self, storage: Storage, slots: torch.Tensor) -> None:
        """Pass on which records get the priority of new ones."""
        if "mark_update" in self.own:
            self.call("mark_update", coordinates(slots, storage), storage=self._shown(storage))
        else:
            super().mark(storage, slots)

    def tell(self, storage: Storage, slots: torch.Tensor) -> None:
        """Tell of slots, ``(n,)`` int64, that hold other records now, the oldest first."""
        own, index = self.own, slots
        if storage.ndim > 1:
            index = torch.stack(coordinates(slots, storage), -1)
        if "mark_update" in own:
            self.call("mark_update", index, storage=self._shown(storage))
        if "add" in own and slots.shape[0] == 1 == storage.ndim:
            self.part.add(int(index))
        elif "extend" in own:
            self.part.extend(index)

    def forget(self) -> None:
        """Tell of another content."""
        if "_empty" in self.own:
            self.call("_empty")

    def _shown(self, storage: Storage) -> Any:
        """Return the storage as the part knows it: one of another library its own kind."""
        return storage.given if self.foreign else storage

    # State

    def snapshot(self) -> Any:
        """Return the state; the user's own where there is one."""
        return self.saved() if "state_dict" in self.own else super().snapshot()

    def parse(self, state: Any) -> Any:
        """Return the value of a saved state."""
        return self.parsed(state) if "load_state_dict" in self.own else super().parse(state)

    def adopt(self, value: Any) -> None:
        """Go on from a value; what is stored then isn't told."""
        if isinstance(value, SavedAttributes):
            self.restore(value)
        else:
            super().adopt(value)
        self._news.silent = True


class _News(Follower[Storage]):
    """Tells a sampler what was written since the last call."""

    def __init__(self, sampler: FamiliarSampler) -> None:
        self._sampler = sampler
        self.silent = True  # the sampler is in step with the next content already

    def _look_at_all(self, storage: Storage) -> None:
        if self.silent:
            self.silent = False
            return
        self._sampler.forget()
        self._look_at(storage, [Change(0, len(storage), False)])

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        slots = slots_in(changes)
        slots = slots[slots < len(storage)]
        # Around the ring: those before its end are the newest.
        newest = slots < storage.end * storage.rows_per_step
        slots = torch.cat([slots[~newest], slots[newest]])
        if slots.shape[0]:
            self._sampler.tell(storage, slots)
