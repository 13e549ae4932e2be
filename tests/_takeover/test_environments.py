"""gleanrl environments run in TorchRL collectors that gleanrl doesn't replace (`make test-foreign`)."""

import pytest

from tests.takeovers import output

pytest.importorskip("torchrl")

PROGRAM = """
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import AsyncBatchedCollector
from torchrl.envs import GymEnv, StepCounter, TransformedEnv

class Act(torch.nn.Module):
    def forward(self, observation):
        return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)

def make():
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(10))

if __name__ == "__main__":
    policy = TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])
    collector = AsyncBatchedCollector([make] * 2, policy=policy, frames_per_batch=80, total_frames=160)
    assert collector.__class__.__module__.startswith("torchrl.")
    for batch in collector:
        counts = batch["next", "step_count"]
        print(batch.shape, counts.flatten().tolist(), flush=True)
        assert 1 <= counts.min() and counts.max() == 10
        assert batch["next", "truncated"][counts == 10].all()
        assert (batch["observation"][batch["step_count"].squeeze(-1) == 0].abs() <= 0.05).all()
    collector.shutdown()
    print("collected")
"""


def test_gleanrl_environments_run_in_a_torchrl_collector(tmp_path):
    assert output(tmp_path, PROGRAM).endswith("collected\n")
