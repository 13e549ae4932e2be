"""Rows of gymnasium environments hold roots, outcomes and actions."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.envs.libs.gym_codecs import RewardCodec
from gleanrl.envs.libs.gym_spaces import action_tree, leaves, observation_tree, reward_spec
from gleanrl.envs.libs.gym_stepper import GymCodecs, GymRows, loaded
from gleanrl.errors import PolicyError, SchemaError

PLACES = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
MOVES = gym.spaces.Discrete(4)
BOTH = gym.spaces.Dict(move=MOVES, place=PLACES)


def rows_of(observations: gym.Space, actions: gym.Space, size: tuple[int, ...] = ()) -> GymRows:
    observation = observation_tree(observations, "observation", False)
    action = action_tree(actions, False)
    if size:
        observation, action = observation.batched(*size), action.batched(*size)
    reward = RewardCodec(("reward",), reward_spec(gym.make("CartPole-v1"), size))
    return GymRows(GymCodecs(observation, action, reward), torch.Size(size))


@pytest.mark.parametrize("size", [(), (5,)])
def test_schema_has_the_columns_of_a_step_without_batch_dimensions(size):
    schema = rows_of(PLACES, MOVES, size).schema()
    assert (
        schema[("observation",)] == schema[("next", "observation")] == Field(torch.Size((3,)), torch.float32)
    )
    assert schema[("next", "reward")] == Field(torch.Size((1,)), torch.float32)
    assert ("reward",) not in schema
    assert all(schema[(*where, "done")].dtype is torch.bool for where in ((), ("next",)))


def test_single_leaf_is_written_without_a_codec():
    assert rows_of(PLACES, MOVES).plain is not None
    assert rows_of(BOTH, MOVES).plain is None
    assert rows_of(MOVES, MOVES).plain is None  # the action is converted to a one-hot vector


def test_copied_roots_share_no_memory():
    rows, array = rows_of(PLACES, MOVES), np.ones(3, np.float32)
    (copy,) = rows.copied([array]).values()
    array[:] = 0
    assert copy.tolist() == [1, 1, 1]


@pytest.mark.parametrize("space", [MOVES, BOTH])
def test_actions_decoded_together_equal_single_ones(space):
    rows, codecs = rows_of(PLACES, space), leaves(action_tree(space, False))
    fields = {codec.key: Field(torch.Size(codec.shape), codec.spec.dtype) for codec in codecs}
    block = Block(Schema(fields), (), 4)
    for codec in codecs:
        block.column(codec.key).copy_(codec.spec.rand((4,)))
    rows.see(block)
    at_once = list(rows.all_actions())
    assert str(at_once) == str([rows.action(t) for t in range(4)])
    assert all(space.contains(action) for action in at_once)


def test_actions_of_another_dtype_are_refused():
    rows = rows_of(PLACES, PLACES)
    block = Block(Schema({("action",): Field(torch.Size((3,)), torch.float64)}), (), 4)
    with pytest.raises(PolicyError, match="expected shape"):
        rows.see(block)


def test_entries_of_foreign_roots_are_copied_if_they_fit():
    root = TensorDict(place=torch.ones(3))
    copy = loaded(root, ("place",), (3,), torch.float32)
    root["place"].zero_()
    assert copy.tolist() == [1, 1, 1]
    for path, shape, dtype in ((("place",), (4,), torch.float32), (("place",), (3,), torch.int64)):
        with pytest.raises(SchemaError, match="'place' expected"):
            loaded(root, path, shape, dtype)
    with pytest.raises(SchemaError, match="got none"):
        loaded(root, ("speed",), (3,), torch.float32)
