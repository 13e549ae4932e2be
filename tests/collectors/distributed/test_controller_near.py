"""Nodes that lend batches get orders through pipes; other nodes get them through Ray."""

from __future__ import annotations

import os
from typing import Any

from gleanrl.collectors.distributed.actor import Contents, Order, Published
from gleanrl.collectors.distributed.controller import LocalNodes
from gleanrl.collectors.distributed.local_transport import MemoryLocation, Offer, SharedBlockPool
from gleanrl.collectors.distributed.progress import NOTHING

WEIGHTS = Published(3, 7, ("a reference",))
LENT = NOTHING._replace(batch=Contents(location=MemoryLocation(b"", 0, 1)), weights=3)


class Actor:
    """Imitates a Ray actor handle and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def options(self, **_: Any) -> _Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        self._actor.calls.append((self._name, arguments))
        return f"{self._name} outcome", f"{self._name} batch"


def test_orders_use_the_pipe_of_nodes_that_lend() -> None:
    near, actor, offer, order = LocalNodes(None), Actor(), Offer.of(1), Order(0, (), WEIGHTS)
    lender = SharedBlockPool(offer)
    near.add(1, lender.name, offer)
    near.add(2, lender.name, Offer.of(1))
    assert 1 in near and 2 not in near and near.leave_pipe(2) == 0
    assert near.send_order(2, actor, order, LENT) == ("collect outcome", "collect batch"), (
        "of another machine"
    )
    assert near.send_order(1, actor, order, NOTHING) == ("collect outcome", "collect batch"), (
        "it hasn't lent yet"
    )
    known = order._replace(weights=WEIGHTS._replace(refs=()))
    assert [sent for _, (sent,) in actor.calls] == [known, order], "weights that it has aren't sent again"
    assert near.send_order(1, actor, order, LENT) == (0, None)
    assert actor.calls[2:] == [("attend", (1, WEIGHTS))]
    assert [message.value for message in lender.end.orders_before(1)] == [known]
    assert [*near.attendances.values()] == [1]
    near.send_order(1, actor, order, NOTHING)
    assert actor.calls[-1][1][0].after == 1
    near.ended(1)
    assert not near.attendances
    near.go_on(1, actor)
    assert actor.calls[-1] == ("attend", (2, WEIGHTS))
    near.forget(1)
    assert near.first(1) is None and 1 not in near and os.getpid() == lender.name.process
