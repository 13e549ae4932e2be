"""Writers and samplers in threads see no torn row and no deadlock; a row costs the documented memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from gleanrl.errors import EmptyBufferError
from tests.data.replay_buffers.overtaken import Overtaken, OvertakenList

WIDTH = 3000


def stamped(value: int, count: int) -> TensorDict:
    """Return rows whose numbers are all the row's own stamp, so that a torn row is visible."""
    stamps = torch.arange(value, value + count, dtype=torch.int64)
    return TensorDict({"a": stamps[:, None].expand(count, WIDTH).clone(), "b": stamps.clone()}, [count])


def torn(rows: TensorDict) -> int:
    return int((rows["a"] != rows["b"][:, None]).any(-1).sum())


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_one_writer_and_two_samplers_tear_no_row(sampler):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler(seed=0), batch_size=64)
    rb.extend(stamped(0, 64))
    stop = threading.Event()
    failures: list[Any] = []
    counts = [0, 0]

    def sample(which: int) -> None:
        try:
            while not stop.is_set():
                found = torn(rb.sample())
                counts[which] += 1
                if found:
                    failures.append(f"{found} torn rows")
                    return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sample, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    value = 64
    while min(counts) < 30 and not failures:
        rb.extend(stamped(value, 32))
        value += 32
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert torn(rb[:]) == 0


def stacked(records):
    return torch.stack(records) if isinstance(records, list) else records


def overtaken(sampler: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=Overtaken(100), sampler=sampler, batch_size=50)
    rb.extend(stamped(0, 100))
    return rb


def test_rows_overwritten_during_the_fetch_are_drawn_again():
    rb = overtaken(RandomSampler(seed=0))
    rb._storage.act = lambda: rb.extend(stamped(1000, 20))
    rows, info = rb.sample(return_info=True)
    fresh = info["index"] < 20
    assert torn(rows) == 0
    assert torch.equal(rows["b"], info["index"] + 1000 * fresh)
    assert torch.equal(info["generation"], 1 + fresh.long())
    assert 0 < rb.stats().rows_redrawn < 50


@pytest.mark.parametrize("storage", [Overtaken, OvertakenList])
@pytest.mark.parametrize("overwritten", [20, 100])
def test_a_writer_waits_for_rows_that_were_overwritten_alone(storage, overwritten):
    def numbers(start, count):
        return [TensorDict({"a": torch.tensor(value)}) for value in range(start, start + count)]

    rb = ReplayBuffer(storage=storage(100), sampler=RandomSampler(seed=0), batch_size=50, collate_fn=stacked)
    rb.extend(numbers(0, 100))
    rb._storage.fetched, rb._storage.act = (), lambda: rb.extend(numbers(1000, overwritten))
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["a"], info["index"] + 1000 * (info["index"] < overwritten))
    redrawn = rb.stats().rows_redrawn
    assert rb._storage.fetched == (50, redrawn)
    assert redrawn == 50 if overwritten == 100 else 0 < redrawn < 25


def test_a_write_elsewhere_redraws_nothing():
    rb = overtaken(RandomSampler(seed=0))
    expected = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=50, seed=0)
    expected.extend(stamped(0, 100))
    drawn = expected.sample(return_info=True)[1]["index"]
    free = next(slot for slot in range(100) if slot not in set(drawn.tolist()))
    rb._storage.act = lambda: rb.__setitem__(free, stamped(7, 1)[0])
    assert torch.equal(rb.sample(return_info=True)[1]["index"], drawn)
    assert rb.stats().rows_redrawn == 0


def test_without_replacement_the_slots_stay():
    rb = overtaken(SamplerWithoutReplacement(seed=0))
    rb._storage.act = lambda: rb.extend(stamped(1000, 100))
    first, second = rb.sample(), rb.sample()
    assert bool((first["b"] >= 1000).all())
    assert sorted((torch.cat([first["b"], second["b"]]) - 1000).tolist()) == list(range(100))


def test_a_buffer_that_is_emptied_during_the_fetch():
    rb = overtaken(RandomSampler(seed=0))
    rb._storage.act = rb.empty
    with pytest.raises(EmptyBufferError, match="emptied while"):
        rb.sample()


def test_a_row_costs_its_columns_and_at_most_sixteen_bytes():
    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

    rows, width = 400_000, 64
    rb = ReplayBuffer(
        storage=LazyTensorStorage(rows), sampler=SamplerWithoutReplacement(seed=0), batch_size=8
    )
    chunk = TensorDict({"x": torch.ones(4000, width, dtype=torch.uint8)}, [4000])
    rb.extend(chunk)
    before = resident()
    for _ in range(rows // 4000 - 1):
        rb.extend(chunk)
    rb.sample()
    grown = (resident() - before) / rows
    # One percent of slack for pages and the allocator.
    assert width * 0.9 < grown < (width + 16) * 1.01 + 1


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_a_buffer_that_is_emptied_and_filled_with_less_during_the_fetch(sampler):
    rb = overtaken(sampler(seed=0))

    def act() -> None:
        rb.empty()
        rb.extend(stamped(1000, 3))

    rb._storage.act = act
    rows, info = rb.sample(return_info=True)
    assert bool((rows["b"] >= 1000).all()) and int(info["index"].max()) < 3


class Forgetful(ListStorage):
    """A list storage that another caller empties just before a fetch reads it."""

    act: Any = None

    def fetch(self, slots: torch.Tensor, paths: object = None) -> Any:
        if self.act is not None:
            act, self.act = self.act, None
            act()
        return super().fetch(slots, paths)


def test_objects_that_are_forgotten_before_the_fetch():
    rb = ReplayBuffer(storage=Forgetful(100), batch_size=50, seed=0)
    rb.extend(list(range(100)))

    def act() -> None:
        rb.empty()
        rb.extend([7, 8])

    rb._storage.act = act
    assert set(rb.sample().tolist()) == {7, 8}
    rb._storage.act = rb.empty
    with pytest.raises(EmptyBufferError, match="emptied while"):
        rb.sample()


class Overtaking:
    """A buffer's lock that another caller acquires before the reader acquires it for the second time."""

    def __init__(self, lock: Any, act: Any) -> None:
        self.lock, self.act = lock, act
        self.reader, self.taken = threading.current_thread(), 0

    def __enter__(self) -> None:
        self.taken += threading.current_thread() is self.reader
        if self.taken == 2:
            self.act()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("ahead", [None, 1])
@pytest.mark.parametrize(
    "sampler",
    [RandomSampler, SamplerWithoutReplacement, lambda seed: PrioritizedSampler(100, 1.0, 1.0, seed=seed)],
)
def test_a_buffer_that_is_emptied_while_stale_rows_wait_for_the_lock(sampler, ahead):
    rb = ReplayBuffer(storage=Overtaken(100), sampler=sampler(seed=0), batch_size=50, prefetch=ahead)
    rb.extend(stamped(0, 100))

    def act() -> None:
        rb.empty()
        rb.extend(stamped(2000, 3))

    rb._storage.act = lambda: rb.extend(stamped(1000, 100))
    rb._gate.lock = rb._gate.sampling = Overtaking(rb._gate.lock, act)
    rows, info = rb.sample(return_info=True)
    assert torn(rows) == 0 and bool((rows["b"] >= 2000).all()) and int(info["index"].max()) < 3
