"""Rows with checksums that many threads write, sample and re-weight at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import IDS

WIDTH = 24
LENGTH = 4  # steps of a slice
BIG = 1 << 40


class Plan(NamedTuple):
    """The amount of work. All limits are counts, none is a time."""

    sampler: str = "random"
    prefetch: int | None = None
    capacity: int = 500
    writers: int = 2
    samplers: int = 2
    updaters: int = 0
    writes: int = 150
    batches: int = 100
    batch_size: int = 64


def block(writer: int, start: int, count: int) -> TensorDict:
    """Return `count` rows of a writer from `start`; every column is a function of (writer, sequence number)."""
    seq = torch.arange(start, start + count)
    stamp = writer * BIG + seq
    return TensorDict(
        {
            "seq": seq,
            "writer": torch.full_like(seq, writer),
            "crc": checksum(stamp),
            "wide": (stamp[:, None] + torch.arange(WIDTH)).double(),
            "collector": TensorDict({"traj_ids": torch.full_like(seq, writer * BIG + start)}, [count]),
            "next": TensorDict({"done": torch.zeros(count, 1, dtype=torch.bool)}, [count]),
        },
        [count],
    )


def checksum(stamp: torch.Tensor) -> torch.Tensor:
    """Return a number that identifies the row (a multiplicative hash, 64 bits)."""
    return (stamp * 6364136223846793005 + 1442695040888963407) ^ (stamp >> 7)


def check(rows: TensorDict) -> torch.Tensor:
    """Return the stamp of each row, after checking that all its columns come from one write."""
    stamp = rows["writer"] * BIG + rows["seq"]
    assert torch.equal(rows["crc"], checksum(stamp)), "a torn row"
    assert torch.equal(rows["wide"], (stamp[:, None] + torch.arange(WIDTH)).double()), "a torn row"
    assert torch.equal(rows[IDS] // BIG, rows["writer"]) and (rows[IDS] % BIG <= rows["seq"]).all()
    return stamp


class Crowd:
    """Threads that start together and do a fixed amount of work; the first error ends all of them."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.errors: list[BaseException] = []
        self.work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def run(self, timeout_s: float) -> None:
        barrier = threading.Barrier(len(self.work))

        def go(work: Callable[[], None]) -> None:
            try:
                barrier.wait(30)
                work()
            except BaseException as error:
                self.errors.append(error)
                self.failed.set()

        threads = [threading.Thread(target=go, args=(work,), daemon=True) for work in self.work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        if self.errors:
            raise self.errors[0]


class Stress:
    """One buffer, its threads, and the records that each thread expects."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.crowd = plan, Crowd()
        self.sizes = [1, 7, 30, 2, 16]
        self.rows = 0
        self.buffer = parts.ReplayBuffer(
            storage=parts.LazyTensorStorage(plan.capacity),
            sampler=self.make_sampler(),
            batch_size=plan.batch_size,
            prefetch=plan.prefetch,
            seed=0,
        )
        # Stamp of the row at each position seen so far: the p-th written row is in slot p % capacity.
        self.stamps: dict[int, int] = {}
        self.buffer.extend(block(0, 0, plan.capacity))
        self.lock = threading.Lock()

    def make_sampler(self) -> Any:
        plan = self.plan
        priorities = {"max_capacity": plan.capacity, "alpha": 0.6, "beta": 0.4}
        return {
            "random": lambda: parts.RandomSampler(),
            "once": lambda: parts.SamplerWithoutReplacement(),
            "prioritized": lambda: parts.PrioritizedSampler(**priorities),
            "slices": lambda: parts.SliceSampler(slice_len=LENGTH, traj_key=IDS),
            "prioritized_slices": lambda: parts.PrioritizedSliceSampler(
                **priorities, slice_len=LENGTH, traj_key=IDS
            ),
        }[plan.sampler]()

    def size(self, turn: int, writer: int) -> int:
        """Return the number of rows of a writer's `turn`-th write."""
        return self.sizes[(turn + writer) % len(self.sizes)]

    def write(self, writer: int) -> None:
        start = 0 if writer else self.plan.capacity
        for turn in range(self.plan.writes):
            if self.crowd.failed.is_set():
                return
            count = self.size(turn, writer)
            self.buffer.extend(block(writer, start, count))
            start += count

    def sample(self, which: int) -> None:
        for _ in range(self.plan.batches):
            if self.crowd.failed.is_set():
                return
            before = self.buffer.stats().rows_written
            batch, info = self.buffer.sample(return_info=True)
            self.check(batch, info, before)

    def check(self, batch: TensorDict, info: Any, before: int) -> None:
        assert len(batch) == self.plan.batch_size or self.plan.sampler == "once"
        stamp = check(batch)
        # The g-th write of a slot wrote row number (g - 1) * capacity + slot.
        position = (info["generation"] - 1) * self.plan.capacity + info["index"]
        assert (position >= before - self.plan.capacity).all(), "a row that was gone before the call"
        with self.lock:
            self.rows += len(batch)
            for place, one in zip(position[:8].tolist(), stamp[:8].tolist(), strict=True):
                assert self.stamps.setdefault(place, one) == one, "one slot and generation, two rows"
        if "slices" in self.plan.sampler:
            pieces = stamp.view(-1, LENGTH)
            assert (pieces == pieces[:, :1] + torch.arange(LENGTH)).all(), "a slice with a gap"
            ids = batch[IDS].view(-1, LENGTH)
            assert (ids == ids[:, :1]).all(), "a slice of two trajectories"
        if "_weight" in info:
            assert torch.isfinite(info["_weight"]).all() and (info["_weight"] > 0).all()

    def update(self, which: int) -> None:
        for turn in range(self.plan.batches):
            if self.crowd.failed.is_set():
                return
            batch, info = self.buffer.sample(return_info=True)
            generation = info["generation"] if (turn + which) % 2 else None
            self.buffer.update_priority(info["index"], 0.1 + batch["seq"].double() % 5, generation)

    def run(self, timeout_s: float = 60) -> None:
        for writer in range(self.plan.writers):
            self.crowd.add(lambda writer=writer: self.write(writer))
        for which in range(self.plan.samplers):
            self.crowd.add(lambda which=which: self.sample(which))
        for which in range(self.plan.updaters):
            self.crowd.add(lambda which=which: self.update(which))
        self.crowd.run(timeout_s)
        self.settled()

    def settled(self) -> None:
        """Check after all threads ended that the buffer holds the newest rows, and each writer's rows without a gap."""
        rows = self.buffer[:]
        check(rows)
        order = torch.arange(self.plan.capacity)
        written = self.buffer.stats().rows_written
        counts = [self.size(turn, w) for w in range(self.plan.writers) for turn in range(self.plan.writes)]
        assert written == self.plan.capacity + sum(counts)
        rows = rows[(order + written) % self.plan.capacity]
        for writer in range(self.plan.writers):
            seq = rows["seq"][rows["writer"] == writer]
            assert (seq.diff() == 1).all(), "a lost or repeated row"
