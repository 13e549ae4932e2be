"""Real TorchRL samplers, writers and storages work in gleanrl's buffers, with each other and with gleanrl's parts."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("torchrl")

from torchrl.data.replay_buffers import samplers, storages, writers

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gleanrl.testing import check_sampler, check_storage, check_writer

pytestmark = pytest.mark.filterwarnings("default")

SLICES = {"slice_len": 2, "end_key": ("next", "done")}
SAMPLERS = {
    "ours": lambda: None,
    "random": samplers.RandomSampler,
    "without replacement": samplers.SamplerWithoutReplacement,
    "slices": lambda: samplers.SliceSampler(**SLICES),
    "slices without replacement": lambda: samplers.SliceSamplerWithoutReplacement(**SLICES),
}
WRITERS = {
    "ours": lambda: None,
    "ring": writers.RoundRobinWriter,
    "ring of TensorDicts": writers.TensorDictRoundRobinWriter,
}
STORAGES = {
    "ours": lambda: LazyTensorStorage(20),
    "our list": lambda: ListStorage(20),
    "tensors": lambda: storages.LazyTensorStorage(20),
    "files": lambda: storages.LazyMemmapStorage(20),
    "list": lambda: storages.ListStorage(20),
}
LISTS = ("our list", "list")


def rows(first: int, count: int) -> TensorDict:
    t = torch.arange(first, first + count)
    done = (t % 5 == 4)[:, None]
    return TensorDict({"t": t, "next": {"done": done, "reward": t[:, None].float()}}, [count])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_parts_of_both_libraries_combine(sampler, writer, storage):
    if storage in LISTS and sampler.startswith("slices"):
        pytest.skip("slices need columns, there too")
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), writer=WRITERS[writer](), batch_size=4
    )
    assert buffer.extend(rows(0, 15)).reshape(-1).tolist() == [*range(15)]
    buffer.extend(rows(15, 9))
    buffer.add(rows(24, 1)[0])
    assert len(buffer) == 20 and {*buffer[:]["t"].tolist()} == {*range(5, 25)}
    for _ in range(6):
        batch, info = buffer.sample(return_info=True)
        assert {*batch["t"].tolist()} <= {*range(5, 25)} and torch.equal(batch["index"], info["index"])
        assert torch.equal(buffer[batch["index"]]["t"], batch["t"])
        if sampler == "slices":
            assert (batch["t"].view(-1, 2).diff(dim=1) == 1).all()
    state = buffer.state_dict()
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(rows(50, 3))
    buffer.load_state_dict(state)
    assert {*buffer[:]["t"].tolist()} == {*range(5, 25)}
    buffer.add(rows(25, 1)[0])
    assert {*buffer[:]["t"].tolist()} == {*range(6, 26)}, "the ring goes on"
    other = copy.deepcopy(buffer)
    other.extend(rows(40, 2))
    assert {*other.sample()["t"].tolist()} <= {*other[:]["t"].tolist()}
    assert 40 not in buffer[:]["t"].tolist()


@pytest.mark.parametrize(
    "make", [lambda: LazyTensorStorage(20, ndim=2), lambda: storages.LazyTensorStorage(20, ndim=2)]
)
@pytest.mark.parametrize("writer", WRITERS)
def test_torchrl_parts_work_with_two_dimensions(make, writer):
    buffer = TensorDictReplayBuffer(
        storage=make(), sampler=samplers.RandomSampler(), writer=WRITERS[writer](), batch_size=4
    )
    for start in (0, 12):
        buffer.extend(TensorDict({"t": torch.arange(start, start + 12).view(3, 4)}, [3, 4]))
    batch = buffer.sample()
    assert len(buffer) == 21 and batch["index"].shape == (4, 2)
    assert torch.equal(buffer[tuple(batch["index"].unbind(-1))]["t"], batch["t"])


def test_epochs_of_a_torchrl_sampler_end():
    buffer = ReplayBuffer(
        storage=storages.LazyTensorStorage(10),
        sampler=samplers.SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=2,
    )
    buffer.extend(torch.arange(10))
    for _ in range(3):
        assert sorted(torch.cat([*buffer]).tolist()) == [*range(10)]


def test_gleanrl_samplers_work_over_torchrl_storages():
    buffer = TensorDictReplayBuffer(
        storage=storages.LazyTensorStorage(5),
        sampler=PrioritizedSampler(5, 1.0, 1.0, seed=0),
        writer=TensorDictMaxValueWriter(),
        batch_size=4,
    )
    assert buffer.extend(rows(0, 8)).tolist() == [-1, -1, -1, 0, 1, 2, 3, 4]
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.zeros(4)))
    buffer.update_priority(2, 1.0)
    assert {*buffer.sample()["t"].tolist()} >= {5}


def test_torchrl_max_value_writer_works():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5),
        writer=writers.TensorDictMaxValueWriter(rank_key=("next", "reward")),
        batch_size=4,
    )
    buffer.extend(rows(0, 8))
    assert {*buffer[:]["t"].tolist()} == {*range(3, 8)}


def test_torchrl_slices_respect_the_cursor():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=samplers.SliceSampler(slice_len=4, end_key=("next", "done")),
        batch_size=80,
    )
    for first, count in ((0, 15), (15, 12)):
        data = rows(first, count)
        buffer.extend(data.set(("next", "done"), torch.zeros(count, 1, dtype=torch.bool)))
    assert (buffer.sample()["t"].view(-1, 4).diff(dim=1) == 1).all()


def test_existing_records_of_a_torchrl_storage_are_served():
    storage = storages.LazyTensorStorage(6)
    storage.set(range(4), rows(0, 4))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=4)
    assert sorted(buffer.sample()["t"].tolist()) == [0, 1, 2, 3] and buffer.storage is storage
    assert buffer.extend(rows(4, 3)).tolist() == [4, 5, 0]


def test_user_generator_reaches_torchrl_samplers():
    def drawn(seed):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100),
            sampler=samplers.SamplerWithoutReplacement(),
            generator=torch.Generator().manual_seed(seed),
            batch_size=50,
        )
        buffer.extend(torch.arange(100))
        return buffer.sample().tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_torchrl_parts_pass_the_suites():
    assert "stored" in check_sampler(samplers.RandomSampler).passed
    assert check_writer(writers.RoundRobinWriter).passed == ("index", "state")
    assert "ring" in check_storage(lambda: storages.LazyTensorStorage(8)).passed
