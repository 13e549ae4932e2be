"""Each version of the weights is put into the object store once, and unchanged weights aren't put again."""

from __future__ import annotations

import pytest
import torch

from gleanrl.collectors.distributed.weights import BroadcastWeights
from gleanrl.collectors.workers.weights import FollowedWeights, fields_of
from gleanrl.errors import PolicyError, SchemaError
from tests.collectors.distributed.helpers import Says


def broadcast(ray, policy, following=FollowedWeights.UNTIL_REPLACED, interval=None):
    return BroadcastWeights(ray, policy, fields_of(policy), following, interval)


def values(ray, weights, node=0):
    return ray.get(weights.latest(node).refs[0]).view()["value"].tolist()


def test_followed_weights_are_put_if_they_have_changed(ray_session):
    policy = Says()
    weights = broadcast(ray_session, policy)
    for batches, (value, puts) in enumerate([(1.0, 1), (1.0, 1), (2.0, 2)]):
        policy.become(value)
        weights.refresh(batches)
        assert weights.puts == puts and values(ray_session, weights) == [value] * 2
    assert weights.version == 0
    weights.push(None, None, 3)
    assert (weights.version, weights.puts) == (1, 3)
    weights.mark(5)
    assert weights.latest(0)[:2] == (3, 5)
    weights.push({"value": torch.full((2,), 9.0)}, None, 3)
    policy.become(3.0)
    weights.refresh(4)
    assert values(ray_session, weights) == [9.0, 9.0] and weights.version == 6
    with pytest.raises(SchemaError, match="expected shape"):
        weights.push({"value": torch.ones(3)}, None, 4)
    assert weights.puts == 4


def test_weights_are_followed_as_long_as_the_mode_says(ray_session):
    policy = Says()
    for following, interval, expected in (
        (FollowedWeights.ALWAYS, None, [1.0, 1.0]),
        (FollowedWeights.UNTIL_REPLACED, None, [7.0, 7.0]),
        (FollowedWeights.UNTIL_UPDATED, 2, [7.0, 1.0]),
    ):
        policy.become(0.0)
        weights = broadcast(ray_session, policy, following, interval)
        weights.push({"value": torch.full((2,), 7.0)}, None, 0)
        policy.become(1.0)
        found = []
        for batches in (1, 2):
            weights.refresh(batches)
            found += values(ray_session, weights)[:1]
        assert found == expected


def test_weights_of_one_node_are_pushed_and_restored(ray_session):
    policy = Says()
    weights = broadcast(ray_session, policy)
    weights.push(None, [1], 0)
    assert weights.latest(0).number == 0 and values(ray_session, weights, 1) == [0.0, 0.0]
    states = {0: {"value": torch.full((2,), 4.0)}, 1: {"value": torch.full((2,), 5.0)}}
    weights.adopt(weights.parse(states, True, {}))
    assert policy.value.tolist() == [4.0, 4.0]
    assert (values(ray_session, weights, 0), values(ray_session, weights, 1)) == ([4.0] * 2, [5.0] * 2)
    with pytest.raises(SchemaError, match="missing"):
        weights.parse({0: {}}, True, {})


def test_policy_factories_run_on_the_nodes(ray_session):
    made_there = BroadcastWeights(ray_session, None, fields_of(Says()), FollowedWeights.UNTIL_REPLACED)
    made_there.refresh(0)
    assert made_there.puts == 0
    with pytest.raises(PolicyError, match="made in the nodes"):
        made_there.push(None, None, 0)
    made_there.push(Says().state_dict(), None, 0)
    assert made_there.puts == 1
    none = BroadcastWeights(ray_session, None, None, FollowedWeights.UNTIL_REPLACED)
    none.push(None, None, 0)
    assert none.version == none.oldest_version(2) == 1
    with pytest.raises(PolicyError, match="isn't a module"):
        none.push(Says(), None, 0)
    assert none.version == 1


def test_the_oldest_version_is_the_lowest_of_all_nodes(ray_session):
    weights = broadcast(ray_session, Says())
    weights.push(None, None, 0)
    weights.push({"value": torch.full((2,), 2.0)}, [0], 0)
    weights.push({"value": torch.full((2,), 3.0)}, [0, 2], 0)
    assert weights.version == 3 and weights.oldest_version(3) == 1
    weights.push({"value": torch.full((2,), 4.0)}, [1], 0)
    assert weights.oldest_version(3) == 3
