"""The user's CUDA streams: operations on a buffer from several streams take effect in the order of the calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from tests.devices.records import numbers, rows

# These tests are in one file and so in one pytest process: each process keeps tens of GiB of the device's memory.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
LONG = 1 << 28  # clock cycles: more than a tenth of a second


@contextmanager
def busy() -> Iterator[None]:
    """Run the block in a stream that first idles for a long time."""
    with elsewhere():
        torch.cuda._sleep(LONG)
        yield


def elsewhere() -> Any:
    """Run the block in a new, idle stream."""
    return torch.cuda.stream(torch.cuda.Stream())


def on_cuda(device: torch.device) -> torch.device:
    """Return the device, or skip the test if it has no streams."""
    if device.type != "cuda":
        pytest.skip("a device without streams")
    return device


@pytest.fixture
def buffer(device: torch.device) -> ReplayBuffer:
    """A full buffer of the rows 0 to 99 on the device, after all work has ended."""
    made = ReplayBuffer(
        storage=LazyTensorStorage(100, device=on_cuda(device)),
        sampler=SamplerWithoutReplacement(),
        batch_size=50,
    )
    made.extend(rows(0, 100, device))
    torch.cuda.synchronize()
    return made


def large(first: int, device: torch.device) -> torch.Tensor:
    """Return 64 rows filled with their number, from `first`; half of them take a millisecond to copy."""
    return torch.arange(first, first + 64, device=device)[:, None].float().expand(64, 1 << 24).contiguous()


def is_whole(batch: torch.Tensor, least: int) -> torch.Tensor:
    """Return whether each row holds one number, at least `least`; the current stream computes it without waiting."""
    low, high = batch.aminmax(dim=1)  # needs no large allocation, which would wait for the device
    return (low == high).all() & (low >= least).all()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_prefetched_batches_belong_to_the_callers_stream(device: torch.device, storage: Any) -> None:
    made = ReplayBuffer(storage=storage(64, device=on_cuda(device)), batch_size=32, prefetch=2)
    with elsewhere():
        made.extend(large(1, device))
        assert bool(is_whole(made[:32] if storage is LazyTensorStorage else made[[1, 2]], 1))
        for _ in range(3):  # the first round allocates memory, which waits for the device
            batches, found = list[torch.Tensor](), list[torch.Tensor]()
            for _ in range(6):
                batches.append(made.sample())
                found.append(is_whole(batches[-1], 1))
            assert all(map(bool, found))


def test_write_from_another_stream_waits_for_pending_reads(device: torch.device) -> None:
    made = ReplayBuffer(storage=LazyTensorStorage(64, device=on_cuda(device)), batch_size=32)
    made.extend(large(100, device))
    later, stream = large(0, device), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        batch = made.sample()
        with torch.cuda.stream(stream):
            made.extend(later)
        found.append(is_whole(batch, 100))
        made.extend(large(100, device))
    assert all(map(bool, found))


def test_read_waits_for_writes_of_another_stream(buffer: ReplayBuffer) -> None:
    stream, later = torch.cuda.Stream(), rows(100, 200, "cuda")
    # Gives this stream its own memory, so that it needn't wait for the device.
    with torch.cuda.stream(stream):
        buffer.sample(), buffer.sample()
    torch.cuda.synchronize()
    with busy():
        buffer.extend(later)
    with torch.cuda.stream(stream):
        assert sorted(numbers(buffer.sample()) + numbers(buffer.sample())) == [*range(100, 200)]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_pinned_batches_do_not_change_until_they_are_copied(
    device: torch.device, prefetch: int | None
) -> None:
    made = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SamplerWithoutReplacement(),
        batch_size=50,
        pin_memory=True,
        prefetch=prefetch,
    )
    made.extend(rows(0, 100))
    with busy():  # the copies wait, and their source batches are freed meanwhile
        sent = [made.sample().to(on_cuda(device), non_blocking=True) for _ in range(20)]
    torch.cuda.synchronize()
    for first, second in zip(sent[::2], sent[1::2], strict=True):
        assert sorted(numbers(first) + numbers(second)) == [*range(100)]


def test_view_is_complete(buffer: ReplayBuffer) -> None:
    with busy():
        buffer.extend(rows(100, 200, "cuda"))
    with elsewhere():
        assert numbers(buffer[:].clone()) == [*range(100, 200)]


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoint_holds_writes_of_another_stream(
    buffer: ReplayBuffer, wait: bool, tmp_path: object
) -> None:
    with busy():
        buffer.extend(rows(100, 200, "cuda"))
    dump = buffer.dumps(tmp_path, wait=wait)
    if not wait:
        with busy():
            buffer.extend(rows(200, 300, "cuda"))
        dump.wait()
    loaded = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=50)
    loaded.loads(tmp_path)
    assert numbers(loaded[:]) == [*range(100, 200)]


def test_batches_come_from_one_write_of_a_concurrent_writer(buffer: ReplayBuffer) -> None:
    """Every batch comes from one write. Each write replaces all rows, in a stream that always lags behind."""
    count, errors = 30, list[BaseException]()

    def write() -> None:
        try:
            with elsewhere():
                for turn in range(1, count):
                    torch.cuda._sleep(LONG >> 6)
                    buffer.extend(rows(100 * turn, 100 * (turn + 1), "cuda"))
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        with elsewhere():
            batch = buffer.sample()
            assert len({number // 100 for number in numbers(batch)}) == 1
    writer.join()
    assert not errors
    assert numbers(buffer[:]) == [*range(100 * (count - 1), 100 * count)]
