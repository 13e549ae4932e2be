"""The last stored step of abandoned trajectories is marked as truncated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.data.replay_buffers import truncate


def steps(ids: list[int], ends: tuple[int, ...] = ()) -> TensorDict:
    """Return steps of these trajectories; the steps at the positions `ends` are done."""
    done = torch.zeros(len(ids), 1, dtype=torch.bool)
    done[list(ends)] = True
    after = {"done": done, "truncated": torch.zeros_like(done), "terminated": done.clone()}
    after["agents"] = TensorDict({"done": done.clone()}, [len(ids)])
    return TensorDict(
        {"n": torch.arange(len(ids)), "collector": {"traj_ids": torch.tensor(ids)}, "next": after}, [len(ids)]
    )


def cut(buffer: Any) -> list[int]:
    """Return the positions of truncated steps, after checking that done is set and terminated is unchanged."""
    after = buffer[:]["next"]
    assert (after["done"] == (after["truncated"] | after["terminated"])).all()
    assert (after["agents", "done"] == after["done"]).all()
    return after["truncated"].reshape(-1).nonzero().flatten().tolist()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("rows", [1 << 20, 3])
def test_newest_step_of_each_trajectory_is_marked(
    storage: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncate, "_ROWS", rows)
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    buffer.extend(steps([0, 1, 0, 1, 0, 2, 1, 2], ends=(4,)))
    buffer.end_trajectories([0, 1, 7])
    assert cut(buffer) == [6]
    buffer.end_trajectories([1])
    assert cut(buffer) == [6] and buffer.write_count == 8


def test_a_ring_is_looked_through_by_age() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=4)
    buffer.extend(steps([0, 1, 2, 3, 4, 5]))
    buffer.extend(steps([5, 4, 4]))  # the slots are now 5 4 4 | 3 4 5
    buffer.end_trajectories([4, 5, 0])
    assert cut(buffer) == [0, 2]


def test_dimensions_of_workers_are_looked_through_step_by_step() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
    both = torch.stack([steps([0, 0, 2]), steps([1, 1, 1])])
    buffer.extend(both)
    buffer.end_trajectories([1, 2])
    assert cut(buffer) == [2, 5]


def test_slices_end_at_marked_steps_and_priorities_stay() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=SliceSampler(slice_len=2, end_key=("next", "done")),
        batch_size=4,
    )
    ranked = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 1.0, 1.0), batch_size=4
    )
    both = ReplayBufferEnsemble(buffer, ranked, batch_size=4)
    for part in (buffer, ranked):
        part.extend(steps([0, 0, 0, 3, 3]))
    ranked.update_priority(torch.arange(5), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
    both.end_trajectories([0])
    assert cut(buffer) == cut(ranked) == [2]
    places = torch.stack([buffer.sample()["n"].view(-1, 2)[:, 0] for _ in range(20)])
    assert 2 not in places and {0, 1, 3} == set(places.flatten().tolist())
    assert (ranked.sample()["n"] == 2).all()


def test_priorities_stay_if_many_trajectories_end():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1100), sampler=PrioritizedSampler(1100, 1.0, 1.0), batch_size=4
    )
    buffer.extend(steps([*range(1100)]))
    buffer.update_priority(torch.arange(1100), (torch.arange(1100) == 2).float())
    buffer.end_trajectories(range(1100))
    assert (buffer.sample()["n"] == 2).all()


def test_records_of_a_data_set_are_unchanged():
    records = steps([0, 0, 1])
    dataset, growing = (
        TensorDictReplayBuffer(storage=TensorStorage(records.clone()), writer=writer, batch_size=2)
        for writer in (ImmutableDatasetWriter(), None)
    )
    ReplayBufferEnsemble(dataset, growing, batch_size=4).end_trajectories([0, 1])
    assert (dataset[:] == records).all() and cut(growing) == [1, 2]


@pytest.mark.parametrize("records", [1 << 10, 4, 1])
def test_records_in_a_list_are_looked_through_by_age(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncate, "_RECORDS", records)
    buffer = TensorDictReplayBuffer(storage=ListStorage(6), batch_size=4)
    buffer.end_trajectories([0])  # the storage is still empty
    buffer.extend(steps([0, 1, 2, 3, 4, 5]))
    last = steps([5, 4, 4], ends=(0,))
    buffer.extend([*last.unbind(0)])  # the slots are now 5 4 4 | 3 4 5
    buffer.end_trajectories([4, 5, 0])
    assert cut(buffer) == [2] and not last["next", "truncated"].any()


def test_other_objects_in_a_list_are_unchanged() -> None:
    buffer = TensorDictReplayBuffer(storage=ListStorage(6), batch_size=4)
    for record in (steps([0, 0]), steps([0]).exclude("collector"), steps([7]).exclude("next")):
        buffer.extend([*record.unbind(0)])
    buffer.storage.set(1, "text")
    before = [*buffer.storage.get([0, 1, 2, 3])]
    buffer.end_trajectories([0, 7])
    assert buffer.storage.get(0)["next", "truncated"].all()
    assert all(one is other for one, other in zip(before[1:], buffer.storage.get([1, 2, 3]), strict=True))


def test_records_in_a_list_are_fetched_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncate, "_RECORDS", 4)
    fetched: list[int] = []

    class Counting(ListStorage):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> list[Any]:
            fetched.append(len(slots))
            return super().fetch(slots, paths)

    buffer = TensorDictReplayBuffer(storage=Counting(10), batch_size=4)
    several = [steps([0, 1, 1]), steps([2]), steps([2, 0])]
    buffer.extend([*steps([9] * 5).unbind(0), *several])
    buffer.end_trajectories([1, 2])
    assert fetched == [4, 1, 1]  # two trajectories end within the newest four records
    after = [buffer.storage.get(slot)["next", "truncated"].flatten().tolist() for slot in (5, 6, 7)]
    assert after == [[False, False, True], [False], [True, False]]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_of_a_record_of_several_steps_the_last_one_is_marked(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    records = [
        steps([0, 0, 1, 1]),
        steps([1, 1, 2, 2]),
        steps([2, 3, 3, 3], ends=(0,)),
        steps([4, 4, -1, -1]),
    ]
    for record in records:
        record["collector", "mask"] = record["collector", "traj_ids"] >= 0
    records[3]["collector", "traj_ids"][2:] = 0  # padding, as `split_trajectories` leaves it
    buffer.extend(torch.stack(records) if storage is LazyTensorStorage else records)
    buffer.end_trajectories([0, 1, 2, 3, 4, 7])
    assert cut(buffer) == [1, 5, 11, 13]


def test_records_of_a_max_value_writer_are_unchanged() -> None:
    writer = TensorDictMaxValueWriter(rank_key="n")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=writer, batch_size=4)
    for _ in range(2):
        buffer.extend(steps([0] * 8))
    buffer.end_trajectories([0])
    assert not any(row["next", "truncated"].any() for row in buffer[:])


def test_without_ids_or_flags_nothing_is_marked() -> None:
    for left in ("collector", "next"):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        buffer.extend(steps([0, 0]).exclude(left))
        buffer.end_trajectories([0])
        assert (buffer.generation(torch.arange(2)) == 1).all()
