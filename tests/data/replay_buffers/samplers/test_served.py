"""Late priorities are dropped for all rows of delivered batches, drawn by any thread."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.hindsight import (
    Hindsight,
    HindsightRule,
    HindsightStrategy,
    with_hindsight,
)
from tests.fakes import FakeFailure

SIZE = 60


def rows(n: int) -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[9::10] = True
    return TensorDict({"x": torch.arange(n), "next": TensorDict({"done": done}, [n])}, [n])


def transitions() -> PrioritizedSampler:
    return PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, seed=0)


def slices() -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(SIZE, alpha=1.0, beta=1.0, slice_len=4, end_key=("next", "done"), seed=0)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("make", [transitions, slices])
def test_late_priorities_are_dropped(make, prefetch):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE), sampler=make(), batch_size=8, prefetch=prefetch
    )
    buffer.extend(rows(SIZE))
    batch = buffer.sample()
    assert (batch["_generation"] == buffer.generation(batch["index"])).all()
    index = batch["index"].clone()
    buffer.update_priority(index, torch.ones(8))
    assert buffer.stats().priorities_dropped == 0
    buffer.extend(rows(SIZE))
    buffer.update_priority(index, torch.full((8,), 50.0))
    assert buffer.stats().priorities_dropped == 8 and buffer.sampler.default_priority == 1.0
    never = sorted({*range(SIZE)} - {*index.tolist()})
    if prefetch is None:  # otherwise other rows may have been drawn since
        buffer.update_priority(torch.tensor(never[:3]), 1.0)
        assert buffer.stats().priorities_dropped == 8


@pytest.mark.parametrize("name", ["on_serve", "_draw", "draw"])
@pytest.mark.parametrize("where", ["derived", "object", "patched"])
def test_overridden_methods_are_called(name, where, monkeypatch):
    called, usual = [], getattr(PrioritizedSampler, name)

    def own(self, *args, **kwargs):
        called.append(name)
        return usual(self, *args, **kwargs)

    sampler = transitions()
    if where == "derived":
        sampler = type("Own", (PrioritizedSampler,), {name: own})(SIZE, alpha=1.0, beta=1.0, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=sampler, batch_size=8)
    buffer.extend(rows(SIZE))
    if where == "object":
        setattr(sampler, name, own.__get__(sampler))
    elif where == "patched":
        monkeypatch.setattr(PrioritizedSampler, name, own)
    check_served(buffer)
    assert called == [name]


def test_a_sample_of_a_users_class_is_called():
    class Own(PrioritizedSampler):
        def sample(self, storage, batch_size):
            called.append(batch_size)
            return super().sample(storage, batch_size)

    called = []
    sampler = Own(SIZE, alpha=1.0, beta=1.0, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=sampler, batch_size=8)
    buffer.extend(rows(SIZE))
    check_served(buffer)
    assert called == [8]


def check_served(buffer: TensorDictReplayBuffer) -> None:
    """Check that a batch has weights, and that late priorities are dropped."""
    batch = buffer.sample()
    assert len(batch) == 8 and "_weight" in batch.keys()
    buffer.extend(rows(SIZE))
    buffer.update_priority(batch["index"], 3.0)
    assert buffer.stats().priorities_dropped == 8


def test_rows_of_a_draw_that_failed_are_not_remembered(monkeypatch):
    rule = HindsightRule(HindsightStrategy.FINAL, 0.5, ("x",))
    sampler = with_hindsight(transitions(), rule, EpisodeTable(BoundaryKeys()))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=sampler, batch_size=200)
    buffer.extend(rows(SIZE))
    index = buffer.sample()["index"]
    buffer.extend(rows(SIZE))
    with monkeypatch.context() as patched, pytest.raises(FakeFailure):
        patched.setattr(Hindsight, "_with_goals", raising)
        buffer.sample()
    buffer.update_priority(index, 3.0)
    assert buffer.stats().priorities_dropped == 200


def raising(*_args):
    raise FakeFailure("no goals")
