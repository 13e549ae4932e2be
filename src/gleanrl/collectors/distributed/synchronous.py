"""Batches of which every node makes its share: nothing is stepped between two of them."""

from __future__ import annotations

from typing import Any

from gleanrl.block import Block, copy_columns
from gleanrl.collectors.budget import Grant, Grants
from gleanrl.collectors.columns import IDS, NONFINITE
from gleanrl.collectors.distributed.node_source import Company, NodeSource
from gleanrl.collectors.distributed.shares import Share
from gleanrl.collectors.source import Collected
from gleanrl.collectors.workers.assembling import Arrangement, mask_last
from gleanrl.collectors.workers.crew_source import SIBLING
from gleanrl.collectors.workers.standing import Taken
from gleanrl.data.boundaries import MASK
from gleanrl.pool import BufferPool
from gleanrl.ray_runtime import RayRuntime
from gleanrl.system import clock
from gleanrl.tree import as_key


class SynchronousNodes(NodeSource):
    """Asks every node for a share of each batch, and waits for all of them.

    Args:
        runtime: Ray.
        company: see `NodeSource`.
        dim: how shares are put together; see `Arrangement.dim`.
    """

    def __init__(self, runtime: RayRuntime, company: Company, dim: int | None) -> None:
        super().__init__(runtime, company)
        self._arrangement = Arrangement(dim, self.description.batch_size, self.num_nodes)
        self.num_envs, self.batch_size = self._arrangement.num_envs, self._arrangement.size
        self._pool = BufferPool()

    def lay_out(self, num_steps: int) -> None:
        """Nothing to note: every grant says how many steps it is for."""

    @property
    def rounds(self) -> int:
        """Batches that were delivered: every node has a share in each."""
        return self.fleet.now.ledger.batches

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget`, which isn't spent, grants."""
        grant = budget.grant(self.spent)
        assert grant is not None, "the budget is spent"
        return self.collect(grant)

    def collect(self, grant: Grant) -> Collected:
        """Return a batch.

        Raises:
            Exception: what a node raised; the shares of the others are discarded.
            WorkerError: a node was lost, and isn't made anew.
        """
        self.lose("interrupted")
        begin = clock.monotonic()
        self.refresh_weights()
        steps = enumerate(self._arrangement.steps(grant.num_steps))
        wanted = {number: Grant(count, grant.random) for number, count in steps if count}
        shares: dict[int, Share] = {}
        try:
            while len(shares) < len(wanted):
                self._order_missing(wanted)
                nodes = self.fleet.now.nodes
                missing = [number for number in wanted if number not in shares and nodes[number].ready]
                for number in missing:
                    share = self.fleet.fetched(number, nodes[number].ready[0])
                    if share is not None:
                        shares[number] = share
                if not missing:
                    self.fleet.wait()
        except Exception:
            self.lose(SIBLING)
            raise
        return self._collected([shares[number] for number in wanted], list(wanted), grant, begin)

    def _joined(self, shares: list[Share]) -> Any:
        """Return the batch that shares make, in memory of its own: one copy."""
        blocks, devices = zip(*[share.block() for share in shares], strict=True)
        dim, in_time = self._arrangement.dim, self._arrangement.in_time
        num_steps = sum(block.num_steps for block in blocks) if in_time else blocks[0].num_steps
        out = Block(blocks[0].schema, self._arrangement.size, num_steps, pool=self._pool)
        axis = 0 if dim == 0 else out.time_dim
        begin = 0
        for number, block in enumerate(blocks):
            count = block.batch_size[0 if dim == 0 else -1]
            places = [
                target[number] if dim is None else target.narrow(axis, begin, count) for target in out.columns
            ]
            copy_columns(places, block.columns)
            begin += count
        return out.batch(None, devices[0])

    def lose(self, reason: str) -> None:
        """Discard the shares of the open batch."""
        self.fleet.discard_all(reason)

    def _order_missing(self, wanted: dict[int, Grant]) -> None:
        """Order a share of every node that has none under way."""
        for number, grant in wanted.items():
            node = self.fleet.now.nodes[number]
            if not node.down and not node.ready and not node.calls:
                self.fleet.order(number, [grant], self.width, self.weights.latest(number), afresh=True)

    def _collected(self, shares: list[Share], numbers: list[int], grant: Grant, begin: float) -> Collected:
        batch = self._joined(shares)
        ready = {number: self.fleet.now.nodes[number].ready[0] for number in numbers}
        outcomes = [arrival.outcome for arrival in ready.values()]
        frames, flagged = sum(one.frames for one in outcomes), sum(one.flagged for one in outcomes)
        mask = batch.get(as_key(MASK), None)
        excess = 0 if grant.most is None or mask is None else max(frames - grant.most, 0)
        if excess:
            flagged -= mask_last(mask, batch.get(as_key(IDS)), batch.get(as_key(NONFINITE), None), excess)
        taken = Taken(
            {number: arrival.batch for number, arrival in ready.items()},
            frames - excess,
            flagged,
            excess,
            grant.counted,
            clock.monotonic() - begin,
        )
        return Collected(batch, taken)
