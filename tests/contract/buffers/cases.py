"""Buffers of every kind by name, and a few cases that cover every pair of choices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import Ring, Tape

SLICES = ("slices", "slices_once", "prioritized_slices")
EPOCHS = ("once", "slices_once")
SHAPES = {1: (), 2: (3,), 3: (2, 3)}
NUM_SLICES, SLICE_LEN = 4, 3
BATCH = NUM_SLICES * SLICE_LEN


class Case(NamedTuple):
    """One buffer and the calls before its first sample."""

    storage: str
    ndim: int
    sampler: str
    buffer: str
    prefetch: int | None
    wrapped: bool
    restored: bool

    @property
    def possible(self) -> bool:
        """Return whether the combination is valid. Lists have one dimension and no columns to cut slices from."""
        return self.storage != "list" or (self.ndim == 1 and self.sampler not in SLICES)

    def __str__(self) -> str:
        words = ("full" if self.wrapped else "part", "restored" if self.restored else "first")
        return "-".join(map(str, (self.storage, self.ndim, self.sampler, self.buffer, self.prefetch, *words)))


FACTORS: Mapping[str, Sequence[Any]] = {
    "storage": ("list", "tensor", "memmap", "given"),
    "ndim": (1, 2, 3),
    "sampler": ("random", "once", "prioritized", *SLICES),
    "buffer": ("plain", "tensordict"),
    "prefetch": (None, 1, 3),
    "wrapped": (False, True),
    "restored": (False, True),
}


def pairwise(
    factors: Mapping[str, Sequence[Any]], make: Callable[..., Any], possible: Callable[[Any], bool]
) -> list[Any]:
    """Return a few cases that cover every possible pair of choices, the same in each run."""
    choices = random.Random(0)
    every = [case for case in (make(*v) for v in itertools.product(*factors.values())) if possible(case)]
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(choices.sample(every, min(len(every), 150)), key=lambda case: len(pairs[case] & missing))
        if pairs[best] & missing:
            chosen.append(best)
            missing -= pairs[best]
    return chosen


def make_storage(kind: str, capacity: int, tape: Tape, ring: Ring | None = None) -> Any:
    """Return a storage of `capacity` time steps. A "given" storage is full from the start, and `ring` records it."""
    size, ndim = capacity * tape.streams, 1 + len(tape.shape)
    if kind == "list":
        return parts.ListStorage(size)
    if kind == "tensor":
        return parts.LazyTensorStorage(size, ndim=ndim)
    if kind == "memmap":
        return parts.LazyMemmapStorage(size, ndim=ndim)
    assert kind == "given"
    if ring is not None:
        ring.extend(range(capacity))
    data = tape.rows(0, capacity)
    # Storages keep time as the first dimension, so time and the first dimension change places.
    order = (data.ndim - 1, *range(1, data.ndim - 1), 0) if data.ndim > 1 else (0,)
    return parts.TensorStorage(data.permute(*order).contiguous(), ndim=ndim)


def make_sampler(kind: str, size: int, seed: int = 0, **kwargs: Any) -> Any:
    """Return a sampler; slice samplers draw `NUM_SLICES` slices per batch."""
    priorities = {"max_capacity": size, "alpha": 0.7, "beta": 0.5}
    slices = {"num_slices": NUM_SLICES, **kwargs}
    made = {
        "random": lambda: parts.RandomSampler(**kwargs),
        "once": lambda: parts.SamplerWithoutReplacement(**kwargs),
        "prioritized": lambda: parts.PrioritizedSampler(**priorities, **kwargs),
        "slices": lambda: parts.SliceSampler(**slices),
        "slices_once": lambda: parts.SliceSamplerWithoutReplacement(**slices),
        "prioritized_slices": lambda: parts.PrioritizedSliceSampler(**priorities, **slices),
    }[kind]()
    made.set_seed(seed)
    return made


def make_buffer(
    kind: str, storage: Any, sampler: Any, prefetch: int | None = None, batch_size: int = BATCH, **kwargs: Any
) -> Any:
    """Return a `ReplayBuffer` ("plain") or a `TensorDictReplayBuffer`."""
    made = {"plain": parts.ReplayBuffer, "tensordict": getattr(parts, "TensorDictReplayBuffer", None)}[kind]
    collate = {} if not isinstance(storage, parts.ListStorage) else {"collate_fn": stack}
    return made(
        storage=storage, sampler=sampler, prefetch=prefetch, batch_size=batch_size, **collate, **kwargs
    )


def stack(records: list[Any]) -> Any:
    """Return a batch of the records of a list storage."""
    return type(records[0]).maybe_dense_stack(records) if isinstance(records, list) else records


def filled(kind: str, capacity: int, tape: Tape) -> tuple[Any, Ring]:
    """Return a storage and a ring with its present content."""
    ring = Ring(capacity)
    return make_storage(kind, capacity, tape, ring), ring


def sizes(tape: Tape, capacity: int) -> int:
    """Return the number of transitions in `capacity` time steps."""
    return capacity * math.prod(tape.shape)
