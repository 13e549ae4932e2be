"""While weights change during a policy's calls, each call uses one whole version, which its rows name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tests.chaos.drills import KINDS, running, scaled
from tests.chaos.oracle import STREAM, Record, makers

pytestmark = pytest.mark.timeout(1800)

CALLS, WORKERS, STEPS, SIZE = 1_000_000, 4, 100, 4096
VERSION = ("collector", "policy_version")


class Ends(nn.Module):
    """A policy whose weights all have one value; the action is the smallest and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(SIZE) for _ in range(4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        low = torch.stack([part.min() for part in self.parts]).min()
        high = torch.stack([part.max() for part in self.parts]).max()
        return torch.stack([low, high]).expand(*observation.shape[:-1], 2)

    def fill(self, value: int) -> None:
        """Set all weights to a value."""
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_sees_two_versions(kind):
    net, calls = Ends(), scaled(CALLS // 2)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    record, seen, value, stale = Record(), [], 0, 0
    batches = -(-calls // (STEPS * WORKERS)) * (1 if kind == "sync" else WORKERS)
    with running(kind, makers(WORKERS), policy, steps=STEPS, track_policy_version=True) as collector:
        for _ in range(batches):
            for _ in range(1 if kind == "sync" else 20):
                value += 1
                net.fill(value)
                collector.update_policy_weights_()
            batch = collector.next()
            record.add(batch)
            rows = batch.reshape(-1)
            seen.append(
                torch.cat([rows["action"].double(), rows[VERSION].reshape(-1, 1).double()], -1).numpy()
            )
            stale += kind == "sync" and bool((rows["action"] != value).any())
    low, high, version = np.concatenate(seen).T
    streams = record.column("root")[:, STREAM]
    print(f"{kind}: {len(low)} calls, {value} updates, {len(np.unique(low))} of them seen")
    assert len(low) >= calls
    assert (low == high).all(), f"{(low != high).sum()} calls saw two versions"
    pairs = np.unique(np.column_stack([version, low]), axis=0)
    assert len(np.unique(pairs[:, 0])) == len(pairs), "one version has several weights"
    for stream in range(WORKERS):
        assert (np.diff(low[streams == stream]) >= 0).all(), "a worker went back to older weights"
    assert not stale, f"{stale} batches were collected with older weights than the last update's"
    assert len(np.unique(low)) > batches // (2 * WORKERS)
    record.check()
