"""The resources of a process don't grow, however much it collects, draws, saves and restores."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl import Checkpoint
from gleanrl._os import clock
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)
from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs import EnvBase, GymEnv, ParallelEnv
from tests.chaos.drills import SHARE, scaled, wait_for
from tests.fakes_base import CountingEnv
from tests.leaks import Holdings

pytestmark = pytest.mark.timeout(1800)

STEPS, RESETS, SAMPLES, LIVES, SAVES = 20_000_000, 100_000, 10_000_000, 1_000, 10_000
ENVS, ROWS, BATCH, CAPACITY = 64, 100, 1_000, 20_000
SAVE_EVERY_S = 600.0
ALLOWED_MB, ALLOWED_MB_PER_MILLION = 8.0, 1.0
"""Memory for the allocator, in addition to the slope allowed for the steps."""


class Walkers(EnvBase):
    """Many walkers at once. Their episode lengths give the required number of resets."""

    def __init__(self) -> None:
        super().__init__(batch_size=(ENVS,))
        self.observation_spec = Composite({"observation": Unbounded((ENVS, 4))}, shape=(ENVS,))
        self.action_spec = Unbounded((ENVS, 1))
        self.reward_spec = Unbounded((ENVS, 1))
        self.resets = 0
        self._left = torch.zeros(ENVS, 1)
        self._at = torch.zeros(ENVS, 4)

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones(ENVS, 1, dtype=torch.bool) if mask is None else mask.view(ENVS, 1)
        self.resets += int(mask.sum())
        self._left = torch.where(mask, torch.full((ENVS, 1), STEPS / RESETS), self._left)
        self._at = torch.where(mask, torch.zeros(ENVS, 4), self._at)
        return TensorDict({"observation": self._at}, [ENVS])

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self._left, self._at = self._left - 1, self._at + tensordict["action"]
        ends = {"reward": self._at[:, :1].clone(), "terminated": self._left <= 0}
        return TensorDict({"observation": self._at} | ends, [ENVS])

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing, because the environment draws no random numbers."""


def few(number: int) -> int:
    """Return the share of a number of slow actions: in short runs a fifth of the usual share."""
    return scaled(number if SHARE >= 1 else number // 5)


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def nothing_grows(what: str) -> Iterator[Callable[[float], None]]:
    """Fail if memory grows, or if a resource is held at the end that was not held at the start.

    Yields a function that takes the completed share of the work. Memory is compared from a fifth on, after each part of
    the work has run once.
    """
    begin, holdings, running, memory = time.monotonic(), Holdings.now(), threads(), []

    def done(share: float) -> None:
        if share >= 0.2 and (not memory or share >= 1):
            memory.append(resident_mb())

    yield done
    growth = memory[-1] - memory[0]
    print(f"{what} in {time.monotonic() - begin:.0f} s: {growth:+.1f} MB")
    holdings.check()
    wait_for(
        lambda: threads() <= running, "threads that end"
    )  # the kernel's part of a joined thread may end later
    assert growth <= ALLOWED_MB + ALLOWED_MB_PER_MILLION * STEPS * SHARE * 0.8e-6


def test_long_collection_and_sampling_holds_no_more_resources(tmp_path):
    """Steps, resets, samples and updates of priorities leave nothing behind."""
    steps, env = scaled(STEPS) // (ENVS * ROWS) * (ENVS * ROWS), Walkers()
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, prefetch=2
    )
    collector = SyncDataCollector(env, None, frames_per_batch=ENVS * ROWS, total_frames=steps)
    buffer.extend(collector.next().reshape(-1))
    buffer.update_tensordict_priority(buffer.sample().set("td_error", torch.rand(BATCH)))
    collected, drawn = ENVS * ROWS, 0
    with nothing_grows(f"{steps} steps") as done:
        while collected < steps:
            buffer.extend(collector.next().reshape(-1))
            collected += ENVS * ROWS
            while drawn < SAMPLES / STEPS * collected:
                batch = buffer.sample()
                buffer.update_tensordict_priority(batch.set("td_error", torch.rand(BATCH)))
                drawn += BATCH
            done(collected / steps)
    assert env.resets >= RESETS * (steps / STEPS) * 0.9
    collector.shutdown()


def test_repeated_construction_and_shutdown_holds_no_more_resources(tmp_path):
    """Collectors, environments and buffers are created and ended, some in the middle of their work."""

    def live(number: int) -> None:
        kind = (MultiSyncDataCollector, MultiaSyncDataCollector, SyncDataCollector)[number % 3]
        makers = CountingEnv if kind is SyncDataCollector else [CountingEnv] * 2
        storage = (LazyMemmapStorage, LazyTensorStorage)[number % 2](100)
        sampler = SliceSampler(slice_len=2, strict_length=False, traj_key=("collector", "traj_ids"))
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=10, prefetch=number % 4)
        collector = kind(makers, None, frames_per_batch=20, total_frames=-1)
        buffer.extend(collector.next().reshape(-1))
        buffer.sample()
        if number % 5 == 0:
            batch_of_envs = ParallelEnv(2, CountingEnv)
            batch_of_envs.rollout(3)
            batch_of_envs.close()
        if number % 2:
            collector.shutdown()

    lives = few(LIVES)
    for number in range(6):  # each kind once, because a first use starts processes
        live(number)
    gc.collect()
    with nothing_grows(f"{lives} lives") as done:
        for number in range(lives):
            live(number)
            done((number + 1) / lives)


def test_repeated_saves_hold_no_more_resources(tmp_path):
    """Checkpoints every ten minutes for months, on a fake clock, with a restore from time to time."""
    saves, time_of_day = few(SAVES), clock.FakeClock()
    collector = SyncDataCollector(lambda: GymEnv("CartPole-v1"), None, frames_per_batch=10, total_frames=-1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=5)
    checkpoint = Checkpoint(collector=collector, buffer=buffer)

    def work(number: int) -> None:
        buffer.extend(collector.next())
        buffer.sample()
        time_of_day.advance(SAVE_EVERY_S)
        checkpoint.save(tmp_path, keep=2)
        if number % 10 == 0:
            checkpoint.load(tmp_path)
            time_of_day.advance(SAVE_EVERY_S)

    with clock.use(time_of_day):
        for number in range(11):
            work(number)
        files = sum(1 for _ in tmp_path.rglob("*"))
        with nothing_grows(f"{saves} saves") as done:
            for number in range(saves):
                work(number)
                done((number + 1) / saves)
    assert sum(1 for _ in tmp_path.rglob("*")) <= files + 2
    collector.shutdown()
