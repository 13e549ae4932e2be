"""The same seed gives the same trajectories for any distribution of the environments over workers."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from tensordict.nn import TensorDictModule

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv
from tests.chaos.drills import SHARE, scaled

pytestmark = pytest.mark.timeout(1800)

ENVS, STEPS, SEED = 12, 20, 5
BATCHES = max(3, scaled(60))
CASES = [(kind, workers) for kind in ("sync", "async") for workers in (1, 2, 3, 4)]


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def several(count: int) -> SerialEnv:
    return SerialEnv(count, cartpole)


def leaning() -> TensorDictModule:
    """Return a policy that pushes in the direction of the falling pole."""
    return TensorDictModule(lambda x: (x[..., 2] > 0).long(), in_keys=["observation"], out_keys=["action"])


def collector_of(kind: str, workers: int) -> Any:
    policy, frames = leaning(), ENVS * STEPS
    if kind in ("serial", "parallel"):
        env = several(ENVS) if kind == "serial" else ParallelEnv(ENVS // 3, cartpole)
        return SyncDataCollector(env, policy, frames_per_batch=env.batch_size.numel() * STEPS)
    makers = [partial(several, ENVS // workers)] * workers
    if kind == "sync":
        return MultiSyncDataCollector(makers, policy, frames_per_batch=frames, cat_results=0)
    return MultiaSyncDataCollector(makers, policy, frames_per_batch=frames // workers)


def trajectories(kind: str, workers: int = 1) -> set[str]:
    """Return the trajectories, without ids, that end within the first `BATCHES` batches of their worker."""
    collector, rows, taken = collector_of(kind, workers), defaultdict(list), defaultdict(int)
    collector.set_seed(SEED)
    batches = iter(collector)
    while not taken or min(taken.values()) < BATCHES or len(taken) < (workers if kind == "async" else 1):
        batch = next(batches)
        ids = batch["collector", "traj_ids"]
        worker = int(ids[0, 0]) % workers if kind == "async" else 0
        taken[worker] += 1
        if taken[worker] > BATCHES:
            continue
        columns = [ids, batch["observation"], batch["action"], batch["next", "done"]]
        for numbers, *parts in zip(*(column.flatten(0, 1).tolist() for column in columns), strict=True):
            rows[numbers].append(parts)
    collector.shutdown()
    return {sha256(repr(steps).encode()).hexdigest() for steps in rows.values() if steps[-1][-1] == [True]}


@pytest.fixture(scope="module")
def expected() -> set[str]:
    found = trajectories("serial")
    assert len(found) > BATCHES, "each environment has trajectories of its own"
    return found


@pytest.mark.parametrize(("kind", "workers"), CASES if SHARE >= 1 else [("sync", 3), ("async", 2)])
def test_trajectories_are_the_same_for_any_number_of_workers(
    kind: str, workers: int, expected: set[str]
) -> None:
    assert trajectories(kind, workers) == expected


@pytest.mark.skipif(SHARE < 1, reason="in full drills only")
def test_environments_in_processes_give_the_same_trajectories(expected: set[str]) -> None:
    """It has a third of the environments, with the first seeds."""
    assert trajectories("parallel") < expected


def test_another_seed_gives_other_trajectories(expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.test_elastic.SEED", 1000)
    assert not trajectories("serial") & expected
