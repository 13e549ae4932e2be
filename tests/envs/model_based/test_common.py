"""Model-based environments step by a world model."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl.data import Composite, Unbounded
from gleanrl.envs import ModelBasedEnvBase, check_env_specs
from gleanrl.errors import UnsupportedError


class Dreamt(ModelBasedEnvBase):
    def __init__(self, **kwargs):
        step = TensorDictModule(
            lambda hidden, action: torch.tanh(hidden + action),
            in_keys=["hidden", "action"],
            out_keys=["hidden"],
        )
        pay = TensorDictModule(nn.Linear(4, 1), in_keys=["hidden"], out_keys=["reward"])
        super().__init__(TensorDictSequential(step, pay), **kwargs)
        self.observation_spec_unbatched = Composite(hidden=Unbounded((4,)))
        self.state_spec_unbatched = Composite(hidden=Unbounded((4,)))
        self.action_spec_unbatched = Unbounded((1,))

    def _reset(self, tensordict=None):
        size = self.batch_size if tensordict is None else tensordict.batch_size
        return TensorDict({"hidden": torch.zeros(*size, 4)}, size)


def test_model_based_environment_passes_the_checks():
    env = Dreamt()
    check_env_specs(env, seed=0)
    assert not env.batch_locked and env.rollout(3, tensordict=TensorDict({}, [5])).shape == (5, 3)
    assert Dreamt(batch_size=(2,)).rollout(3).shape == (2, 3) and Dreamt(batch_size=(2,)).batch_locked


def test_gradients_reach_the_model():
    env = Dreamt()
    env.rollout(3)["next", "reward"].sum().backward()
    assert all(weight.grad is not None for weight in env.world_model.parameters())


def test_set_specs_from_env_copies_specs():
    env = Dreamt()
    other = Dreamt()
    other.action_spec = Unbounded((4,))
    env.set_specs_from_env(other)
    assert env.action_spec.shape == (4,)


def test_params_argument_is_refused():
    with pytest.raises(UnsupportedError, match="params"):
        Dreamt(params=[torch.zeros(1)])
