"""Batches are served on the requested device, in pinned memory, and prefetched."""

from __future__ import annotations

import threading

import pytest
import torch

from gleanrl.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.envs.transforms import DeviceCastTransform
from gleanrl.errors import UnsupportedError
from tests.data.replay_buffers.oracle import clock, ted
from tests.devices.records import CPU, numbers, on, plain, rows

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class TestPlaces:
    def test_batches_are_cast_to_the_device(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10), transform=DeviceCastTransform(device), batch_size=8, seed=0
        )
        rb.extend(rows(0, 10, source))
        batch, info = rb.sample(return_info=True)
        assert on(device, batch) and batch.device == device and on(CPU, rb.storage.get(slice(None)))
        assert numbers(batch) == info["index"].tolist() and on(device, rb[2:4])
        assert numbers(rb[2:4]) == [2, 3]

    def test_only_named_entries_are_cast(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10), transform=DeviceCastTransform(device, in_keys=["x"]), batch_size=8
        )
        rb.extend(rows(0, 10))
        batch = rb.sample()
        assert batch["x"].device == device and batch["next", "x"].device == CPU
        assert torch.equal(batch["x"].cpu() + 1, batch["next", "x"])

    def test_sampling_entries_are_cast_too(self, device):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10),
            sampler=PrioritizedSampler(10, alpha=1.0, beta=1.0),
            transform=DeviceCastTransform(device),
            batch_size=8,
        )
        rb.extend(rows(0, 10))
        batch = rb.sample()
        assert on(device, batch) and batch["index"].tolist() == batch["x"].tolist()
        batch["td_error"] = batch["x"] + 1.0
        rb.update_tensordict_priority(batch)
        again = rb.sample()
        assert again["_weight"].device == device and rb.stats().priorities_dropped == 0

    def test_batches_are_cast_to_the_cpu(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            transform=DeviceCastTransform("cpu", device),
            batch_size=8,
        )
        rb.extend(rows(0, 10))
        assert on(CPU, rb.sample()) and on(device, rb.storage.get([1])) and numbers(rb[:]) == [*range(10)]

    def test_pinned_memory_needs_cuda(self, device):
        if not torch.cuda.is_available():
            with pytest.raises(UnsupportedError, match="CUDA"):
                ReplayBuffer(storage=LazyTensorStorage(10, device=device), pin_memory=True)

    @NEEDS_CUDA
    @pytest.mark.parametrize("prefetch", [None, 2])
    def test_batches_are_copied_into_pinned_memory(self, device, source, prefetch):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), pin_memory=True, prefetch=prefetch, batch_size=8, seed=0
        )
        rb.extend(rows(0, 10, source))
        for _ in range(4):
            batch = rb.sample()
            assert all(leaf.is_pinned() for leaf in batch.values(True, True))
            there = batch.to(device, non_blocking=True)
            torch.cuda.synchronize()
            assert numbers(there.select("x", "pixels", "next")) == batch["index"].tolist()

    @NEEDS_CUDA
    @pytest.mark.parametrize("prefetch", [None, 2])
    def test_priorities_from_the_device_update_pinned_batches(self, device, prefetch):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10),
            sampler=PrioritizedSampler(10, alpha=1.0, beta=1.0),
            pin_memory=True,
            prefetch=prefetch,
            batch_size=40,
        )
        rb.extend(rows(0, 12))  # rows 10 and 11 replace the first two
        for _ in range(6):
            batch = rb.sample()
            assert all(leaf.is_pinned() for leaf in batch.values(True, True))
            there = batch.to(device, non_blocking=True)
            assert torch.equal(there["x"] % 10, there["index"]) and int(there["x"].min()) >= 2
            there["td_error"] = (there["x"] == 5).float()
            rb.update_tensordict_priority(there)
        assert rb.stats().priorities_dropped == 0
        assert (rb.sample()["x"] == 5).float().mean() > 0.9

    @NEEDS_CUDA
    def test_single_tensors_and_lists_are_pinned(self, source):
        for storage in (LazyTensorStorage(10), ListStorage(10, device="cpu")):
            rb = ReplayBuffer(storage=storage, pin_memory=True, batch_size=8)
            rb.extend(torch.arange(10, device=source))
            batch, info = rb.sample(return_info=True)
            assert batch.is_pinned() and batch.tolist() == info["index"].tolist()

    @NEEDS_CUDA
    def test_batches_on_the_device_are_not_pinned(self, device):
        # As in TorchRL, whose buffers pin tensors of the CPU and leave the other ones unchanged.
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=device), pin_memory=True, batch_size=8)
        rb.extend(rows(0, 10))
        assert on(device, rb.sample())


class TestPrefetching:
    @pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
    def test_prefetched_batches_equal_unprefetched_ones(self, device, source, sampler):
        found = []
        for prefetch in (None, 3):
            rb = ReplayBuffer(
                storage=LazyTensorStorage(20, device=device),
                sampler=sampler(),
                prefetch=prefetch,
                batch_size=7,
                seed=0,
            )
            rb.extend(rows(0, 20, source))
            batches = [rb.sample() for _ in range(9)]
            assert all(on(device, batch) for batch in batches)
            found.append([numbers(batch) for batch in batches])
        assert found[0] == found[1]

    def test_overwritten_rows_are_drawn_again(self, device, source):
        rb = ReplayBuffer(storage=LazyTensorStorage(20, device=device), prefetch=3, batch_size=50, seed=0)
        rb.extend(rows(0, 20, source))
        rb.sample()
        for start in range(20, 120, 20):
            rb.extend(rows(start, start + 20, source))
            assert set(numbers(rb.sample())) <= set(range(start, start + 20))

    def test_records_are_complete_during_concurrent_writes(self, device, source):
        rb = ReplayBuffer(storage=LazyTensorStorage(50, device=device), prefetch=2, batch_size=32, seed=0)
        rb.extend(ted(50).to(source))
        ended = threading.Event()

        def write() -> None:
            for start in range(50, 2050, 20):
                rb.extend(ted(20, start).to(source))
            ended.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not ended.is_set():
            clock(rb.sample().to("cpu"))
        writer.join()
        assert sorted(clock(rb[:].to("cpu")).tolist()) == [*range(2000, 2050)]

    def test_transforms_apply_to_prefetched_batches(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(20),
            transform=DeviceCastTransform(device),
            prefetch=2,
            batch_size=8,
            seed=0,
        )
        rb.extend(rows(0, 20))
        plainly = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, seed=0)
        plainly.extend(rows(0, 20))
        for _ in range(4):
            batch = rb.sample()
            assert on(device, batch) and plain(batch) == plain(plainly.sample())
