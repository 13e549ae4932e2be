"""Compact storages against plain ones: bytes of a transition, and the time of writes and samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness import Case, Gauge, Setup, Target, Work
from benchmarks.memory import in_fresh_process
from benchmarks.workload import settled_resident
from gleanrl.data import Compact as Stored
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


class Compact:
    """A plain buffer, a compact one, or a compact one of single frames that are stacked; see `compact_peers.py`."""

    def __init__(self, kind: str, size: int, envs: int, how: str) -> None:
        self._frames, sampler, transform = how == "frames", None, None
        self._ndim = 1 if envs == 1 else 2
        if self._frames:
            stack = CatFrames(N=FRAMES, dim=-3, in_keys=["observation", ("next", "observation")])
            transform, sampler = stack.make_rb_transform_and_sampler(BATCH)
        # The stacks are named, because the first write may hold a single step, which shows none.
        named = (
            Stored(stack={"observation": FRAMES}) if kind == "stacks" and how == "compact" else how != "plain"
        )
        self._buffer = ReplayBuffer(
            storage=LazyTensorStorage(size, ndim=self._ndim, compact=named),
            sampler=sampler,
            transform=transform,
            batch_size=BATCH,
        )

    def writes(self, steps: Any, count: int) -> list[TensorDict]:
        """Return the arguments of `write` for `count` steps each."""
        data = TensorDict({"observation": steps.observation, "action": steps.action}, steps.reward.shape)
        for name in ("reward", "terminated", "truncated"):
            data["next", name] = getattr(steps, name)[..., None]
        data["next", "observation"] = steps.following
        data["next", "done"] = data["next", "terminated"] | data["next", "truncated"]
        if self._frames:
            for key in ("observation", ("next", "observation")):
                data[key] = data[key][:, :, -1:]
        data = data[:, 0].contiguous() if self._ndim == 1 else data.transpose(0, 1).contiguous()
        return list(data.unbind(0) if self._ndim == count == 1 else data.split(count, -1))

    def write(self, row: TensorDict) -> int:
        """Write a step or several."""
        if row.ndim:
            self._buffer.extend(row)
            return row.shape[-1]
        self._buffer.add(row)
        return 1

    def sample(self) -> TensorDict:
        """Return a batch."""
        return self._buffer.sample()

    def rows(self, batch: TensorDict) -> dict[str, Any]:
        """Return a batch as arrays."""
        rows = {name: batch[name].numpy() for name in ("observation", "action")}
        for name in ("reward", "terminated", "truncated"):
            rows[name] = batch["next", name].numpy()
        return {**rows, "following": batch["next", "observation"].numpy()}


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

    fill(EPISODE)  # loads everything that only the first use of a buffer loads
    before = settled_resident()
    buffer = fill(size)
    return (settled_resident() - before) / len(buffer)


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
