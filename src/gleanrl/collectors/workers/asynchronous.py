"""`AsynchronousSource`, whose batches are the shares of one worker each: no worker waits for another one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._os import clock
from gleanrl.collectors.source import Collected, Grant, Grants
from gleanrl.collectors.workers.batching import Shares
from gleanrl.collectors.workers.controller import PoolConfig
from gleanrl.collectors.workers.progress import Consumed
from gleanrl.collectors.workers.shared_counters import SERVED
from gleanrl.collectors.workers.source import WorkerSource
from gleanrl.envs.rollout import mark_truncated
from gleanrl.errors import UnsupportedError


class AsynchronousSource(WorkerSource):
    """Keeps every worker collecting: a worker fills one block while the share in its other block is delivered.

    Args:
        pool_config: see `WorkerSource`. A share ends early once `PoolConfig.enough` other workers have finished a share
            since it began.
    """

    def __init__(self, pool_config: PoolConfig) -> None:
        super().__init__(pool_config)
        self.num_envs, self.batch_size = self.width, self.description.batch_size
        self._enough, self._truncated = pool_config.enough, pool_config.truncated
        self._pool = BufferPool()
        self._open: int | None = None
        self._rotation = 0
        self._seen = [0] * self.num_workers  # finished shares that `_notice` has recorded
        self._overtakers: list[set[int]] = [set() for _ in range(self.num_workers)]

    def steps(self, num_steps: int) -> list[int]:
        """Return `num_steps` for each worker, since each worker makes whole batches."""
        return [num_steps] * self.num_workers

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the batch of a worker that has finished a share; wait for one if there is none.

        A batch that is still open is discarded first, and the user's current weights are published.

        Raises:
            Exception: the error that a worker raised. Shares of the other workers are delivered later.
            WorkerError: a worker was lost and isn't replaced. All workers have ended.
        """
        self.lose("interrupted")
        self.refresh_weights()
        begin = clock.monotonic()
        self.controller.look()
        while True:
            self._grant_all(budget)
            worker = self._next_ready()
            if worker is not None:
                break
            self._cut_slow_workers()
            self.controller.wait()
        return self._collected(worker, lend, clock.monotonic() - begin)

    def collect(self, grant: Grant, lend: bool = False) -> Collected:
        """Raise `UnsupportedError`, since workers collect ahead and within the budget only."""
        raise UnsupportedError(
            "rollout: an asynchronous collector can't make one batch on request, as its workers collect ahead; "
            "iterate over the collector"
        )

    def _grant_all(self, budget: Grants) -> None:
        """Grant shares to all workers that can take one, until the budget is spent.

        Every worker gets its first share before any gets a second one, so that a small budget keeps all of them busy.
        """
        slots = len(self.controller.blocks)
        for depth in range(slots):
            for worker in range(self.num_workers):
                free = self.controller.under_way(worker) <= depth and not self.controller.now.unwanted[worker]
                if free and not self.controller.is_down(worker):
                    grant = budget.grant(self.spent + self._on_their_way())
                    if grant is None:
                        return
                    self.controller.grant(worker, grant)

    def _on_their_way(self) -> int:
        """Return the maximal number of frames of the shares that are not delivered yet."""
        return sum(self._frames_coming(worker) for worker in range(self.num_workers))

    def _frames_coming(self, worker: int) -> int:
        """Return the maximal number of frames that a worker's shares under way can still deliver.

        A finished share counts its frames, a failed one 0. An unfinished one counts all steps of its grant, times the
        environments. If the worker's shares are unwanted, the result is 0.
        """
        if self.controller.now.unwanted[worker]:
            return 0
        counters, frames = self.controller.counters[worker], 0
        for number in range(
            self.controller.now.num_consumed[worker],
            self.controller.now.num_consumed[worker] + self.controller.under_way(worker),
        ):
            if number < counters.num_served:
                share = counters.share(number)
                frames += 0 if share.failed else share.frames
            else:
                frames += counters.granted_steps(number) * self.width
        return frames

    def _next_ready(self) -> int | None:
        """Return a worker with a finished share; None if there is none.

        The search begins after the worker that was delivered last, so that fast workers don't keep a slow one waiting.
        """
        self._notice()
        for worker in (*range(self._rotation, self.num_workers), *range(self._rotation)):
            if self.controller.ready(worker):
                self._rotation = worker + 1
                return worker
        return None

    def _notice(self) -> None:
        """Record for each worker which other workers have finished a share since its own last one."""
        for worker, counters in enumerate(self.controller.counters):
            if counters.words[SERVED] != self._seen[worker]:
                self._seen[worker] = counters.words[SERVED]
                self._overtakers[worker].clear()
                for overtakers in self._overtakers:
                    overtakers.add(worker)

    def _cut_slow_workers(self) -> None:
        """Cut the share of each worker that enough other workers have overtaken."""
        if self._enough is None:
            return
        for worker, overtakers in enumerate(self._overtakers):
            if len(overtakers - {worker}) >= self._enough:
                self.controller.cut(worker, self._seen[worker] + 1)

    def lose(self, reason: str) -> None:
        """Discard the open batch and all later shares of its worker: trajectories would have a gap before them.

        No effect without an open batch.
        """
        if self._open is not None:
            self.controller.discard(self._open, reason)
        self._open = None

    def _collected(self, worker: int, lend: bool, seconds: float) -> Collected:
        """Return a worker's finished share as a batch. The batch is open until it is delivered or discarded."""
        number = self.controller.now.num_consumed[worker]
        share = self.controller.counters[worker].share(number)
        self._open = worker
        batch = self._block(number, worker, share.num_steps, lend).batch(None, self.description.device)
        if self._truncated:
            mark_truncated(batch, list(self.description.done_keys))
        consumed = Consumed({worker: number}, share.frames, share.flagged, share.excess, True, seconds)
        return Collected(batch, consumed, (worker, self.num_workers))

    def _block(self, number: int, worker: int, num_steps: int, lend: bool) -> Block:
        """Return the block of a share: a view if it may be lent, else a copy."""
        slot = number % len(self.controller.blocks)
        part = self.controller.parts[slot][worker].leading(num_steps)
        if lend:
            return part
        # `Shares` copies whole shares without object columns only.
        if num_steps < self.controller.blocks[slot].num_steps or part.schema.lists:
            return part.copied(self._pool)
        out = Block(part.schema, part.batch_size[:-1], num_steps, pool=self._pool)
        self._shares[slot].copy_alone(worker, out)
        return out

    @cached_property
    def _shares(self) -> list[Shares]:
        return [Shares(block) for block in self.controller.blocks]

    def _commit(self, consumed: Consumed) -> Any:
        self._open = None
        super()._commit(consumed)
