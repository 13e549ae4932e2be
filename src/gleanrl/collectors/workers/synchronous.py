"""`SynchronousSource`, whose batches have a share of every worker; no worker steps between two batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from tensordict import TensorDict

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._os import clock
from gleanrl.collectors.batch_columns import IDS, NONFINITE
from gleanrl.collectors.source import Collected, Grant, Grants
from gleanrl.collectors.workers.batching import ShareLayout, Shares, mask_last
from gleanrl.collectors.workers.controller import PoolConfig
from gleanrl.collectors.workers.progress import Consumed
from gleanrl.collectors.workers.source import SIBLING, WorkerSource
from gleanrl.data.trajectories import MASK
from gleanrl.envs.rollout import mark_truncated


class _Begun(NamedTuple):
    """A batch into which finished shares are copied while other workers still collect."""

    addresses: list[int]
    """Addresses of the columns."""
    block: Block
    """The columns, in the form of the batch."""
    batch: TensorDict


class _Plan(NamedTuple):
    """The grants of a batch, which are the same for all batches of one length."""

    grant: tuple[int, bool]
    """Number of steps, and whether actions are random."""
    wanted: dict[int, Grant]
    """The grant of each worker that has a share."""
    singly: bool
    """Whether the position of each share in the batch is known before the other shares are finished."""


class SynchronousSource(WorkerSource):
    """Grants every worker a share of each batch, and waits for all of them.

    Args:
        pool_config: see `WorkerSource`.
        cat: how shares are put together; see `ShareLayout.dim`.
    """

    def __init__(self, pool_config: PoolConfig, cat: int | None) -> None:
        super().__init__(pool_config)
        size = self.description.batch_size
        self.arrangement = ShareLayout(cat, size, self.num_workers, pool_config.enough is not None)
        self.num_envs, self.batch_size = self.arrangement.num_envs, self.arrangement.size
        self._enough, self._truncated = pool_config.enough, pool_config.truncated
        self._pool = BufferPool()
        self._plan: _Plan | None = None  # of the last batch

    def steps(self, num_steps: int) -> list[int]:
        """Return the number of steps of each worker's share of a batch of `num_steps` steps.

        Raises:
            UnsupportedError: shares of different lengths couldn't be put together.
        """
        self.arrangement.check()
        return self.arrangement.steps(num_steps)

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget` grants; the budget must not be spent."""
        grant = budget.grant(self.spent)
        assert grant is not None, "the budget is spent"
        return self.collect(grant, lend)

    def collect(self, grant: Grant, lend: bool = False) -> Collected:
        """Return a batch.

        Finished shares are copied into the batch while the other workers still collect, so that little is left to do
        after the last one. Shares that an earlier call left are discarded first.

        Raises:
            Exception: the error that a worker raised; the shares of the other workers are discarded.
            WorkerError: a worker was lost and isn't replaced. All workers have ended.
        """
        # Shares that an interrupt left under way use the same blocks, so they must end first.
        self.lose("interrupted")
        self.controller.settle()
        self.refresh_weights()
        begin = clock.monotonic()
        if self._plan is None or self._plan.grant != (grant.num_steps, grant.random):
            self._plan = self._planned(grant)
        wanted = self._plan.wanted
        singly = self._plan.singly and not (lend and self.arrangement.dim is None)
        begun: _Begun | None = None
        missing = list(wanted)
        try:
            while True:
                finished = [worker for worker in missing if self.controller.ready(worker)]
                if finished:
                    missing = [worker for worker in missing if worker not in finished]
                    if singly:
                        begun = begun or self._begun()
                        self._shares.copy(finished, begun.addresses)
                    if not missing:
                        break
                self._grant_missing(missing)
                self._cut_unfinished(wanted, len(wanted) - len(missing))
                self.controller.wait()
        except Exception:
            self.lose(SIBLING)
            raise
        return self._collected(grant, lend, begun, clock.monotonic() - begin)

    def _planned(self, grant: Grant) -> _Plan:
        """Return the grants for batches of this length; workers without a step get none."""
        steps = dict(enumerate(self.arrangement.steps(grant.num_steps)))
        wanted = {worker: Grant(count, grant.random) for worker, count in steps.items() if count}
        singly = self.arrangement.has_fixed_positions(self.controller.blocks[0], steps)
        return _Plan((grant.num_steps, grant.random), wanted, singly)

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self.controller.blocks[0])

    def _begun(self) -> _Begun:
        """Return a new batch for finished shares, built while the other workers still collect."""
        side_by_side = self._shares.side_by_side(self._pool)
        block = self.arrangement.arranged(side_by_side)
        addresses = [column.data_ptr() for column in side_by_side.columns]
        return _Begun(addresses, block, block.batch(None, self.description.device))

    def lose(self, reason: str) -> None:
        """Discard all shares that aren't delivered, of the open batch or under way."""
        self.controller.discard_all(reason)

    def _grant_missing(self, missing: Sequence[int]) -> None:
        """Grant a share to the workers that have none under way."""
        assert self._plan is not None
        for worker in missing:
            free = not self.controller.under_way(worker) and not self.controller.raises(worker)
            if free and not self.controller.is_down(worker):
                self.controller.grant(worker, self._plan.wanted[worker])

    def _cut_unfinished(self, wanted: Iterable[int], ready: int) -> None:
        """Cut the unfinished shares once enough shares are finished."""
        if self._enough is not None and ready >= self._enough:
            for worker in wanted:
                self.controller.cut(worker, self.controller.now.num_consumed[worker] + 1)

    def _collected(self, grant: Grant, lend: bool, begun: _Begun | None, seconds: float) -> Collected:
        """Return the batch of the finished shares.

        The batch of `_begun` has room for whole shares only. If a share was cut, the batch is put together again.
        """
        now, source = self.controller.now, self.controller.blocks[0]
        assert self._plan is not None
        numbers = {worker: now.num_consumed[worker] for worker in self._plan.wanted}
        shares = [self.controller.counters[worker].share(number) for worker, number in numbers.items()]
        counts = dict(zip(numbers, [share.num_steps for share in shares], strict=True))
        if begun is not None and all(count == source.num_steps for count in counts.values()):
            block, batch = begun.block, begun.batch
        else:
            block = self.arrangement.batch(source, counts, self._pool, lend)
            batch = block.batch(None, self.description.device)
        frames, flagged = sum([s.frames for s in shares]), sum([s.flagged for s in shares])
        excess = 0 if grant.most is None or MASK not in block.schema else max(frames - grant.most, 0)
        if excess:
            flags = block.column(NONFINITE) if NONFINITE in block.schema else None
            flagged -= mask_last(block.column(MASK), block.column(IDS), flags, excess)
        if self._truncated:  # the last step of each share, which may be in the middle of the batch
            for share in self.arrangement.shares(batch, counts):
                mark_truncated(share, list(self.description.done_keys))
        return Collected(batch, Consumed(numbers, frames - excess, flagged, excess, grant.counted, seconds))
