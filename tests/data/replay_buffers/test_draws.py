"""Draws of a buffer: at once, ahead, taken back, and what an interrupt leaves of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from gleanrl.errors import EmptyBufferError
from tests.interrupts import interruptions


def epochs(depth: int | None) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=2, prefetch=depth)
    buffer.extend(torch.arange(12))
    return buffer


def rest(buffer: ReplayBuffer) -> list[int]:
    found: list[int] = []
    while True:
        found += buffer.sample().tolist()
        if buffer.sampler.ran_out:
            return found


def test_another_size_takes_back_what_was_drawn_ahead():
    buffer = epochs(3)
    seen = buffer.sample().tolist()
    with pytest.warns(UserWarning, match="batch_size=4 differs"):
        seen += buffer.sample(4).tolist()
    assert sorted(seen + rest(buffer)) == [*range(12)]


def test_a_draw_that_fails_leaves_nothing():
    buffer = epochs(2)
    buffer.empty()
    for _ in range(2):
        with pytest.raises(EmptyBufferError):
            buffer.sample()
    buffer.extend(torch.arange(12))
    assert sorted(rest(buffer)) == [*range(12)]


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_an_interrupted_call_loses_one_batch_of_an_epoch_at_most(depth):
    def make() -> tuple[Any, list[int]]:
        buffer = epochs(depth)
        return buffer, buffer.sample().tolist()

    for (buffer, seen), place in interruptions(make, lambda made: made[0].sample(), 60):
        left = rest(buffer)
        assert len({*seen, *left}) == len(seen) + len(left) >= 10, place
