"""Slices come with truncation at their ends, the documented sizes, padding, masks and epochs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.slices import Span, allowed, cut, slice_buffer
from tests.contract.buffers.slices import sampler as make
from tests.contract.buffers.tape import MASK, TRUNCATED, Tape, check_bijection

L = 4
TAPE = Tape((3, 4, 9, 1))
CAPACITY = 40


def buffer_of(**kwargs: Any) -> Any:
    return slice_buffer(TAPE, CAPACITY, CAPACITY + 7, 10 * L, make(**kwargs))[0]


def test_the_last_step_of_every_slice_is_truncated_and_done() -> None:
    batch = buffer_of(slice_len=L).sample()
    last = torch.arange(10 * L) % L == L - 1
    stream, t = TAPE.locate(batch)
    written = TAPE.expected(stream, t)["next"]
    assert (batch[TRUNCATED][:, 0] == (last | written["truncated"][:, 0])).all()
    assert (batch["next", "done"][:, 0] == (last | written["done"][:, 0])).all()
    assert torch.equal(batch["next", "terminated"], written["terminated"])
    assert batch[TRUNCATED].shape == batch["next", "done"].shape == (10 * L, 1)


def test_without_a_truncated_key_nothing_changes() -> None:
    batch = buffer_of(slice_len=L, truncated_key=None).sample()
    TAPE.check(batch)


def test_the_storage_keeps_its_flags() -> None:
    buffer = buffer_of(slice_len=L)
    before = buffer[:].clone()
    for _ in range(5):
        buffer.sample()
    assert (buffer[:] == before).all()
    TAPE.check(buffer[:])


@pytest.mark.parametrize("kind", ["plain", "tensordict"])
def test_flag_is_written_to_another_truncated_key(kind: str) -> None:
    made = {"plain": parts.ReplayBuffer, "tensordict": parts.TensorDictReplayBuffer}[kind]
    buffer = made(
        storage=parts.LazyTensorStorage(CAPACITY),
        sampler=make(slice_len=L, truncated_key=("next", "cut")),
        batch_size=10 * L,
    )
    buffer.extend(TAPE.rows(0, CAPACITY))
    batch, info = buffer.sample(return_info=True)
    last = torch.arange(10 * L) % L == L - 1
    found = batch["next", "cut"] if kind == "tensordict" else info["next", "cut"]
    assert torch.equal(found.reshape(-1), last)


def test_data_without_terminated_gets_it_false() -> None:
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(CAPACITY), sampler=make(slice_len=L), batch_size=10 * L
    )
    buffer.extend(TAPE.rows(0, CAPACITY).exclude(("next", "terminated"), ("next", "truncated")))
    batch = buffer.sample()
    last = torch.arange(10 * L) % L == L - 1
    assert torch.equal(batch[TRUNCATED].reshape(-1), last)
    assert not batch.get(("next", "terminated"), torch.zeros(1)).any()


@pytest.mark.parametrize(("kwargs", "count"), [({"num_slices": 5}, 5), ({"slice_len": 8}, 5)])
def test_number_and_length_of_slices_follow_the_options(kwargs: dict[str, int], count: int) -> None:
    buffer = buffer_of(**kwargs)
    slices = cut(TAPE, buffer.sample())
    assert len(slices) == count and {length for _, _, length in slices} == {8}


def test_a_batch_that_slices_do_not_divide() -> None:
    for kwargs in ({"num_slices": 3}, {"slice_len": 7}):
        with pytest.raises(RuntimeError):
            buffer_of(**kwargs).sample()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["SliceSampler", "SliceSamplerWithoutReplacement"])
def test_padded_slices_have_masks(kind: str, strict: bool) -> None:
    buffer = buffer_of(kind=kind, num_slices=10, pad=True, strict_length=strict)
    lengths: Counter[int] = Counter()
    names: dict[int, tuple[int, int]] = {}
    for _ in range(3):
        batch = buffer.sample()
        assert len(batch) % L == 0 and batch[MASK].dtype == torch.bool
        assert batch[MASK].shape == batch.batch_size
        if kind == "SliceSampler":
            assert len(batch) == 10 * L
        mask = batch[MASK].view(-1, L)
        assert (mask[:, 0]).all() and (mask[:, :-1] >= mask[:, 1:]).all(), "padding comes last"
        real = batch[batch[MASK]]
        spans = cut(TAPE, real.exclude(MASK))
        assert [length for _, _, length in spans] == mask.sum(1).tolist()
        check_bijection(real, names)
        lengths.update(mask.sum(1).tolist())
    assert set(lengths) == ({L} if strict else {1, 3, 4})


def test_padded_slices_with_overhang_have_all_lengths() -> None:
    buffer = buffer_of(num_slices=10, pad=True, span=True)
    lengths: Counter[int] = Counter()
    for _ in range(20):
        lengths.update(buffer.sample()[MASK].view(-1, L).sum(1).tolist())
    assert set(lengths) == set(range(1, L + 1))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_without_replacement_each_trajectory_gives_one_slice_an_epoch(
    shape: tuple[int, ...], strict: bool
) -> None:
    tape = Tape((3, 4, 9, 1), shape)
    sampler = make("SliceSamplerWithoutReplacement", num_slices=3, strict_length=strict)
    buffer, ring = slice_buffer(tape, CAPACITY, CAPACITY + 7, 3 * L, sampler)
    table = allowed(ring, tape, L, strict)
    owner = {
        (s, t): (s, piece[0]) for s in range(tape.streams) for piece in ring.pieces(tape, s) for t in piece
    }
    expected = {owner[stream, t] for stream, t, _ in table}
    seen: Counter[Span] = Counter()
    for _ in range(60):
        epoch: Counter[tuple[int, int]] = Counter()
        batches = list(buffer)
        for batch in batches:
            slices = cut(tape, batch)
            assert len(slices) == 3 or batch is batches[-1]
            epoch.update(owner[stream, t] for stream, t, _ in slices)
            seen.update(slices)
        assert set(epoch) == expected and set(epoch.values()) == {1}
        assert len(batches) == -(-len(expected) // 3)
    assert set(seen) == set(table)


def test_without_replacement_drops_the_last_batch_if_asked() -> None:
    sampler = make("SliceSamplerWithoutReplacement", num_slices=3, drop_last=True)
    buffer, ring = slice_buffer(TAPE, CAPACITY, CAPACITY, 3 * L, sampler)
    long = [piece for piece in ring.pieces(TAPE) if len(piece) >= L]
    assert len(long) % 3
    batches = list(buffer)
    assert len(batches) == len(long) // 3 and all(len(batch) == 3 * L for batch in batches)


def test_epoch_without_shuffle_serves_trajectories_in_order() -> None:
    sampler = make("SliceSamplerWithoutReplacement", num_slices=3, shuffle=False)
    buffer, ring = slice_buffer(TAPE, CAPACITY, CAPACITY, 3 * L, sampler)
    long = [piece for piece in ring.pieces(TAPE) if len(piece) >= L]
    owner = {t: piece[0] for piece in long for t in piece}
    for _ in range(3):
        order = [owner[t] for batch in buffer for _, t, _ in cut(TAPE, batch)]
        assert order == sorted(order) and len(order) == len(long)


def test_without_replacement_ran_out_on_the_last_batch() -> None:
    sampler = make("SliceSamplerWithoutReplacement", num_slices=1)
    buffer, ring = slice_buffer(TAPE, CAPACITY, CAPACITY, L, sampler)
    count = sum(len(piece) >= L for piece in ring.pieces(TAPE))
    for _ in range(2):
        flags = []
        for _ in range(count):
            buffer.sample()
            flags.append(sampler.ran_out)
        assert flags == [False] * (count - 1) + [True]
