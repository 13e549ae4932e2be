"""Batches of one node each, in the order of their arrival. No node waits for another."""

from __future__ import annotations

from typing import Any

from gleanrl._arrays.allocate import BufferPool
from gleanrl._os import clock
from gleanrl._process.ray import RayRuntime
from gleanrl.collectors.distributed.progress import ReceivedShare
from gleanrl.collectors.distributed.source import NodesConfig, NodeSource
from gleanrl.collectors.source import Collected, Grant, Grants
from gleanrl.collectors.workers.progress import Consumed
from gleanrl.errors import UnsupportedError

_ORDERS = 2
"""Maximum number of orders of a node under way. With two, the node collects while its last batch is on its way."""


class AsynchronousNodes(NodeSource):
    """Keep every node collecting: a node collects its next batch while the last one is on its way.

    Args:
        runtime: Ray.
        nodes_config: see `NodeSource`.
    """

    def __init__(self, runtime: RayRuntime, nodes_config: NodesConfig) -> None:
        super().__init__(runtime, nodes_config)
        self.num_envs, self.batch_size = self.width, self.description.batch_size
        self._ahead, self._by_reference = nodes_config.ahead, nodes_config.by_reference
        self._pool = BufferPool()
        self._open: int | None = None
        self._frames = self.width
        self._rotation = 0

    def lay_out(self, num_steps: int) -> None:
        """Store the number of steps of a full batch."""
        self._frames = num_steps * self.width

    @property
    def rounds(self) -> int:
        """Mean number of delivered batches per node."""
        return self.controller.now.counts.batches // self.num_nodes

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the batch of the next ready node; wait for one if there is none.

        A batch that is still open is discarded first, and the user's current weights are published.

        Raises:
            Exception: the exception of a node. Batches of other nodes are delivered by later calls.
            WorkerError: a node was lost and is not restarted. All nodes have ended.
        """
        self.lose("interrupted")
        begin = clock.monotonic()
        self.refresh_weights()
        while True:
            self._order_all(budget)
            number = self._next_ready()
            if number is None:
                self.controller.wait()
                continue
            arrival = self.controller.now.nodes[number].ready[0]
            batch = self._batch(number, arrival, lend)
            if batch is not None:
                break
        self._open, outcome = number, arrival.outcome
        seconds = clock.monotonic() - begin
        consumed = Consumed({number: arrival.batch}, outcome.frames, outcome.flagged, 0, True, seconds)
        return Collected(batch, consumed, outcome.batch.part)

    def _batch(self, number: int, arrival: ReceivedShare, lend: bool) -> Any:
        """Return a node's batch, or a reference to it; None if the batch was lost with its machine."""
        if self._by_reference and not self.controller.now.nodes[number].losses.number:
            return arrival.batch
        share = self.controller.fetched(number, arrival)
        if share is None or self._by_reference:
            return share and arrival.batch  # fetched first: a batch of a node that was ever lost may be gone
        return share.view() if lend else share.own(self._pool)

    def collect(self, grant: Grant) -> Collected:
        """Raise an error: nodes collect ahead, within the budget."""
        raise UnsupportedError(
            "rollout: asynchronous nodes collect within the budget only; iterate instead, or pass sync=True"
        )

    def _order_all(self, budget: Grants) -> None:
        """Send orders to all nodes, as far as the budget allows.

        Each node gets one batch before any node gets a second one, so that the end of the budget is shared evenly.
        """
        grants: dict[int, list[Grant]] = {number: [] for number in range(self.num_nodes)}
        ordered = 0
        on_their_way = sum(node.coming for node in self.controller.now.nodes)
        for depth in range(self._ahead):
            for number, new_grants in grants.items():
                if self._takes_orders(number) and self._pending(number) + len(new_grants) <= depth:
                    grant = budget.grant(self.spent + on_their_way + ordered)
                    if grant is not None:
                        new_grants.append(grant)
                        ordered += grant.num_steps * self.width
        for number, new_grants in grants.items():
            while self._takes_orders(number) and (new_grants or self._has_frames_left(number)):
                self.controller.order(number, new_grants, self.width, self.weights.latest(number))
                new_grants = []

    def _takes_orders(self, number: int) -> bool:
        node = self.controller.now.nodes[number]
        return not node.down and not node.unwanted and len(node.calls) < _ORDERS

    def _pending(self, number: int) -> int:
        """Return how many batches of a node are granted, or ready and not delivered."""
        node = self.controller.now.nodes[number]
        return len(node.ready) + max(len(node.calls), -(-node.owed // self._frames))

    def _has_frames_left(self, number: int) -> bool:
        """Return whether a node was granted frames that no order under way covers."""
        node = self.controller.now.nodes[number]
        return node.owed > len(node.calls) * self._frames

    def _next_ready(self) -> int | None:
        """Return a node with a ready batch; None if no batch is ready.

        Nodes take turns, so that fast nodes can't starve slow ones.
        """
        for number in (*range(self._rotation, self.num_nodes), *range(self._rotation)):
            if self.controller.now.nodes[number].ready:
                self._rotation = number + 1
                return number
        return None

    def lose(self, reason: str) -> None:
        """Discard the open batch and the node's later frames, which would otherwise follow a gap.

        No effect without an open batch.
        """
        if self._open is not None:
            self.controller.discard(self._open, reason)
        self._open = None

    def _commit(self, consumed: Consumed) -> Any:
        self._open = None
        super()._commit(consumed)
