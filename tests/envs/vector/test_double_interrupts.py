"""After a second interrupt during clean-up, a batch of environments continues with correct data or is closed."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from gleanrl.errors import ClosedError, WorkerError
from tests.envs.vector.pools import BACKENDS
from tests.envs.vector.test_async_pool_pool_interrupts import Subject as PoolSubject
from tests.envs.vector.test_async_pool_pool_interrupts import pool
from tests.envs.vector.test_interrupts import CALLS, batch, check_goes_on, check_rows, rollout, told
from tests.interrupts import double_interruptions
from tests.leaks import Holdings

pytestmark = pytest.mark.timeout(1800)


class Living:
    """Holds a batch of environments, and replaces it when it is closed."""

    def __init__(self, make):
        self._make, self.env = make, make()
        rollout(self.env)
        self.holdings = Holdings.now()

    def check(self):
        try:
            check_goes_on(self.env)
        except (ClosedError, WorkerError):
            self.env.close()
            self.env = self._make()
            check_goes_on(self.env)
            self.holdings = Holdings.now()
        self.holdings.check()


@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_after_two_interrupts_has_right_rows_or_is_closed(kind, name):
    batch().close()
    living = Living(partial(batch, kind))
    for _, place in double_interruptions(lambda: living, lambda it: CALLS[name](it.env), 40):
        with told(place):
            living.check()
    living.env.close()


@pytest.mark.filterwarnings("ignore:ParallelEnv. it was stepped or reset outside")
@pytest.mark.filterwarnings("ignore:SerialEnv. it was stepped or reset outside")
@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
@pytest.mark.parametrize("policy", [None, nn.Linear(3, 2)], ids=["random", "policy"])
def test_a_collector_after_two_interrupts_delivers_transitions_only(kind, policy):
    collector = SyncDataCollector(batch(kind), policy, frames_per_batch=36, total_frames=-1)
    delivered = [collector.next().numel()]

    def collect(made):
        delivered.append(made.next().numel())

    for _, place in double_interruptions(lambda: collector, collect, 120):
        with told(place):
            for _ in range(2):
                found = collector.next()
                delivered.append(found.numel())
                assert found.shape == (3, 12)
                check_rows(found)
            stats = collector.stats()
            assert stats.stepped == stats.delivered + stats.discarded
            assert stats.delivered - sum(delivered) == 0
    collector.shutdown()


def test_collector_of_free_running_workers_delivers_transitions_only():
    """Workers with prepared actions run without the owner between two steps, and the clean-up stops their run."""
    torch.manual_seed(0)
    collector = SyncDataCollector(batch(), None, frames_per_batch=36, total_frames=-1)
    collector.next()
    crew = collector.env.runner
    for _, place in double_interruptions(lambda: collector, lambda made: made.next(), 200):
        with told(place):
            check_rows(collector.next())
            assert crew.made() == [12] * 3
    collector.shutdown()


def test_a_start_that_is_interrupted_twice():
    batch().close()
    before = Holdings.now()
    for env, place in double_interruptions(batch, lambda env: env.start(), 10, close=lambda env: env.close()):
        with told(place):
            with suppress(ClosedError):
                check_goes_on(env)
            env.close()
            before.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["step", "reset", "send", "receive"])
def test_a_pool_after_two_interrupts_has_right_rows(backend, name):
    subject = PoolSubject(backend)
    before = Holdings.now()
    steps = subject.pool.steps_taken if name == "receive" else None

    def receive(it):
        it.pool.async_step_send(it.roots)
        it.pool.async_step_recv(3)

    call = {
        "step": lambda it: it.pool.step(it.roots),
        "reset": lambda it: it.pool.reset(),
        "send": lambda it: it.pool.async_step_send(it.roots),
        "receive": receive,
    }[name]
    for _, place in double_interruptions(lambda: subject, call, 60, PoolSubject.settle):
        with told(place):
            try:
                for env, row in subject.settle().items():
                    assert row["next", "observation"][0, 0] == env
                if steps is not None:
                    taken = subject.pool.steps_taken
                    assert len({after - begun for after, begun in zip(taken, steps, strict=True)}) == 1, taken
            except WorkerError:  # its worker is lost until a reset
                with suppress(WorkerError):
                    subject.settle()
                subject.pool.reset()
                before = Holdings.now()
            found = subject.pool.rollout(3, break_when_any_done=False)
            assert found["next", "observation"][..., 0].tolist() == [[0] * 3, [1] * 3, [2] * 3]
            check_pool_rows(found)
            subject.roots = subject.pool.rand_action(subject.pool.reset())
            steps = subject.pool.steps_taken if steps is not None else None
            before.check()
    subject.pool.close()


def check_pool_rows(found):
    roots, nexts = found["observation"], found["next", "observation"]
    assert bool((nexts[..., 2] == roots[..., 2] + 1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_whose_start_or_close_is_interrupted_twice(backend):
    pool(backend).close()
    before = Holdings.now()
    for each, place in double_interruptions(
        lambda: pool(backend), AsyncEnvPool.start, 10, close=lambda p: p.close()
    ):
        with told(place):
            with suppress(ClosedError):
                assert each.reset()["observation"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
            each.close()
            before.check()

    def started():
        made = pool(backend)
        made.async_reset_send()
        return made

    for each, place in double_interruptions(started, lambda p: p.close(), 10):
        with told(place):
            each.close()
            with pytest.raises(ClosedError):
                each.start()
            before.check()
