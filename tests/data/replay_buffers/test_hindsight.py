"""Batches that `HERReplayBuffer` relabels agree with a plain scan of the stored steps."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    HERReplayBuffer,
    HindsightStrategy,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

WANTED = -1.0
STRATEGIES = [strategy.value for strategy in HindsightStrategy]


def data(first=0, count=20, length=5):
    """Return steps in trajectories of equal length, whose achieved goal is their number."""
    t = torch.arange(first, first + count)
    goal, x = torch.full((count, 1), WANTED), t.float()[:, None]
    done = (t % length == length - 1)[:, None]
    after = {"achieved_goal": x + 0.5, "desired_goal": goal.clone(), "reward": goal - 6, "done": done}
    return TensorDict({"t": t, "achieved_goal": x, "desired_goal": goal, "next": after}, [count])


def reward_of(rows):
    return rows["desired_goal"] * 10 + rows["t"][:, None]


def made(strategy="future", ratio=1.0, size=100, batch_size=50, reward=reward_of, **options):
    return HERReplayBuffer(
        reward,
        her_ratio=ratio,
        strategy=strategy,
        storage=options.pop("storage") if "storage" in options else LazyTensorStorage(size),
        batch_size=batch_size,
        seed=0,
        **options,
    )


def possible(strategy, t, length=5, newest=None, oldest=0):
    """Return the goals that a step may get."""
    begin, end = t // length * length, t // length * length + length - 1
    begin, end = max(begin, oldest), end if newest is None else min(end, newest)
    return {
        "future": {*range(t, end + 1)},
        "final": {end},
        "episode": {*range(begin, end + 1)},
        "random": {*range(oldest, 1 + (end if newest is None else newest))},
    }[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_goal_of_the_strategy_comes_equally_often(strategy):
    buffer = made(strategy, batch_size=20_000)
    buffer.extend(data())
    batch = buffer.sample()
    counts = {}
    for t, goal in zip(batch["t"].tolist(), batch["desired_goal"].flatten().tolist(), strict=True):
        counts.setdefault(t, Counter())[int(goal)] += 1
    for t, found in counts.items():
        wanted = possible(strategy, t, newest=19)
        assert set(found) == wanted
        assert all(abs(n / found.total() - 1 / len(wanted)) < 0.09 for n in found.values())
    assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])
    assert torch.equal(batch["next", "reward"], reward_of(batch)), "of the new goals"
    assert torch.equal(batch["next", "done"], (batch["t"] % 5 == 4)[:, None]), "flags stay"
    assert (buffer[:]["desired_goal"] == WANTED).all(), "what is stored stays"
    assert not [key for key in batch.keys() if key.startswith("_")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trajectories_around_the_end_of_the_ring(strategy):
    buffer = made(strategy, size=12)
    # The stored steps are 21 to 32: the first is inside a trajectory, and the last trajectory is unfinished.
    for first in range(0, 33, 3):
        buffer.extend(data(first, 3))
    for _ in range(20):
        batch = buffer.sample()
        for t, goal in zip(batch["t"].tolist(), batch["desired_goal"].flatten().tolist(), strict=True):
            assert goal in possible(strategy, t, newest=32, oldest=21)


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.3, 3), (0.8, 8), (1.0, 10)])
def test_a_part_of_each_batch_is_relabelled(ratio, count):
    calls = []
    buffer = made(ratio=ratio, batch_size=10, reward=lambda rows: calls.append(rows) or reward_of(rows))
    buffer.extend(data())
    places = torch.zeros(10)
    for _ in range(50):
        batch = buffer.sample()
        relabelled = batch["desired_goal"].flatten() != WANTED
        assert relabelled.sum() == count
        places += relabelled
        assert (batch["next", "reward"][~relabelled] == WANTED - 6).all()
    assert len(calls) == (50 if count else 0)
    if count:
        assert calls[-1].shape == (count,) and "index" in calls[-1]
        assert (places > 0).all(), "whichever row it is"


def test_achieved_goal_may_be_a_next_entry():
    buffer = made("final", achieved_goal_key=("next", "achieved_goal"))
    buffer.extend(data())
    batch = buffer.sample()
    assert torch.equal(batch["desired_goal"].flatten(), batch["t"] // 5 * 5 + 4.5)


@pytest.mark.parametrize("reward", [lambda rows: rows["t"], lambda rows: rows["t"][:, None].double()])
def test_rewards_come_in_the_shape_of_stored_ones(reward):
    buffer = made(reward=reward)
    buffer.extend(data())
    batch = buffer.sample()
    assert torch.equal(batch["next", "reward"], batch["t"].float()[:, None])


def test_an_epoch_has_every_transition():
    buffer = made(sampler=SamplerWithoutReplacement(), batch_size=8)
    buffer.extend(data())
    seen = []
    for batch in buffer:
        seen += batch["t"].tolist()
        assert (batch["desired_goal"].flatten() >= batch["t"]).all()
    assert sorted(seen) == [*range(20)]


def test_priorities_select_relabelled_steps():
    buffer = made(sampler=PrioritizedSampler(None, 1.0, 1.0), batch_size=10)
    buffer.extend(data())
    buffer.update_priority(torch.arange(20), (torch.arange(20) == 6).float())
    batch = buffer.sample()
    assert (batch["t"] == 6).all() and "_weight" in batch.keys()
    assert set(batch["desired_goal"].flatten().tolist()) == {6, 7, 8, 9}
    batch["td_error"] = torch.zeros(10)
    buffer.update_tensordict_priority(batch)


def test_samplers_of_slices_tell_how_they_cut():
    buffer = made("final", sampler=SliceSampler(slice_len=2), batch_size=10)
    sampler = buffer.sampler
    assert (sampler.num_slices, sampler.slice_len, sampler.span) == (None, 2, (False, False))


def test_slices_are_relabelled():
    buffer = made("final", sampler=SliceSampler(slice_len=2), batch_size=10)
    buffer.extend(data())
    batch = buffer.sample()
    assert torch.equal(batch["desired_goal"].flatten(), batch["t"] // 5 * 5 + 4.0)
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 5


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_restored_and_copied_buffers_continue_with_the_same_samples(strategy, prefetch):
    buffer = made(strategy, 0.5, batch_size=8, prefetch=prefetch)
    buffer.extend(data())
    buffer.sample()
    restored = made(strategy, 0.5, batch_size=8, prefetch=prefetch)
    restored.load_state_dict(buffer.state_dict())
    copies = [restored, copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    for _ in range(4):
        batch = buffer.sample()
        for other in copies:
            assert (other.sample() == batch).all()


def test_rows_that_were_overwritten_get_goals_of_their_new_trajectory():
    buffer = made("episode", size=10, batch_size=6, prefetch=2)
    buffer.extend(data(0, 10))
    for first in range(10, 100, 5):
        batch = buffer.sample()
        assert torch.equal(batch["desired_goal"].flatten() // 5, (batch["t"] // 5).float())
        buffer.extend(data(first, 5))


def test_streams_of_several_environments_are_relabelled_separately():
    buffer = made("final", storage=LazyTensorStorage(40, ndim=2))
    buffer.extend(torch.stack([data(0, 10), data(100, 10)]))
    batch = buffer.sample()
    assert torch.equal(batch["desired_goal"].flatten(), batch["t"] // 5 * 5 + 4.0)


def test_further_transforms_see_relabelled_batches():
    buffer = made(transform=lambda td: td.set("seen", td["desired_goal"].clone()))
    buffer.extend(data())
    batch = buffer.sample()
    assert torch.equal(batch["seen"], batch["desired_goal"]) and (batch["seen"] >= 0).all()
    assert (buffer[3:5]["desired_goal"] == WANTED).all()


def test_the_sampler_can_be_exchanged():
    buffer, other = made(), SamplerWithoutReplacement()
    buffer.extend(data())
    old = buffer.set_sampler(other)
    assert isinstance(old, RandomSampler) and buffer.sampler is other
    assert (buffer.sample()["desired_goal"] >= 0).all()
    assert not old.draw(buffer.storage, 4).extras, "the old one draws no goals"
    delayed = made(delayed_init=True)
    assert not delayed.initialized
    delayed.extend(data())
    assert (delayed.sample()["desired_goal"] >= 0).all()


class Foreign(Sampler):
    def sample(self, storage, batch_size):
        return torch.arange(batch_size), {}


def test_invalid_options_are_refused():
    for options, name in (({"ratio": 1.5}, "her_ratio"), ({"strategy": "x"}, "strategy")):
        with pytest.raises(InvalidArgumentError, match=name):
            made(**options)
    with pytest.raises(InvalidTypeError, match="reward_fn"):
        made(reward=3)
    with pytest.raises(UnsupportedError, match="got a Foreign"):
        made(sampler=Foreign())
    for key, missing in (("desired_goal", "goal_key"), ("achieved_goal", "achieved_goal_key")):
        buffer = made()
        buffer.extend(data().exclude(key))
        with pytest.raises(MissingKeyError, match=f"^{missing}: '{key}' isn't"):
            buffer.sample()
    buffer = made()
    buffer.extend(data().exclude(("next", "reward")))
    with pytest.raises(MissingKeyError, match="reward_key"):
        buffer.sample()
    buffer = made(end_key=("next", "over"))
    buffer.extend(data())
    with pytest.raises(MissingKeyError, match="end_key"):
        buffer.sample()
    buffer = made(achieved_goal_key="t")
    buffer.extend(data())
    with pytest.raises(SchemaError, match="goal_key: 'desired_goal' has the shape"):
        buffer.sample()
    buffer = made(reward=lambda rows: rows["t"].repeat(2))
    buffer.extend(data())
    with pytest.raises(SchemaError, match="reward_fn: expected rewards"):
        buffer.sample()
    buffer = made(storage=ListStorage(30))
    buffer.extend(data())
    with pytest.raises(UnsupportedError, match="use LazyTensorStorage"):
        buffer.sample()
