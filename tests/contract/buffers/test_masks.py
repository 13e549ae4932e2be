"""No sampler serves rows that are no steps, whose `("collector", "mask")` is False and whose id is -1."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.cases import make_sampler
from tests.contract.buffers.slices import cut
from tests.contract.buffers.tape import IDS, MASK, Tape, chi_square, chunks

L = 3
CAPACITY = 21
KINDS = ("random", "once", "prioritized", "slices", "slices_once", "prioritized_slices")


class Masked:
    """A tape with an extra row after every episode, as from environments that reset one step late.

    `at(stream, i)` is the step of row i, or None if the row is no step.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.tape = Tape((4, 1, 6), shape)
        self.rows_of = [self.track(stream) for stream in range(self.tape.streams)]

    def track(self, stream: int) -> list[int | None]:
        rows: list[int | None] = []
        steps = torch.arange(200)
        episodes = self.tape.episode(torch.full_like(steps, stream), steps)[0].tolist()
        for t, (episode, after) in enumerate(zip(episodes, episodes[1:], strict=False)):
            rows.append(t)
            if after != episode:
                rows.append(None)
        return rows

    def rows(self, start: int, stop: int) -> TensorDict:
        size = (self.tape.streams, stop - start)
        steps = [[row or 0 for row in track[start:stop]] for track in self.rows_of]
        mask = torch.tensor([[row is not None for row in track[start:stop]] for track in self.rows_of])
        stream = torch.arange(size[0])[:, None].expand(size)
        data = self.tape.expected(stream, torch.tensor(steps).reshape(size))
        data[MASK] = mask
        data[IDS][~mask] = -1
        data["observation"][~mask] = -99.0
        return data.reshape(*self.tape.shape, stop - start)


def make(kind: str, shape: tuple[int, ...], written: int, **kwargs: Any) -> tuple[Any, Masked, set[Any]]:
    """Return a buffer and the pairs (stream, t) that it may serve."""
    masked = Masked(shape)
    size = CAPACITY * masked.tape.streams
    options = {"slice_len": L, "num_slices": None} if "slices" in kind else {}
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(size, ndim=1 + len(shape)),
        sampler=make_sampler(kind, size, **options),
        batch_size=20 * L,
        **kwargs,
    )
    for start, stop in chunks(written):
        buffer.extend(masked.rows(start, stop))
    tracks = [track[:written] for track in masked.rows_of]
    if not shape:
        # In one dimension, rows that are no steps are not stored.
        tracks = [[row for row in track if row is not None] for track in tracks]
    allowed = {
        (stream, row) for stream, track in enumerate(tracks) for row in track[-CAPACITY:] if row is not None
    }
    return buffer, masked, allowed


def served(masked: Masked, batch: TensorDict, kind: str) -> list[tuple[int, int]]:
    """Return (stream, t) of the rows of a batch, after checking that all of them are steps."""
    assert batch[MASK].all()
    batch = batch.exclude(MASK)
    if "slices" in kind:
        return [(s, t + i) for s, t, length in cut(masked.tape, batch) for i in range(length)]
    stream, t = masked.tape.check(batch)
    return list(zip(stream.tolist(), t.tolist(), strict=True))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("written", [15, CAPACITY + 17])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_are_never_sampled(
    kind: str, shape: tuple[int, ...], written: int, prefetch: int | None
) -> None:
    buffer, masked, allowed = make(kind, shape, written, prefetch=prefetch)
    if not shape:
        assert len(buffer) == len(allowed), "rows that are no steps aren't counted"
    seen: set[tuple[int, int]] = set()
    for _ in range(25):
        seen |= set(served(masked, buffer.sample(), kind))
    assert seen <= allowed
    if "slices" not in kind:
        assert seen == allowed
    buffer.extend(masked.rows(written, written + 7))
    for _ in range(5):
        assert set(served(masked, buffer.sample(), kind))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("written", [15, CAPACITY + 17])
@pytest.mark.parametrize("kind", ["random", "prioritized"])
def test_steps_come_equally_often(kind: str, shape: tuple[int, ...], written: int) -> None:
    buffer, masked, allowed = make(kind, shape, written)
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(60):
        counts.update(served(masked, buffer.sample(), kind))
    chi_square([counts[key] for key in allowed], [1 / len(allowed)] * len(allowed))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("written", [15, CAPACITY + 17])
def test_an_epoch_is_all_steps(shape: tuple[int, ...], written: int) -> None:
    buffer, masked, allowed = make("once", shape, written)
    for _ in range(3):
        counts = Counter(row for batch in buffer for row in served(masked, batch, "once"))
        assert set(counts) == allowed and set(counts.values()) == {1}


@pytest.mark.parametrize("kind", ["prioritized", "prioritized_slices"])
def test_high_priority_never_samples_masked_rows(kind: str) -> None:
    buffer, masked, allowed = make(kind, (3,), 15)
    index = torch.cartesian_prod(torch.arange(15), torch.arange(3))
    buffer.update_priority(index, torch.full((45,), 50.0))
    for _ in range(10):
        assert set(served(masked, buffer.sample(), kind)) <= allowed


@pytest.mark.parametrize("kind", ["random", "once", "prioritized", "slices"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_masked_rows_are_never_sampled_after_a_restore(kind: str, shape: tuple[int, ...]) -> None:
    buffer, masked, allowed = make(kind, shape, CAPACITY + 17)
    other, _, _ = make(kind, shape, 0)
    other.load_state_dict(buffer.state_dict())
    for _ in range(10):
        assert set(served(masked, other.sample(), kind)) <= allowed


@pytest.mark.timeout(10)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_buffer_of_masked_rows_alone_cannot_be_sampled(shape: tuple[int, ...]) -> None:
    rows = Masked(shape).rows(0, 6)
    rows[MASK] = torch.zeros_like(rows[MASK])
    for kind in ("random", "once", "prioritized", "slices"):
        buffer, _, _ = make(kind, shape, 0)
        buffer.extend(rows)
        with pytest.raises(RuntimeError):
            buffer.sample()


@pytest.mark.parametrize("kind", ["slices", "slices_once", "prioritized_slices"])
def test_masked_rows_may_have_the_id_of_their_neighbours(kind: str) -> None:
    mask = torch.arange(20).view(2, 10) % 10 != 4
    rows = TensorDict(
        {
            "t": torch.arange(10).expand(2, 10),
            "collector": {"traj_ids": torch.zeros(2, 10).long(), "mask": mask},
        },
        [2, 10],
    )
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(CAPACITY * 2, ndim=2),
        sampler=make_sampler(kind, CAPACITY * 2, slice_len=L, num_slices=None),
        batch_size=4 * L,
    )
    buffer.extend(rows)
    for _ in range(10):
        steps = buffer.sample()["t"].view(-1, L)
        assert not (steps == 4).any()
        assert (steps.diff(dim=1) == 1).all()


def test_verify_accepts_masked_rows() -> None:
    for shape in ((), (3,)):
        assert make("random", shape, CAPACITY + 17)[0].verify().ok
