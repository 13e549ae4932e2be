"""Random samplers draw uniformly."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, RandomSampler
from tests.data.replay_buffers.oracle import fill


def test_every_stored_row_is_equally_likely():
    storage = LazyTensorStorage(100)
    fill(storage, torch.arange(20))
    counts = torch.bincount(RandomSampler(seed=0).draw(storage, 20_000).slots, minlength=20)
    assert counts.shape == (20,)
    # Chi-square with 19 degrees of freedom exceeds 43.8 for one seed in a thousand.
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 43.8


def test_redraw_replaces_the_stale_rows_only():
    storage = LazyTensorStorage(1_000_000)
    fill(storage, torch.arange(1_000_000, dtype=torch.uint8))
    sampler = RandomSampler(seed=0)
    drawn = sampler.draw(storage, 50)
    stale = torch.arange(50) % 3 == 0
    again = sampler.redraw(storage, drawn, stale)
    assert torch.equal(again.slots[~stale], drawn.slots[~stale])
    assert not (again.slots[stale] == drawn.slots[stale]).any()


def test_random_sampler_never_runs_out():
    storage = LazyTensorStorage(3)
    fill(storage, torch.arange(3))
    sampler = RandomSampler(seed=0)
    sampler.draw(storage, 9)
    assert not sampler.ran_out
