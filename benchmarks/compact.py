"""Compact storages against plain ones: bytes of a transition, and the time of writes and samples."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness import Case, Gauge, Setup, Target, Work
from benchmarks.memory import in_fresh_process, resident
from gleanrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
from gleanrl.envs.transforms import CatFrames

EPISODE, CHUNK, BATCH = 500, 200, 256
STACKS, SMALL = 4_000, 200_000  # rows of the buffers
SIDE, FRAMES = 84, 4


def flags(start: int, count: int) -> dict[str, torch.Tensor]:
    done = (torch.arange(start, start + count) % EPISODE == EPISODE - 1)[:, None]
    return {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}


def record(observation: torch.Tensor, coming: torch.Tensor, key: str, start: int, action: Any) -> TensorDict:
    """Return transitions, ``[count]``."""
    count = len(observation)
    root = {name: torch.zeros_like(flag) for name, flag in flags(start, count).items()}
    after = {key: coming, "reward": torch.rand(count, 1), **flags(start, count)}
    return TensorDict({key: observation, "action": action, **root, "next": after}, [count])


def small(count: int, start: int = 0) -> TensorDict:
    """Return transitions of 17 floats and 6 actions, in episodes of 500 steps."""
    numbers = torch.randn(count + 1, 17)
    coming = torch.where(flags(start, count)["done"], torch.randn(count, 17), numbers[1:])
    return record(numbers[:-1], coming, "observation", start, torch.randn(count, 6))


def frames(count: int, start: int = 0, stacked: int = FRAMES, last: bool = False) -> TensorDict:
    """Return transitions of stacks of `stacked` frames, in episodes of 500 steps, as an environment's stacking does.

    The first stacks of an episode repeat its first frame. With `last`, frames are the last dimension.
    """
    images = torch.randint(256, (count + count // EPISODE + 2, SIDE, SIDE), dtype=torch.uint8)
    step, episode = torch.arange(start, start + count), torch.arange(start, start + count) // EPISODE
    begins = (
        torch.maximum(episode * EPISODE, torch.tensor(start)) + episode
    )  # an episode has a frame more than steps
    backs = torch.arange(1 - stacked, 1)
    stacks = [
        images[
            torch.maximum((step + episode + more)[:, None] + backs, begins[:, None])
            - start
            - start // EPISODE
        ]
        for more in (0, 1)
    ]
    root, coming = (stack.permute(0, 2, 3, 1).contiguous() if last else stack for stack in stacks)
    return record(root, coming, "pixels", start, torch.zeros(count, dtype=torch.int64))


def frames_last(count: int, start: int = 0) -> TensorDict:
    """Return transitions of stacks 84x84x4."""
    return frames(count, start, last=True)


MAKE: dict[str, tuple[Callable[..., TensorDict], int]] = {
    "stacks": (frames, STACKS),
    "last": (frames_last, STACKS),
    "small": (small, SMALL),
}


def chunks(kind: str, count: int, number: int = 10) -> list[TensorDict]:
    """Return batches of consecutive transitions."""
    return [MAKE[kind][0](count, start).contiguous() for start in range(0, count * number, count)]


def filled(kind: str, compact: bool, sampler: Any = None, batch_size: int = BATCH) -> ReplayBuffer:
    """Return a full buffer."""
    make, size = MAKE[kind]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(size, compact=compact), sampler=sampler, batch_size=batch_size, seed=0
    )
    for start in range(0, size, EPISODE * 4):
        buffer.extend(make(EPISODE * 4, start))
    return buffer


def writing(kind: str, compact: bool, count: int, calls: int) -> Setup:
    def setup() -> Work:
        buffer = filled(kind, compact)
        data = chunks(kind, count) if count else [row.clone() for row in chunks(kind, CHUNK, 1)[0]]
        turns: Iterator[Any] = cycle(data)
        write: Callable[[Any], Any] = buffer.extend if count else buffer.add

        def work() -> int:
            for _ in range(calls):
                write(next(turns))
            return calls

        return work

    return setup


def sampling(kind: str, compact: bool, sampler: Callable[[int], Any] | None, calls: int) -> Setup:
    def setup() -> Work:
        made = None if sampler is None else sampler(MAKE[kind][1])
        buffer = filled(kind, compact, made)

        def work() -> int:
            for _ in range(calls):
                buffer.sample()
            return calls

        return work

    return setup


def prioritized(size: int) -> Any:
    return PrioritizedSampler(size, alpha=0.6, beta=0.4)


def slices(size: int) -> Any:
    return SliceSampler(slice_len=16)


def case(name: str, title: str, side: Callable[[bool], Setup], most: float) -> Case:
    """Return a case whose subject is a compact buffer, and whose reference is a plain one."""
    sides = {"plain": side(False), "compact": side(True)}
    return Case(f"compact/{name}", title, "call", sides, "plain", (Target(most, "time"),), subject="compact")


CASES = (
    case("extend-stacks", "extend(200) of stacks 4x84x84", lambda c: writing("stacks", c, CHUNK, 20), 1.0),
    case("extend-small", "extend(200) of 17 floats", lambda c: writing("small", c, CHUNK, 500), 1.4),
    case("add-stacks", "add of a stack 4x84x84", lambda c: writing("stacks", c, 0, 1000), 1.3),
    case("add-small", "add of 17 floats", lambda c: writing("small", c, 0, 2000), 1.3),
    case("sample-stacks", "sample(256) of stacks 4x84x84", lambda c: sampling("stacks", c, None, 20), 1.1),
    case("sample-last", "sample(256) of stacks 84x84x4", lambda c: sampling("last", c, None, 20), 1.2),
    case("sample-small", "sample(256) of 17 floats", lambda c: sampling("small", c, None, 1000), 1.25),
    case("prioritized", "prioritized sample(256)", lambda c: sampling("small", c, prioritized, 1000), 1.2),
    case("slices", "sample(256) of slices of 16 steps", lambda c: sampling("small", c, slices, 500), 1.2),
)


def bytes_of(kind: str, compact: bool, size: int, stacked: int = FRAMES) -> float:
    """Fill a buffer and return the growth of the resident memory, in bytes for each transition."""

    def fill(size: int) -> ReplayBuffer:
        sampler = None
        if stacked == 1:
            transform, sampler = CatFrames(
                N=FRAMES, dim=-3, in_keys=["pixels", ("next", "pixels")]
            ).make_rb_transform_and_sampler(BATCH // 8)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(size, compact=compact), sampler=sampler, batch_size=BATCH // 8
        )
        if sampler is not None:
            buffer.append_transform(transform)
        make = MAKE[kind][0]
        for start in range(0, size, EPISODE):
            options = {"stacked": stacked} if kind == "stacks" else {}
            buffer.extend(make(EPISODE, start, **options))
        buffer.sample()
        return buffer

    def used() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # returns the memory of freed batches to the system
        return resident()

    fill(EPISODE)  # loads everything that only the first use of a buffer loads
    before = used()
    buffer = fill(size)
    return (used() - before) / len(buffer)


READINGS: dict[str, Callable[[], float]] = {
    "stacks-plain": lambda: bytes_of("stacks", False, 40_000),
    "stacks-compact": lambda: bytes_of("stacks", True, 100_000),
    "frames-compact": lambda: bytes_of("stacks", True, 60_000, 1),
    "small-plain": lambda: bytes_of("small", False, 1_000_000),
    "small-compact": lambda: bytes_of("small", True, 1_000_000),
}
TITLES = {
    "stacks-plain": "stacks of 4 frames 84x84, each transition with two",
    "stacks-compact": "the same, compact",
    "frames-compact": "single frames, compact, stacked by CatFrames in each sample",
    "small-plain": "17 floats, 6 actions, reward, six flags",
    "small-compact": "the same, compact",
}
BOUNDS = {
    "stacks-plain": 59_000.0,
    "stacks-compact": 7_300.0,
    "frames-compact": 7_500.0,
    "small-plain": 190.0,
}
GAUGES = tuple(
    Gauge(
        f"compact/bytes-{name}",
        f"resident memory: {TITLES[name]}",
        "bytes/transition",
        lambda name=name: in_fresh_process(name, "benchmarks.compact"),  # type: ignore[misc]
        BOUNDS.get(name, 120.0),
    )
    for name in READINGS
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(READINGS[sys.argv[1]]()))
