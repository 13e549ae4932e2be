"""Random sequences of calls on a buffer, and a slow recomputation of its trajectories."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from tests.data.replay_buffers.oracle import fill

IDS, DONE, STEPS = ("collector", "traj_ids"), ("next", "done"), ("steps_to_next_obs",)
CAPACITY = 11  # time steps

WRITES = ("extend", "add", "set", "set_extend", "item", "items", "done", "ids")
CLEARS = ("empty", "clear")
EXCHANGES = ("storage", "sampler")
COPIES = ("reload", "restore", "restore_used", "pickle", "deepcopy")


@dataclass
class Kind:
    """A kind of data: its batch dimensions before time, and the keys that separate its trajectories."""

    batch: tuple[int, ...] = ()
    ids: bool = True
    done: bool = True
    nstep: bool = False

    def rows(self, steps: int, seed: int) -> TensorDict:
        """Return records ``[*batch, steps]`` with short random trajectories."""
        random = torch.Generator().manual_seed(seed)
        size = [*self.batch, steps]

        def draw(high: int) -> torch.Tensor:
            return torch.randint(high, size, generator=random)

        rows = TensorDict({"x": draw(1000)}, size)
        if self.done:
            rows[DONE] = draw(5)[..., None] == 0
        if self.ids:
            rows[IDS] = (draw(4) == 0).cumsum(-1)
        if self.nstep:
            rows[STEPS] = draw(3) + 1
        return rows

    def storage(self) -> LazyTensorStorage:
        streams = torch.Size(self.batch).numel()
        return LazyTensorStorage(CAPACITY * streams - (streams > 1), ndim=1 + len(self.batch))


def new_buffer(kind: Kind, sampler: Any, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=kind.storage(), sampler=sampler, **options)


def acts(*names: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Return a strategy of lists of acts. An act is a name and a number for its details; the first act writes."""
    act = st.tuples(st.sampled_from(names), st.integers(0, 2**20))
    return st.lists(act, min_size=1, max_size=14).map(lambda found: [("extend", 5), *found])


def perform(
    name: str, number: int, buffer: Any, kind: Kind, make_sampler: Callable[[], Any], **options: Any
) -> Any:
    """Perform one act and return the buffer, or the buffer that replaces it."""
    storage = buffer.storage
    stored, size = storage.num_steps, number % (CAPACITY + 3) + 1
    if name == "extend":
        buffer.extend(kind.rows(size, number))
    elif name == "add":
        buffer.add(kind.rows(1, number)[..., 0])
    elif name in ("set", "set_extend"):
        start = number // 7 % (stored + 1)
        steps = min(size, CAPACITY - start)
        if steps and storage.initialized:
            rows = kind.rows(steps, number)
            fill(storage, rows.transpose(0, rows.ndim - 1), start)
        if name == "set_extend":
            buffer.extend(kind.rows(2, number))
    elif name == "item" and stored:
        buffer[..., number % stored] = kind.rows(1, number)[..., 0]
    elif name == "items" and stored:
        places = sorted({number % stored, number // 3 % stored, number // 11 % stored})
        buffer[..., places] = kind.rows(len(places), number)
    elif name == "done" and stored and kind.done:
        buffer[DONE] = buffer[DONE] ^ (buffer["x"][..., None] % 3 == number % 3)
    elif name == "ids" and stored and kind.ids:
        buffer[IDS] = buffer[IDS] // 2
    elif name == "empty":
        buffer.empty()
    elif name == "clear":
        storage.clear()
    elif name == "storage":
        other = kind.storage()
        rows = kind.rows(min(size, CAPACITY), number)
        fill(other, rows.transpose(0, rows.ndim - 1))
        buffer.set_storage(other)
    elif name == "sampler":
        buffer.set_sampler(make_sampler())
    elif name == "reload":
        buffer.load_state_dict(buffer.state_dict())
    elif name in ("restore", "restore_used"):
        other = new_buffer(kind, make_sampler(), **options)
        if name == "restore_used":
            other.extend(kind.rows(size, number + 1))
        other.load_state_dict(buffer.state_dict())
        return other
    elif name == "pickle":
        return pickle.loads(pickle.dumps(buffer))
    elif name == "deepcopy":
        return copy.deepcopy(buffer)
    return buffer


def stored_steps(storage: Any) -> list[int]:
    """Return the time steps of a storage, oldest first."""
    if storage.num_steps < storage.capacity_steps:
        return list(range(storage.num_steps))
    return [*range(storage.end, storage.capacity_steps), *range(storage.end)]


def trajectories(storage: Any, kind: Kind) -> list[list[int]]:
    """Return the slots of every stored trajectory, stream by stream, oldest first, by looking at every row."""
    streams = torch.Size(kind.batch).numel()

    def column(path: tuple[str, ...]) -> list[Any]:
        return storage.column(path).reshape(storage.max_size).tolist()

    done = column(DONE) if kind.done else [False] * storage.max_size
    ids = column(IDS) if kind.ids else [0] * storage.max_size
    ahead = column(STEPS) if kind.nstep else [1] * storage.max_size
    found: list[list[int]] = []
    for stream in range(streams):
        run: list[int] = []
        for slot in (step * streams + stream for step in stored_steps(storage)):
            if run and (ids[slot] != ids[run[-1]] or (done[run[-1]] and ahead[run[-1]] == 1)):
                found.append(run)
                run = []
            run.append(slot)
        found += [run] if run else []
    return found


def cut_by(slots: Sequence[int], last: Sequence[bool]) -> list[list[int]]:
    """Return the rows of a batch, cut after each last step."""
    pieces: list[list[int]] = [[]]
    for slot, ends in zip(slots, last, strict=True):
        pieces[-1].append(slot)
        if ends:
            pieces.append([])
    assert not pieces.pop(), "rows behind the last slice"
    return pieces
