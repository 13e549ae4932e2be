"""All workers of one owner."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gleanrl.errors import ClosedError, WorkerCrashedError, WorkerError, WorkerTimeoutError
from gleanrl.system import clock
from gleanrl.workers.crew import Crew, WorkerFault
from gleanrl.workers.handle import Timeouts
from tests.leaks import Holdings
from tests.workers.servants import Clerk, Grudging, NeverMade, PrivateError, Stubborn, Unmade


@pytest.fixture(scope="module")
def crew():
    """Three workers that survive their tests."""
    made = Crew([Clerk] * 3)
    yield made
    made.close()


@pytest.fixture
def doomed():
    """Makes crews that don't survive; nothing may be left of them."""
    Crew([Clerk]).close()  # the launcher itself stays
    before = Holdings.now()
    made = []

    def make(*servants, **timeouts):
        crew = Crew(
            servants or (Clerk, Clerk),
            Timeouts(**timeouts),
            where=lambda worker, place, step: f"at item {place}, step {step}",
        )
        made.append(crew)
        return crew

    yield make
    for crew in made:
        crew.close()
    before.check()


def test_requests_and_signals(crew):
    assert crew.request_all("echo", 3) == [3, 3, 3]
    assert crew.request("echo", {2: ("two",), 0: ("none",)}) == {0: "none", 2: "two"}
    before = crew.request_all("count")
    for _ in range(50):
        crew.signal(b"s")
    assert crew.request_all("count") == [count + 50 for count in before]


def test_what_a_worker_raises_arrives_and_the_crew_goes_on(crew):
    for ask in (lambda: crew.request_all("fail"), lambda: crew.signal(b"r")):
        with pytest.raises(WorkerFault) as caught:
            ask()
        fault = caught.value
        assert (fault.worker, fault.place, fault.lost) == (0, 7, False)
        assert type(fault.cause) is PrivateError and fault.cause.a == 0
        assert "servants.py" in str(fault.cause.__cause__)
        assert crew.request_all("echo", 1) == [1, 1, 1]


def test_what_cannot_be_sent(crew):
    with pytest.raises(WorkerFault) as caught:
        crew.request_all("fail_privately")
    assert str(caught.value.cause) == "UnpicklableError: held back"
    with pytest.raises(WorkerFault) as caught:
        crew.request_all("unsendable")
    assert isinstance(caught.value.cause, WorkerError) and "can't be sent" in str(caught.value.cause)
    with pytest.raises(WorkerError, match="can't be sent"):
        crew.request_all("echo", threading.Lock())
    assert crew.request_all("echo", 1) == [1, 1, 1]


def test_long_messages(crew):
    data = bytes(3 << 20)
    assert crew.request_all("echo", data) == [data] * 3


class Interrupt(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def interrupting():
    """Interrupts the main thread after a delay, over and over until it's told to stop."""

    def interrupt(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda delay: signal.setitimer(signal.ITIMER_REAL, delay)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupted_signals_leave_it_usable(crew, interrupting):
    for delay in (0.0005, 0.001, 0.002, 0.003) * 10:
        interrupting(delay)
        with pytest.raises(Interrupt):
            while True:
                crew.signal(b"s")
        assert crew.request_all("echo", delay) == [delay] * 3


def test_interrupted_requests_leave_it_usable(crew, interrupting):
    for delay in (0.0005, 0.001, 0.002, 0.003) * 10:
        interrupting(delay)
        with pytest.raises(Interrupt):
            while True:
                crew.request_all("echo", 0)
        assert crew.request_all("echo", delay) == [delay] * 3


def test_shared_memory(crew):
    crew.segment.grow(1 << 20)
    crew.request("write", {i: (i + 5,) for i in range(3)})
    assert crew.segment._data[:3].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM], ids=lambda number: number.name
)
def test_a_killed_worker_is_noticed_with_its_signal(doomed, number):
    crew = doomed()
    begin = clock.monotonic()
    with pytest.raises(WorkerFault) as caught:
        crew.request("die", {1: (number,)})
    fault = caught.value
    assert (fault.worker, fault.lost) == (1, True) and isinstance(fault.cause, WorkerCrashedError)
    assert f"was killed by {number.name} at item 7, step 0" in str(fault.cause)
    assert ("for want of memory" in str(fault.cause)) == (number == signal.SIGKILL)
    assert ("in die" in str(fault.cause)) == (number in (signal.SIGSEGV, signal.SIGABRT))
    assert "MB" in str(fault.cause)
    assert crew.closed and clock.monotonic() - begin < 3
    with pytest.raises(ClosedError, match="worker 1 was lost: WorkerCrashedError"):
        crew.request_all("echo", 1)


def test_a_worker_that_leaves(doomed):
    with pytest.raises(WorkerFault, match="exited with code 3"):
        doomed().request("leave", {0: (3,)})


def test_one_killed_between_two_requests(doomed):
    crew = doomed()
    os.kill(crew.workers[1].pid, signal.SIGKILL)
    crew.workers[1].wait(clock.Deadline(5))
    with pytest.raises(WorkerFault, match="SIGKILL"):
        crew.signal(b"s")


def test_one_killed_by_its_signal(doomed):
    crew = doomed()
    crew.signal(b"s")
    with pytest.raises(WorkerFault, match="SIGKILL at item 7, step 2"):
        crew.signal(b"d")


@pytest.mark.parametrize("ask", [lambda crew: crew.signal(b"h"), lambda crew: crew.request("hang", {1: ()})])
def test_a_hung_worker_shows_its_stack(doomed, ask):
    crew = doomed(work_s=0.3)
    with pytest.raises(WorkerFault) as caught:
        ask(crew)
    text = str(caught.value.cause)
    assert isinstance(caught.value.cause, WorkerTimeoutError) and isinstance(caught.value.cause, TimeoutError)
    assert "hasn't got on for 0.3 s at item 7" in text and "servants.py" in text and "in hang" in text


def test_a_stopped_worker(doomed):
    with pytest.raises(WorkerFault, match="It is stopped"):
        doomed(work_s=0.3).request("stop_itself", {0: ()})


def test_getting_on_is_not_hanging(doomed):
    crew = doomed(work_s=0.5)
    assert crew.request("walk", {0: (12,)}) == {0: 12}


def test_servants_that_cannot_be_made(doomed):
    with pytest.raises(WorkerFault) as caught:
        doomed(Clerk, Unmade)
    assert caught.value.worker == 1 and caught.value.cause.b == "construction"
    with pytest.raises(WorkerFault, match="in hang"):
        doomed(Clerk, NeverMade, start_s=0.3, close_s=1.0)


def test_ends_whatever_its_workers_do(doomed):
    crew = doomed(Clerk, Stubborn, Clerk, close_s=0.3)
    crew.close()
    assert all(worker.pid for worker in crew.workers)


def test_what_a_close_raises(doomed):
    crew = doomed(Clerk, Grudging)
    with pytest.raises(PrivateError):
        crew.close()
    crew.close()


def test_many_workers(doomed):
    crew = doomed(*[Clerk] * 12)
    assert crew.request_all("echo", 0) == [0] * 12


def test_a_fork_of_the_owner_leaves_them_alone(doomed):
    crew = doomed()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            crew.close()
            crew.request_all("echo", 1)
        except ClosedError:
            code = 17
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert crew.request_all("echo", 2) == [2, 2]


class _Closer:
    """Closes a crew when it's pickled, as a garbage collection in the midst of a call may."""

    def __init__(self, crew):
        self.crew = crew

    def __reduce__(self):
        self.crew.close()
        return int, ()


def test_a_close_while_a_request_is_being_written(doomed):
    crew = doomed()
    with pytest.raises(ClosedError, match="have been ended"):
        crew.request_all("echo", _Closer(crew))


@pytest.mark.parametrize("ask", [lambda crew: crew.signal(b"h"), lambda crew: crew.request("hang", {1: ()})])
def test_a_close_while_answers_are_waited_for(doomed, ask):
    crew = doomed()
    before = signal.signal(signal.SIGALRM, lambda *_: crew.close(0.0))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(ClosedError, match="have been ended"):
            ask(crew)
    finally:
        signal.signal(signal.SIGALRM, before)
