"""Draws of a buffer are made at once or ahead, undone, and consistent after an interrupt."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import HERReplayBuffer, SamplesPerInsert
from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.errors import EmptyBufferError, SchemaError
from tests.data.replay_buffers.overtaken import Overtaken
from tests.interrupts import interruptions


def epochs(depth: int | None) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=2, prefetch=depth)
    buffer.extend(torch.arange(12))
    return buffer


def rest(buffer: ReplayBuffer) -> list[int]:
    found: list[int] = []
    while True:
        found += buffer.sample().tolist()
        if buffer.sampler.ran_out:
            return found


def test_another_batch_size_undoes_prefetched_draws():
    buffer = epochs(3)
    seen = buffer.sample().tolist()
    with pytest.warns(UserWarning, match="batch_size=4 differs"):
        seen += buffer.sample(4).tolist()
    assert sorted(seen + rest(buffer)) == [*range(12)]


def test_a_draw_that_fails_leaves_nothing():
    buffer = epochs(2)
    buffer.empty()
    for _ in range(2):
        with pytest.raises(EmptyBufferError):
            buffer.sample()
    buffer.extend(torch.arange(12))
    assert sorted(rest(buffer)) == [*range(12)]


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_an_interrupted_call_loses_one_batch_of_an_epoch_at_most(depth):
    def make() -> tuple[Any, list[int]]:
        buffer = epochs(depth)
        return buffer, buffer.sample().tolist()

    for (buffer, seen), place in interruptions(make, lambda made: made[0].sample(), 60):
        left = rest(buffer)
        assert len({*seen, *left}) == len(seen) + len(left) >= 10, place


def test_a_forked_process_serves_nothing_that_its_parent_drew_ahead():
    def in_child(buffer: ReplayBuffer, check: Callable[[], bool]) -> bool:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if check() else 1)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=20, prefetch=3, seed=0)
    buffer.extend(torch.arange(10_000))
    buffer.sample()
    ahead = [ticket.drawn.slots.tolist() for ticket in buffer._draws.prefetcher]
    assert len(ahead) == 3
    assert in_child(buffer, lambda: all(buffer.sample().tolist() not in ahead for _ in range(3)))
    epochs = ReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SamplerWithoutReplacement(seed=0), batch_size=10, prefetch=2
    )
    epochs.extend(torch.arange(60))
    first = epochs.sample().tolist()

    def rest() -> bool:
        return sorted(first + torch.cat([epochs.sample() for _ in range(5)]).tolist()) == list(range(60))

    assert in_child(epochs, rest), "the epoch goes on where it stood"
    assert rest()


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("where", ["transform", "collate", "fetch"])
def test_permits_of_a_failed_batch_are_returned(where: str, depth: int | None) -> None:
    failing = True

    def fail(data: Any) -> Any:
        if failing:
            raise RuntimeError("not today")
        return data

    class Failing(LazyTensorStorage):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
            return fail(super().fetch(slots, paths)) if where == "fetch" else super().fetch(slots, paths)

    buffer = ReplayBuffer(
        storage=Failing(12),
        batch_size=2,
        prefetch=depth,
        collate_fn=fail if where == "collate" else None,
        transform=fail if where == "transform" else None,
        rate_limiter=SamplesPerInsert(1.0, min_size=4, tolerance=2, timeout_s=0.0),
    )
    failing = False
    buffer.extend(torch.arange(4))
    failing = True
    for _ in range(4):
        with pytest.raises(RuntimeError, match="not today"):
            buffer.sample()
        found = buffer.stats()
        assert found.batches_sampled == 0
        assert found.rate_limiter is not None and found.rate_limiter.sampled == 0
    failing = False
    if where != "fetch" or depth is None:  # otherwise the next batch may have been fetched already
        assert buffer.sample().shape == (2,)


def test_a_batch_that_is_fetched_again_takes_the_memory_of_the_first_one() -> None:
    places = list[int]()

    class Noting(Overtaken):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
            found = super().fetch(slots, paths)
            places.append(found.data_ptr())
            return found

    rows = torch.ones(8, 1 << 18)  # 1 MB per row
    buffer = ReplayBuffer(storage=Noting(8), batch_size=2)
    buffer.extend(rows)
    buffer.storage.act = lambda: buffer.extend(2 * rows)
    assert (buffer.sample() == 2).all()
    first, again = places
    assert first == again


# Ends that are written through live views


def one_trajectory(count: int = 40) -> TensorDict:
    """Return steps of one unfinished trajectory, with their number as achieved goal."""
    t, flag = torch.arange(count), torch.zeros(count, 1, dtype=torch.bool)
    after = {
        "done": flag,
        "terminated": flag.clone(),
        "truncated": flag.clone(),
        "reward": torch.ones(count, 1),
    }
    goals = {"achieved_goal": t.float()[:, None], "desired_goal": torch.full((count, 1), -1.0)}
    ids = {"collector": {"traj_ids": torch.zeros(count, dtype=torch.int64)}}
    return TensorDict({"t": t, **goals, **ids, "next": after}, [count])


SLICERS: dict[str, Callable[[], Any]] = {
    "slices": lambda: SliceSampler(slice_len=4, seed=0),
    "padded": lambda: SliceSampler(slice_len=4, seed=0, span=True, pad=True),
    "epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4, seed=0),
    "priorities": lambda: PrioritizedSliceSampler(40, 0.7, 0.5, slice_len=4, seed=0),
}
STORAGES: dict[str, Callable[[], Any]] = {
    "lazy": lambda: LazyTensorStorage(40),
    "files": lambda: LazyMemmapStorage(40),
    "given": lambda: TensorStorage(one_trajectory()),
}


def sliced(kind: str, storage: str = "lazy", make: Any = ReplayBuffer, **options: Any) -> Any:
    buffer = make(storage=STORAGES[storage](), sampler=SLICERS[kind](), batch_size=8, **options)
    if storage != "given":
        buffer.extend(one_trajectory())
    return buffer


def end_by_flag(buffer: Any) -> None:
    buffer[:]["next", "done"][9] = True


def end_by_id(buffer: Any) -> None:
    buffer["collector", "traj_ids"][10:] += 1


def crossings(buffer: Any, batches: int = 40) -> int:
    """Return the number of slices that continue from step 9 to step 10 without an end in between."""
    found = 0
    for _ in range(batches):
        batch, info = buffer.sample(return_info=True)
        last = info["next", "truncated"].flatten()
        found += int(((batch["t"][:-1] == 9) & (batch["t"][1:] == 10) & ~last[:-1]).sum())
    return found


@pytest.mark.parametrize("write", [end_by_flag, end_by_id])
@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["slices", "epochs", "priorities"])
def test_slices_end_at_a_flag_written_through_a_live_view(kind, storage, depth, write):
    buffer = sliced(kind, storage, prefetch=depth)
    for _ in range(3):
        buffer.sample()
    write(buffer)
    assert crossings(buffer) == 0


@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_padded_slices_end_at_a_flag_written_through_a_live_view(make):
    buffer = sliced("padded", make=make)
    buffer.sample()
    end_by_flag(buffer)
    for _ in range(40):
        batch, info = buffer.sample(return_info=True)
        t = batch["t"].view(-1, 4)
        assert not bool(((t <= 9).any(1) & (t > 9).any(1)).any())


def test_slices_of_a_buffer_that_processes_share_end_at_a_flag_of_a_live_view():
    buffer = sliced("slices", shared=True)
    buffer.sample()
    end_by_flag(buffer)
    assert crossings(buffer) == 0


def test_slices_of_streams_end_at_a_flag_written_through_a_live_view():
    buffer = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), sampler=SLICERS["slices"](), batch_size=8)
    buffer.extend(one_trajectory().reshape(2, 20))
    buffer.sample()
    buffer[:]["next", "done"][0, 9] = True
    assert crossings(buffer) == 0


def test_sampler_without_a_buffer_ends_slices_at_a_flag_of_a_live_view():
    storage, sampler = STORAGES["lazy"](), SLICERS["slices"]()
    storage.set(range(40), one_trajectory())
    sampler.sample(storage, 8)
    storage.get(slice(None))["next", "done"][9] = True
    for _ in range(40):
        index = sampler.sample(storage, 8)[0].view(-1, 4)
        assert not bool(((index[:, :-1] == 9) & (index[:, 1:] == 10)).any())


@pytest.mark.parametrize("depth", [None, 2])
def test_an_epoch_serves_each_trajectory_once_though_a_live_view_ends_some_within(depth):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SLICERS["epochs"](), batch_size=8, prefetch=depth
    )
    data = one_trajectory()
    data["next", "done"][7::8] = True  # five trajectories of eight steps
    buffer.extend(data)
    seen = list[int]()
    for batch in buffer:
        seen += (batch["t"].view(-1, 4)[:, 0] // 8).tolist()
        buffer[:]["next", "done"][3::8] = True  # ten trajectories of four steps, in the middle of the epoch
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert sorted(t for batch in buffer for t in batch["t"].tolist()) == [*range(40)]


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_goals_stay_before_a_flag_written_through_a_live_view(strategy, depth):
    buffer = HERReplayBuffer(
        lambda rows: rows["desired_goal"],
        her_ratio=1.0,
        strategy=strategy,
        storage=LazyTensorStorage(40),
        batch_size=8,
        prefetch=depth,
        seed=0,
    )
    buffer.extend(one_trajectory())
    buffer.sample()
    buffer.storage.get(slice(None))["next", "done"][9] = True
    for _ in range(40):
        batch = buffer.sample()
        assert torch.equal(batch["t"] <= 9, batch["desired_goal"][:, 0] <= 9)


class Flipping(SliceSampler):
    """Writes an end into the first slice of each draw."""

    view: Any = None

    def is_unbroken(self, storage, draw):
        self.view[draw.slots[0]] = True
        return super().is_unbroken(storage, draw)


def test_slices_into_which_ends_are_written_at_each_draw_raise_after_three():
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), sampler=Flipping(slice_len=4, seed=0), batch_size=8)
    buffer.extend(one_trajectory())
    buffer.sampler.view = buffer[:]["next", "done"]
    with pytest.raises(SchemaError, match="3 draws in a row"):
        buffer.sample()
    assert buffer.stats().batches_sampled == 0


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("kind", SLICERS)
def test_views_that_nothing_is_written_through_leave_the_sequence_of_draws(kind, depth):
    left, right = sliced(kind, prefetch=depth), sliced(kind, prefetch=depth)
    for step in range(12):
        if step % 4 == 1:
            assert len(right[:]) == 40
        assert torch.equal(left.sample()["t"], right.sample()["t"])
