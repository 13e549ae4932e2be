"""The loop of the transforms benchmark records the same values as the transforms."""

from __future__ import annotations

import torch

from benchmarks.transforms import CASES, FrameBank, by_hand, frames
from gleanrl.collectors import SyncDataCollector


def test_loop_records_equal_the_transforms():
    batch = SyncDataCollector(frames(), frames_per_batch=300, total_frames=-1).next()
    before, after, action, reward, flags = next(by_hand(FrameBank(), 300))
    assert torch.allclose(batch["pixels"], before, atol=1e-6)
    assert torch.allclose(batch["next", "pixels"], after, atol=1e-6)
    assert torch.equal(batch["next", "reward"], reward)
    assert torch.equal(batch["next", "terminated"], flags[0])
    assert batch["action"].shape == action.shape


def test_every_case_runs():
    for case in CASES:
        assert case.sides["gleanrl"]()() > 0
