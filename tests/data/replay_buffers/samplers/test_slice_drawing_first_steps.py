"""First steps of slices agree with a scan of all rows, after every act."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, InvalidTypeError
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

MASK, TRUNCATED = ("collector", "mask"), ("next", "truncated")
KINDS = [Kind(), Kind(ids=False), Kind(nstep=True), Kind(batch=(3,)), Kind(batch=(2, 2))]
# Options, and the number of steps by which a slice may end after its trajectory (None: all but one step).
OPTIONS = [
    ({}, 0),
    ({"strict_length": False}, 0),
    ({"span": (False, 1)}, 1),
    ({"span": (0, True), "strict_length": False}, None),
]


def first_steps(run: list[int], length: int, strict: bool, right: int) -> list[int]:
    """Return the steps of a trajectory at which slices may begin."""
    if len(run) < length:
        if strict:
            return []
        return run[: max(len(run) - (length - right) + 1, 1)]
    return run[: len(run) - (length - right) + 1]


def drawable(sampler: Any, storage: Any) -> set[int]:
    """Return the slots that the core may draw."""
    native = sampler._priorities.of(storage)
    index, leaves = np.arange(len(storage)), np.empty(len(storage))
    native.check_valid()
    native.leaves(index.ctypes.data, len(index), leaves.ctypes.data)
    return set(np.flatnonzero(leaves).tolist())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("options", "right"), OPTIONS, ids=str)
@settings(max_examples=25, deadline=None)
@given(script=acts(*WRITES, *CLEARS, *EXCHANGES, *COPIES, "length"))
def test_first_steps_are_always_known(kind, options, right, script):
    strict = options.get("strict_length", True)

    def make() -> PrioritizedSliceSampler:
        size = kind.storage().max_size
        return PrioritizedSliceSampler(size, 0.7, 0.5, num_slices=2, seed=0, **options)

    length, buffer = 3, new_buffer(kind, make())
    for name, number in script:
        if name == "length":
            length = number % 3 + 2
        buffer = perform(name, number, buffer, kind, make)
        storage, sampler = buffer.storage, buffer.sampler
        overhang = length - 1 if right is None else right
        runs = trajectories(storage, kind) if len(buffer) else []
        starts = {slot for run in runs for slot in first_steps(run, length, strict, overhang)}
        if not starts:
            with pytest.raises(EmptyBufferError):
                sampler.draw(storage, 2 * length)
            continue
        drawn = sampler.draw(storage, 2 * length)
        assert drawable(sampler, storage) == starts
        pieces = cut_by(drawn.slots.tolist(), drawn.last.tolist())
        assert len(pieces) == 2
        for piece in pieces:
            (run,) = [run for run in runs if piece[0] in run]
            place = run.index(piece[0])
            assert piece[0] in starts and piece == run[place : place + length]


def rows(lengths: list[int]) -> TensorDict:
    ends = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    following = {"done": ends, "terminated": ends.clone()}
    return TensorDict({"t": torch.arange(len(ends)), "next": following}, [len(ends)])


def buffer_of(lengths: list[int], batch_size: int = 6, **options: Any) -> TensorDictReplayBuffer:
    given = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "slice_len": 3, "seed": 0, **options}
    sampler = PrioritizedSliceSampler(sum(lengths), **given)
    storage = LazyTensorStorage(sum(lengths))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.extend(rows(lengths))
    return buffer


def test_slices_have_the_weight_of_their_first_step():
    buffer = buffer_of([5, 4], 300)
    priorities = torch.tensor([1.0, 4.0, 2.0, 50.0, 50.0, 8.0, 0.0, 50.0, 50.0])
    buffer.update_priority(torch.arange(9), priorities)
    batch = buffer.sample()
    slices = batch.view(100, 3)
    first = slices["t"][:, 0]
    assert set(first.tolist()) == {0, 1, 2, 5}
    torch.testing.assert_close(batch["_weight"].view(100, 3), (1 / priorities[first])[:, None].expand(100, 3))
    assert batch["priority_weight"] is batch["_weight"] and bool((batch["_generation"] == 1).all())
    assert torch.equal(slices[TRUNCATED][..., 0], torch.tensor([[False, False, True]]).expand(100, 3))


def test_short_trajectories_come_whole_and_padded():
    buffer = buffer_of([2, 4], 60, strict_length=False, pad=True)
    batch = buffer.sample().view(20, 3)
    assert {tuple(t) for t in batch["t"].tolist()} == {(0, 1, 1), (2, 3, 4), (3, 4, 5)}
    assert torch.equal(batch[MASK][:, 2], batch["t"][:, 0] != 0)
    assert batch["_weight"].shape == (20, 3)
    whole = buffer_of([2, 4], 60, strict_length=False).sample()
    assert whole["_weight"].shape == whole["t"].shape and len(whole) < 60


def test_updates_for_any_step_and_late_ones():
    buffer = buffer_of([6], 6)
    batch = buffer.sample()
    batch["td_error"] = torch.full((6,), 2.0)
    buffer.update_tensordict_priority(batch)
    again = buffer.sample()
    buffer.extend(rows([6]))
    again["td_error"] = torch.full((6,), 9.0)
    buffer.update_tensordict_priority(again)
    assert buffer.stats().priorities_dropped == 6
    buffer.update_priority(again["index"], 9.0)  # every step of a slice counts as drawn
    assert buffer.stats().priorities_dropped == 12


def test_slices_whose_first_steps_have_priority_zero_are_not_drawn():
    buffer = buffer_of([4])
    buffer.update_priority([0, 1, 2, 3], [0.0, 0.0, 5.0, 5.0])
    with pytest.raises(EmptyBufferError, match="priorities are 0"):
        buffer.sample()
    buffer.update_priority([1], [3.0])
    assert buffer.sample()["t"].tolist() == [1, 2, 3] * 2


def test_priorities_of_other_steps_come_back_with_shorter_slices():
    buffer = buffer_of([4], 12, slice_len=None, num_slices=4)
    buffer.update_priority([0, 1, 2, 3], [1.0, 1.0, 7.0, 7.0])
    assert set(buffer.sample().view(4, 3)["t"][:, 0].tolist()) <= {0, 1}
    drawn = buffer.sampler.draw(buffer.storage, 4)
    assert drawable(buffer.sampler, buffer.storage) == {0, 1, 2, 3}
    assert buffer.sampler._priorities.state_dict()["raw"].tolist() == [1, 1, 7, 7] and len(drawn.slots) == 4


def test_a_left_overhang_is_turned_off():
    with pytest.warns(UserWarning, match="the left value is ignored"):
        buffer = buffer_of([5], span=(1, 1))
    assert buffer.sampler.unit.rule.left == 0 and buffer.sampler.unit.rule.right == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_slices": 3}, InvalidTypeError),
        ({"alpha": -1.0}, InvalidArgumentError),
        ({"reduction": "avg"}, InvalidArgumentError),
        ({"normalize": "?"}, InvalidArgumentError),
        ({"slice_len": 0}, InvalidArgumentError),
    ],
)
def test_invalid_options_are_refused(options, error):
    with pytest.raises(error):
        buffer_of([5], **options)


def test_writes_look_at_their_neighbourhood_only():
    buffer = buffer_of([7] * 40)
    buffer.sample()
    looked: list[int] = []
    starts, original = buffer.sampler.unit._starts, buffer.sampler.unit._starts._find
    starts._find = lambda *args: (looked.append(args[-1]), original(*args))[1]
    for _ in range(5):
        buffer.extend(rows([4]))
        buffer.sample()
    assert max(looked) <= 4 + 2 * 3 and len(looked) == 5
