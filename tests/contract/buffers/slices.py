"""Slice buffers, their samples cut into slices, and the starts that the contract allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import TRUNCATED, Ring, Tape, chi_square, chunks

Span = tuple[int, int, int]  # stream, first step, number of steps


def slice_buffer(
    tape: Tape, capacity: int, written: int, batch_size: int, sampler: Any, transform: Any = None
) -> tuple[Any, Ring]:
    """Return a TensorDict buffer with `written` steps, written in chunks of different sizes, and its ring."""
    storage = parts.LazyTensorStorage(capacity * tape.streams, ndim=1 + len(tape.shape))
    buffer = parts.TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=batch_size, transform=transform
    )
    ring = Ring(capacity)
    for start, stop in chunks(written):
        write(buffer, ring, tape, start, stop)
    return buffer, ring


def write(buffer: Any, ring: Ring, tape: Tape, start: int, stop: int) -> None:
    """Write these steps to the buffer and to its ring."""
    buffer.extend(tape.rows(start, stop))
    ring.extend(range(start, stop))


def cut(tape: Tape, batch: Any) -> list[Span]:
    """Return the slices of a batch, found by the flag at the end of each; every row is checked."""
    ends = batch[TRUNCATED].reshape(-1)
    stream, t = tape.check(batch, ends)
    slices = []
    start = 0
    assert ends[-1], "the last slice has no end"
    for stop in (ends.nonzero()[:, 0] + 1).tolist():
        steps = t[start:stop]
        assert (stream[start:stop] == stream[start]).all()
        assert torch.equal(steps, steps[0] + torch.arange(stop - start)), f"not consecutive: {steps.tolist()}"
        slices.append((int(stream[start]), int(steps[0]), stop - start))
        start = stop
    return slices


def allowed(
    ring: Ring,
    tape: Tape,
    length: int,
    strict: bool = True,
    left: int = 0,
    right: int = 0,
) -> dict[Span, float]:
    """Return the probability of each slice: the trajectory is uniform, then its start is uniform.

    A start may be up to `left` steps before the trajectory, or leave out up to `right` steps at its end. Steps outside
    the trajectory are cut off. Trajectories shorter than `length` are excluded if `strict`, and served whole otherwise.
    """
    pieces = [(s, piece) for s in range(tape.streams) for piece in ring.pieces(tape, s)]
    pieces = [(s, piece) for s, piece in pieces if len(piece) >= length or not strict]
    table: Counter[Span] = Counter()
    for stream, piece in pieces:
        starts = range(-left, max(len(piece) - length, 0) + right + 1)
        for start in starts:
            held = piece[max(start, 0) : max(start + length, 0)]
            table[stream, held[0], len(held)] += 1 / len(starts) / len(pieces)
    return dict(table)


def check_distribution(tape: Tape, buffer: Any, table: dict[Span, float], batches: int = 12) -> None:
    """Check that exactly the slices of `table` are drawn, with its probabilities."""
    counts: Counter[Span] = Counter()
    for _ in range(batches):
        counts.update(cut(tape, buffer.sample()))
    assert set(counts) <= set(table), f"not allowed: {sorted(set(counts) - set(table))[:5]}"
    assert set(counts) == set(table), f"never drawn: {sorted(set(table) - set(counts))[:5]}"
    chi_square([counts[key] for key in table], list(table.values()))


def sampler(kind: str = "SliceSampler", seed: int = 0, **kwargs: Any) -> Any:
    """Return a slice sampler with a seed."""
    made = getattr(parts, kind)(**kwargs)
    made.set_seed(seed)
    return made


def episodes(ids: Sequence[int], done: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a column of ids ``[T]`` and a column of done flags ``[T, 1]``."""
    flags = torch.zeros(len(ids), 1, dtype=torch.bool)
    flags[list(done)] = True
    return torch.tensor(ids, dtype=torch.int64), flags
