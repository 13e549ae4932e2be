"""Prioritized slice samplers draw a start by priority, among the starts at which a slice fits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.priorities import Oracle, close
from tests.contract.buffers.slices import cut, slice_buffer
from tests.contract.buffers.tape import Ring, Tape, chi_square

L = 3
CAPACITY = 23


def make(size: int, oracle: Oracle, **kwargs: Any) -> Any:
    sampler = parts.PrioritizedSliceSampler(
        max_capacity=size, alpha=oracle.alpha, beta=oracle.beta, eps=oracle.eps, **{"slice_len": L, **kwargs}
    )
    sampler.set_seed(0)
    return sampler


def starts(ring: Ring, tape: Tape, length: int = L) -> list[tuple[int, int]]:
    """Return every (stream, t) at which a slice fits."""
    pieces = [(s, piece) for s in range(tape.streams) for piece in ring.pieces(tape, s)]
    return [(s, t) for s, piece in pieces for t in piece[: max(0, len(piece) - length + 1)]]


def check(buffer: Any, tape: Tape, ring: Ring, oracle: Oracle, batches: int = 12) -> None:
    """Check the starts by chi-square, and that no other start is drawn."""
    place = {t: slot for slot, t in enumerate(ring.slots) if t is not None}
    slots = {(s, t): place[t] * tape.streams + s for s, t in starts(ring, tape)}
    total = math.fsum(oracle.stored(slot) for slot in slots.values())
    chance = {start: oracle.stored(slot) / total for start, slot in slots.items()}
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(batches):
        batch = buffer.sample()
        slices = cut(tape, batch)
        assert all(length == L for _, _, length in slices)
        counts.update((s, t) for s, t, _ in slices)
        weight = batch["_weight"].reshape(-1, L)
        assert (weight == weight[:, :1]).all() and (weight <= 1 + 1e-6).all()
    assert set(counts) <= set(chance)
    chi_square([counts[key] for key in chance], list(chance.values()))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("written", [11, CAPACITY, CAPACITY + 14])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_starts_are_drawn_by_priority(shape: tuple[int, ...], written: int, alpha: float) -> None:
    tape, oracle = Tape((1, L - 1, L, 9, 5), shape), Oracle(alpha, 0.5)
    size = CAPACITY * tape.streams
    buffer, ring = slice_buffer(tape, CAPACITY, written, 200 * L, make(size, oracle))
    filled = list(range(len(ring) * tape.streams))
    oracle.write(filled)
    check(buffer, tape, ring, oracle)
    values = [0.5 + slot * 13 % 4 for slot in filled]
    buffer.update_priority(grid(filled, tape), torch.tensor(values))
    oracle.update(filled, values)
    check(buffer, tape, ring, oracle)
    buffer.extend(tape.rows(written, written + 2))
    places = [p * tape.streams + s for p in ring.extend([written, written + 1]) for s in range(tape.streams)]
    oracle.write(places)
    check(buffer, tape, ring, oracle)


def grid(slots: list[int], tape: Tape) -> Any:
    index = torch.tensor(slots)
    return index if not tape.shape else torch.stack([index // tape.streams, index % tape.streams], 1)


def test_slice_weights_follow_the_priority_of_the_start() -> None:
    tape, oracle = Tape((9,)), Oracle(1.0, 1.0)
    buffer, ring = slice_buffer(tape, 18, 18, 200 * L, make(18, oracle))
    values = [1.0 + slot % 5 for slot in range(18)]
    oracle.write(list(range(18)))
    oracle.update(list(range(18)), values)
    buffer.update_priority(torch.arange(18), torch.tensor(values))
    check(buffer, tape, ring, oracle)
    batch = buffer.sample()
    first = batch["index"].view(-1, L)[:, 0].tolist()
    ratio = batch["_weight"].reshape(-1, L)[:, 0].double() * torch.tensor(
        [oracle.stored(slot) for slot in first]
    )
    close(ratio / ratio[0], [1.0] * len(first))


def test_the_priorities_of_the_last_steps_come_back_after_a_draw() -> None:
    # At first no slice fits at the steps with a priority. They become starts when their trajectory grows.
    tape, oracle = Tape((100,)), Oracle(1.0, 0.5, 0.0)
    buffer, ring = slice_buffer(tape, 40, 6, 10 * L, make(40, oracle))
    buffer.update_priority(torch.arange(6), torch.tensor([1.0, 1.0, 1.0, 1.0, 50.0, 50.0]))
    for _ in range(5):
        assert {t for _, t, _ in cut(tape, buffer.sample())} <= {0, 1, 2, 3}
    buffer.extend(tape.rows(6, 8))
    drawn = Counter(t for _ in range(30) for _, t, _ in cut(tape, buffer.sample()))
    assert set(drawn) <= {0, 1, 2, 3, 4, 5}
    assert drawn[4] + drawn[5] > 0.9 * sum(drawn.values())


def test_sampling_without_a_fitting_start_raises() -> None:
    tape, oracle = Tape((L - 1,)), Oracle()
    buffer, _ = slice_buffer(tape, CAPACITY, CAPACITY, 10 * L, make(CAPACITY, oracle))
    with pytest.raises(RuntimeError):
        buffer.sample()


def test_left_overhang_is_turned_off_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="span"):
        make(CAPACITY, Oracle(), span=(True, False))


def test_restored_buffer_draws_the_same_slices() -> None:
    tape, oracle = Tape((1, 4, 9)), Oracle(1.0, 0.5)
    buffer, ring = slice_buffer(tape, CAPACITY, CAPACITY + 7, 20 * L, make(CAPACITY, oracle))
    buffer.update_priority(torch.arange(CAPACITY), 1.0 + torch.arange(CAPACITY) % 4)
    other, _ = slice_buffer(tape, CAPACITY, 0, 20 * L, make(CAPACITY, oracle))
    other.load_state_dict(buffer.state_dict())
    for _ in range(5):
        assert (buffer.sample() == other.sample()).all()
