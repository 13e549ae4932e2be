"""After an interrupt, an `AsyncEnvPool` has neither lost nor repeated a request, and leaves no resources behind."""

from __future__ import annotations

from functools import partial

import pytest

from gleanrl.envs import AsyncEnvPool
from gleanrl.errors import ClosedError, PendingError
from tests.envs.vector.makers import oracle
from tests.envs.vector.pools import BACKENDS
from tests.envs.vector.test_interrupts import told
from tests.interrupts import interruptions
from tests.leaks import Holdings


def pool(backend):
    # Two environments share a process.
    return AsyncEnvPool(
        [partial(oracle, stream) for stream in range(3)],
        backend=backend,
        **({"envs_per_worker": 2} if backend == "multiprocessing" else {}),
    )


class Subject:
    """A pool, and rows to send to it."""

    def __init__(self, backend):
        self.pool = pool(backend)
        self.roots = self.pool.rand_action(self.pool.reset())

    def settle(self):
        """Receive all pending rows, and return them by environment."""
        found = {}
        while True:
            try:
                row = self.pool.async_step_recv(max_get=1, timeout=60)
            except PendingError:
                return found
            found[row["env_index"][0]] = row


@pytest.mark.parametrize("backend", BACKENDS)
def test_interrupted_send_is_complete_or_absent(backend):
    pool(backend).close()
    subject = Subject(backend)
    before, sent = Holdings.now(), 0

    def send(subject):
        subject.pool.async_step_send(subject.roots)

    for _, place in interruptions(lambda: subject, send, 60, Subject.settle):
        with told(place):
            found = subject.settle()
            assert sorted(found) in ([], [0, 1, 2])
            sent += bool(found)
            for env, row in found.items():
                assert row["next", "observation"][0, 0] == env
    assert sent
    before.check()
    subject.pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_interrupted_receive_loses_and_repeats_no_request(backend):
    subject = Subject(backend)
    before = Holdings.now()
    steps = 0

    def send():
        nonlocal steps
        steps += 1
        subject.pool.async_step_send(subject.roots)
        return subject

    for _, place in interruptions(send, lambda s: s.pool.async_step_recv(3), 80):
        with told(place):
            found = subject.settle()
            # None are left if the interrupt came after the last delivery.
            assert sorted(found) in ([], [0, 1, 2])
            assert subject.pool.steps_taken == [steps] * 3
    before.check()
    subject.pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["step", "reset"])
def test_batch_continues_after_an_interrupt(backend, name):
    subject = Subject(backend)
    call = {"step": lambda s: s.pool.step(s.roots), "reset": lambda s: s.pool.reset()}[name]
    for _, place in interruptions(lambda: subject, call, 50):
        with told(place):
            found = subject.pool.rollout(3, break_when_any_done=False)
            assert found["next", "observation"][..., 0].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    subject.pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_interrupted_start_and_close_leave_nothing(backend):
    pool(backend).close()
    before = Holdings.now()
    for each, place in interruptions(
        lambda: pool(backend), lambda p: p.start(), 40, close=lambda p: p.close()
    ):
        with told(place):
            assert each.reset()["observation"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
            each.close()
    before.check()

    def started():
        made = pool(backend)
        made.async_reset_send()
        return made

    for each, place in interruptions(started, lambda p: p.close(), 30):
        with told(place):
            each.close()
            with pytest.raises(ClosedError):
                each.start()
    before.check()
