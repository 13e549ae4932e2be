"""The table of pending requests matches answers to requests; the test provides the host and its answers."""

from __future__ import annotations

import pytest

from gleanrl._os.clock import Deadline
from gleanrl._rollout.errors import StepFault
from gleanrl.envs.vector.async_requests import ReceivedAnswer, Request, Requests, Wanted
from gleanrl.envs.vector.members import RESET, STEP
from gleanrl.errors import NotReadyError, PendingError, WorkerCrashedError, WorkerError


class Desk:
    """A host that records its requests and delivers prepared answers."""

    def __init__(self):
        self.posted, self.arrivals, self.lost, self.renewed = [], [], {}, []

    def start(self):
        pass

    def post(self, env, number, name, arguments):
        if arguments == ("unsendable",):
            raise WorkerError("can't be sent")
        self.posted.append((env, number, name))

    def wait(self, deadline):
        if not self.arrivals:
            assert deadline.passed(), "nothing would ever come"
            return None
        arrival = self.arrivals.pop(0)
        if isinstance(arrival, BaseException):
            raise arrival
        return arrival

    def loss(self, env):
        return self.lost.get(env)

    def renew(self, env):
        self.renewed.append(env)
        self.lost.pop(env)

    def close(self):
        pass

    def answer(self, *envs, error=None, value="came"):
        numbers = {env: number for env, number, _ in self.posted}
        self.arrivals += [ReceivedAnswer(env, numbers[env], None if error else value, error) for env in envs]


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def requests(desk):
    return Requests(desk)


NOW = Deadline(0.0)


def send(requests, *envs, name=STEP):
    requests.send({env: Request(name, ()) for env in envs})


def test_first_arrivals_are_returned_in_index_order(desk, requests):
    send(requests, 0, 1, 2, 3)
    desk.answer(3, 1, 0)
    assert list(requests.received(Wanted(STEP, 1, 2), NOW)) == [1, 3]
    assert list(requests.received(Wanted(STEP, 1, 2), NOW)) == [1, 3], "until they are released"
    requests.release([1, 3])
    assert list(requests.received(Wanted(STEP, 1), NOW)) == [0] and requests.busy == [0, 2]


def test_steps_and_resets_are_received_separately(desk, requests):
    send(requests, 0, 1)
    send(requests, 2, name=RESET)
    desk.answer(2, 0)
    assert list(requests.received(Wanted(STEP, 1), NOW)) == [0]
    assert list(requests.received(Wanted(RESET, 1), NOW)) == [2]
    with pytest.raises(PendingError, match="reset: expected 2 requests"):
        requests.received(Wanted(RESET, 2), NOW)


def test_answers_before_a_timeout_are_kept(desk, requests):
    send(requests, 0, 1)
    desk.answer(1)
    with pytest.raises(NotReadyError, match=r"1 of 2 answers arrived in time, of the environments \[1\]"):
        requests.received(Wanted(STEP, 2), NOW)
    assert list(requests.received(Wanted(STEP, 1), NOW)) == [1]


def test_interrupted_wait_can_be_repeated(desk, requests):
    send(requests, 0, 1)
    desk.answer(0)
    desk.arrivals.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        requests.received(Wanted(STEP, 2), NOW)
    posted = list(desk.posted)
    desk.answer(1, 1)
    assert list(requests.received(Wanted(STEP, 2), NOW)) == [0, 1]
    assert desk.posted == [*posted, posted[1]], "by the same number, and only what is missing"
    requests.release([0, 1])
    send(requests, 1)
    desk.arrivals.insert(0, ReceivedAnswer(1, posted[1][1]))  # its answer to the second request comes late
    with pytest.raises(NotReadyError):
        requests.received(Wanted(STEP, 1), NOW)


def test_answers_of_other_environments_are_kept_during_a_wait(desk, requests):
    send(requests, 0)
    desk.answer(0)
    desk.arrivals.append(ReceivedAnswer(1, 2, "asked"))
    assert requests.ask(STEP, {1: ()}) == {1: "asked"}
    assert list(requests.received(Wanted(STEP, 1), NOW)) == [0]
    with pytest.raises(PendingError, match=r"environment 0 \(step\)"):
        requests.ask(STEP, {0: (), 1: ()})


def test_faults_are_raised_with_their_environment(desk, requests):
    send(requests, 0, 1)
    desk.answer(0)
    desk.answer(1, error=ValueError("bad"))
    with pytest.raises(StepFault) as caught:
        requests.received(Wanted(STEP, 2), NOW)
    assert caught.value.env == 1 and caught.value.during == STEP
    requests.release([1])
    assert list(requests.received(Wanted(STEP, 1), NOW)) == [0]


def test_unsendable_request_is_reported_by_its_answer(desk, requests):
    requests.send({0: Request(STEP, ("unsendable",)), 1: Request(STEP, ())})
    with pytest.raises(StepFault) as caught:
        requests.received(Wanted(STEP, 1), NOW)
    assert caught.value.env == 0 and "can't be sent" in str(caught.value.cause)


def test_lost_environments_are_reported_until_a_reset(desk, requests):
    send(requests, 0, 1)
    desk.lost = {0: WorkerCrashedError("gone"), 2: WorkerCrashedError("gone, too")}
    with pytest.raises(WorkerCrashedError, match="environment 2 is lost until it is reset: gone, too"):
        send(requests, 2)
    send(requests, 2, name=RESET)
    assert desk.renewed == [2]
    # Requests sent to the process of a lost environment are sent again, and lost environments report their loss.
    with pytest.raises(StepFault) as caught:
        requests.received(Wanted(STEP, 2), NOW)
    assert caught.value.env == 0 and caught.value.cause.args == ("gone",)
