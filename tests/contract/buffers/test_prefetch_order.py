"""Other calls between prefetched batches keep epochs complete, and no record repeats."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.slices import cut
from tests.contract.buffers.tape import Tape

TAPE = Tape((6, 4))


def make(depth: int | None, sampler: Any, batch_size: int = 6) -> Any:
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(40), sampler=sampler, batch_size=batch_size, prefetch=depth, seed=0
    )
    buffer.extend(TAPE.rows(0, 40))
    return buffer


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_an_epoch_of_columns_and_whole_rows(depth: int | None) -> None:
    buffer = make(depth, parts.SamplerWithoutReplacement())
    drawn: Counter[int] = Counter()
    for turn in range(7):
        batch = buffer.sample(keys=["action"] if turn % 2 else None)
        drawn.update(batch["index"].tolist())
    assert set(drawn) == set(range(40)) and set(drawn.values()) == {1}


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_an_epoch_of_batches_of_two_sizes(depth: int | None) -> None:
    buffer = make(depth, parts.SamplerWithoutReplacement())
    drawn: Counter[int] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(8):
            drawn.update(buffer.sample(4 if turn % 2 else None)["index"].tolist())
    assert set(drawn) == set(range(40)) and set(drawn.values()) == {1}


@pytest.mark.parametrize("depth", [None, 1, 3])
@pytest.mark.parametrize("length", [3, 4])
def test_epoch_of_slices_has_each_trajectory_once(depth: int | None, length: int) -> None:
    buffer = make(depth, parts.SliceSamplerWithoutReplacement(slice_len=length), 3 * length)
    for _ in range(3):
        heads = Counter(
            int(TAPE.episode(torch.tensor([0]), torch.tensor([t]))[0])
            for batch in buffer
            for _, t, _ in cut(TAPE, batch)
        )
        assert set(heads) == set(range(8)) and set(heads.values()) == {1}


@pytest.mark.parametrize("depth", [1, 3])
def test_ran_out_belongs_to_the_batch_that_was_served(depth: int) -> None:
    sampler = parts.SamplerWithoutReplacement()
    buffer = make(depth, sampler)
    flags = []
    for _ in range(14):
        buffer.sample()
        flags.append(sampler.ran_out)
    assert flags == ([False] * 6 + [True]) * 2


@pytest.mark.parametrize("depth", [1, 3])
def test_records_added_during_an_epoch_join_the_next_one(depth: int) -> None:
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(40),
        sampler=parts.SamplerWithoutReplacement(),
        batch_size=6,
        prefetch=depth,
        seed=0,
    )
    buffer.extend(TAPE.rows(0, 18))
    drawn = Counter(buffer.sample()["index"].tolist())
    buffer.extend(TAPE.rows(18, 24))
    for _ in range(2):
        drawn.update(buffer.sample()["index"].tolist())
    # Records that are written during an epoch join the next one.
    assert drawn == Counter(range(18))
    assert Counter(i for batch in buffer for i in batch["index"].tolist()) == Counter(range(24))


@pytest.mark.parametrize("depth", [1, 3])
def test_records_overwritten_during_an_epoch_are_served_once(depth: int) -> None:
    buffer = make(depth, parts.SamplerWithoutReplacement())
    drawn = Counter(buffer.sample()["index"].tolist())
    buffer.extend(TAPE.rows(40, 53))
    for _ in range(6):
        batch = buffer.sample()
        drawn.update(batch["index"].tolist())
        _, t = TAPE.check(batch)
        assert t.tolist() == [i + 40 if i < 13 else i for i in batch["index"].tolist()]
    assert drawn == Counter(range(40))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["PrioritizedSampler", "RandomSampler"])
def test_a_draw_ahead_is_no_draw_before_its_batch_is_served(kind: str, depth: int) -> None:
    options = {"max_capacity": 40, "alpha": 1.0, "beta": 1.0} if "Prio" in kind else {}
    buffer = make(depth, getattr(parts, kind)(**options))
    for turn in range(10):
        batch = buffer.sample()
        buffer.extend(TAPE.rows(40 + 9 * turn, 49 + 9 * turn))
        held = set(TAPE.locate(buffer[:])[1].tolist())
        again = buffer.sample()
        assert set(TAPE.check(again)[1].tolist()) <= held
        if "Prio" in kind:
            batch["td_error"] = torch.ones(6)
            before = buffer.stats().priorities_dropped
            buffer.update_tensordict_priority(batch)
            gone = [t for t in TAPE.locate(batch)[1].tolist() if t not in held]
            assert buffer.stats().priorities_dropped - before == len(gone)


@pytest.mark.parametrize("depth", [1, 3])
def test_late_updates_without_generations_are_dropped(depth: int) -> None:
    # Prefetched draws may come after the write. Updates refer only to the draws of batches that were served.
    options = {"max_capacity": 8, "alpha": 1.0, "beta": 1.0}
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(8),
        sampler=parts.PrioritizedSampler(**options),
        batch_size=64,
        prefetch=depth,
        seed=0,
    )
    buffer.extend(TAPE.rows(0, 8))
    _, info = buffer.sample(return_info=True)
    buffer.extend(TAPE.rows(8, 10))
    buffer.update_priority(info["index"], torch.ones(64))
    assert buffer.stats().priorities_dropped == int((info["index"] < 2).sum()) > 0


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_draws_ahead_dont_make_late_updates_timely(depth: int | None) -> None:
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(8),
        sampler=parts.PrioritizedSampler(max_capacity=8, alpha=1.0, beta=1.0),
        batch_size=2,
        prefetch=depth,
        seed=0,
    )
    dropped = 0
    for turn in range(30):
        buffer.extend(TAPE.rows(8 * turn, 8 * turn + 8))
        _, late = buffer.sample(return_info=True)
        buffer.extend(TAPE.rows(8 * turn + 8, 8 * turn + 12))
        _, served = buffer.sample(return_info=True)
        gone = buffer.generation(late["index"]) != late["generation"]
        again = torch.isin(late["index"], served["index"])
        buffer.update_priority(late["index"], torch.ones(2))
        dropped += int((gone & ~again).sum())
        assert buffer.stats().priorities_dropped == dropped
    assert dropped > 10
