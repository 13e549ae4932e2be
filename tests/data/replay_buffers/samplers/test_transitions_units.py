"""Single transitions are drawn from real steps only, and only stale ones are drawn again."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl._state.rng import OwnedGenerator
from gleanrl.data.replay_buffers import LazyTensorStorage
from gleanrl.data.replay_buffers.samplers.transitions import Transitions
from gleanrl.errors import EmptyBufferError
from tests.data.replay_buffers.oracle import fill

MASK = ("collector", "mask")


def masked(*steps: int) -> LazyTensorStorage:
    """Return four time steps of two streams, of which only the given slots are steps."""
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask.view(-1)[list(steps)] = True
    storage = LazyTensorStorage(8, ndim=2)
    fill(storage, TensorDict({"x": torch.arange(8).view(4, 2), MASK: mask}, [4, 2]))
    return storage


def test_rows_that_are_no_steps_are_no_items_and_never_drawn():
    storage, unit = masked(1, 2, 7), Transitions()
    assert unit.items(storage, 1).tolist() == [1, 2, 7]
    assert unit.living(storage, torch.tensor([0, 1, 7]), None, 1).tolist() == [False, True, True]
    assert set(unit.uniform(storage, 60, OwnedGenerator(0)).slots.tolist()) == {1, 2, 7}


def test_without_a_mask_every_row_is_an_item():
    storage, unit = LazyTensorStorage(5), Transitions()
    fill(storage, torch.arange(3))
    assert unit.items(storage, 1) is None and unit.living(storage, torch.arange(3), None, 1) is None
    assert unit.sizes(6) == (6, 1)


def test_only_stale_rows_are_drawn_again():
    storage, unit, random = masked(1, 2, 7), Transitions(), OwnedGenerator(0)
    drawn = unit.uniform(storage, 50, random)
    stale = torch.arange(50) % 2 == 0
    again = unit.again(storage, drawn, stale, random)
    assert torch.equal(again.slots[~stale], drawn.slots[~stale])
    assert not torch.equal(again.slots[stale], drawn.slots[stale])


def test_storage_without_a_step_raises():
    with pytest.raises(EmptyBufferError, match="every stored row is masked out"):
        Transitions().items(masked(), 1)
