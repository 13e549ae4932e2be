"""Ensembles are made of buffers or of lists of components."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    StorageEnsemble,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.ensemble import assemble
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError


def test_each_buffer_gets_its_parts():
    storages, samplers = [ListStorage(2), ListStorage(3)], [RandomSampler(), RandomSampler()]
    writers, collates = [RoundRobinWriter(), RoundRobinWriter()], [sum, None]
    held = StorageEnsemble(*storages, transforms=[None, lambda number: -number])
    buffers = assemble(held, samplers, writers, collates)
    for buffer, *parts in zip(buffers, storages, samplers, writers, strict=True):
        assert [buffer.storage, buffer.sampler, buffer.writer] == parts
        buffer.extend([5, 5])
    assert buffers[0].sample(2) == 10 and buffers[1].sample(2).tolist() == [-5, -5]


@pytest.mark.parametrize("name", ["samplers", "writers", "collate_fns"])
def test_parts_of_another_number_raise(name):
    parts = {"samplers": [RandomSampler()], "writers": None, "collate_fns": None, name: []}
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected 1, one for each storage, got 0"):
        assemble([ListStorage(2)], **parts)


@pytest.mark.parametrize("missing", ["storages", "samplers"])
def test_parts_that_every_buffer_needs(missing):
    parts = {"storages": [ListStorage(2)], "samplers": [RandomSampler()], missing: None}
    with pytest.raises(InvalidArgumentError, match="storages= and samplers="):
        assemble(writers=None, collate_fns=None, **parts)


# Batches of ensembles as in other releases


def members(*data: TensorDict) -> list[ReplayBuffer]:
    made = []
    for rows in data:
        made.append(ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4))
        made[-1].extend(rows)
    return made


def test_batches_name_the_member_of_each_row():
    both = members(*(TensorDict({"x": torch.arange(5) + 100 * k}, [5]) for k in range(2)))
    for rbs in (both, [TensorDictReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]):
        if rbs is not both:
            for number, member in enumerate(rbs):
                member.extend(TensorDict({"x": torch.arange(5) + 100 * number}, [5]))
        ensemble = ReplayBufferEnsemble(*rbs, batch_size=6, num_buffer_sampled=3, p=[0.5, 0.5])
        batch, info = ensemble.sample(return_info=True)
        assert batch["index", "buffer_ids"].shape == batch["index", "index"].shape == (3, 2)
        assert torch.equal(batch["x"], batch["index", "buffer_ids"] * 100 + batch["index", "index"])
        assert info.batch_size == (3, 2) and (info["index"] == batch["index"]).all()
    tensors = [ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
    for member in tensors:
        member.extend(torch.arange(3))
    assert ReplayBufferEnsemble(*tensors, batch_size=4).sample().shape == (2, 2)


def test_members_with_differing_keys_give_lazy_stacks():
    ensemble = ReplayBufferEnsemble(
        *members(
            TensorDict({"x": torch.arange(5)}, [5]),
            TensorDict({"x": torch.arange(7), "y": torch.ones(7, 2), "g": {}}, [7]),
        ),
        batch_size=4,
        sample_from_all=True,
    )
    batch = ensemble.sample()
    assert batch.batch_size == (2, 2) and batch["x"].shape == (2, 2) and batch[1]["y"].shape == (2, 2)
    assert "y" not in batch.keys() and batch["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]
    kinds = ReplayBufferEnsemble(
        *members(TensorDict({"x": torch.ones(5)}, [5]), TensorDict({"x": torch.arange(5)}, [5])),
        batch_size=4,
        sample_from_all=True,
    )
    with pytest.raises(SchemaError, match="float32"):
        kinds.sample()


@pytest.mark.parametrize("prefetch", [None, 3])
def test_interrupt_undoes_the_draws_of_all_members(prefetch: int | None) -> None:
    stops = [KeyboardInterrupt]

    def collate(parts: list[Any]) -> Any:
        if stops:
            raise stops.pop()
        return torch.stack(parts)

    members = [
        ReplayBuffer(
            storage=LazyTensorStorage(10),
            sampler=SamplerWithoutReplacement(seed=0),
            batch_size=2,
            prefetch=prefetch,
        )
        for _ in range(2)
    ]
    for member in members:
        member.extend(torch.arange(10))
    both = ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True, collate_fn=collate)
    with pytest.raises(KeyboardInterrupt):
        both.sample()
    rows = torch.cat([both.sample()[0] for _ in range(5)])
    assert rows.sort().values.tolist() == [*range(10)]


@pytest.mark.parametrize("made", [RandomSampler, SamplerWithoutReplacement])
def test_permits_of_undelivered_draws_are_returned(made: Any) -> None:
    limited = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=made(),
        batch_size=2,
        rate_limiter=SamplesPerInsert(1.0, min_size=4, tolerance=2, timeout_s=0.0),
    )
    limited.extend(torch.arange(4))
    empty = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    both = ReplayBufferEnsemble(limited, empty, batch_size=4, sample_from_all=True)
    for _ in range(3):
        with pytest.raises(EmptyBufferError):
            both.sample()
    empty.extend(torch.arange(4))
    assert both.sample()[0].shape == (2,)


def test_a_member_that_fails_at_its_second_part_goes_back_before_the_first() -> None:
    calls = list[int]()

    def collate(rows: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rows

    member = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=SamplerWithoutReplacement(seed=0),
        batch_size=2,
        collate_fn=collate,
        rate_limiter=SamplesPerInsert(1.0, min_size=4, tolerance=10, timeout_s=0.0),
    )
    member.extend(torch.arange(10))
    both = ReplayBufferEnsemble(member, member, batch_size=4, sample_from_all=True)
    with pytest.raises(KeyboardInterrupt):
        both.sample()
    found = member.stats()
    assert found.batches_sampled == 0
    assert found.rate_limiter is not None and found.rate_limiter.sampled == 0
    rows = torch.cat([member.sample() for _ in range(5)])
    assert rows.sort().values.tolist() == [*range(10)]


def in_use(first: int, **options: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, **options)
    buffer.extend(TensorDict({"x": torch.arange(first, first + 4)}, [4]))
    return buffer


def test_parts_of_used_buffers_select_these_buffers():
    one = in_use(0, sampler=SamplerWithoutReplacement(), seed=1)
    other = in_use(10, transform=lambda batch: batch.set("x", batch["x"] + 100))
    held = StorageEnsemble(one.storage, other.storage, transforms=[None, other.transforms.read])
    samplers = SamplerEnsemble(one.sampler, other.sampler, sample_from_all=True)
    ensemble = ReplayBufferEnsemble(storages=held, samplers=samplers, batch_size=4)
    assert [*(ensemble[i] for i in range(2))] == [one, other]
    assert (ensemble.sample()["x"][1] >= 110).all() and len(one.sample()) == 2
    again = ReplayBufferEnsemble(storages=ensemble.storage, samplers=ensemble.sampler, batch_size=4)
    assert again.sample()["x"].shape == (2, 2)
    one.extend(TensorDict({"x": torch.arange(4)}, [4]))
    assert len(ensemble) == 12
    # A read would bypass the transform of `one`.
    with pytest.raises(InvalidArgumentError, match="belongs to another"):
        ReplayBufferEnsemble(storages=[one.storage, other.storage], samplers=samplers, batch_size=4)
    with pytest.raises(InvalidArgumentError, match="belongs to another"):
        ReplayBufferEnsemble(storages=[LazyTensorStorage(3)], samplers=[one.sampler], batch_size=4)
