"""Rate limiters admit calls by their counts, which are part of a buffer's state."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import TensorDict

from gleanrl._arrays.results import RateCounts
from gleanrl.data import (
    LazyTensorStorage,
    MinSize,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, RateLimiterTimeoutError, SchemaError

AT_ONCE = 0.0
CAPACITY = 40


def limited(limiter: SamplesPerInsert, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), rate_limiter=limiter, **options)


def counts(buffer: Any) -> tuple[int, ...]:
    found = buffer.stats().rate_limiter
    assert isinstance(found, RateCounts)
    return tuple(found)


def place(buffer: ReplayBuffer) -> str:
    """Return the position in the sequence of samples, including prefetched batches."""
    state = buffer.state_dict()
    return repr([state["_sampler"]["generator"].tolist(), len(state.get("_prefetched", ()))])


class Ratio(RuleBasedStateMachine):
    """One thread, with every waiting call rejected at once, compared with two plain counters."""

    @initialize(
        ratio=st.sampled_from([0.1, 1.0, 2.5, 8]),
        least=st.integers(1, 12),
        tolerance=st.sampled_from([0, 1, 7.5, 100, math.inf]),
        prefetch=st.sampled_from([None, 2]),
    )
    def begin(self, ratio: float, least: int, tolerance: float, prefetch: int | None) -> None:
        limiter = SamplesPerInsert(ratio, least, tolerance, timeout_s=AT_ONCE)
        self.make = lambda: limited(limiter, batch_size=4, prefetch=prefetch, seed=0)
        self.buffer = self.make()
        self.ratio, self.least, self.tolerance = ratio, least, tolerance
        self.inserted = self.sampled = self.stored = 0
        self.free = least

    @property
    def due(self) -> float:
        return self.ratio * max(self.inserted - self.free, 0) - self.sampled

    @rule(rows=st.integers(1, CAPACITY), single=st.booleans())
    def insert(self, rows: int, single: bool) -> None:
        waits, rows = self.due > self.tolerance and self.stored >= self.least, 1 if single else rows
        written = self.buffer.write_count
        try:
            self.buffer.add(torch.tensor(0)) if single else self.buffer.extend(torch.zeros(rows, dtype=int))
            assert not waits
            self.inserted, self.stored = self.inserted + rows, min(self.stored + rows, CAPACITY)
        except RateLimiterTimeoutError as error:
            assert waits and self.buffer.write_count == written
            needed = int(str(error).split(" more rows")[0].split()[-1])
            assert self.due - needed <= self.tolerance < self.due - needed + 1

    @rule(rows=st.one_of(st.none(), st.integers(1, 30)), iterate=st.booleans())
    def sample(self, rows: int | None, iterate: bool) -> None:
        waits = self.due < -self.tolerance or self.stored < self.least
        before = place(self.buffer)
        try:
            if iterate or rows is None:
                rows = 4
                assert len(next(iter(self.buffer)) if iterate else self.buffer.sample()) == 4
            else:
                with pytest.warns(UserWarning) if rows != 4 else nullcontext():
                    assert len(self.buffer.sample(rows)) == rows
            assert not waits
            self.sampled += rows
        except RateLimiterTimeoutError as error:
            assert waits
            assert iterate or place(self.buffer) == before
            needed = int(str(error).split(" more rows")[0].split()[-1])
            assert self.stored + needed >= self.least
            after = self.ratio * max(self.inserted + needed - self.free, 0) - self.sampled
            assert after >= -self.tolerance - 1e-9 * abs(after)

    @rule(rows=st.integers(1, 5))
    def amend(self, rows: int) -> None:
        rows = min(rows, self.stored)
        if rows:
            self.buffer[:rows] = torch.ones(rows, dtype=int)

    @rule(all_counts=st.booleans())
    def empty(self, all_counts: bool) -> None:
        self.buffer.empty(empty_write_count=all_counts)
        self.stored = 0
        if all_counts:
            self.inserted, self.sampled, self.free = 0, 0, self.least

    @rule(how=st.sampled_from(["load", "pickle", "deepcopy"]))
    def go_on_elsewhere(self, how: str) -> None:
        old = self.buffer
        if how == "load":
            self.buffer = self.make()
            self.buffer.load_state_dict(old.state_dict())
        else:
            self.buffer = pickle.loads(pickle.dumps(old)) if how == "pickle" else copy.deepcopy(old)

    @invariant()
    def both_never_wait(self) -> None:
        if hasattr(self, "buffer"):
            assert counts(self.buffer) == (self.inserted, self.sampled, self.free)
            limiter = self.buffer._gate.limiter
            assert not (limiter.inserts_wait() and limiter.samples_wait())


Ratio.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRatio = Ratio.TestCase


def test_a_minimum_size_holds_back_samples_only():
    buffer = limited(MinSize(10, timeout_s=AT_ONCE), batch_size=4)
    for _ in range(3):
        with pytest.raises(RateLimiterTimeoutError, match=r"10 more rows .* \(MinSize\(10\); 0 inserted"):
            buffer.sample()
    buffer.extend(torch.arange(9))
    with pytest.raises(RateLimiterTimeoutError, match="1 more rows"):
        buffer.sample()
    buffer.add(torch.tensor(9))
    for _ in range(30):
        buffer.sample()
        buffer.extend(torch.arange(20))


def test_errors_are_of_the_family():
    buffer = limited(SamplesPerInsert(4, timeout_s=AT_ONCE), batch_size=1)
    buffer.extend(torch.arange(3))
    for kind in (RuntimeError, TimeoutError):
        with pytest.raises(
            kind,
            match="extend waited for samples for 0 s: 8 more rows have to be sampled before the next insert "
            r"\(SamplesPerInsert\(ratio=4, min_size=1, tolerance=0\); 3 inserted, 0 sampled, 3 stored\). Nothing was",
        ):
            buffer.extend(torch.arange(3))


def test_one_limiter_serves_several_buffers_and_each_counts_for_itself():
    limiter = SamplesPerInsert(1, 4)
    first, second = limited(limiter), limited(limiter)
    first.extend(torch.arange(7))
    assert counts(first) == (7, 0, 4) and counts(second) == (0, 0, 4)


def test_records_that_were_there_before_are_free():
    storage = LazyTensorStorage(CAPACITY)
    ReplayBuffer(storage=storage).extend(torch.arange(30))
    buffer = ReplayBuffer(
        storage=storage, rate_limiter=SamplesPerInsert(1, 20, timeout_s=AT_ONCE), batch_size=8
    )
    assert counts(buffer) == (0, 0, 0)
    buffer.sample()
    with pytest.raises(RateLimiterTimeoutError, match="8 more rows"):
        buffer.sample()
    buffer.extend(torch.arange(8))
    buffer.sample()


def test_rows_that_are_not_stored_are_not_inserted():
    best = ReplayBuffer(
        storage=LazyTensorStorage(3),
        writer=TensorDictMaxValueWriter(rank_key="score"),
        rate_limiter=MinSize(1),
    )
    best.extend(TensorDict({"score": torch.tensor([3.0, 4.0, 5.0, 1.0])}, [4]))
    best.extend(TensorDict({"score": torch.tensor([0.0, 9.0])}, [2]))
    assert counts(best)[0] == 4
    longer = limited(MinSize(1))
    longer.extend(torch.arange(CAPACITY + 5))
    assert counts(longer)[0] == CAPACITY == longer.write_count
    masked = limited(MinSize(1))
    mask = torch.tensor([True, False, True])
    masked.extend(TensorDict({"x": torch.arange(3), "collector": {"mask": mask}}, [3]))
    assert counts(masked)[0] == 2
    held = limited(MinSize(1), transform=Holds())
    assert len(held.extend(torch.arange(4))) == 0 and counts(held)[0] == 0


class Holds:
    """Keeps all records."""

    def __call__(self, batch: Any) -> Any:
        return batch

    def inv(self, records: Any) -> None:
        return None


def test_failed_call_counts_its_stored_rows():
    buffer = limited(MinSize(1))
    buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    with pytest.raises(SchemaError):
        buffer.extend(TensorDict({"y": torch.arange(3)}, [3]))
    assert counts(buffer) == (3, 0, 1)

    class After(TensorDictReplayBuffer):
        def _extend(self, data: Any) -> Any:
            super()._extend(data)
            raise ZeroDivisionError

    buffer = After(storage=LazyTensorStorage(CAPACITY), rate_limiter=MinSize(1))
    with pytest.raises(ZeroDivisionError):
        buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert counts(buffer) == (3, 0, 1) and len(buffer) == 3


def test_short_batches_count_their_rows():
    epochs = limited(MinSize(1), sampler=SamplerWithoutReplacement(), batch_size=4)
    epochs.extend(torch.arange(10))
    assert sum(len(batch) for batch in epochs) == 10 and counts(epochs) == (10, 10, 1)
    slices = limited(
        MinSize(1), sampler=SliceSampler(slice_len=4, traj_key="episode", strict_length=False), batch_size=8
    )
    slices.extend(TensorDict({"x": torch.arange(6), "episode": torch.arange(6) // 2}, [6]))
    assert len(slices.sample()) == 4 and counts(slices) == (6, 4, 1)


def test_batches_drawn_ahead_count_when_they_are_handed_out_and_the_sequence_stays():
    plain = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, prefetch=3, seed=0)
    buffer = limited(SamplesPerInsert(1, 4, timeout_s=AT_ONCE), batch_size=4, prefetch=3, seed=0)
    for rb in (plain, buffer):
        rb.extend(torch.arange(12))
    for handed_out in (4, 8, 12):  # the last one is prefetched
        assert torch.equal(buffer.sample(), plain.sample()) and counts(buffer)[1] == handed_out
    for _ in range(3):
        with pytest.raises(RateLimiterTimeoutError):
            buffer.sample()
    for rb in (plain, buffer):
        rb.extend(torch.arange(20, 24))
    assert torch.equal(buffer.sample(), plain.sample()) and counts(buffer) == (16, 16, 4)


def test_buffers_over_one_storage_go_by_one_limiter():
    storage = LazyTensorStorage(CAPACITY)
    writer = ReplayBuffer(storage=storage)
    reader = ReplayBuffer(storage=storage, rate_limiter=SamplesPerInsert(1, timeout_s=AT_ONCE), batch_size=3)
    writer.extend(torch.arange(4))
    assert counts(writer) == counts(reader) == (4, 0, 1)
    with pytest.raises(RateLimiterTimeoutError):
        writer.extend(torch.arange(4))
    reader.sample()
    writer.extend(torch.arange(4))
    with pytest.raises(InvalidArgumentError, match="another buffer over this storage has one"):
        ReplayBuffer(storage=storage, rate_limiter=MinSize(1))
    mixture = ReplayBufferEnsemble(
        storages=StorageEnsemble(storage), samplers=[SamplerWithoutReplacement()], batch_size=2
    )
    mixture.sample()
    assert counts(reader)[1] == 5


def test_each_member_of_an_ensemble_has_its_limiter():
    free, held = ReplayBuffer(storage=LazyTensorStorage(CAPACITY)), limited(MinSize(5, timeout_s=AT_ONCE))
    mixture = ReplayBufferEnsemble(free, held, batch_size=4, sample_from_all=True)
    free.extend(torch.arange(5))
    held.extend(torch.arange(4))
    with pytest.raises(RateLimiterTimeoutError):
        mixture.sample()
    held.extend(torch.arange(4))
    mixture.sample()
    assert counts(held) == (8, 2, 5) and mixture.stats()[0].rate_limiter is None


def test_states_with_and_without_counts_fit():
    limiter = SamplesPerInsert(2, 4)
    buffer, plain = limited(limiter, batch_size=4), ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    buffer.extend(torch.arange(6))
    buffer.sample()
    state = buffer.state_dict()
    assert state["_rate_limiter"] == {"inserted": 6, "sampled": 4, "free": 4}
    plain.load_state_dict(state)
    assert plain.stats().rate_limiter is None and "_rate_limiter" not in plain.state_dict()
    plain.empty()
    plain.extend(torch.arange(3))
    buffer.load_state_dict(plain.state_dict())
    assert counts(buffer) == (0, 0, 1) and len(buffer) == 3
    for broken in ({"inserted": -1}, {"sampled": 1.0}, {"free": None}):
        with pytest.raises(SchemaError, match=f"'{next(iter(broken))}' of a rate limiter"):
            buffer.load_state_dict({**state, "_rate_limiter": {**state["_rate_limiter"], **broken}})
    assert counts(buffer) == (0, 0, 1) and len(buffer) == 3


def test_direct_changes_of_the_storage_are_not_counted():
    buffer = limited(SamplesPerInsert(1, timeout_s=AT_ONCE), batch_size=2)
    other = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    other.extend(torch.arange(30))
    buffer.storage.load_state_dict(other.storage.state_dict())
    buffer.storage.set(range(3), torch.arange(3))
    buffer[0] = torch.tensor(5)
    assert counts(buffer) == (0, 0, 1) and len(buffer) == 30
    buffer.extend(torch.arange(2))
    buffer.storage.clear()
    assert counts(buffer) == (2, 0, 1)


def test_empty_buffer_raises_without_a_limiter_and_waits_with_one():
    with pytest.raises(EmptyBufferError):
        ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=2).sample()
    with pytest.raises(RateLimiterTimeoutError):
        limited(MinSize(1, timeout_s=AT_ONCE), batch_size=2).sample()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ratio": 0}, "ratio"),
        ({"ratio": -1.0}, "ratio"),
        ({"ratio": math.inf}, "ratio"),
        ({"ratio": math.nan}, "ratio"),
        ({"ratio": "1"}, "ratio"),
        ({"ratio": 1, "min_size": 0}, "min_size"),
        ({"ratio": 1, "min_size": 1.5}, "min_size"),
        ({"ratio": 1, "tolerance": -1}, "tolerance"),
        ({"ratio": 1, "tolerance": math.nan}, "tolerance"),
        ({"ratio": 1, "timeout_s": -1}, "timeout_s"),
        ({"ratio": 1, "timeout_s": math.inf}, "timeout_s"),
        ({"ratio": 1, "timeout_s": True}, "timeout_s"),
    ],
)
def test_bad_numbers_are_refused_by_name(arguments, name):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected"):
        SamplesPerInsert(**arguments)
