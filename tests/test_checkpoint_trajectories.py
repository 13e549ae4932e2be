"""Trajectories that were unfinished when a whole training was saved resume or end after the load."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gleanrl import Checkpoint
from gleanrl._state.rng import GENERATORS
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv
from gleanrl.envs.transforms import MultiStepTransform


@pytest.fixture(autouse=True)
def as_before() -> Any:
    with GENERATORS.preserved():
        yield


def cart() -> GymEnv:
    """Return an environment whose episodes end in their seventh step. No policy falls over before that step."""
    return GymEnv("CartPole-v1", max_episode_steps=7)


# In both environments five batches end in mid-episode: a multiple of 15 steps up to 75 is no multiple of 7.
COLLECTORS = {
    "workers, together": lambda: MultiSyncDataCollector([cart] * 2, frames_per_batch=30, total_frames=-1),
    "workers, apart": lambda: MultiaSyncDataCollector([cart] * 2, frames_per_batch=30, total_frames=-1),
    "environments": lambda: SyncDataCollector(ParallelEnv(2, cart), frames_per_batch=30, total_frames=-1),
}


def unfinished(buffer: ReplayBuffer) -> set[int]:
    """Return the ids of stored trajectories whose last stored step is not done."""
    rows = buffer[:]
    last = dict(
        zip(rows["collector", "traj_ids"].tolist(), rows["next", "done"].flatten().tolist(), strict=True)
    )
    return {number for number, done in last.items() if not done}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*trajectories end where they were saved")
@pytest.mark.parametrize("kind", COLLECTORS)
def test_load_marks_unresumable_trajectories_in_the_buffers(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[Any, ReplayBuffer, Checkpoint]:
        collector: Any = COLLECTORS[kind]()
        buffer: ReplayBuffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=4)
        return collector, buffer, Checkpoint(collector=collector, buffer=buffer)

    collector, buffer, checkpoint = made()
    try:
        for _ in range(5):
            buffer.extend(collector.next().reshape(-1))
        checkpoint.save(tmp_path)
        expected, rows = unfinished(buffer), buffer[:].clone()
        assert 1 <= len(expected) <= 2
    finally:
        collector.shutdown()
    collector, buffer, checkpoint = made()
    try:
        checkpoint.load(tmp_path)
        assert not unfinished(buffer) and collector.stats().cut == len(expected)
        marked = (buffer[:]["next", "truncated"] != rows["next", "truncated"]).flatten()
        assert set(rows[marked]["collector", "traj_ids"].tolist()) == expected and marked.sum() == len(
            expected
        )
        assert (buffer[:].exclude("next") == rows.exclude("next")).all() and buffer.write_count == len(rows)
        later = collector.next()["collector", "traj_ids"]
        assert not set(later.flatten().tolist()) & set(rows["collector", "traj_ids"].tolist())
    finally:
        collector.shutdown()


@pytest.mark.filterwarnings("ignore:.*trajectories end where they were saved")
@pytest.mark.parametrize(("num_saved", "num_going_on"), [(3, 2), (1, 2), (2, 1)])
def test_load_into_another_number_of_environments_ends_trajectories(
    tmp_path: Path, num_saved: int, num_going_on: int
) -> None:
    def made(count: int) -> tuple[Any, ReplayBuffer, Checkpoint]:
        alone = num_saved == count == 1  # one environment can load a member's state, but not a batch's
        env: Any = GymEnv("CartPole-v1") if alone else SerialEnv(count, lambda: GymEnv("CartPole-v1"))
        collector: Any = SyncDataCollector(env, frames_per_batch=6, total_frames=60)
        buffer: ReplayBuffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        return collector, buffer, Checkpoint(collector=collector, buffer=buffer)

    collector, buffer, checkpoint = made(num_saved)
    buffer.extend(collector.next().reshape(-1))
    checkpoint.save(tmp_path)
    expected = unfinished(buffer)
    assert len(expected) == num_saved
    later, buffer, checkpoint = made(num_going_on)
    checkpoint.load(tmp_path)
    assert not unfinished(buffer) and later.stats().cut == num_saved
    assert min(later.next()["collector", "traj_ids"].flatten().tolist()) >= num_saved


def test_load_into_used_parts_continues_as_into_new_parts(tmp_path: Path) -> None:
    def made() -> tuple[Any, ReplayBuffer, Checkpoint]:
        collector = SyncDataCollector(cart(), frames_per_batch=30, total_frames=-1)
        collector.set_seed(3)
        buffer: ReplayBuffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(500), transform=MultiStepTransform(3, 0.9)
        )
        return collector, buffer, Checkpoint(collector=collector, buffer=buffer)

    def go_on(collector: Any, buffer: ReplayBuffer, batches: int) -> Any:
        for _ in range(batches):
            buffer.extend(collector.next())
        return buffer[:].exclude("_generation")

    collector, buffer, checkpoint = made()
    go_on(collector, buffer, 1)
    checkpoint.save(tmp_path)
    wanted = go_on(collector, buffer, 2)
    checkpoint.load(tmp_path)
    assert (go_on(collector, buffer, 2) == wanted).all()
    collector, buffer, checkpoint = made()
    go_on(collector, buffer, 4)
    checkpoint.load(tmp_path)
    assert (go_on(collector, buffer, 2) == wanted).all()
    # A collector that is restored without its buffer gives later trajectories new ids: the buffer keeps its rows.
    alone = Checkpoint(collector=collector)
    alone.save(tmp_path / "alone")
    ids = set(collector.next()["collector", "traj_ids"].tolist())
    alone.load(tmp_path / "alone")
    assert not ids & set(collector.next()["collector", "traj_ids"].tolist())


def test_load_marks_no_trajectories_that_continue(tmp_path: Path) -> None:
    """The ids of a second collector may be equal, so the buffer can't tell which collector made its rows."""
    for _ in range(2):
        long = partial(GymEnv, "Pendulum-v1")  # the batches end before its first episode does
        going = SyncDataCollector(long(), frames_per_batch=5)
        beside = SyncDataCollector(ParallelEnv(2, long), frames_per_batch=30)
        buffer: ReplayBuffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=4)
        checkpoint = Checkpoint(going=going, beside=beside, buffer=buffer)
        try:
            if not any(tmp_path.iterdir()):
                buffer.extend(going.next())
                beside.next()
                checkpoint.save(tmp_path)
            else:
                told = pytest.warns(
                    UserWarning, match=r"trajectories .* \[0\].* call end_trajectories\(ids\)"
                )
                with pytest.warns(UserWarning, match="other processes"), told:
                    checkpoint.load(tmp_path)
                assert unfinished(buffer) == {0} and going.next()["collector", "traj_ids"][0] == 0
                buffer.end_trajectories([0])
                assert not unfinished(buffer)
        finally:
            beside.shutdown()
