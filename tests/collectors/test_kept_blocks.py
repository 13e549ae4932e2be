"""Small blocks are written again, and batches are copies; what a policy keeps of what it was shown stays as it was."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import SerialEnv, StepCounter, TransformedEnv
from tests.fakes import Script
from tests.fakes_base import CountingEnv

BATCHES = 8
ENVS = {
    "one": CountingEnv,
    "batch": lambda script: CountingEnv(script, (2,)),
    "serial": lambda script: SerialEnv(2, lambda: CountingEnv(script)),
    "transformed": lambda script: TransformedEnv(CountingEnv(script, (2,)), StepCounter()),
}
PARTS = {"row": lambda row: row, "view": lambda row: row[..., 1:], "nothing": lambda row: None}


class Keeping(torch.nn.Module):
    """Keeps what it is shown, or what `part` makes of it."""

    def __init__(self, part, policy):
        super().__init__()
        self.part, self.policy, self.kept, self.addresses = part, policy, [], set()

    def forward(self, observation):
        part = self.part(observation)
        if part is not None:
            self.kept.append((part, part.clone()))
        self.addresses.add(observation.data_ptr())
        return self.policy(observation)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_what_a_policy_keeps_stays_as_it_was(part, whole, kind, steps):
    env = ENVS[kind](Script(lengths=(4,)))
    shape, dtype = env.action_spec.shape, env.action_spec.dtype
    module = Keeping(PARTS[part], lambda observation: torch.ones(shape, dtype=dtype))
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    frames = steps * env.batch_size.numel()
    collector = SyncDataCollector(
        env,
        policy if whole else (lambda td: policy(td)),
        frames_per_batch=frames,
        total_frames=BATCHES * frames,
    )
    batches = [(batch, batch.clone()) for batch in collector]
    assert len(batches) == BATCHES
    assert all((batch == copy).all() for batch, copy in batches)
    assert all(torch.equal(row, copy) for row, copy in module.kept)
    observed = torch.cat([batch["observation"].reshape(frames, -1) for batch, _ in batches])
    assert len(observed.unique(dim=0)) > 1, "there is something that could be overwritten"
    if part == "nothing":
        assert len(module.addresses) <= steps + 1, "the memory is written again"
