"""The progress of a collection on nodes counts each frame once, as delivered or with its discard reason."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gleanrl.collectors.distributed.actor import Contents, Outcome
from gleanrl.collectors.distributed.progress import Call, NodeProgress, NodeState
from gleanrl.collectors.frame_accounting import Episode, FrameCounts
from gleanrl.collectors.workers.progress import Consumed, Losses


def outcome(number: int, frames: int, handed_out: int, left: int = 0, **reasons: int) -> Outcome:
    stats = replace(FrameCounts(delivered=handed_out).stats(), reasons=MappingProxyType(reasons))
    return Outcome(number, frames, 0, left, number + 1, stats, 0.0, 0)


def standing(*numbers: int) -> NodeProgress:
    calls = tuple(Call(number, 10, None, f"batch {number}") for number in numbers)
    return NodeProgress(
        FrameCounts(), (NodeState(), NodeState(num_orders=len(numbers), calls=calls, down=False))
    )


def state(now: NodeProgress) -> Any:
    return now.nodes[1]


def test_batches_arrive_and_are_delivered_once():
    now = standing(0, 1)
    assert state(now).owed == state(now).coming == 20
    first = outcome(0, 10, 10, left=5, environment=3)._replace(batch=Contents(under_way=(4, 7)))
    now = now.arriving(1, first, "batch 0")
    assert state(now).owed == 15 and state(now).coming == 25 and state(now).served == 1
    assert now.counts.discards == {"environment": 3}
    taken = Consumed({1: "batch 0"}, 9, 0, 1, True, 2.0)
    now = now.delivering(taken)
    assert now.counts.spent == 9 and now.counts.discards == {"environment": 3, "budget": 1}
    assert now.delivering(taken) is now and not state(now).ready
    assert now.under_way == {(1, 0): (4, 7)}
    now = now.arriving(1, outcome(1, 10, 20, environment=3), "batch 1")
    assert now.counts.discards == {"environment": 3, "budget": 1} and state(now).next_id == 2


def test_unwanted_batches_are_discarded_on_arrival():
    now = standing(0, 1).arriving(1, outcome(0, 10, 10), "batch 0").discarding(1, "reset")
    assert now.counts.discards == {"reset": 10} and state(now).coming == 0
    assert state(now).unwanted.reason == "reset" and state(now).reset and state(now).afresh
    now = now.arriving(1, outcome(1, 7, 17, left=3), "batch 1")
    assert now.counts.discards == {"reset": 17} and not state(now).unwanted
    assert state(now).owed == 0  # the node is ordered to drop the rest


def test_batches_lost_by_an_interrupt_and_their_successors_are_discarded():
    now = (
        standing(0, 1, 2)
        .arriving(1, outcome(0, 10, 10), "batch 0")
        .arriving(1, outcome(1, 10, 30), "batch 1")
    )
    assert now.counts.discards == {"interrupted": 30} and not state(now).ready
    now = now.arriving(1, outcome(2, 10, 40), "batch 2")
    assert now.counts.discards == {"interrupted": 40} and state(now).reset and not state(now).unwanted


def test_arrived_batches_of_a_lost_node_are_kept():
    now = standing(0, 1).arriving(1, outcome(0, 10, 10), "batch 0")
    now = now.losing(1, 10, "worker", Losses(1))
    after = state(now)
    assert now.counts.discards == {"worker": 10} and after.down and len(after.ready) == 1
    assert (after.num_orders, after.owed, after.next_id, after.served, after.former) == (0, 0, 1, 1, (20, 0))


def test_the_last_hundred_episodes_of_all_nodes_count_as_they_arrive():
    now = standing(0, 1)
    for number in range(2):
        ended = tuple(Episode(float(number), 60 * number + place) for place in range(60))
        arrived = outcome(number, 10, 10 * (number + 1))._replace(episodes=ended)
        now = now.arriving(1, arrived, f"batch {number}")
    assert [one.length for one in now.recent] == [*range(20, 120)]
