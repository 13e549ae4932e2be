"""A buffer works the same under another default device (here "meta" simulates an accelerator)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from gleanrl.data.replay_buffers.change_log import touched
from tests.data.replay_buffers.oracle import fill, fingerprint, ted


def use(storage: Any, sampler: Any, ndim: int, data: list[Any]) -> list[Any]:
    """Call all methods of a buffer and return the results."""
    kind = storage(20) if storage is ListStorage else storage(20, ndim=ndim)
    rb = ReplayBuffer(storage=kind, sampler=sampler(), batch_size=4)
    found: list[Any] = [rb.extend(part) for part in data]
    found.append(rb.add(data[0][0] if ndim == 1 else data[0][:, 0]))
    found += [rb.sample(), *rb.sample(return_info=True)]
    found += [rb[2], rb[1:3], rb[:], rb[[0, 2]], rb[np.array([1, 0])]]
    if storage is not ListStorage:
        found += [rb["observation"], rb[[]], rb[rb["observation"][..., 0] >= 0]]
        rb[0] = rb[1]
        rb[[0, 2]] = rb[[1, 1]]
        rb["observation"] = rb["observation"] + 1
    if sampler is SamplerWithoutReplacement:
        found += list(rb)
    slots, version = torch.zeros(3, dtype=torch.int64, device="cpu"), rb.storage.version
    for old in (version._replace(content=0), version._replace(changes=version.changes - 1)):
        found.append(touched(slots, rb.storage.changed_since(old)))
    again = ReplayBuffer(storage=storage(20) if storage is ListStorage else storage(20, ndim=ndim))
    again.set_sampler(sampler())
    again.load_state_dict(rb.state_dict())
    found += [again.sample(6), again[:], rb.state_dict()]
    rb.empty()
    return [tree(part) for part in found]


def tree(part: Any) -> Any:
    if isinstance(part, list):
        return [tree(item) for item in part]
    return part.to_dict() if hasattr(part, "to_dict") else part


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize(
    "storage, ndim",
    [
        (LazyTensorStorage, 1),
        (LazyTensorStorage, 2),
        (LazyMemmapStorage, 1),
        (LazyMemmapStorage, 2),
        (ListStorage, 1),
    ],
)
def test_buffer_gives_the_same_results_under_a_default_device(storage, sampler, ndim):
    streams = 3 if ndim == 2 else None
    data = [ted(5, 0, streams), ted(9, 5, streams), ted(30, 14, streams)]
    torch.manual_seed(0)
    expected = use(storage, sampler, ndim, data)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = use(storage, sampler, ndim, data)
    assert fingerprint(found) == fingerprint(expected)


def test_set_default_device_leaves_buffers_on_the_cpu():
    torch.set_default_device("meta")
    try:
        rb = ReplayBuffer(storage=TensorStorage(torch.arange(5.0, device="cpu")), seed=0)
        assert rb.sample(3).device.type == rb.storage.device.type == "cpu"
        empty = LazyTensorStorage(3)
        fill(empty, torch.zeros(2, 0, device="cpu"))
        assert empty.get(slice(None)).shape == (2, 0) and empty.get([1]).device.type == "cpu"
    finally:
        # None restores the state from before. Naming the CPU would leave a torch mode installed.
        torch.set_default_device(None)
