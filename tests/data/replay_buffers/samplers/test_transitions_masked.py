"""Rows that are no steps are never drawn."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import HERReplayBuffer, LazyTensorStorage
from gleanrl.data.replay_buffers.samplers.transitions import check_any_step, redrawn_masked
from gleanrl.errors import EmptyBufferError
from tests.data.replay_buffers.oracle import fill


def storage_of(*steps):
    """Return four time steps of two streams, of which only the given slots are steps."""
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask.view(-1)[list(steps)] = True
    storage = LazyTensorStorage(8, ndim=2)
    fill(storage, TensorDict({"x": torch.arange(8).view(4, 2), ("collector", "mask"): mask}, [4, 2]))
    return storage


def test_only_masked_rows_are_drawn_again():
    asked = []

    def draw(count):
        asked.append(count)
        return torch.tensor([0, 7, 1])[:count] if len(asked) == 1 else torch.full((count,), 2)

    drawn = redrawn_masked(storage_of(1, 2, 7), torch.tensor([3, 1, 4, 5]), draw)
    assert drawn.tolist() == [2, 1, 7, 1] and asked == [3, 1]


def test_storage_without_steps_raises():
    with pytest.raises(EmptyBufferError, match="every stored row is masked out"):
        redrawn_masked(storage_of(), torch.tensor([0]), lambda count: torch.zeros(count, dtype=torch.int64))
    check_any_step(storage_of(3))


def test_masked_rows_give_no_goals():
    """A self-resetting environment has a row between two trajectories."""
    mask = torch.tensor([True, True, False, True, True])
    t, done = torch.arange(5.0)[:, None], torch.tensor([False, True, False, False, True])[:, None]
    rows = {"achieved": t, "goal": t - 9, "collector": {"mask": mask}, "next": {"reward": t, "done": done}}
    for strategy in ("future", "final", "episode", "random"):
        buffer = HERReplayBuffer(
            lambda rows: rows["goal"],
            her_ratio=1.0,
            strategy=strategy,
            goal_key="goal",
            achieved_goal_key="achieved",
            storage=LazyTensorStorage(5, ndim=2),
            batch_size=200,
            seed=0,
        )
        buffer.extend(TensorDict(rows, [5])[None])
        batch = buffer.sample()
        assert not (batch["achieved"] == 2).any() and not (batch["goal"] == 2).any()
