"""Environment classes over TorchRL's `EnvBase` and over gleanrl's behave equally."""

from __future__ import annotations

import pytest
import torch

torchrl_envs = pytest.importorskip("torchrl.envs")
from torchrl import data as torchrl_data  # noqa: E402

from gleanrl import (  # noqa: E402
    data,
    envs,
)
from gleanrl.envs import (  # noqa: E402
    ParallelEnv,
    SerialEnv,
)
from tests.envs.derived import kinds  # noqa: E402

THEIRS, OURS = kinds(torchrl_envs, torchrl_data), kinds(envs, data)
REFUSED_THERE = {"scalar_flags"}
LEFT_BEHIND = {"memory", "extra", "action_mask", "noise"}
"""Undeclared keys of steps. In roots of TorchRL's rollouts they keep the reset's values; in gleanrl's they change."""
pytestmark = pytest.mark.filterwarnings("ignore")


def act(env):
    """Return a policy that takes the same actions in both."""
    keys = list(env.action_keys)
    zeros = env.full_action_spec.zero()

    def policy(td):
        return td.update(zeros.clone()) if keys else td

    return policy


@pytest.mark.parametrize("kind", sorted(OURS.keys() - REFUSED_THERE))
def test_rollouts_equal_torchrls(kind):
    found = []
    for made in (THEIRS, OURS):
        env = made[kind]()
        found.append(env.rollout(8, act(env), break_when_any_done=False, return_contiguous=True))
    theirs, ours = found
    assert theirs.shape == ours.shape
    keys = set(theirs.keys(True, True)) & set(ours.keys(True, True))
    assert {("next", "done"), "done"} <= keys and len(keys) >= 5
    if kind != "functions":  # it draws from its own generator
        for key in keys - LEFT_BEHIND:
            assert torch.equal(theirs[key].nan_to_num(9), ours[key].nan_to_num(9)), key
    lacking = {key for key in theirs.keys(True, True) if key not in ours.keys(True, True)}
    assert all((key if isinstance(key, str) else key[-1]) in LEFT_BEHIND for key in lacking)


@pytest.mark.parametrize("kind", ["before_super", "full_setters", "of_the_class", "extra_state", "masked"])
def test_gleanrl_batches_step_torchrl_environments(kind):
    for batch in (SerialEnv, ParallelEnv):
        env = batch(2, THEIRS[kind])
        data = env.rollout(6, break_when_any_done=False)
        assert data.shape == (2, 6) and ("next", "observation") in data.keys(True)
        env.close()
