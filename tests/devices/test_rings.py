"""Storages on a device combine all features: all kinds of writes, priorities, slices, prefetching, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.data.replay_buffers.oracle import clock, ted
from tests.devices.records import on, plain

SIZE = 30
SAMPLERS: dict[str, Any] = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(SIZE, alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(SIZE, alpha=0.7, beta=0.5, slice_len=2),
}


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_buffer_on_the_device_equals_one_on_the_cpu(
    device: torch.device, name: str, prefetch: int | None, tmp_path: Any
) -> None:
    def made(place: Any) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(SIZE, device=place),
            sampler=SAMPLERS[name](),
            batch_size=8,
            prefetch=prefetch,
            seed=1,
        )

    here, there = made("cpu"), made(device)
    start = 0
    for count in (12, 7, 9, 11, SIZE, 3):  # goes around the ring, and replaces all records
        here.extend(ted(count, start))
        there.extend(ted(count, start).to(device if count % 2 else "cpu"))
        start += count
        mine, its = here.sample(), there.sample()
        assert on(device, its) and plain(mine) == plain(its)
        if "slices" not in name:
            clock(its.to("cpu"))
        if "prior" in name:
            for rb, batch in ((here, mine), (there, its)):
                error = batch["index"].cpu() / SIZE + 0.1  # division on a GPU rounds differently
                batch["td_error"] = error.to(batch["index"].device)
                rb.update_tensordict_priority(batch)
        changed = ted(2, start)  # by index, and through a live view
        start += 2
        for rb, place in ((here, "cpu"), (there, device)):
            rb[torch.tensor([4, 2], device=place)] = changed.to(place)
            if prefetch is None:  # prefetched batches may be older than a write through a view
                rb[5:7]["next", "reward"].fill_(start)
        assert plain(here[:]) == plain(there[:])
        assert plain(here.sample()) == plain(there.sample())
        there.dumps(tmp_path / "dump")
        restored = made(device)
        restored.loads(tmp_path / "dump")
        assert plain(there[:]) == plain(restored[:]) and on(device, restored[:])
        assert plain(here.sample()) == plain(there.sample()) == plain(restored.sample())
