"""The cases of the restore matrix: buffers of every kind, random histories of them, and their draws.

A case names a sampler, a storage, whether the buffer is shared, its prefetch and its number of dimensions. A history is
a seed: the same seed makes the same calls on any buffer of the case.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    CompressedListStorage,
    ConsumingSampler,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.errors import GleanError

STEPS = 13  # time steps that fit into a storage
BATCHES = {1: (), 2: (2,), 3: (2, 2)}
SIZE = 6

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "epochs in order": lambda: SamplerWithoutReplacement(drop_last=True, shuffle=False),
    "prioritized": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "prioritized by batch": lambda: PrioritizedSampler(
        None, 0.7, 0.5, max_priority_within_buffer=True, normalize="batch"
    ),
    "slices": lambda: SliceSampler(slice_len=2),
    "short slices": lambda: SliceSampler(num_slices=2, strict_length=False, span=True),
    "epochs of slices": lambda: SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=2, strict_length=False),
    "consuming": ConsumingSampler,
    "consuming twice": lambda: ConsumingSampler(2),
    "staleness": StalenessAwareSampler,
    "goals": RandomSampler,
    "goals in epochs": SamplerWithoutReplacement,
    "goals by priority": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "goals of slices": lambda: SliceSampler(slice_len=2, strict_length=False),
}
STORAGES: dict[str, Callable[..., Any]] = {
    "lazy": LazyTensorStorage,
    "tensor": lambda size, ndim: TensorStorage(blank(ndim), ndim=ndim),
    "memmap": LazyMemmapStorage,
    "list": lambda size, ndim: ListStorage(size),
    "stack": lambda size, ndim: LazyStackStorage(size),
    "compressed": lambda size, ndim: CompressedListStorage(size),
}
LISTS = ("list", "stack", "compressed")
SHAREABLE = ("lazy", "memmap")
ANY_RECORDS = ("random", "epochs", "epochs in order", "consuming", "consuming twice")
"""Samplers that read no columns."""
PREFETCH: dict[str, dict[str, int]] = {
    "none": {},
    "one": {"prefetch": 1},
    "three": {"prefetch": 3},
    "three, two threads": {"prefetch": 3, "prefetch_threads": 2},
}
ENSEMBLES: dict[str, tuple[str, ...]] = {
    "ensemble of random": ("random", "epochs"),
    "ensemble of epochs": ("epochs", "slices"),
    "ensemble of consuming": ("consuming", "consuming"),
    "ensemble of priorities": ("prioritized", "prioritized by batch"),
}
WAYS = ("dumps", "state_dict")
TARGETS = ("new", "used", "itself")


class Case(NamedTuple):
    """A kind of buffer, and the way in which it is restored."""

    sampler: str
    storage: str
    shared: bool
    prefetch: str
    ndim: int
    way: str
    target: str

    def __str__(self) -> str:
        shared = "shared" if self.shared else "own"
        return f"{self.sampler}-{self.storage}-{shared}-{self.prefetch}-{self.ndim}d-{self.way}-{self.target}"

    @property
    def is_legal(self) -> bool:
        """Return whether the library offers such a buffer."""
        samplers = ENSEMBLES.get(self.sampler, (self.sampler,))
        if self.storage in LISTS and (self.ndim > 1 or any(name not in ANY_RECORDS for name in samplers)):
            return False
        return not self.shared or (
            self.storage in SHAREABLE and not any("priorit" in name for name in samplers)
        )


def all_cases() -> list[Case]:
    """Return every legal case."""
    axes = ((*SAMPLERS, *ENSEMBLES), STORAGES, (False, True), PREFETCH, BATCHES, WAYS, TARGETS)
    return [case for case in (Case(*found) for found in product(*axes)) if case.is_legal]


def some_cases() -> list[Case]:
    """Return cases in which each sampler and each storage meets each value of every other axis."""
    cases, met, kept = all_cases(), set[Any](), []
    random.Random(0).shuffle(cases)
    for case in cases:
        pairs = {
            (axis, case[axis], other, case[other]) for axis in (0, 1) for other in range(axis + 1, len(case))
        }
        if not pairs <= met:
            kept.append(case)
            met |= pairs
    return kept


def rows(ndim: int, first: int, steps: int, draws: random.Random) -> TensorDict:
    """Return records ``[*batch, steps]`` of short trajectories. Calls with different `first` share no trajectory id."""
    batch = BATCHES[ndim]
    size = [*batch, steps]
    streams = torch.arange(torch.Size(batch).numel() or 1).view(*batch, 1) if batch else torch.tensor([0])
    time = torch.arange(first, first + steps)
    done = torch.tensor([draws.random() < 0.3 for _ in range(torch.Size(size).numel())]).view(*size, 1)
    x = (1000 * streams + time).expand(size).clone()
    return TensorDict(
        {
            "x": x,
            "policy_version": x // 5 % 4,
            "achieved_goal": x[..., None].float(),
            "desired_goal": -x[..., None].float(),
            "next": {"done": done, "terminated": done.clone(), "reward": x[..., None].float()},
        },
        size,
    )


def blank(ndim: int) -> TensorDict:
    """Return empty memory for a `TensorStorage`, with time as the first dimension."""
    order = [ndim - 1, *range(ndim - 1)]
    return rows(ndim, 0, STEPS, random.Random(0)).permute(*order).clone().zero_()


def same_goal(part: Any) -> torch.Tensor:
    """Return rewards for hindsight goals."""
    return (part["achieved_goal"] == part["desired_goal"]).float()


def made(case: Case, sampler: str | None = None) -> Any:
    """Return a new buffer of a case. `sampler` is given for a member of an ensemble."""
    if sampler is None and case.sampler in ENSEMBLES:
        members = [made(case, name) for name in ENSEMBLES[case.sampler]]
        return ReplayBufferEnsemble(*members, batch_size=2 * SIZE)
    name = sampler or case.sampler
    size = STEPS * torch.Size(BATCHES[case.ndim]).numel()
    options: dict[str, Any] = {
        "storage": STORAGES[case.storage](size, ndim=case.ndim),
        "sampler": SAMPLERS[name](),
        "batch_size": SIZE,
        "shared": case.shared,
        **PREFETCH[case.prefetch],
    }
    if name.startswith("goals"):
        return HERReplayBuffer(same_goal, **options)
    plain = case.storage in ("list", "compressed") or case.ndim == 1 and case.prefetch == "one"
    if plain:
        collate = {"collate_fn": torch.stack} if case.storage in ("list", "compressed") else {}
        return ReplayBuffer(**options, **collate)
    return TensorDictReplayBuffer(**options)


class History:
    """Random calls on a buffer. The same seed makes the same calls on each buffer of a case.

    Args:
        case: the kind of buffer.
        seed: determines the calls.
        first: the number of the first record.
    """

    def __init__(self, case: Case, seed: int, first: int = 1) -> None:
        self.case, self.draws, self.written = case, random.Random(seed), first

    @property
    def place(self) -> tuple[Any, int]:
        """The position in the history; can be set."""
        return self.draws.getstate(), self.written

    @place.setter
    def place(self, place: tuple[Any, int]) -> None:
        self.draws.setstate(place[0])
        self.written = place[1]

    def run(self, buffer: Any, calls: int) -> list[Any]:
        """Make `calls` calls and return their results."""
        return [self.call(buffer) for _ in range(calls)]

    def call(self, buffer: Any) -> Any:
        """Make one call on a buffer or on an ensemble's member, and return its result."""
        draws = self.draws
        name = draws.choices(
            ("extend", "add", "sample", "update", "item", "empty", "other size"), (3, 2, 8, 3, 1, 0.3, 1)
        )[0]
        number = draws.randrange(1 << 20)
        member = buffer
        if isinstance(buffer, ReplayBufferEnsemble):
            member = buffer[number % len(ENSEMBLES[self.case.sampler])]
        ndim, stored = self.case.ndim, member.storage.num_steps
        if name == "extend":
            steps = number % (STEPS + 2) // 2 + 1
            member.extend(self._rows(steps))
        elif name == "add":
            member.add(self._rows(1)[..., 0])
        elif name == "item" and stored:
            record = self._rows(1)[..., 0]
            if ndim == 1:
                member[number % stored] = record
            else:
                member[..., number % stored] = record
        elif name == "empty":
            member.empty()
        elif name == "update" and stored and member.sampler.takes_priorities:
            places = sorted({number % stored, number // 3 % stored, number // 11 % stored})
            index: Any = torch.tensor(places)
            if ndim > 1:
                index = torch.stack([index, *(torch.zeros_like(index) for _ in BATCHES[ndim])], -1)
            member.update_priority(index, torch.tensor([1.0 + (number + i) % 7 for i in places]))
        elif name == "other size":
            return drawn(member, 4)
        elif name == "sample":
            return drawn(buffer, None)
        return len(buffer)

    def _rows(self, steps: int) -> Any:
        first, self.written = self.written, self.written + steps
        return rows(self.case.ndim, first, steps, self.draws)


def drawn(buffer: Any, size: int | None) -> Any:
    """Return a batch with its info, or the text of a library error (for example if no record is left)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sample: batch_size")
        try:
            return buffer.sample(size, return_info=True)
        except GleanError as error:
            return str(error)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and tensors of a call's result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "items") and not isinstance(value, type):
        flat = value.items(True, True) if hasattr(value, "batch_size") else value.items()
        for key, part in sorted(flat, key=lambda pair: str(pair[0])):
            yield key
            yield from leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def same(first: Any, second: Any) -> bool:
    """Return whether two results are equal, bit by bit. Generations may differ, because they only grow."""
    pairs = [list(_counted(leaves(value))) for value in (first, second)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(*pairs, strict=True)
    )


def _counted(parts: Iterator[Any]) -> Iterator[Any]:
    """Skip generations: a buffer that held records before counts from there."""
    for part in parts:
        if isinstance(part, str) and part in ("generation", "_generation"):
            next(parts)
        else:
            yield part
