"""Environments run in threads."""

from __future__ import annotations

import threading

import pytest
import torch

from gleanrl._os.clock import Deadline
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault
from gleanrl.envs.vector.async_requests import EnvThreads
from gleanrl.envs.vector.factories import factories
from gleanrl.errors import WorkerTimeoutError
from tests.fakes import FakeFailure
from tests.fakes_base import CountingEnv


class Thoughtful(CountingEnv):
    """Reports its thread, and waits for an event."""

    go = threading.Event()

    def where(self):
        return threading.get_ident()

    def wait(self):
        self.go.wait(60)
        return "went on"

    def close(self, **kwargs):
        self.closed_in = threading.get_ident()
        super().close()


@pytest.fixture
def host():
    Thoughtful.go.clear()
    host = EnvThreads(factories(2, Thoughtful, None), Timeouts(work_s=1.0, close_s=20.0))
    host.start()
    yield host
    Thoughtful.go.set()
    host.close()


def asked(host, env, number, name, *arguments):
    host.post(env, number, name, arguments)
    arrival = host.wait(Deadline(60.0))
    assert (arrival.env, arrival.number) == (env, number)
    return arrival


def test_each_environment_has_its_own_thread(host):
    where = [asked(host, env, env + 1, "call", "where", (), {}).value for env in (0, 1)]
    again = [asked(host, env, env + 3, "call", "where", (), {}).value for env in (0, 1)]
    assert where == again and len({*where, threading.get_ident()}) == 3


def test_wait_returns_none_without_an_answer_in_time(host):
    assert host.wait(Deadline(None)) is None
    host.post(0, 1, "call", ("wait", (), {}))
    assert host.wait(Deadline(0.0)) is None
    Thoughtful.go.set()
    assert host.wait(Deadline(60.0)).value == "went on"


def test_threads_use_the_callers_grad_mode(host):
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            host.post(0, 1 + enabled, "attribute", ("device",))
    assert host.wait(Deadline(60.0)).number == 1, "an answer that nobody waits for is dropped"


def test_hanging_thread_is_lost_and_replaced(host):
    host.post(0, 1, "call", ("wait", (), {}))
    arrival = host.wait(Deadline(60.0))
    assert isinstance(arrival.error, WorkerTimeoutError) and host.loss(0) is arrival.error
    assert "hasn't got on for 1 s during its call" in str(arrival.error) and "in wait" in str(arrival.error)
    assert host.loss(1) is None and asked(host, 1, 2, "call", "where", (), {}).value
    host.renew(0)
    assert host.loss(0) is None and asked(host, 0, 3, "call", "where", (), {}).value
    Thoughtful.go.set()  # a late answer of the former thread isn't taken for the new one's answer
    assert asked(host, 0, 4, "attribute", "is_closed").value == (False, False)


def test_construction_and_close_may_raise():
    class Grudging(CountingEnv):
        def close(self, **kwargs):
            super().close()
            raise FakeFailure("at the end")

    def fails():
        raise FakeFailure("at the beginning")

    host = EnvThreads(factories(2, [Grudging, CountingEnv], None), Timeouts())
    host.start()
    with pytest.raises(FakeFailure, match="at the end"):
        host.close()
    host.close()
    host = EnvThreads(factories(2, [CountingEnv, fails], None), Timeouts())
    with pytest.raises(StepFault) as caught:
        host.start()
    assert caught.value.env == 1 and caught.value.during == "construction"
