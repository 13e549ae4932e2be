"""Prefetched batches form the same sequence for any number of threads, and contain stored rows only."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts

SIZE = 40
SAMPLERS = ["RandomSampler", "SamplerWithoutReplacement", "PrioritizedSampler"]


def rows(start: int, count: int) -> TensorDict:
    """Return numbered records, each with a column of its squared number."""
    x = torch.arange(start, start + count)
    return TensorDict({"x": x, "wide": (x * x)[:, None].expand(count, 50).clone()}, [count])


def make(
    depth: int | None = 2,
    threads: int | None = None,
    sampler: str = "RandomSampler",
    batch_size: int = 8,
    seed: int = 0,
    capacity: int = SIZE,
    **kwargs: Any,
) -> Any:
    options = {"max_capacity": capacity, "alpha": 0.6, "beta": 0.4} if "Prio" in sampler else {}
    made = getattr(parts, sampler)(**options)
    more = {} if threads is None else {"prefetch_threads": threads}
    return parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(capacity),
        sampler=made,
        batch_size=batch_size,
        prefetch=depth,
        seed=seed,
        **more,
        **kwargs,
    )


def check(batch: TensorDict) -> list[int]:
    """Return the numbers of the rows, after checking that no row is torn."""
    assert (batch["wide"] == (batch["x"] ** 2)[:, None]).all()
    return batch["x"].tolist()


def story(buffer: Any) -> list[Any]:
    """Write, sample and update in rotation; return all samples."""
    told: list[Any] = []
    buffer.extend(rows(0, 30))
    for turn in range(12):
        for _ in range(turn % 4 + 1):
            batch, info = buffer.sample(return_info=True)
            told.append((check(batch), info["index"].tolist(), info["generation"].tolist()))
            if "_weight" in info:
                told.append(info["_weight"].tolist())
        if turn % 3 == 0:
            buffer.extend(rows(100 * turn, 7))
        if turn % 3 == 1 and "_weight" in info:
            buffer.update_priority(info["index"], 0.1 + batch["x"].double() % 7)
        if turn == 8:
            buffer.empty()
            buffer.extend(rows(5000, 20))
    return told


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_sequence_is_the_same_for_any_number_of_threads(depth: int, sampler: str) -> None:
    told = [story(make(depth, threads, sampler)) for threads in (1, 2, 4)]
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_sequence_is_the_same_for_any_depth_if_nothing_is_written(sampler: str) -> None:
    told = []
    for depth in (None, 1, 2, 5):
        buffer = make(depth, sampler=sampler)
        buffer.extend(rows(0, 30))
        told.append([check(buffer.sample()) for _ in range(11)])
    assert told[0] == told[1] == told[2] == told[3]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_overwritten_rows_are_not_sampled(depth: int, sampler: str) -> None:
    buffer = make(depth, sampler=sampler)
    buffer.extend(rows(0, SIZE))
    for turn in range(1, 30):
        check(buffer.sample())
        buffer.extend(rows(turn * 1000, SIZE))
        assert min(check(buffer.sample())) >= turn * 1000
        check(buffer.sample())
        buffer.extend(rows(turn * 1000 + 500, 11))
        assert set(check(buffer.sample())) <= set(buffer[:]["x"].tolist())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_replaced_by_index_are_not_sampled(sampler: str) -> None:
    buffer = make(3, sampler=sampler)
    buffer.extend(rows(0, SIZE))
    for turn in range(1, 20):
        check(buffer.sample())
        buffer[:] = rows(turn * 1000, SIZE)
        assert min(check(buffer.sample())) >= turn * 1000


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_emptied_buffer_serves_no_prefetched_batch(sampler: str) -> None:
    buffer = make(3, sampler=sampler)
    for turn in range(10):
        buffer.extend(rows(turn * 1000, 25))
        assert min(check(buffer.sample())) >= turn * 1000
        buffer.empty()
        with pytest.raises(RuntimeError):
            buffer.sample()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_loaded_buffer_serves_no_prefetched_batch(sampler: str) -> None:
    buffer, other = make(3, sampler=sampler), make(3, sampler=sampler, seed=1)
    buffer.extend(rows(0, SIZE))
    other.extend(rows(1000, SIZE))
    buffer.sample()
    state = other.state_dict()
    buffer.load_state_dict(state)
    for _ in range(8):
        assert check(buffer.sample()) == check(other.sample())


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_loaded_buffer_continues_with_the_prefetched_batches(depth: int | None, sampler: str) -> None:
    buffer = make(depth, sampler=sampler)
    buffer.extend(rows(0, 30))
    for _ in range(3):
        check(buffer.sample())
    state = buffer.state_dict()
    other = make(depth, threads=3 if depth else None, sampler=sampler, seed=99)
    other.load_state_dict(state)
    assert [check(buffer.sample()) for _ in range(9)] == [check(other.sample()) for _ in range(9)]
    for one in (buffer, other):
        one.extend(rows(700, 6))
    assert [check(buffer.sample()) for _ in range(9)] == [check(other.sample()) for _ in range(9)]


def test_exchanged_storage_serves_no_prefetched_batch() -> None:
    buffer = make(3)
    buffer.extend(rows(0, SIZE))
    buffer.sample()
    storage = parts.LazyTensorStorage(SIZE)
    buffer.set_storage(storage)
    buffer.extend(rows(1000, SIZE))
    for _ in range(6):
        assert min(check(buffer.sample())) >= 1000


def test_exchanged_sampler_serves_no_prefetched_batch() -> None:
    buffer = make(3)
    buffer.extend(rows(0, SIZE))
    buffer.sample()
    buffer.set_sampler(parts.SamplerWithoutReplacement(shuffle=False))
    assert check(buffer.sample()) == list(range(8))


def test_seed_set_later_restarts_the_draws() -> None:
    buffer, plain = make(3, seed=5), make(None)
    buffer.extend(rows(0, SIZE))
    plain.extend(rows(0, SIZE))
    buffer.sample()
    buffer.set_seed(0)
    assert [check(buffer.sample()) for _ in range(6)] == [check(plain.sample()) for _ in range(6)]


@pytest.mark.parametrize("depth", [None, 1, 3, 20])
@pytest.mark.parametrize("batch_size", [7, 8, 40])
def test_epochs_are_complete(depth: int | None, batch_size: int) -> None:
    buffer = make(depth, sampler="SamplerWithoutReplacement", batch_size=batch_size)
    buffer.extend(rows(0, SIZE))
    for _ in range(4):
        batches = [check(batch) for batch in buffer]
        assert Counter(sum(batches, [])) == Counter(range(SIZE))
        assert len(batches) == -(-SIZE // batch_size)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_epoch_after_a_loop_that_was_left(depth: int) -> None:
    buffer = make(depth, sampler="SamplerWithoutReplacement")
    buffer.extend(rows(0, SIZE))
    for _ in buffer:
        break
    assert Counter(sum([check(batch) for batch in buffer], [])) == Counter(range(SIZE))


def test_another_size_holds_for_one_call() -> None:
    buffer = make(3)
    buffer.extend(rows(0, SIZE))
    buffer.sample()
    with pytest.warns(UserWarning, match="batch_size"):
        assert len(buffer.sample(5)) == 5
    assert len(buffer.sample()) == 8


class Failure(Exception):
    """Raised by a transform. The library doesn't know this class."""


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_of_a_transform_arrives_at_the_caller(depth: int) -> None:
    broken = threading.Event()

    def transform(batch: Any) -> Any:
        if broken.is_set():
            raise Failure("on purpose")
        return batch

    buffer = make(depth, transform=transform)
    buffer.extend(rows(0, SIZE))
    check(buffer.sample())
    broken.set()
    with pytest.raises(Failure, match="on purpose"):
        for _ in range(depth + 2):
            buffer.sample()
    broken.clear()
    for _ in range(depth + 2):
        try:
            check(buffer.sample())
        except Failure:
            continue
    for _ in range(2 * depth):
        check(buffer.sample())


def test_changing_a_batch_changes_no_other_batch_or_record() -> None:
    buffer = make(3)
    buffer.extend(rows(0, SIZE))
    batches = [buffer.sample() for _ in range(6)]
    copies = [batch.clone() for batch in batches]
    for batch in batches[:3]:
        batch["wide"].zero_()
        batch["x"].zero_()
    for _ in range(6):
        check(buffer.sample())
    assert all((a == b).all() for a, b in zip(batches[3:], copies[3:], strict=True))
    check(buffer[:])


def test_transforms_see_each_batch_once() -> None:
    seen = Counter()
    lock = threading.Lock()

    def transform(batch: Any) -> Any:
        with lock:
            seen[id(batch)] += 1
        return batch.set("x", batch["x"] + 1)

    buffer = make(3, transform=transform)
    buffer.extend(rows(0, SIZE))
    for _ in range(20):
        batch = buffer.sample()
        assert (batch["wide"] == ((batch["x"] - 1) ** 2)[:, None]).all()


def test_threads_end_with_the_buffer() -> None:
    before = set(threading.enumerate())
    for _ in range(5):
        buffer = make(3, threads=2)
        buffer.extend(rows(0, SIZE))
        buffer.sample()
    del buffer
    mine = [thread for thread in threading.enumerate() if thread not in before]
    for thread in mine:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.parametrize("bad", [-1, 1.5, "2", True])
@pytest.mark.parametrize("name", ["prefetch", "prefetch_threads"])
def test_bad_prefetch_options_raise(name: str, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        parts.ReplayBuffer(storage=parts.LazyTensorStorage(SIZE), batch_size=8, **{"prefetch": 2, name: bad})


def test_a_batch_size_is_needed() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        parts.ReplayBuffer(storage=parts.LazyTensorStorage(SIZE), prefetch=2)
