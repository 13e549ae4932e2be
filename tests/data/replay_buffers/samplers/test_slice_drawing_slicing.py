"""Slices agree with trajectories found by a scan of all rows, with flags, padding and options."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.samplers.slice_drawing import SliceRule, slice_rule
from gleanrl.errors import (
    BatchSizeError,
    EmptyBufferError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)
from tests.data.replay_buffers.samplers.acts import (
    CLEARS,
    COPIES,
    EXCHANGES,
    WRITES,
    Kind,
    acts,
    cut_by,
    new_buffer,
    perform,
    trajectories,
)

MASK, TRUNCATED, DONE = ("collector", "mask"), ("next", "truncated"), ("next", "done")
KINDS = [Kind(), Kind(nstep=True), Kind(batch=(3,)), Kind(batch=(2, 2))]
SLICES = 40
ENDS = torch.ones(3, dtype=torch.bool)
OPTIONS = [{}, {"strict_length": False}, {"span": (1, 2)}, {"span": True, "strict_length": False}]


def starts(run: list[int], length: int, left: int, right: int) -> list[tuple[int, ...]]:
    """Return the slices of a trajectory, one per first step. Steps outside the trajectory are cut off."""
    last = min(max(len(run) - length, 0) + right, len(run) - 1)
    return [tuple(run[max(first, 0) : first + length]) for first in range(-left, last + 1)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=20, deadline=None)
@given(script=acts(*WRITES, *CLEARS, *EXCHANGES, *COPIES))
def test_slices_are_pieces_of_trajectories(kind, options, script):
    length = 3
    left, right = {True: (2, 2), None: (0, 0)}.get(options.get("span"), (1, 2))

    def make_sampler() -> SliceSampler:
        return SliceSampler(slice_len=length, seed=0, **options)

    buffer = new_buffer(kind, make_sampler())
    for name, number in script:
        buffer = perform(name, number, buffer, kind, make_sampler)
        if not len(buffer):
            continue
        shortest = length if options.get("strict_length", True) else 1
        runs = [run for run in trajectories(buffer.storage, kind) if len(run) >= shortest]
        if not runs:
            with pytest.raises(EmptyBufferError, match="no trajectory of 3 steps is stored"):
                buffer.sample(6)
            continue
        offered = {piece for run in runs for piece in starts(run, length, left, right)}
        drawn = buffer.sampler.draw(buffer.storage, SLICES * length)
        pieces = [tuple(piece) for piece in cut_by(drawn.slots.tolist(), drawn.last.tolist())]
        assert len(pieces) == SLICES and set(pieces) <= offered


def rows(lengths: list[int]) -> TensorDict:
    """Return trajectories of these lengths, one after the other, with all flags."""
    ids = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    ends = torch.zeros(len(ids), 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    following = {"done": ends, "terminated": ends.clone(), "truncated": torch.zeros_like(ends)}
    return TensorDict({"t": torch.arange(len(ids)), "id": ids, "next": following}, [len(ids)])


def buffer_of(lengths: list[int], batch_size: int, **options: Any) -> TensorDictReplayBuffer:
    sampler = SliceSampler(seed=0, **{"traj_key": "id", **options})
    storage = LazyTensorStorage(sum(lengths))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.extend(rows(lengths))
    return buffer


@pytest.mark.parametrize("strict", [True, False])
def test_every_trajectory_and_every_start_is_equally_likely(strict):
    buffer = buffer_of([1, 4, 5, 9], 3000, num_slices=1000, strict_length=strict)
    drawn = buffer.sampler.draw(buffer.storage, 3000)
    pieces = Counter(tuple(piece) for piece in cut_by(drawn.slots.tolist(), drawn.last.tolist()))
    runs = trajectories(buffer.storage, Kind(ids=False))[0 if strict else 1 - 1 :]
    runs = [run for run in runs if len(run) >= (3 if strict else 1)]
    for run in runs:
        offered = starts(run, 3, 0, 0)
        for piece in offered:
            expected = 1000 / len(runs) / len(offered)
            assert abs(pieces[piece] - expected) < 5 * expected**0.5
    assert sum(pieces.values()) == 1000


def test_the_last_step_is_flagged_and_nothing_else():
    buffer = buffer_of([5, 5], 9, num_slices=3)
    batch, info = buffer.sample(return_info=True)
    last = torch.tensor([False, False, True] * 3)
    stored = buffer[:]
    ends = stored[DONE][batch["index"]][:, 0]
    assert torch.equal(batch[TRUNCATED][:, 0], last)
    assert torch.equal(batch[DONE][:, 0], last | ends)
    assert torch.equal(batch["next", "terminated"][:, 0], ends)
    for key in (TRUNCATED, DONE, ("next", "terminated")):
        assert torch.equal(info[key], batch[key])
    assert not stored[TRUNCATED].any(), "the storage was written"


def test_flags_of_another_place_and_of_none():
    batch = buffer_of([5, 5], 6, slice_len=3, truncated_key=("deep", "cut")).sample()
    assert batch["deep", "cut"].tolist() == [[False], [False], [True]] * 2 or batch["deep", "cut"].shape == (
        6,
    )
    assert not batch[TRUNCATED].any()
    batch = buffer_of([5, 5], 6, slice_len=3, truncated_key=None).sample()
    assert not batch[TRUNCATED].any() and "deep" not in batch.keys()


@pytest.mark.parametrize("truncated_key", [TRUNCATED, None])
def test_first_steps_of_slices_and_stored_first_steps_are_flagged(truncated_key):
    buffer = buffer_of([5, 5], 9, num_slices=3, init_key="is_init", truncated_key=truncated_key)
    first = torch.tensor([True, False, False] * 3)[:, None]
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["is_init"], first) and torch.equal(info["is_init"], first)
    stored = torch.zeros(10, 1, dtype=torch.bool)
    stored[[1, 4, 8]] = True
    buffer["is_init"] = stored
    for keys in (None, ["t"]):
        batch = buffer.sample(keys=keys)
        assert torch.equal(batch["is_init"], first | stored[batch["index"]])
    assert torch.equal(buffer["is_init"], stored), "the storage was written"


def test_first_steps_of_slices_of_unlike_lengths_and_of_filled_ones():
    short = buffer_of([1, 2, 5], 30, num_slices=10, init_key=("a", "b"), strict_length=False)
    last = short.sampler.draw(short.storage, 30).last
    assert last.sum() == 10 and not bool(last.all())
    batch = short.sample()
    assert batch["a", "b"][0] and torch.equal(batch["a", "b"][1:], batch[TRUNCATED][:-1])
    filled = buffer_of(
        [1, 2, 5], 30, num_slices=10, init_key="is_init", strict_length=False, pad=True
    ).sample()
    assert torch.equal(filled["is_init"][:, 0], torch.arange(30) % 3 == 0)


def test_flags_in_info_and_with_chosen_columns():
    buffer = buffer_of([5, 5], 6, slice_len=3)
    batch, info = buffer.sample(keys=["t"], return_info=True)
    assert set(batch.keys(True, True)) == {"t", "index", DONE, TRUNCATED, ("next", "terminated")}
    last = torch.tensor([[False], [False], [True]] * 2)
    assert torch.equal(batch[TRUNCATED], last) and torch.equal(info[TRUNCATED], last)
    plain = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3, seed=0))
    plain.extend(rows([5, 5]))
    batch, info = plain.sample(6, return_info=True)
    assert not batch[TRUNCATED].any() and torch.equal(info[TRUNCATED], last)


def test_batches_of_single_tensors_with_ids_that_are_given():
    sampler = SliceSampler(slice_len=2, trajectories=torch.tensor([0, 0, 1, 1]), cache_values=True, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(torch.arange(4))
    batch, info = buffer.sample(40, return_info=True)
    assert set(map(tuple, batch.view(-1, 2).tolist())) == {(0, 1), (2, 3)}
    assert info[TRUNCATED][:, 0].tolist() == [False, True] * 20


def test_padding_repeats_the_last_step_and_masks_it():
    buffer = buffer_of([1, 2, 9], 400, slice_len=4, strict_length=False, pad=True)
    batch = buffer.sample()
    t, mask, cut = (value.view(100, 4) for value in (batch["t"], batch[MASK], batch[TRUNCATED]))
    for steps, real, flagged in zip(t.tolist(), mask.tolist(), cut.tolist(), strict=True):
        count = sum(real)
        assert real == [True] * count + [False] * (4 - count)
        assert steps == [steps[0] + min(i, count - 1) for i in range(4)]
        assert flagged[count - 1] and sum(flagged) == 1
    assert {1, 2, 4} == set(mask.sum(1).tolist())


def test_overhanging_slices_that_are_padded():
    buffer = buffer_of([6, 6], 400, slice_len=4, span=(True, 1), pad=True)
    batch = buffer.sample()
    assert batch.batch_size == (400,)
    counts = batch[MASK].view(100, 4).sum(1)
    assert set(counts.tolist()) == {1, 2, 3, 4}


def test_slices_stay_within_one_stream():
    kind = Kind(batch=(2, 3))
    buffer = new_buffer(kind, SliceSampler(slice_len=2, seed=0))
    buffer.extend(kind.rows(9, 0))
    batch, info = buffer.sample(200, return_info=True)
    assert batch["index"].shape == (200, 3) and len(info["index"]) == 3
    steps, columns = batch["index"].view(100, 2, 3)[..., 0], batch["index"].view(100, 2, 3)[..., 1:]
    assert torch.equal(steps[:, 1], steps[:, 0] + 1) and torch.equal(columns[:, 0], columns[:, 1])
    assert torch.equal(batch["x"], buffer.storage[:]["x"][info["index"]])


@pytest.mark.parametrize(
    ("options", "batch_size", "sizes"),
    [({"num_slices": 4}, 12, (4, 3)), ({"slice_len": 4}, 12, (3, 4)), ({"num_slices": 1}, 5, (1, 5))],
)
def test_rule_returns_number_and_length_of_slices(options, batch_size, sizes):
    given_sizes = {"num_slices": None, "slice_len": None, **options}
    rule = slice_rule(*given_sizes.values(), True, False, False, None)
    assert isinstance(rule, SliceRule) and rule.sizes(batch_size) == sizes


@pytest.mark.parametrize(
    ("options", "name"), [({"num_slices": 5}, "num_slices=5"), ({"slice_len": 7}, "slice_len=7")]
)
def test_batches_that_slices_dont_divide(options, name):
    buffer = buffer_of([20], 10, **options)
    with (
        pytest.raises(BatchSizeError, match=f"batch_size=12 isn't a multiple of {name}"),
        pytest.warns(UserWarning),
    ):
        buffer.sample(12)


@pytest.mark.parametrize(
    ("span", "overhang"),
    [(False, (0, 0)), (True, (3, 3)), (2, (2, 2)), ((True, 1), (3, 1)), ([0, True], (0, 3)), ((False, 3), (0, 3))],
)  # fmt: skip
def test_span_gives_the_overhang(span, overhang):
    assert slice_rule(None, 4, True, span, False, None).overhang(4) == overhang


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, InvalidTypeError, "exactly one of num_slices and slice_len"),
        ({"num_slices": 2, "slice_len": 2}, InvalidTypeError, "exactly one of"),
        ({"num_slices": 0}, InvalidArgumentError, "num_slices"),
        ({"slice_len": -1}, InvalidArgumentError, "slice_len"),
        ({"slice_len": True}, InvalidArgumentError, "slice_len"),
        ({"slice_len": 2.0}, InvalidArgumentError, "slice_len"),
        ({"slice_len": 3, "span": 3}, InvalidArgumentError, "span"),
        ({"slice_len": 3, "span": -1}, InvalidArgumentError, "span"),
        ({"slice_len": 3, "span": (1, 2, 3)}, InvalidArgumentError, "span"),
        ({"slice_len": 3, "span": 1.5}, InvalidArgumentError, "span"),
        ({"slice_len": 3, "traj_key": "a", "trajectory_key": "b"}, InvalidArgumentError, "trajectory_key"),
        ({"slice_len": 3, "ends": ENDS}, UnsupportedError, "cache_values=True"),
        ({"slice_len": 3, "ends": ENDS, "cache_values": True, "end_key": "e"}, UnsupportedError, "end_key"),
        ({"slice_len": 3, "ends": ENDS, "cache_values": True, "traj_key": "e"}, UnsupportedError, "exclude end_key"),
        (
            {"slice_len": 3, "ends": ENDS, "trajectories": torch.arange(3), "cache_values": True},
            UnsupportedError,
            "exclude each other",
        ),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        SliceSampler(**options)


def test_span_of_a_whole_slice_raises_at_the_draw():
    buffer = buffer_of([9], 12, num_slices=4, span=3)
    with pytest.raises(InvalidArgumentError, match=r"span=\(3, 3\): a slice of 3 steps may overhang by 2"):
        buffer.sample()


@pytest.mark.parametrize("asked", [[True, False, True], [False] * 3])
def test_a_redraw_draws_whole_slices(asked):
    buffer = buffer_of([4, 2, 5], 9, slice_len=3, strict_length=False)
    sampler, storage = buffer.sampler, buffer.storage
    drawn = sampler.draw(storage, 9)
    again = sampler.redraw(storage, drawn, torch.ones(drawn.slots.shape, dtype=torch.bool), True)
    assert len(cut_by(again.slots.tolist(), again.last.tolist())) == 3 and again.asked == 9
    assert torch.equal(again.generation, torch.ones(again.slots.shape, dtype=torch.int64))


def test_a_draw_that_fails_uses_up_no_random_numbers():
    for options in ({}, {"generator": torch.Generator().manual_seed(0)}):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=4, seed=0), batch_size=8, **options
        )
        done = torch.arange(20) % 2 == 1
        buffer.extend(TensorDict({"x": torch.arange(20), "next": {"done": done}}, [20]))
        state = buffer.sampler.random.state_dict()["generator"]
        with pytest.raises(EmptyBufferError):
            buffer.sample()
        assert torch.equal(buffer.sampler.random.state_dict()["generator"], state)
        buffer.extend(TensorDict({"x": torch.arange(4), "next": {"done": torch.arange(4) == 3}}, [4]))
        for _ in range(2):
            assert buffer.sample()["x"].tolist() == [*range(4)] * 2
        buffer[20:24] = TensorDict(
            {"x": torch.arange(4), "next": {"done": torch.ones(4, dtype=torch.bool)}}, [4]
        )
        state = buffer.sampler.random.state_dict()["generator"]
        with pytest.raises(EmptyBufferError):  # the same draw as before fails for the new records
            buffer.sample()
        assert torch.equal(buffer.sampler.random.state_dict()["generator"], state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_flags_that_are_numbers_stay_numbers(dtype):
    data = rows([5, 5])
    for key in (DONE, TRUNCATED, ("next", "terminated")):
        if key in data.keys(True):
            data[key] = data[key].to(dtype)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3, seed=0), batch_size=30
    )
    buffer.extend(data)
    for _ in range(5):
        batch, info = buffer.sample(return_info=True)
        t = batch["t"].view(-1, 3)
        assert bool((t // 5 == t[:, :1] // 5).all())
        last = torch.arange(30) % 3 == 2
        assert batch[DONE].dtype is info[DONE].dtype is dtype
        assert torch.equal(batch[DONE].flatten() == 1, last | (batch["t"] % 5 == 4))


def test_flags_at_the_root_have_plain_keys():
    sampler = SliceSampler(slice_len=3, seed=0, truncated_key="truncated")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6)
    buffer.extend(rows([5, 5]))
    _, info = buffer.sample(return_info=True)
    last = torch.tensor([[False], [False], [True]] * 2)
    assert torch.equal(info["truncated"], last) and torch.equal(info["done"], last)
    assert not info["terminated"].any()


@pytest.mark.parametrize("kind", ["uniform", "epochs", "priorities"])
def test_a_sampler_called_without_a_buffer_returns_the_flags(kind):
    sampler = {
        "uniform": lambda: SliceSampler(slice_len=3, seed=0),
        "epochs": lambda: SliceSamplerWithoutReplacement(slice_len=3, seed=0),
        "priorities": lambda: PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=3, seed=0),
    }[kind]()
    storage = LazyTensorStorage(10)
    storage.set(range(10), rows([5, 5]))
    index, info = sampler.sample(storage, 6)
    last = torch.tensor([[False], [False], [True]] * 2)
    assert torch.equal(info[TRUNCATED], last)
    assert torch.equal(info[DONE], last | storage.get(index)[DONE])
    assert info["next", "terminated"].shape == (6, 1)
