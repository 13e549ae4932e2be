"""The torch pendulum computes the same steps as gymnasium's."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from gleanrl.envs import PendulumEnv, StepCounter, TransformedEnv, check_env_specs
from gleanrl.testing import check_env


def test_pendulum_passes_the_environment_checks():
    check_env_specs(PendulumEnv(seed=0))
    assert "seed" not in check_env(lambda: PendulumEnv(seed=0)).skipped


def test_steps_equal_gymnasiums_pendulum():
    theirs = gymnasium.make("Pendulum-v1").unwrapped
    theirs.reset(seed=0)
    env = PendulumEnv(seed=0)
    root = env.reset()
    theirs.state = np.array([float(root["th"]), float(root["thdot"])])
    for torque in (1.0, -2.0, 5.0, 0.3):
        _, reward, *_ = theirs.step(np.array([torque]))
        after = env.step(root.set("action", torch.tensor([torque])))["next"]
        angle = (theirs.state[0] + np.pi) % (2 * np.pi) - np.pi
        assert np.allclose([float(after["th"]), float(after["thdot"])], [angle, theirs.state[1]], atol=1e-5)
        assert abs(float(after["reward"]) - reward) < 1e-5
        root = env.step_mdp(root)


def test_unlocked_pendulum_steps_any_batch_with_its_own_parameters():
    env = PendulumEnv(seed=0)
    many = env.gen_params(g=torch.pi, batch_size=[10])
    batch = env.rollout(3, tensordict=many)
    assert batch.shape == (10, 3) and torch.allclose(batch["params", "g"], torch.tensor(torch.pi))
    start = env.reset(env.gen_params(batch_size=[4, 2]))
    policy = torch.nn.Linear(1, 1)

    def act(td):
        return td.set("action", policy(td["th"].unsqueeze(-1)))

    loss = env.rollout(5, act, auto_reset=False, tensordict=start)["next", "reward"].mean()
    loss.backward()
    assert policy.weight.grad is not None and policy.weight.grad.abs().sum() > 0


def test_equal_seeds_give_equal_first_states():
    first, again, other = (PendulumEnv(seed=seed).reset()["th"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("make", [PendulumEnv, lambda **kw: TransformedEnv(PendulumEnv(**kw), StepCounter())])
def test_a_reset_begins_in_a_given_state(make):
    env = make(seed=0)
    given = env.reset(env.gen_params(batch_size=[3]))
    given["th"], given["thdot"] = torch.tensor([0.5, 0.25, -1.0]), torch.tensor([0.1, 0.2, 0.3])
    begun = env.reset(given.clone(), set_state=True)
    assert torch.equal(begun["th"], given["th"]) and torch.equal(begun["thdot"], given["thdot"])
    for chosen in ({}, {"set_state": False}):
        assert not torch.equal(env.reset(given.clone(), **chosen)["th"], given["th"])
    half = given.clone().set("_reset", torch.tensor([[True], [False], [True]]))
    begun = env.reset(half.set("th", given["th"] + 1), set_state=True)
    assert torch.equal(begun["th"], given["th"] + 1)
    # A reset without a state in its parameters draws one.
    env.reset(env.gen_params(batch_size=[3]), set_state=True)
