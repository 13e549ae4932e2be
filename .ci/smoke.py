"""Test an installed wheel: collect, store and sample. Run it in a folder from which the sources can't be imported."""

from pathlib import Path

import torch

import gleanrl
from gleanrl._arrays import native
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, RandomPolicy

place = Path(native.__file__)
assert "site-packages" in place.parts, f"gleanrl comes from {place}, not from the wheel"

environment = GymEnv("CartPole-v1")
collector = SyncDataCollector(
    environment, RandomPolicy(environment.action_spec), frames_per_batch=100, total_frames=300
)
for storage in (LazyTensorStorage(1000), LazyMemmapStorage(1000)):
    buffer = ReplayBuffer(storage=storage, batch_size=32)
    collector.reset()
    batch = next(iter(collector))
    buffer.extend(batch)
    sample = buffer.sample()
    assert len(buffer) == 100 and sample.batch_size == torch.Size([32])
    rows = (sample["observation"][:, None] == batch["observation"][None]).all(-1)
    assert bool(rows.any(1).all()), "expected only collected observations in the sample, got another one"
collector.shutdown()
print(f"gleanrl {gleanrl.__version__}: the wheel collects, stores and samples")
