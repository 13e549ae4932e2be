"""Every row identifies its origin for each storage, dimension, sampler, buffer, prefetch, wrap and restore."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.contract.buffers.cases import (
    EPOCHS,
    FACTORS,
    NUM_SLICES,
    SHAPES,
    SLICE_LEN,
    SLICES,
    Case,
    filled,
    make_buffer,
    make_sampler,
    pairwise,
)
from tests.contract.buffers.tape import TRUNCATED, Ring, Tape, check_bijection, chunks

CAPACITY = 29
LENGTHS = (7, 3, 12, 4)
CASES = pairwise(FACTORS, Case, lambda case: case.possible)


class Audit:
    """A buffer and a ring that models its content; every batch is checked row by row."""

    def __init__(self, case: Case) -> None:
        self.case, self.tape = case, Tape(LENGTHS, SHAPES[case.ndim])
        self.names: dict[int, tuple[int, int]] = {}
        self.seen: dict[tuple[int, int], int] = {}
        self.buffer, self.ring = self.make()
        self.written = len(self.ring)

    def make(self) -> tuple[Any, Ring]:
        storage, ring = filled(self.case.storage, CAPACITY, self.tape)
        sampler = make_sampler(self.case.sampler, CAPACITY * self.tape.streams)
        return make_buffer(self.case.buffer, storage, sampler, self.case.prefetch), ring

    def write(self, count: int) -> None:
        for start, stop in chunks(count):
            data = self.tape.rows(self.written, self.written + stop - start)
            before = data.clone()
            index = self.buffer.extend(data)
            assert (data == before).all() and set(data.keys(True)) == set(before.keys(True))
            places = self.ring.extend(range(self.written, self.written + stop - start))
            assert index[:, 0].tolist()[:: self.tape.streams] == places if index.ndim > 1 else True
            assert len(index) == len(places) * self.tape.streams
            self.written += stop - start
            assert len(self.buffer) == len(self.ring) * self.tape.streams

    def add(self) -> None:
        step = self.tape.step_at(self.written)
        # `add` takes the batch dimensions in their stored order.
        self.buffer.add(step.permute(*reversed(range(step.ndim))).contiguous() if step.ndim > 1 else step)
        self.ring.extend([self.written])
        self.written += 1

    def restore(self) -> None:
        state = self.buffer.state_dict()
        self.buffer, _ = self.make()
        self.seen.clear()
        self.buffer.load_state_dict(state)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, info = self.buffer.sample(return_info=True)
        return self.check(batch, info)

    def check(self, batch: Any, info: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        sliced = self.case.sampler in SLICES
        cut = None
        if sliced and self.case.buffer == "tensordict":
            cut = torch.zeros(len(batch), dtype=torch.bool)
            cut[SLICE_LEN - 1 :: SLICE_LEN] = True
        stream, t = self.tape.check(batch, cut)
        held = set(self.ring.slots)
        assert set(t.tolist()) <= held, "a row that is no longer stored, or never was"
        check_bijection(batch, self.names)
        if sliced:
            assert len(batch) % SLICE_LEN == 0
            self.check_slices(stream.view(-1, SLICE_LEN), t.view(-1, SLICE_LEN))
        if info is not None:
            self.check_index(info, stream, t)
        if "index" in batch.keys() and self.case.buffer == "tensordict":
            index = batch["index"].unbind(-1) if self.case.ndim > 1 else batch["index"]
            self.check_index({"index": index}, stream, t)
        return stream, t

    def check_slices(self, stream: torch.Tensor, t: torch.Tensor) -> None:
        episode = self.tape.episode(stream, t)[0]
        assert (stream == stream[:, :1]).all() and (episode == episode[:, :1]).all()
        assert (t == t[:, :1] + torch.arange(SLICE_LEN)).all(), f"not consecutive: {t}"

    def check_index(self, info: Any, stream: torch.Tensor, t: torch.Tensor) -> None:
        index = info["index"]
        step = index if self.case.ndim == 1 else index[0]
        assert step.dtype == torch.int64
        assert [self.ring.slots[slot] for slot in step.tolist()] == t.tolist()
        if self.case.ndim > 1:
            column = torch.zeros_like(step)
            # `extend` swaps time with the first dimension: [B, P, T] is stored as [T, P, B].
            for place, size in zip(reversed(index[1:]), self.tape.shape, strict=True):
                column = column * size + place
            assert torch.equal(column, stream)
        if "generation" in info:
            for slot, generation, now in zip(
                step.tolist(), info["generation"].tolist(), t.tolist(), strict=True
            ):
                assert self.seen.setdefault((slot, generation), now) == now, "one generation, two records"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_sampled_row_is_a_stored_row(case: Case) -> None:
    audit = Audit(case)
    audit.write(2 * CAPACITY + 9 if case.wrapped else CAPACITY - 4)
    audit.sample()
    if case.restored:
        audit.restore()
        audit.sample()
    for count in (1, 4, 13, 2):
        audit.write(count)
        audit.sample()
        audit.sample()
        audit.add()
        audit.sample()
    if case.sampler in EPOCHS:
        check_epoch(audit)
    report = audit.buffer.verify()
    assert report.ok, report


def check_epoch(audit: Audit) -> None:
    drawn = Counter()
    for batch in audit.buffer:
        stream, t = audit.check(batch)
        if audit.case.sampler == "once":
            drawn.update(zip(stream.tolist(), t.tolist(), strict=True))
        else:
            episode = audit.tape.episode(stream, t)[0]
            drawn.update(zip(stream.tolist()[::SLICE_LEN], episode.tolist()[::SLICE_LEN], strict=True))
            assert len(batch) <= NUM_SLICES * SLICE_LEN
    streams = range(audit.tape.streams)
    if audit.case.sampler == "once":
        expected = {(s, t) for s in streams for t in audit.ring.slots if t is not None}
    else:
        expected = set()
        for s in streams:
            for piece in audit.ring.pieces(audit.tape, s):
                if len(piece) >= SLICE_LEN:
                    at = torch.tensor(piece[:1])
                    expected.add((s, int(audit.tape.episode(torch.full_like(at, s), at)[0])))
    assert set(drawn) == expected and set(drawn.values()) == {1}


def test_the_cases_show_every_pair() -> None:
    assert 20 <= len(CASES) <= 60
    for name, column in zip(FACTORS, zip(*CASES, strict=True), strict=True):
        assert set(column) == set(FACTORS[name])


def test_a_slice_flag_reaches_the_data_of_tensordict_buffers_only() -> None:
    for kind in ("plain", "tensordict"):
        audit = Audit(Case("tensor", 1, "slices", kind, None, False, False))
        audit.write(CAPACITY)
        batch, info = audit.buffer.sample(return_info=True)
        ends = torch.arange(len(batch)) % SLICE_LEN == SLICE_LEN - 1
        if kind == "tensordict":
            assert batch[TRUNCATED][ends].all()
        else:
            assert info[TRUNCATED].reshape(len(batch))[ends].all()
            audit.check(batch, info)
