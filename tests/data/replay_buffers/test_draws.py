"""Draws of a buffer: at once, ahead, taken back, and what an interrupt leaves of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gleanrl.data import SamplesPerInsert
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from gleanrl.errors import EmptyBufferError
from tests.data.replay_buffers.overtaken import Overtaken
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


def test_a_forked_process_serves_nothing_that_its_parent_drew_ahead():
    def in_child(buffer: ReplayBuffer, check: Callable[[], bool]) -> bool:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if check() else 1)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=20, prefetch=3, seed=0)
    buffer.extend(torch.arange(10_000))
    buffer.sample()
    ahead = [ticket.drawn.slots.tolist() for ticket in buffer._draws.prefetcher]
    assert len(ahead) == 3
    assert in_child(buffer, lambda: all(buffer.sample().tolist() not in ahead for _ in range(3)))
    epochs = ReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SamplerWithoutReplacement(seed=0), batch_size=10, prefetch=2
    )
    epochs.extend(torch.arange(60))
    first = epochs.sample().tolist()

    def rest() -> bool:
        return sorted(first + torch.cat([epochs.sample() for _ in range(5)]).tolist()) == list(range(60))

    assert in_child(epochs, rest), "the epoch goes on where it stood"
    assert rest()


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("where", ["transform", "collate", "fetch"])
def test_permits_of_a_batch_that_nobody_gets_are_given_back(where: str, depth: int | None) -> None:
    failing = True

    def fail(data: Any) -> Any:
        if failing:
            raise RuntimeError("not today")
        return data

    class Failing(LazyTensorStorage):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
            return fail(super().fetch(slots, paths)) if where == "fetch" else super().fetch(slots, paths)

    buffer = ReplayBuffer(
        storage=Failing(12),
        batch_size=2,
        prefetch=depth,
        collate_fn=fail if where == "collate" else None,
        transform=fail if where == "transform" else None,
        rate_limiter=SamplesPerInsert(1.0, min_size=4, tolerance=2, timeout_s=0.0),
    )
    failing = False
    buffer.extend(torch.arange(4))
    failing = True
    for _ in range(4):
        with pytest.raises(RuntimeError, match="not today"):
            buffer.sample()
        found = buffer.stats()
        assert found.batches_sampled == 0
        assert found.rate_limiter is not None and found.rate_limiter.sampled == 0
    failing = False
    if where != "fetch" or depth is None:  # else the next one may have been fetched already
        assert buffer.sample().shape == (2,)


def test_a_batch_that_is_fetched_again_takes_the_memory_of_the_first_one() -> None:
    places = list[int]()

    class Noting(Overtaken):
        def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
            found = super().fetch(slots, paths)
            places.append(found.data_ptr())
            return found

    rows = torch.ones(8, 1 << 18)  # a MB each
    buffer = ReplayBuffer(storage=Noting(8), batch_size=2)
    buffer.extend(rows)
    buffer.storage.act = lambda: buffer.extend(2 * rows)
    assert (buffer.sample() == 2).all()
    first, again = places
    assert first == again
