"""A collector actor, run in this process, carries out each order once and numbers its own trajectories."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl._process import serialization
from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.collectors.distributed.actor import CollectorActor, NodeDescription, NodeRecipe, Order, Published
from gleanrl.collectors.distributed.local_transport import NodeMemory, Offer
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.source import Grant
from gleanrl.collectors.workers.worker import PickledPolicy
from gleanrl.errors import SchemaError
from tests.collectors.distributed.helpers import FATAL, Says, check_rows, environments, make_wide
from tests.collectors.distributed.test_controller_near import Actor
from tests.fakes import FakeFailure

NONE = Published()


def started(
    recipe: NodeRecipe, policy: torch.nn.Module | None = None
) -> tuple[CollectorActor, NodeDescription]:
    node = CollectorActor()
    answer = node.start(recipe, PickledPolicy.of(policy or Says(), None))
    assert answer.report is None, answer.report
    return node, answer.value


def recipe(**changes: object) -> NodeRecipe:
    keywords = {"frames_per_batch": 20, "track_policy_version": True}
    found = {"collector": SyncDataCollector, "create_env_fn": environments(1)[0], "keywords": keywords}
    return NodeRecipe(**{**found, "numbering": Numbering(1, 3), "entropy": (1, 2), **changes})


def opened(parcel):
    return pickle.loads(pickle.dumps(parcel, protocol=5)).open()


def test_orders_are_carried_out_once():
    node, _ = started(recipe(first_id=5))
    first, batch = node.collect(Order(0, (Grant(20), Grant(10)), NONE))
    assert (first.frames, first.left, first.batch.part, first.report) == (20, 10, (1, 3), None)
    again, nothing = node.collect(Order(0, (Grant(20),), NONE))
    assert (again.frames, again.left, nothing) == (0, 10, None)
    second, rest = node.collect(Order(1, (), NONE))
    assert (second.frames, second.left) == (10, 0)
    nothing_left, none = node.collect(Order(2, (), NONE))
    assert (nothing_left.frames, none) == (0, None)
    batches = [opened(batch), opened(rest)]
    check_rows(batches)
    names = torch.cat([found["collector", "traj_ids"] for found in batches])
    assert bool((names % 3 == 1).all()) and int(names.min()) == 5 * 3 + 1
    assert second.next_id == int(names.max()) // 3 + 1
    for outcome, found in zip((first, second), batches, strict=True):
        last = found[-1]
        assert outcome.batch.under_way == (
            () if last["next", "done"] else (int(last["collector", "traj_ids"]),)
        )
    afresh, _ = node.collect(Order(3, (Grant(7),), NONE, afresh=True, reset=True))
    assert (afresh.frames, afresh.left) == (7, 0)
    assert node.ask("close").report is None


def test_failures_are_reported_and_counted():
    policy = Says()
    policy.become(FATAL)
    node, _ = started(recipe(), policy)
    outcome, batch = node.collect(Order(0, (Grant(20),), NONE))
    assert batch is None and (outcome.frames, outcome.left, outcome.is_final) == (0, 20, False)
    with pytest.raises(FakeFailure, match="broke on purpose"):
        raise outcome.report.error()
    answer = node.ask("load", {"frames": 1}, True)
    assert answer.value is None and isinstance(answer.report.error(), KeyError)
    node.ask("close")
    outcome, _ = node.collect(Order(1, (), NONE))
    assert outcome.is_final
    failed = CollectorActor().start(recipe(create_env_fn=lambda: 3), PickledPolicy.of(None, None))
    assert isinstance(failed.report.error(), TypeError)


def test_weights_come_from_the_object_store(ray_session):
    node, _ = started(recipe())
    refs = broadcast(ray_session, value=torch.full((2,), 4.0))
    outcome, batch = node.collect(Order(0, (Grant(20),), Published(1, 7, refs)))
    found = opened(batch)
    assert found["action"].unique().tolist() == [4.0] and found["policy_version"].unique().tolist() == [7]
    assert outcome.weights == 1
    # An order without weights keeps the present ones.
    _, batch = node.collect(Order(1, (Grant(20),), Published(1, 9, ())))
    assert opened(batch)["policy_version"].unique().tolist() == [9]
    unfit, _ = node.collect(
        Order(2, (Grant(20),), Published(2, 9, broadcast(ray_session, other=torch.ones(1))))
    )
    assert isinstance(unfit.report.error(), SchemaError)
    node.ask("close")


def broadcast(ray, **weights: torch.Tensor):
    return (ray.put(serialization.PickledBatch(TensorDict(weights))),)


def test_orders_by_pipe_and_by_ray_are_carried_out_in_order():
    offer = Offer.of(2)
    node, told = started(recipe(offer=offer))
    memory = NodeMemory.opened(told.memory, offer)
    assert memory is not None
    line, given = memory.line, Order(0, (Grant(10),), NONE, lend=True)
    for number in range(2):
        line.send_order(given._replace(number=number))
    line.attend(Actor(), NONE)
    line.send_order(given._replace(number=3, wanted=3))
    line.leave()
    _, batch = node.collect(Order(2, (Grant(10),), NONE, after=2))
    node.attend(1, NONE)
    assert node.ask("nothing", after=3).report is not None
    line.pull()
    batches, numbers = [], []
    while (message := line.first()) is not None:
        outcome, _ = message.value
        numbers.append(outcome.number)
        batches.append(memory.share(outcome.batch.location).view())
        line.drop()
    assert numbers == [0, 1, 3] and outcome.frames == 10
    check_rows([batches[1], opened(batch), batches[2]])
    node.ask("close")


def test_node_with_workers_saves_and_loads_its_state():
    keywords = {"frames_per_batch": 20, "cat_results": "stack"}
    offer = Offer.of(1)
    made = recipe(
        collector=MultiSyncDataCollector,
        create_env_fn=[lambda: make_wide(0)] * 2,
        keywords=keywords,
        offer=offer,
    )
    node, told = started(made)
    try:
        _, batch = node.collect(Order(0, (Grant(10),), NONE))
        found = opened(batch)
        assert found.shape == (2, 10)
        names = found["collector", "traj_ids"]
        assert [set((row // 3 % 2).tolist()) for row in names] == [{0}, {1}]
        state = node.ask("save").value
        stats, episodes = node.ask("load", state, True).value
        assert len(episodes) == stats.episodes
        assert stats.delivered == 20
        outcome, batch = node.collect(Order(1, (Grant(10),), NONE, lend=True))
        assert (outcome.frames, batch) == (20, None)
        memory = NodeMemory.opened(told.memory, offer)
        assert memory is not None
        lent = memory.share(outcome.batch.location).view()
        check_rows([lent[1:]])
        assert not set(lent["collector", "traj_ids"].unique().tolist()) & set(names.unique().tolist())
    finally:
        node.ask("close")
