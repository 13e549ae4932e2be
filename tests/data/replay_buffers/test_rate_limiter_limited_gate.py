"""Calls that wait at a rate limiter wake at the right time, time out, and survive interrupts and forks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from gleanrl._os import clock, threads
from gleanrl.data import LazyTensorStorage, MinSize, ReplayBuffer, SamplesPerInsert
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, RateLimiterTimeoutError, UnsupportedError
from tests.interrupts import in_another_thread, interruptions

CAPACITY = 1_000


def limited(ratio: float = 1, min_size: int = 1, tolerance: float = 0, **options: Any) -> ReplayBuffer:
    timeout_s = options.pop("timeout_s", 100.0)
    limiter = SamplesPerInsert(ratio, min_size, tolerance, timeout_s=timeout_s)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), rate_limiter=limiter, **options)


def owing() -> ReplayBuffer:
    """Return a buffer that admits no insert before the next sample."""
    buffer = limited(batch_size=4)
    buffer.extend(torch.arange(8))
    return buffer


def counts(buffer: ReplayBuffer) -> tuple[int, int]:
    found = buffer.stats().rate_limiter
    assert found is not None
    return found.inserted, found.sampled


def waits(buffer: ReplayBuffer, count: int = 1) -> None:
    """Wait until `count` calls wait."""
    while len(buffer._gate.waiting) < count:  # type: ignore[attr-defined]
        time.sleep(0)  # lets the other threads run


class Calls:
    """Runs calls in threads, which must end in time or fail the test."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def begin(self, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self) -> list[BaseException]:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a call waits for ever"
        return self.errors


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    assert made.end() == []


@pytest.fixture
def company() -> Iterator[None]:
    """Run another thread, so that a waiting call isn't rejected as the only thread."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


class TestWaking:
    def test_a_sample_waits_until_enough_is_stored(self, calls: Calls) -> None:
        buffer, got = limited(min_size=6, batch_size=2), []
        calls.begin(lambda: got.append(buffer.sample()))
        waits(buffer)
        buffer.extend(torch.arange(3))
        buffer.add(torch.tensor(3))
        assert not got and len(buffer._gate.waiting) == 1
        buffer.extend(torch.arange(4, 6))
        calls.end()
        assert len(got[0]) == 2 and counts(buffer) == (6, 2) and not buffer._gate.waiting

    def test_an_insert_waits_until_enough_is_sampled(self, calls: Calls) -> None:
        buffer = owing()
        calls.begin(lambda: buffer.extend(torch.arange(10, 13)))
        waits(buffer)
        buffer.sample()
        assert len(buffer) == 8 and counts(buffer) == (8, 4)
        buffer.sample()
        calls.end()
        assert len(buffer) == 11 and counts(buffer) == (11, 8)

    def test_waiting_inserts_are_admitted_up_to_the_limit(self, calls: Calls) -> None:
        buffer = owing()  # 7 rows are due
        for _ in range(5):
            calls.begin(lambda: buffer.extend(torch.arange(4)))
        waits(buffer, 5)
        buffer.sample()
        for left in range(4, -1, -1):
            buffer.sample()  # -1 row is due: one call is admitted, then 3 rows are due
            while counts(buffer)[0] < 28 - 4 * left or len(buffer._gate.waiting) != left:
                time.sleep(0)
            assert counts(buffer)[0] == 28 - 4 * left

    @pytest.mark.parametrize(
        "change",
        [
            ReplayBuffer.empty,
            lambda buffer: (buffer.storage.clear(), len(buffer)),  # the next call sees the change
            lambda buffer: buffer.load_state_dict(limited(batch_size=4).state_dict()),
        ],
    )
    def test_waiting_insert_wakes_after_any_change_that_admits_it(self, calls: Calls, change: Any) -> None:
        buffer = owing()
        calls.begin(lambda: buffer.extend(torch.arange(5)))
        waits(buffer)
        change(buffer)
        calls.end()
        assert len(buffer) == 5

    def test_waiting_sample_wakes_after_any_change_that_admits_it(self, calls: Calls) -> None:
        buffer = limited(min_size=6, batch_size=2)
        calls.begin(buffer.sample)
        waits(buffer)
        buffer.storage.set(range(6), torch.arange(6))
        calls.end()
        assert counts(buffer) == (0, 2)

    def test_iteration_and_prefetch_wait_too(self, calls: Calls) -> None:
        buffer = limited(min_size=4, batch_size=2, prefetch=2)
        calls.begin(lambda: next(iter(buffer)))
        calls.begin(buffer.next)
        calls.begin(lambda: buffer.sample(return_info=True))
        waits(buffer, 3)
        buffer.extend(torch.arange(10))
        calls.end()
        assert counts(buffer) == (10, 6)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("tolerance", [0, 30])
    def test_many_threads_keep_the_ratio_and_all_finish(
        self, calls: Calls, seed: int, tolerance: int
    ) -> None:
        draws = random.Random(seed)
        ratio, most = draws.choice([0.5, 2, 7]), 20
        buffer = limited(ratio, 25, tolerance, prefetch=2 * (seed % 2), batch_size=8)
        begin, stop, inserting = threading.Barrier(4), threading.Event(), threads.Activity()
        seen: list[tuple[int, int]] = []

        def insert(sizes: list[int]) -> None:
            threads.current.activity = inserting
            begin.wait()
            for size in sizes:
                buffer.extend(torch.zeros(size, dtype=int))
                seen.append(counts(buffer))

        def sample() -> None:
            begin.wait()
            while not stop.is_set():
                buffer.sample()
                seen.append(counts(buffer))

        sizes = [[draws.randint(1, most) for _ in range(40)] for _ in range(2)]
        inserters = Calls()
        for each in sizes:
            inserters.begin(lambda each=each: insert(each))  # type: ignore[misc]
        for _ in range(2):
            calls.begin(sample)
        assert inserters.end() == []
        found = list(seen)
        stop.set()
        inserting.end()  # no caller waits for it any more
        calls.end()
        assert counts(buffer)[0] == sum(map(sum, sizes))
        for inserted, sampled in found:
            due = ratio * max(inserted - 25, 0) - sampled
            assert -tolerance - 8 <= due <= tolerance + ratio * most


class TestTimeouts:
    @pytest.mark.usefixtures("company")
    def test_timeouts_use_the_clock_and_change_nothing(self) -> None:
        buffer = owing()
        buffer.sample()
        fake = clock.FakeClock()
        with clock.use(fake):
            with pytest.raises(RateLimiterTimeoutError, match="extend waited for samples for 100 s: 3 more"):
                buffer.extend(torch.arange(5))
            assert fake.slept == [100.0] and counts(buffer) == (8, 4) and len(buffer) == 8
            buffer.sample()
            before = str(buffer.state_dict())
            with pytest.raises(RateLimiterTimeoutError, match="sample waited for inserts for 100 s: 1 more"):
                buffer.sample()
            assert fake.slept == [100.0] * 2 and str(buffer.state_dict()) == before
        assert not buffer._gate.waiting
        in_another_thread(lambda: buffer.extend(torch.arange(5)))

    def test_call_without_a_timeout_waits_until_admitted(self, calls: Calls) -> None:
        buffer = limited(timeout_s=None, batch_size=2)
        with clock.use(clock.FakeClock()):
            calls.begin(buffer.sample)
            waits(buffer)
            buffer.extend(torch.arange(2))
            calls.end()

    def test_wait_within_a_call_that_holds_the_lock_raises(self) -> None:
        buffer = owing()
        with (
            buffer.sampler.guard(),
            pytest.raises(RateLimiterTimeoutError, match="within a call that holds the buffer's lock"),
        ):
            buffer.extend(torch.arange(2))
        in_another_thread(lambda: (buffer.sample(), buffer.sample(), buffer.extend(torch.arange(2))))

    def test_wait_in_the_only_thread_raises_at_once(self) -> None:
        buffer = limited(timeout_s=None, batch_size=2)
        child = os.fork()  # the child has one thread
        if child == 0:
            try:
                buffer.sample()
            except RateLimiterTimeoutError as error:
                os._exit(
                    not str(error).startswith("sample waited for inserts in the only thread that there is")
                )
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestInterrupts:
    @pytest.mark.parametrize("side", ["insert", "sample"])
    def test_ctrl_c_ends_the_wait_and_leaves_everything_usable(self, calls: Calls, side: str) -> None:
        buffer = owing()
        if side == "sample":
            for _ in range(2):
                buffer.sample()
        before = counts(buffer)

        heard = threading.Event()

        def interrupt(*_: Any) -> None:
            if not heard.is_set():
                heard.set()
                raise KeyboardInterrupt

        def press() -> None:
            waits(buffer)
            # A signal that arrives just before the wait is handled only at the next signal.
            while not heard.wait(0.02):
                os.kill(os.getpid(), signal.SIGINT)

        former = signal.signal(signal.SIGINT, interrupt)
        try:
            calls.begin(press)
            with pytest.raises(KeyboardInterrupt):
                buffer.extend(torch.arange(3)) if side == "insert" else buffer.sample()
            calls.end()
        finally:
            signal.signal(signal.SIGINT, former)
        assert counts(buffer) == before and not buffer._gate.waiting
        in_another_thread(lambda: buffer.sample() if side == "insert" else buffer.extend(torch.arange(5)))

    def test_an_insert_that_is_interrupted_anywhere_is_counted_if_it_happened(self) -> None:
        def make() -> ReplayBuffer:
            buffer = limited(8)
            buffer.extend(torch.arange(1))
            return buffer

        for buffer, place in interruptions(make, lambda buffer: buffer.extend(torch.arange(4)), most=150):
            assert in_another_thread(lambda buffer=buffer: counts(buffer)) == (buffer.write_count, 0), place
            assert buffer.write_count in (1, 5) and not buffer._gate.waiting
            buffer[0] = torch.tensor(7)
            assert counts(buffer)[0] == len(buffer), place

    @pytest.mark.parametrize("prefetch", [None, 1])
    def test_a_sample_that_is_interrupted_anywhere_holds_no_lock(self, prefetch: int | None) -> None:
        def make() -> ReplayBuffer:
            buffer = limited(tolerance=100, batch_size=4, prefetch=prefetch)
            buffer.extend(torch.arange(4))
            return buffer

        for buffer, place in interruptions(make, lambda buffer: buffer.sample(), most=150):
            assert len(in_another_thread(buffer.sample)) == 4, place
            assert counts(buffer)[1] in (4, 8), place

    @pytest.mark.usefixtures("company")
    def test_a_wait_that_is_interrupted_anywhere_leaves_nothing(self) -> None:
        def call(buffer: ReplayBuffer) -> None:
            with suppress(RateLimiterTimeoutError):
                buffer.extend(torch.arange(3))

        with clock.use(clock.FakeClock()):
            for buffer, place in interruptions(owing, call):
                assert counts(buffer) == (8, 0) and len(buffer) == 8, place
                for _ in range(2):
                    assert len(in_another_thread(buffer.sample)) == 4, place
                assert not buffer._gate.waiting, place


class TestActivities:
    def test_hurried_activity_is_admitted(self, calls: Calls) -> None:
        for before in (False, True):
            buffer, activity = owing(), threads.Activity()

            def insert(buffer: ReplayBuffer = buffer, activity: threads.Activity = activity) -> None:
                threads.current.activity = activity
                for _ in range(3):
                    buffer.extend(torch.arange(4))

            if before:
                activity.hurry()
            calls.begin(insert)
            if not before:
                waits(buffer)
                assert counts(buffer)[0] == 8
                activity.hurry()
            calls.end()
            assert counts(buffer) == (20, 0) and not activity.waiters

    def test_sample_stops_waiting_when_all_activities_have_ended(self, calls: Calls) -> None:
        buffer, activities = limited(min_size=100, batch_size=4), [threads.Activity(), threads.Activity()]

        def insert(activity: threads.Activity) -> None:
            threads.current.activity = activity
            buffer.extend(torch.arange(5))

        calls.begin(buffer.sample)  # it waits before any insert
        waits(buffer)
        for activity in activities:
            in_another_thread(lambda activity=activity: insert(activity))
        activities[0].end()
        waits(buffer)
        assert counts(buffer) == (10, 0)
        activities[1].end()
        calls.end()
        assert counts(buffer) == (10, 4) and len(buffer.sample()) == 4
        activities[0].begin()  # the activity resumes
        calls.begin(buffer.sample)
        waits(buffer)
        activities[0].end()
        calls.end()
        buffer.extend(torch.arange(5))  # another caller inserts now
        calls.begin(buffer.sample)
        waits(buffer)
        buffer.extend(torch.arange(100))
        calls.end()
        assert not any(activity.waiters for activity in activities)


def test_forked_process_continues_despite_waiting_threads(calls: Calls) -> None:
    buffer = owing()
    calls.begin(lambda: buffer.extend(torch.arange(4)))
    waits(buffer)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer.sampler.guard():
            held.set()
            done.wait(timeout=60)

    calls.begin(hold)
    assert held.wait(timeout=60)
    child = os.fork()
    if child == 0:
        try:
            alone = not buffer._gate.waiting
            for _ in range(2):
                buffer.sample()
            buffer.extend(torch.arange(5))
            good = alone and counts(buffer) == (13, 8) and buffer._gate.limiter is not None
            with suppress(RateLimiterTimeoutError):
                while True:
                    buffer.sample()
        except BaseException:
            good = False
        os._exit(int(not good))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    assert code == 0
    for _ in range(2):
        buffer.sample()
    calls.end()
    assert counts(buffer) == (12, 8)


def test_invalid_limiters_are_refused_by_name() -> None:
    with pytest.raises(InvalidTypeError, match="rate_limiter: expected SamplesPerInsert or MinSize, got 4"):
        ReplayBuffer(storage=LazyTensorStorage(10), rate_limiter=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="min_size=11 is more than the 10 records that fit"):
        ReplayBuffer(storage=LazyTensorStorage(10), rate_limiter=MinSize(11))
    with pytest.raises(UnsupportedError, match="share: .* one process only"):
        ReplayBuffer(storage=LazyTensorStorage(10), rate_limiter=MinSize(1), shared=True)
    shared = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    for storage in (shared.storage, ReplayBuffer(storage=LazyTensorStorage(10), shared=True).storage):
        with pytest.raises(UnsupportedError, match="one process only"):
            ReplayBuffer(storage=storage, rate_limiter=MinSize(1))
    buffer = ReplayBuffer(storage=(storage := LazyTensorStorage(10)), rate_limiter=MinSize(1))
    with pytest.raises(UnsupportedError, match="share: .* one process only"):
        buffer.share()
    assert type(storage) is LazyTensorStorage and not buffer.shared
    with pytest.raises(UnsupportedError, match="set_storage: the buffer's rate limiter"):
        buffer.set_storage(LazyTensorStorage(10))
    buffer.extend(torch.arange(3))
    assert counts(buffer) == (3, 0)


def test_parts_that_are_made_later_are_limited_too() -> None:
    buffer = ReplayBuffer(
        storage=lambda: LazyTensorStorage(10), rate_limiter=MinSize(2, timeout_s=0), delayed_init=True
    )
    with pytest.raises(RateLimiterTimeoutError):
        buffer.sample(1)


def test_lock_keeps_no_deleted_buffer_alive() -> None:
    buffer = limited()
    buffer.extend(torch.arange(3))
    gate, limiter = buffer._gate, buffer._gate.limiter
    del buffer
    with pytest.raises(AssertionError):
        limiter.storage  # noqa: B018
    assert gate.limiter is limiter
