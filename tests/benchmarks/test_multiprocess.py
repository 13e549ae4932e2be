"""Cases of collectors with workers: both sides do equal work, and the harness reads their reports correctly."""

from __future__ import annotations

import os

import pytest

from benchmarks import multiprocess_gauges
from benchmarks.free_running import FreeRunning
from benchmarks.multiprocess import CASES, STEPS, ours
from benchmarks.multiprocess_gauges import READINGS, descriptors, growth, resident
from benchmarks.workload import Greedy

CHEAP = [case for case in CASES if "cartpole-random" in case.name or "sleepy-4" in case.name]


@pytest.mark.parametrize("policy", [None, Greedy])
def test_processes_run_and_end(policy) -> None:
    processes = FreeRunning(2, "CartPole-v1", policy, 20)
    processes.run(3)
    processes.close()
    assert not processes.close.alive


def test_processes_that_cannot_start_are_noticed() -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        FreeRunning(1, "NoSuchEnvironment-v0", None, 20)


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.name)
def test_both_sides_make_as_many_frames(case) -> None:
    frames = {setup()() for setup in case.sides.values()}
    assert len(frames) == 1 and frames.pop() % (2 * STEPS) == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_small_batches_make_as_many_frames_as_large_ones(kind) -> None:
    assert ours(kind, 2, "CartPole-v1", None, 5, 80)()() == ours(kind, 2, "CartPole-v1", None, 20, 20)()()


def test_growth_is_the_slope_of_a_line() -> None:
    seen = iter(range(1000))
    assert growth(lambda pids: 3 * next(seen), 50, 5, list) == pytest.approx(150)
    assert growth(lambda pids: 7, 50, 5, list) == 0


def test_descriptors_and_memory_of_processes_are_counted() -> None:
    before = descriptors([os.getpid()])
    with open(os.devnull):
        assert descriptors([os.getpid()]) == before + 1
    assert resident([os.getpid()] * 2) > 2 << 20


@pytest.mark.parametrize("name", READINGS)
def test_every_reading_works(name, monkeypatch) -> None:
    for constant in ("WARM_UP", "ROUNDS", "BATCHES", "BATCHES_BEFORE", "CYCLES", "CYCLES_BEFORE"):
        monkeypatch.setattr(multiprocess_gauges, constant, 3)
    assert 0 <= READINGS[name]() < 1e6
