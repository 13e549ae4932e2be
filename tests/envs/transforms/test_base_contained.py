"""A transform has one container, sees its parent from there, and is copied without it."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from gleanrl.envs import GymEnv
from gleanrl.envs.transforms import Compose, RewardScaling, RewardSum, StepCounter, TransformedEnv
from gleanrl.envs.transforms.vec_norm import VecNorm
from gleanrl.errors import ContainerError


def test_parent_depends_on_the_place_in_the_chain():
    first, last = StepCounter(), RewardSum()
    assert first.holder is first.container is first.parent is first.collector is first.home() is None
    chain = Compose(first, last)
    assert first.holder is last.holder is chain and last.container is None
    env = TransformedEnv(GymEnv("CartPole-v1"), chain)
    assert last.container is env and last.home() == "cpu"
    assert "step_count" in last.parent.observation_spec.keys()
    assert "step_count" not in first.parent.observation_spec.keys()
    with pytest.raises(ContainerError, match="clone"):
        Compose(first)
    last.reset_parent()
    assert last.holder is None and last.parent is None


def test_only_learning_transforms_stay_in_training_mode():
    scaling, norm = RewardScaling(0.0, 1.0), VecNorm(["observation"])
    Compose(scaling, norm)
    assert scaling.training and norm.training
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(scaling.clone(), norm.clone()))
    assert [transform.training for transform in env.transform] == [False, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda chain: pickle.loads(pickle.dumps(chain))])
def test_a_copy_of_a_chain_is_its_transforms_container(copied):
    chain = Compose(StepCounter())
    twin = copied(chain)
    assert twin[0].holder is twin and chain[0].holder is chain
    assert chain[0].clone().holder is None and chain[0].holder is chain


def test_a_container_isnt_kept_alive():
    counter = StepCounter()
    chain = Compose(counter)
    assert counter.holder is chain
    del chain
    gc.collect()
    assert counter.holder is None
