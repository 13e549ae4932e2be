"""Checkpoints load into storages of another size, in agreement with the original records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ConsumingSampler,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from gleanrl.errors import SchemaError

SIZE = 40
FORMS = (
    TensorStorageCheckpointer,
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    H5StorageCheckpointer,
)


def records(start: int, count: int) -> TensorDict:
    """Return steps of trajectories of length 7."""
    steps = torch.arange(start, start + count)
    done = (steps % 7 == 6)[:, None]
    following = {"observation": (steps + 1.0)[:, None], "done": done, "reward": steps.float()[:, None]}
    return TensorDict(
        {"observation": steps.float()[:, None], "episode": steps // 7, "next": following}, [count]
    )


def buffer(size: int, kind: Callable[..., Any] = LazyTensorStorage, **parts: Any) -> Any:
    return TensorDictReplayBuffer(storage=kind(size), batch_size=5, **parts)


def steps_of(data: Any) -> list[int]:
    return [int(step) for step in data["observation"].reshape(-1)]


def held(mine: Any) -> list[int]:
    return [] if not len(mine) else steps_of(mine[:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("count", [12, SIZE, 55])
def test_the_oldest_record_comes_first(tmp_path: Path, form: Any, kind: Any, count: int) -> None:
    saved = buffer(SIZE)
    saved.storage.checkpointer = form()
    for start in range(0, count, 5):  # the last write wraps
        saved.extend(records(start, min(5, count - start)))
    saved.dumps(tmp_path)
    came = list(range(count))[-SIZE:]
    for size in {len(came), 47, 1000} - {SIZE}:
        for filled in (0, 3):
            other = buffer(size, kind)
            other.extend(records(500, filled)) if filled else None
            before = other.storage.generation(torch.arange(filled))
            other.loads(tmp_path)
            assert held(other) == came and other.writer.cursor == len(came) % size
            assert (other.storage.generation(torch.arange(filled)) > before).all()
            other.extend(records(count, 11))
            ring = dict(enumerate(came))
            ring.update({(len(came) + i) % size: count + i for i in range(11)})
            assert held(other) == [ring[slot] for slot in sorted(ring)]
            other.storage.check_valid()


def test_load_of_too_many_records_names_the_sizes(tmp_path: Path) -> None:
    saved, small = buffer(SIZE), buffer(11)
    saved.extend(records(0, 12))
    saved.dumps(tmp_path)
    small.extend(records(3, 4))
    with pytest.raises(
        SchemaError, match="12 records, of a storage with max_size=40.* room for 11: .* of 12 or more"
    ):
        small.loads(tmp_path)
    assert held(small) == [3, 4, 5, 6]
    flat = TensorDictReplayBuffer(storage=LazyTensorStorage(50, ndim=2))
    with pytest.raises(SchemaError, match="ndim=1, this storage 2"):
        flat.loads(tmp_path)


@pytest.mark.parametrize("size", [40, 48, 80])
def test_streams_load_into_another_size(tmp_path: Path, size: int) -> None:
    saved, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(n, ndim=2), dim_extend=0) for n in (40, size)
    )
    data = TensorDict({"a": torch.arange(60).reshape(15, 4)}, [15, 4])
    saved.extend(data[:9])
    saved.extend(data[9:])
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    assert sorted(other[:]["a"].reshape(-1).tolist()) == list(range(20, 60))
    if size != 40:
        assert other[:]["a"].tolist() == data[5:]["a"].tolist() and other.storage.end == 10 % (size // 4)


@pytest.mark.parametrize("count", [12, 55])
def test_lists_load_into_another_size(tmp_path: Path, count: int) -> None:
    saved, other = (ReplayBuffer(storage=ListStorage(size)) for size in (SIZE, 100))
    saved.extend(torch.arange(30))
    saved.extend(torch.arange(30, count)) if count > 30 else None
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    assert [int(x) for x in other[:]] == list(range(max(count, 30)))[-SIZE:]
    unbounded = ReplayBuffer(storage=ListStorage())
    unbounded.loads(tmp_path)
    assert [int(x) for x in unbounded[:]] == list(range(max(count, 30)))[-SIZE:]


@pytest.mark.parametrize("count", [30, 55])
@pytest.mark.parametrize("filled", [0, 9])
def test_priorities_go_with_their_records(tmp_path: Path, count: int, filled: int) -> None:
    def made(size: int) -> Any:
        sampler = PrioritizedSampler(size, 1.0, 1.0, eps=0.0)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=300, sampler=sampler)

    saved, other = made(SIZE), made(90)
    for start in range(0, count, 5):
        saved.extend(records(start, 5))
    wanted = {count - 1: 5.0, count - 20: 2.5}
    priority = torch.tensor([wanted.get(step, 0.0) for step in held(saved)])
    saved.update_priority(torch.arange(len(saved)), priority)
    saved.dumps(tmp_path)
    other.extend(records(700, filled)) if filled else None
    other.loads(tmp_path)
    assert held(other) == list(range(count))[-SIZE:]
    drawn = other.sample()
    assert set(steps_of(drawn)) == set(wanted)
    share = sum(step == count - 1 for step in steps_of(drawn)) / 300
    assert 0.55 < share < 0.8  # 2 of 3
    other.extend(records(count, 1))  # the new record gets the largest priority
    assert count in steps_of(other.sample())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [30, 55])
def test_load_into_a_larger_storage_continues_the_epoch(tmp_path: Path, count: int, shuffle: bool) -> None:
    def made(size: int) -> Any:
        return buffer(size, sampler=SamplerWithoutReplacement(shuffle=shuffle))

    saved, other = made(SIZE), made(90)
    for start in range(0, count, 5):
        saved.extend(records(start, 5))
    drawn = [step for _ in range(3) for step in steps_of(saved.sample())]
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    rest = [step for _ in range(len(saved) // 5 - 3) for step in steps_of(other.sample())]
    assert rest == [step for _ in range(len(saved) // 5 - 3) for step in steps_of(saved.sample())]
    assert sorted(drawn + rest) == list(range(count))[-SIZE:]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SliceSampler(num_slices=8, traj_key="episode", strict_length=False),
        lambda: SliceSamplerWithoutReplacement(num_slices=1, traj_key="episode", strict_length=False),
        lambda: PrioritizedSliceSampler(90, 0.5, 0.5, num_slices=8, traj_key="episode", strict_length=False),
    ],
)
def test_slices_are_of_whole_trajectories(tmp_path: Path, sampler: Callable[[], Any]) -> None:
    saved, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=40, sampler=sampler())
        for size in (SIZE, 90)
    )
    for start in range(0, 63, 9):
        saved.extend(records(start, 9))
    saved.sample()
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    seen = set()
    for _ in range(12):
        steps = steps_of(other.sample())
        jumps = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b != a + 1]
        assert all(a // 7 != b // 7 or b <= a for a, b in jumps) and set(steps) <= set(range(23, 63))
        seen |= set(steps)
    assert seen == set(range(23, 63))


def test_the_best_records_stay_the_best(tmp_path: Path) -> None:
    def made(size: int) -> Any:
        return buffer(size, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))

    saved, other = made(10), made(12)
    saved.extend(records(0, 25)[torch.randperm(25)])
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    assert sorted(held(other)) == list(range(15, 25))
    other.extend(records(5, 10))
    assert sorted(held(other)) == list(range(13, 25))
    other.writer.check_valid()


def test_parts_that_need_the_same_size_are_named(tmp_path: Path) -> None:
    def consuming(size: int) -> Any:
        return buffer(size, sampler=ConsumingSampler(2))

    saved = consuming(SIZE)
    saved.extend(records(0, 30))
    saved.sample()
    saved.dumps(tmp_path / "short")
    consuming(50).loads(tmp_path / "short")
    saved.extend(records(30, 15))
    saved.dumps(tmp_path / "around")
    with pytest.raises(SchemaError, match="a ConsumingSampler may refer.*same max_size"):
        consuming(50).loads(tmp_path / "around")

    ahead = buffer(SIZE, prefetch=2)
    ahead.extend(records(0, 55))
    ahead.sample()
    ahead.dumps(tmp_path / "ahead")
    with pytest.raises(SchemaError, match="batches drawn ahead.*same max_size"):
        buffer(50, prefetch=2).loads(tmp_path / "ahead")
