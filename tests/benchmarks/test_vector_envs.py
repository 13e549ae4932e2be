"""The loop of the vector benchmark records the same batches as a collector."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.vector_envs import CASES, native, serial, vector_loop
from benchmarks.workload import Greedy
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper

NAMES = {"collector.traj_ids": "traj_ids", "collector.mask": "mask"}


@pytest.mark.parametrize("make", [native, serial])
def test_loop_stores_the_leaves_of_a_batch(make) -> None:
    batch = next(iter(SyncDataCollector(GymWrapper(make(3)), frames_per_batch=60)))
    by_hand = next(vector_loop(make(3), steps=20))
    leaves = {NAMES.get(path, path): leaf for path, leaf in batch.flatten_keys(".").items()}
    ours = {path: (tuple(leaf.shape), leaf.numpy().dtype) for path, leaf in leaves.items()}
    assert ours == {path: (array.shape, array.dtype) for path, array in by_hand.items()}


@pytest.mark.parametrize("make", [native, serial])
def test_loop_records_equal_a_collectors(make) -> None:
    collector = SyncDataCollector(GymWrapper(make(3)), Greedy(), frames_per_batch=120)
    collector.set_seed(0)
    loop = vector_loop(make(3), Greedy(), steps=40)
    for batch, by_hand in zip(collector, loop, strict=False):
        for path, leaf in batch.flatten_keys(".").items():
            name = NAMES.get(path, path)
            if name in ("terminated", "truncated", "done"):
                continue
            assert np.array_equal(by_hand[name], leaf.numpy()), name
        if batch["next", "done"].any():
            break
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_sides_make_equal_frames(case) -> None:
    frames = {setup()() for setup in case.sides.values()}
    assert len(frames) == 1 and frames.pop() > 0
