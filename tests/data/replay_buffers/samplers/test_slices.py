"""Each slice sampler is composed of the documented parts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.samplers.prioritized import Prioritized
from gleanrl.data.replay_buffers.samplers.slice_drawing import Slices
from gleanrl.data.replay_buffers.samplers.transitions import Transitions, UnitSampler
from gleanrl.data.replay_buffers.samplers.without_replacement import EpochSampler
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

MADE = [
    (RandomSampler(), UnitSampler, Transitions),
    (SamplerWithoutReplacement(), EpochSampler, Transitions),
    (PrioritizedSampler(10, 0.6, 0.4), Prioritized, Transitions),
    (SliceSampler(slice_len=2), UnitSampler, Slices),
    (SliceSamplerWithoutReplacement(slice_len=2), EpochSampler, Slices),
    (PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=2), Prioritized, Slices),
]


@pytest.mark.parametrize(("sampler", "draws", "unit"), MADE, ids=lambda part: type(part).__name__)
def test_samplers_combine_a_draw_rule_and_a_unit(sampler, draws, unit):
    assert type(sampler).__bases__ == (draws,) and type(sampler.unit) is unit


@pytest.mark.parametrize("make", [SliceSampler, SliceSamplerWithoutReplacement])
def test_the_trajectory_key_has_two_names(make):
    made = make(slice_len=2, trajectory_key=("mine",))
    assert made.unit.table.keys.trajectory == ("mine",)
    with pytest.raises(InvalidArgumentError, match="trajectory_key is another word for traj_key"):
        make(slice_len=2, traj_key="mine", trajectory_key="yours")


def test_given_ends_exclude_each_other():
    ends = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="exclude each other"):
        SliceSamplerWithoutReplacement(slice_len=2, ends=ends, trajectories=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="cache_values=True"):
        SliceSampler(slice_len=2, ends=ends)


def test_samplers_derive_from_the_classes_in_their_names():
    once, weighted = (
        SliceSamplerWithoutReplacement(slice_len=2),
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2),
    )
    assert isinstance(once, SliceSampler) and isinstance(once, SamplerWithoutReplacement)
    assert isinstance(weighted, SliceSampler) and isinstance(weighted, PrioritizedSampler)
    assert not isinstance(SliceSampler(slice_len=2), (SamplerWithoutReplacement, PrioritizedSampler))


# Keywords and kinds of keys that other releases accept


def test_float_ids_that_are_whole_numbers():
    """A documentation example has such ids: 100 steps of one trajectory and four of another."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=5, traj_key="episode", strict_length=False, seed=0),
        batch_size=50,
    )
    buffer.extend(TensorDict({"obs": torch.arange(100), "episode": torch.zeros(100)}, [100]))
    buffer.extend(TensorDict({"obs": torch.arange(4), "episode": torch.ones(4)}, [4]))
    batch = buffer.sample()
    starts = torch.cat([torch.tensor([True]), batch["next", "truncated"][:-1, 0]])
    short = batch["episode"] == 1
    assert short.any() and batch["obs"][short].tolist() == [0, 1, 2, 3] * int((starts & short).sum())
    for wrong in (0.5, float("nan"), float("inf")):
        broken = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=2
        )
        broken.extend(TensorDict({"episode": torch.tensor([0.0, wrong, 1.0, 1.0])}, [4]))
        with pytest.raises(SchemaError, match=f"expected whole numbers, got {wrong}"):
            broken.sample()


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_several_keys_of_ends(kind):
    flags = {name: torch.zeros(12, dtype=torch.bool) for name in ("a", "b", "c")}
    flags["a"][3] = flags["b"][7] = flags["c"][9] = True

    def pieces(**options) -> list[int]:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(20),
            sampler=kind(slice_len=12, strict_length=False, **options),
            batch_size=240,
        )
        buffer.extend(TensorDict({"x": torch.arange(12), **flags}, [12]))
        batch, info = buffer.sample(return_info=True)
        last = info["next", "truncated"][:, 0]
        return sorted(set(batch["x"][last].tolist()))

    assert pieces(end_keys=["a", "b", "missing"]) == [3, 7, 11]
    assert pieces(end_keys=["a"]) == pieces(end_key="a") == [3, 11]
    with pytest.raises(MissingKeyError, match="missing"):
        pieces(end_keys=["missing"])
    for wrong in ({"end_keys": ["a"], "end_key": "b"}, {"end_keys": "a"}, {"end_keys": []}):
        with pytest.raises(InvalidTypeError, match="end_key"):
            kind(slice_len=2, **wrong)


def test_keywords_of_other_releases_are_accepted():
    for kind, more in (
        (SliceSampler, {}),
        (SliceSamplerWithoutReplacement, {}),
        (PrioritizedSliceSampler, {"max_capacity": 10, "alpha": 1.0, "beta": 1.0}),
    ):
        given = kind(
            slice_len=3, trajectory_key="t", pad_output=True, strict_length=False, use_gpu=True, **more
        )
        ours = kind(slice_len=3, traj_key="t", pad=True, strict_length=False, **more)
        assert given.unit.rule == ours.unit.rule and given.unit.table.keys == ours.unit.table.keys


def test_spans_can_be_read():
    for span, shown in (
        (False, (False, False)),
        (True, (True, True)),
        (2, (2, 2)),
        ((1, 0), (1, False)),
        ((True, 2), (True, 2)),
    ):
        assert SliceSampler(slice_len=5, span=span).span == shown
    assert PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=5, span=(False, 2)).span == (False, 2)


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_options_of_a_sampler_can_be_read(kind):
    priorities = {"max_capacity": 10, "alpha": 1.0, "beta": 1.0} if kind is PrioritizedSliceSampler else {}
    sampler = kind(slice_len=4, strict_length=False, truncated_key="cut", **priorities)
    told = (sampler.num_slices, sampler.slice_len, sampler.strict_length, sampler.truncated_key, sampler.span)
    assert told == (None, 4, False, "cut", (False, False))
    assert kind(num_slices=2, **priorities).num_slices == 2
