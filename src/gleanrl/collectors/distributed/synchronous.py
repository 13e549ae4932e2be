"""Batches with a share of every node. The environments are not stepped between two batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block, copy_columns
from gleanrl._arrays.tensordicts import as_key
from gleanrl._os import clock
from gleanrl._process.ray import RayRuntime
from gleanrl.collectors.batch_columns import IDS, NONFINITE
from gleanrl.collectors.distributed.source import NodesConfig, NodeSource
from gleanrl.collectors.source import Collected, Grant, Grants
from gleanrl.collectors.workers.batching import ShareLayout, mask_last
from gleanrl.collectors.workers.progress import Consumed
from gleanrl.collectors.workers.source import SIBLING
from gleanrl.data.trajectories import MASK


class Joining:
    """A batch under construction. Each share is copied into it by one call of the native core.

    Args:
        arrangement: how shares are joined.
        steps: number of steps of each node's share, in node order.
        first: the columns of one share, and the ``device`` of its batch.
        pool: provides memory for large columns.
    """

    def __init__(
        self,
        arrangement: ShareLayout,
        steps: Mapping[int, int],
        first: tuple[Block, torch.device | None],
        pool: BufferPool,
    ) -> None:
        self._arrangement, self._steps, self._pool = arrangement, steps, pool
        self._first, self._device = first
        self._targets, self._shares = dict[int, list[Any]](), dict[int, Block]()
        num_steps = sum(steps.values()) if arrangement.in_time else max(steps.values())
        self._block = out = Block(self._first.schema, arrangement.size, num_steps, pool=pool)
        axis, begin = 0 if arrangement.dim == 0 else out.time_dim, 0
        for index, (number, count) in enumerate(steps.items()):
            if arrangement.dim is None:
                self._targets[number] = [column[index] for column in out.columns]
                continue
            count = count if arrangement.in_time else self._first.batch_size[0]
            self._targets[number] = [column.narrow(axis, begin, count) for column in out.columns]
            begin += count

    def take(self, number: int, share: Block) -> None:
        """Keep a node's share, and copy it into the batch unless it was cut short."""
        self._shares[number] = share
        if share.num_steps == self._steps[number]:
            copy_columns(self._targets[number], share.columns)

    def batch(self) -> Any:
        """Return the batch after all shares were taken.

        If a share was cut short, the planned places don't fit. All shares are then copied again, by their true lengths.
        """
        found = {number: self._shares[number].num_steps for number in self._steps}
        if found == self._steps:
            return self._block.batch(None, self._device)
        rejoined = Joining(self._arrangement, found, (self._first, self._device), self._pool)
        for number, share in self._shares.items():
            rejoined.take(number, share)
        return rejoined.batch()


class SynchronousNodes(NodeSource):
    """Request a share of each batch from every node, and wait for all shares.

    Args:
        runtime: Ray.
        nodes_config: see `NodeSource`.
        dim: how shares are joined; see `ShareLayout.dim`.
    """

    def __init__(self, runtime: RayRuntime, nodes_config: NodesConfig, dim: int | None) -> None:
        super().__init__(runtime, nodes_config)
        self._arrangement = ShareLayout(dim, self.description.batch_size, self.num_nodes)
        self.num_envs, self.batch_size = self._arrangement.num_envs, self._arrangement.size
        self._pool = BufferPool()

    def lay_out(self, num_steps: int) -> None:
        """Do nothing: every grant contains its number of steps."""

    @property
    def rounds(self) -> int:
        """Number of delivered batches, in each of which every node has a share."""
        return self.controller.now.counts.batches

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget` grants. The budget must not be spent."""
        grant = budget.grant(self.spent)
        assert grant is not None, "the budget is spent"
        return self.collect(grant)

    def collect(self, grant: Grant) -> Collected:
        """Return a batch with a share of each node.

        Raises:
            Exception: the exception of a node. The shares of all other nodes are discarded.
            WorkerError: a node was lost and is not restarted. All nodes have ended.
        """
        self.lose("interrupted")
        begin = clock.monotonic()
        self.refresh_weights()
        steps = enumerate(self._arrangement.steps(grant.num_steps))
        wanted = {number: Grant(count, grant.random) for number, count in steps if count}
        joining: Joining | None = None
        left = {number: share_grant.num_steps for number, share_grant in wanted.items()}
        try:
            # A share that was lost with its node is ordered again, so each round orders all missing ones.
            while left:
                self._order_missing(wanted)
                nodes = self.controller.now.nodes
                here = [number for number in left if nodes[number].ready]
                for number in here:
                    share = self.controller.fetched(number, nodes[number].ready[0])
                    if share is not None:  # copied while other nodes still collect
                        block, device = share.block()
                        joining = joining or Joining(
                            self._arrangement, dict(left), (block, device), self._pool
                        )
                        joining.take(number, block)
                        del left[number]
                if not here:
                    self.controller.wait()
        except Exception:
            self.lose(SIBLING)
            raise
        assert joining is not None, "at least one node has a share"
        return self._collected(joining.batch(), list(wanted), grant, begin)

    def lose(self, reason: str) -> None:
        """Discard all shares that aren't delivered, of the open batch or under way."""
        self.controller.discard_all(reason)

    def _order_missing(self, wanted: dict[int, Grant]) -> None:
        """Order a share of every node that has neither a share nor an order under way."""
        for number, grant in wanted.items():
            node = self.controller.now.nodes[number]
            if not node.down and not node.ready and not node.calls:
                self.controller.order(number, [grant], self.width, self.weights.latest(number), afresh=True)

    def _collected(self, batch: Any, numbers: list[int], grant: Grant, begin: float) -> Collected:
        """Return a joined batch with its counts. Frames beyond the grant's limit are masked."""
        ready = {number: self.controller.now.nodes[number].ready[0] for number in numbers}
        outcomes = [arrival.outcome for arrival in ready.values()]
        frames, flagged = sum(one.frames for one in outcomes), sum(one.flagged for one in outcomes)
        mask = batch.get(as_key(MASK), None)
        excess = 0 if grant.most is None or mask is None else max(frames - grant.most, 0)
        if excess:
            flagged -= mask_last(mask, batch.get(as_key(IDS)), batch.get(as_key(NONFINITE), None), excess)
        consumed = Consumed(
            {number: arrival.batch for number, arrival in ready.items()},
            frames - excess,
            flagged,
            excess,
            grant.counted,
            clock.monotonic() - begin,
        )
        return Collected(batch, consumed)
