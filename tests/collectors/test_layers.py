"""A step passes few functions: what can be found out once a batch isn't asked at every step."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, ParallelEnv
from tests.layers import entered, size_of


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).argmax(-1)


def make() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_passes_few_functions(batched: bool, wrapped: bool) -> None:
    policy = TensorDictModule(Greedy(), ["observation"], ["action"]) if wrapped else Greedy()
    env = ParallelEnv(2, make) if batched else make()
    collector = SyncDataCollector(env, policy, frames_per_batch=20 * (1 + batched), total_frames=-1)
    try:
        batches = iter(collector)
        next(batches)
        functions = entered(lambda: next(batches))
    finally:
        collector.shutdown()
    begins = [
        i
        for i, code in enumerate(functions)
        if code.co_name == "step" and code.co_filename.endswith("stepper.py")
    ]
    assert len(begins) == 20
    least = min(size_of(functions[a:b]) for a, b in zip(begins, begins[1:], strict=False))
    most = (10, 6) if batched else (6, 4)
    assert 3 < least[0] <= most[0] and 1 < least[1] <= most[1]
