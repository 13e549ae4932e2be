"""Pickles and deep copies of buffers have the same records and the same future samples, and share nothing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from gleanrl.errors import UnsupportedError


def through_torch(buffer: ReplayBuffer) -> ReplayBuffer:
    file = io.BytesIO()
    torch.save(buffer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer)), through_torch]


def records(start: int, count: int) -> TensorDict:
    x = torch.arange(start, start + count)
    return TensorDict({"x": x, "next": {"y": x.float().unsqueeze(-1)}}, [count])


def same(a: Any, b: Any) -> bool:
    return bool((torch.as_tensor(a["x"]) == torch.as_tensor(b["x"])).all())


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("written", [0, 3, 11])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_copy_continues_independently_with_the_same_samples(
    storage: Any, sampler: Any, written: int, duplicate: Any
) -> None:
    buffer = ReplayBuffer(storage=storage(7), sampler=sampler(), batch_size=2)
    for start in range(written):
        buffer.add(records(start, 1)[0])
    if written:
        buffer.sample()
    other = duplicate(buffer)
    assert len(other) == len(buffer) == min(written, 7)
    for made in (buffer, other):
        made.add(records(100, 1)[0])  # written to the same slot in both
    for _ in range(5):
        assert same(buffer.sample(), other.sample())
    other.add(records(200, 1)[0])
    assert 200 not in [int(x) for x in buffer[:]["x"]]


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_copy_counts_its_own_generations(storage: Any, duplicate: Any) -> None:
    buffer = ReplayBuffer(storage=storage(3))
    buffer.extend([records(0, 1)[0], records(1, 1)[0]])
    other = duplicate(buffer)
    slots = torch.arange(3)
    before, copied = buffer.storage.generation(slots), other.storage.generation(slots)
    other.extend([records(start, 1)[0] for start in range(4)])
    assert torch.equal(buffer.storage.generation(slots), before)
    assert (other.storage.generation(slots) > copied).all()


class Meanwhile:
    """A transform that samples a buffer during its copy, as another thread may do. It returns batches unchanged."""

    buffer: ReplayBuffer | None = None

    def __call__(self, batch: Any) -> Any:
        return batch

    def __getstate__(self) -> dict[str, Any]:
        assert self.buffer is not None
        for _ in range(3):
            self.buffer.sample()
        return {"asked": True}


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch"])
def test_a_buffer_that_is_sampled_while_it_is_copied(duplicate: Any) -> None:
    collate = Meanwhile()
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), collate_fn=collate, batch_size=4, prefetch=2)
    collate.buffer = buffer
    buffer.extend(torch.arange(20))
    buffer.sample()
    other = duplicate(buffer)
    assert other.state_dict().keys() == buffer.state_dict().keys()
    assert set(torch.cat([other.sample() for _ in range(9)]).tolist()) <= {*range(20)}


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_copy_leaves_out_batches_prefetched_before_a_clear(storage: Any, duplicate: Any) -> None:
    buffer = ReplayBuffer(storage=storage(7), batch_size=2, prefetch=2)
    buffer.extend([records(start, 1)[0] for start in range(7)])
    buffer.sample()
    buffer.storage.clear()  # without the buffer's knowledge
    other = duplicate(buffer)
    other.extend([records(100, 1)[0]])
    assert set(other.sample()["x"].flatten().tolist()) == {100}


class OnTop(RandomSampler):
    """A user's sampler derived from the library's."""

    def sample(self, storage: Any, batch_size: int) -> Any:
        return super().sample(storage, batch_size)


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch"])
def test_a_sampler_that_builds_on_another_one(duplicate: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=OnTop(), batch_size=4)
    buffer.extend(torch.arange(20))
    buffer.sample()
    assert torch.equal(duplicate(buffer).sample(), buffer.sample())


def test_copies_of_streams_and_wrapped_tensors_are_independent() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(torch.arange(21).view(3, 7))
    assert torch.equal(copy.deepcopy(buffer)[:], buffer[:])
    whole = ReplayBuffer(storage=TensorStorage(torch.arange(5)))
    other = pickle.loads(pickle.dumps(whole))
    whole[0] = torch.tensor(9)
    assert other[:].tolist() == [0, 1, 2, 3, 4]


def test_a_part_alone_and_its_owner() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(torch.arange(3))
    storage = copy.deepcopy(buffer.storage)
    assert storage.owner is None and storage.get([0, 1, 2]).tolist() == [0, 1, 2]
    other = copy.deepcopy(buffer)
    assert other.storage.owner is other and buffer.storage.owner is buffer


def test_storage_with_a_scratch_dir_cannot_be_copied(tmp_path: Any) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "records"))
    buffer.extend(torch.arange(3))
    with pytest.raises(UnsupportedError, match="scratch_dir"):
        copy.deepcopy(buffer)


class Scale(torch.nn.Module):
    """Multiplies records on read; its factor is a torch buffer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] * self.factor)


def test_the_state_holds_that_of_transforms() -> None:
    def make(factor: float) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(5), transform=Scale(factor), batch_size=2, seed=0
        ).append_transform(lambda batch: batch)

    buffer, other = make(3.0), make(1.0)
    buffer.extend(TensorDict({"x": torch.ones(4)}, [4]))
    state = buffer.state_dict()
    other.load_state_dict(state)
    assert other.sample()["x"].tolist() == [3.0, 3.0]
    state["_transforms"][0]["factor"].fill_(7)
    assert other.sample()["x"].tolist() == [3.0, 3.0] == buffer.sample()["x"].tolist()
    for broken in ([None], [{"wrong": torch.ones(())}, None]):
        with pytest.raises(RuntimeError):
            other.load_state_dict({**buffer.state_dict(), "_transforms": broken})
    assert other.sample()["x"].tolist() == [3.0, 3.0] and len(other) == 4
