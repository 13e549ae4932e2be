"""Cases of native policies: the sides record the same fields, and the limit in C computes what torch computes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.climit import Actor
from benchmarks.native import CARTPOLE, CASES, CATEGORICAL, PENDULUM, normal
from benchmarks.recording_loop import recording_loop
from benchmarks.workload import mlp
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv


@pytest.mark.parametrize(("name", "policy"), [(CARTPOLE, CATEGORICAL), (PENDULUM, normal())])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_loop_stores_the_leaves_of_a_batch(name, policy, backend) -> None:
    env = GymEnv(name, categorical_action_encoding=name == CARTPOLE)
    (batch,) = SyncDataCollector(
        env, policy.by_module(), frames_per_batch=20, total_frames=20, policy_backend=backend
    )
    by_hand = next(recording_loop(name, policy.by_hand(), steps=20, indices=True, outputs=policy.outputs))
    by_hand["collector.traj_ids"] = by_hand.pop("traj_ids")
    leaves = {path: (tuple(leaf.shape), leaf.numpy().dtype) for path, leaf in batch.flatten_keys(".").items()}
    assert leaves == {path: (array.shape[1:], array.dtype) for path, array in by_hand.items()}


def test_loop_stores_the_log_probabilities_of_its_actions() -> None:
    loop = recording_loop(
        CARTPOLE, CATEGORICAL.by_hand(), num_envs=3, steps=50, indices=True, outputs=CATEGORICAL.outputs
    )
    batch = {name: torch.from_numpy(array) for name, array in next(loop).items()}
    expected = batch["logits"].log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(batch["action_log_prob"], expected)
    with torch.no_grad():
        torch.testing.assert_close(batch["logits"], mlp(4, 2)(batch["observation"]))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_limit_in_c_computes_the_network_and_draws_from_its_distribution() -> None:
    n, layers = 100_000, [one for one in mlp(4, 2) if isinstance(one, nn.Linear)]
    observation = np.random.default_rng(0).standard_normal((n, 4), np.float32)
    actor = Actor([(one.weight.detach().numpy(), one.bias.detach().numpy()) for one in layers], observation)
    actor()
    with torch.no_grad():
        logits = mlp(4, 2)(torch.from_numpy(observation))
    scores = logits.log_softmax(-1)
    np.testing.assert_allclose(actor.logits, logits, atol=1e-5)
    chosen = scores.gather(-1, torch.from_numpy(actor.action)[:, None])[:, 0]
    np.testing.assert_allclose(actor.score, chosen, atol=1e-5)
    expected = scores.exp()[:, 1]
    deviation = (actor.action.sum() - expected.sum()) / (expected * (1 - expected)).sum().sqrt()
    assert abs(deviation) < 4


@pytest.mark.parametrize(
    "case", [one for one in CASES if "multi" not in one.name], ids=lambda case: case.name
)
def test_every_side_runs(case) -> None:
    assert all(setup()() > 0 for setup in case.sides.values())
