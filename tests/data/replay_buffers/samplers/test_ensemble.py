"""An ensemble of samplers draws from several storages."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import (
    LazyTensorStorage,
    RandomSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
)
from gleanrl.data.replay_buffers.samplers.ensemble import join_infos
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError
from tests.data.replay_buffers.oracle import fill


def storages(*counts: int) -> StorageEnsemble:
    filled = [LazyTensorStorage(10) for _ in counts]
    for number, (storage, count) in enumerate(zip(filled, counts, strict=True)):
        if count:
            fill(storage, 100 * number + torch.arange(count))
    return StorageEnsemble(*filled)


def test_index_selects_members():
    members = [RandomSampler() for _ in range(3)]
    samplers = SamplerEnsemble(*members, p=[1, 1, 2])
    assert len(samplers) == 3 and list(samplers) == members and samplers[-1] is members[2]
    some = samplers[[0, 2]]
    assert list(some) == [members[0], members[2]]
    assert torch.allclose(some.p, torch.tensor([1, 2], dtype=torch.float64) / 3)
    assert samplers[:1].num_buffer_sampled == 1


def test_an_index_names_the_storage_and_the_slots_in_it():
    held = storages(3, 8)
    samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), num_buffer_sampled=3)
    seen: set[int] = set()
    for _ in range(50):
        index, info = samplers.sample(held, 12)
        assert index["index"].shape == (3, 4) == info["generation"].shape
        assert index["buffer_ids"].shape == (3, 4) and info["index", "index"] is not None
        for (number, records), expected, slots in zip(
            held.get(index), index["buffer_ids"][:, 0].tolist(), index["index"], strict=True
        ):
            assert number == expected and torch.equal(records, 100 * number + slots)
            seen |= set(records.tolist())
    assert seen == {0, 1, 2, *range(100, 108)}
    with pytest.raises(InvalidArgumentError, match="multiple of 3"):
        samplers.sample(held, 10)
    with pytest.raises(EmptyBufferError):
        SamplerEnsemble(RandomSampler(), sample_from_all=True).sample(storages(0), 2)


def test_checkpoints_hold_the_mixture_and_all_members(tmp_path):
    held, samplers = storages(6, 9), SamplerEnsemble(RandomSampler(), RandomSampler())
    samplers.set_seed(0)
    samplers.dumps(tmp_path)
    expected, _ = samplers.sample(held, 8)
    others = SamplerEnsemble(RandomSampler(), RandomSampler())
    others.loads(tmp_path)
    found, _ = others.sample(held, 8)
    assert (found == expected).all()


def test_an_epoch_of_a_member_ends():
    samplers = SamplerEnsemble(RandomSampler(), SamplerWithoutReplacement(), sample_from_all=True)
    held = storages(3, 4)
    samplers.sample(held, 4)
    assert not samplers.ran_out
    samplers.sample(held, 4)
    assert samplers.ran_out


def test_state_and_seeds_reproduce_draws():
    held = storages(3, 8)
    samplers, other = (SamplerEnsemble(RandomSampler(), SamplerWithoutReplacement()) for _ in range(2))
    assert samplers.set_seed(5) == 7
    samplers.sample(held, 4)
    other.load_state_dict(samplers.state_dict())
    for _ in range(4):
        assert torch.equal(
            samplers.sample(held, 4)[1]["index", "index"], other.sample(held, 4)[1]["index", "index"]
        )
    state = samplers.state_dict()
    for broken in ({}, {**state, "samplers": state["samplers"][:1]}, {**state, "mixture": None}):
        with pytest.raises(SchemaError):
            other.load_state_dict(broken)
    wrong = {**state, "samplers": [state["samplers"][0], {"generator": 3}]}
    with pytest.raises(SchemaError):
        other.load_state_dict(wrong)
    assert torch.equal(
        samplers.sample(held, 4)[1]["index", "index"], other.sample(held, 4)[1]["index", "index"]
    )


def test_only_samplers_are_taken():
    with pytest.raises(InvalidArgumentError, match="at least one"):
        SamplerEnsemble()
    with pytest.raises(InvalidArgumentError, match="expected Samplers"):
        SamplerEnsemble(RandomSampler(), None)


def test_infos_of_parts_are_joined():
    one = {"index": torch.zeros(2), "_weight": torch.ones(2), ("next", "truncated"): torch.zeros(2, 1)}
    two = {"index": torch.ones(2), ("next", "truncated"): torch.ones(2, 1)}
    info = join_infos(torch.tensor([1, 0]), [one, two])
    assert info["index"]["index"].tolist() == [[0, 0], [1, 1]] and info["index", "buffer_ids"].tolist() == [
        [1, 1],
        [0, 0],
    ]
    assert info["next", "truncated"].shape == (2, 2, 1) and "_weight" not in info.keys()
    grid = {"index": (torch.zeros(2), torch.ones(2))}
    assert join_infos(torch.tensor([1]), [grid])["index", "index"].tolist() == [[[0, 1], [0, 1]]]
    with pytest.raises(
        SchemaError, match=r"the info 'index' of the members differs in shape, \[\(2,\), \(3,\)\]"
    ):
        join_infos(torch.tensor([0, 1]), [one, {"index": torch.zeros(3)}])


def test_failing_member_undoes_the_draws_of_the_other_members():
    samplers = SamplerEnsemble(
        SamplerWithoutReplacement(seed=0), SamplerWithoutReplacement(seed=1), sample_from_all=True
    )
    with pytest.raises(EmptyBufferError):
        samplers.sample(storages(10, 0), 4)
    held = storages(10, 10)
    rows = torch.cat([samplers.sample(held, 4)[0]["index"][0] for _ in range(5)])
    assert rows.sort().values.tolist() == [*range(10)]


def test_interrupt_undoes_the_draws_of_the_other_members(monkeypatch):
    samplers = SamplerEnsemble(
        SamplerWithoutReplacement(seed=0), SamplerWithoutReplacement(seed=1), sample_from_all=True
    )
    held = storages(10, 10)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(samplers[1], "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            samplers.sample(held, 4)
    rows = torch.cat([samplers.sample(held, 4)[0]["index"][0] for _ in range(5)])
    assert rows.sort().values.tolist() == [*range(10)]
