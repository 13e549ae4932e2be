"""A worker pool posts to one worker, signals all, and waits for the answers of all together."""

from __future__ import annotations

import select
import signal
import threading

import pytest

from gleanrl._os.clock import Deadline
from gleanrl.errors import WorkerError
from tests._process.crews import ROWS, ask, started, told
from tests._process.servants import Clerk, PrivateError
from tests.interrupts import interruptions
from tests.leaks import Holdings


@pytest.fixture(scope="module")
def crew():
    """Return a pool of three workers that live until the end of this module."""
    made = started(*[Clerk] * 3)
    assert [(a.worker, a.error) for a in made.wait_all()] == [(0, None), (1, None), (2, None)]
    yield made
    made.close()


def test_requests_and_signals_are_answered(crew):
    assert ask(crew, "echo", 3) == [3, 3, 3]
    numbers = [crew.post(2, "echo", "two"), crew.post(0, "echo", "none")]
    assert [(a.worker, a.request, a.value) for a in crew.wait_all()] == [
        (0, numbers[1], "none"),
        (2, numbers[0], "two"),
    ]
    before = ask(crew, "count")
    assert all(crew.signal(b"s") for _ in range(50))
    assert ask(crew, "count") == [count + 50 for count in before] and crew.wait_any() is None


def test_answers_are_returned_in_order_of_arrival(crew):
    """The slow worker is asked first, and has a second request in its queue."""
    slow = [crew.post(0, "walk", 3), crew.post(0, "echo", 7)]
    quick = crew.post(1, "echo", 8)
    assert crew.wait_any().request == quick and not crew.is_idle
    assert crew.wait_any(Deadline(0.0)) is None
    assert [crew.wait_any().request for _ in slow] == slow and crew.wait_any() is None and crew.is_idle


def test_arrived_answer_is_returned_after_the_deadline(crew):
    number = crew.post(1, "echo", 9)
    assert select.select([crew.workers[1].channel.reading], [], [], 60)[0]
    assert crew.wait_any(Deadline(0.0)).request == number and crew.wait_any(Deadline(0.0)) is None


def test_exception_of_a_worker_arrives_and_the_pool_continues(crew):
    for raising in (lambda: [crew.post(i, "fail") for i in range(3)], lambda: crew.signal(b"r")):
        assert raising() is not True
        answers = crew.wait_all()
        assert [(a.worker, type(a.error), a.error.a, a.lost) for a in answers] == [
            (i, PrivateError, i, False) for i in range(3)
        ]
        assert "servants.py" in str(answers[0].error.__cause__)
        assert ask(crew, "echo", 1) == [1, 1, 1]


def test_unpicklable_values_raise_in_both_directions(crew):
    crew.post(0, "fail_privately")
    crew.post(1, "unsendable")
    first, second = crew.wait_all()
    assert str(first.error) == "UnpicklableError: held back"
    assert isinstance(second.error, WorkerError) and "can't be sent" in str(second.error)
    with pytest.raises(WorkerError, match="can't be sent"):
        crew.post(0, "echo", threading.Lock())
    assert ask(crew, "echo", 1) == [1, 1, 1]


def test_long_messages_arrive(crew):
    data = bytes(3 << 20)
    assert ask(crew, "echo", data) == [data] * 3


def test_forgotten_answers_are_dropped(crew):
    crew.post(0, "walk", 2)
    crew.forget()
    assert crew.is_idle and ask(crew, "echo", "mine") == ["mine"] * 3


@pytest.mark.parametrize(
    "call", [lambda c: c.signal(b"s"), lambda c: ask(c, "echo", 0)], ids=["signal", "ask"]
)
def test_pool_is_usable_after_interrupts(crew, call):
    for number, (_, place) in enumerate(interruptions(lambda: crew, call, 150)):
        crew.forget()
        assert ask(crew, "echo", number) == [number] * 3, place
        assert crew.signal(b"s") and ask(crew, "echo", -number) == [-number] * 3, place


def test_interrupted_start_leaves_nothing(doomed):
    doomed().close()
    before = Holdings.now()
    for crew, place in interruptions(
        list, lambda made: made.append(started()), 40, close=lambda m: m[0].close()
    ):
        crew.clear()
        with told(place):
            before.check()


class Interrupt(BaseException):
    """The exception that the signal handler raises."""


@pytest.fixture
def interrupting():
    """Interrupt the main thread after a delay in seconds, and every 20 s after that; 0 stops it.

    Python drops an exception that is raised during garbage collection, hence the repetition.
    """

    def interrupt(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda delay: signal.setitimer(signal.ITIMER_REAL, delay, 20.0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "call", [lambda c: c.signal(b"s"), lambda c: ask(c, "echo", 0)], ids=["signal", "ask"]
)
def test_pool_is_usable_after_raising_signal_handlers(crew, interrupting, call):
    for delay in (0.0005, 0.001, 0.002, 0.003) * 10:
        with pytest.raises(Interrupt):
            interrupting(delay)
            while True:
                call(crew)
        interrupting(0)
        crew.forget()
        assert ask(crew, "echo", delay) == [delay] * 3


def test_a_worker_writes_one_block_while_the_other_one_is_read(doomed):
    crew = doomed()
    regions = [crew.segment.region(str(index), ROWS, num_blocks=2) for index in range(2)]
    blocks = [[crew.segment.block(region, number) for number in range(2)] for region in regions]
    for index, region in enumerate(regions):
        crew.post(index, "fill", region, 0, 0)
    seen = [0, 0]
    while (answer := crew.wait_any()) is not None:
        index, value = answer.worker, answer.value
        assert value == seen[index], "each in the order of asking"
        seen[index] += 1
        if seen[index] < 40:
            crew.post(index, "fill", regions[index], seen[index] % 2, seen[index])
        assert bool((blocks[index][value % 2].column(("x",)) == value).all())
    assert seen == [40, 40]


def test_every_worker_is_served_in_turn(crew):
    for index in (0, 1):
        crew.post(index, "echo", index)
    for _ in range(10):
        answers = [crew.wait_any() for _ in range(2)]
        assert {answer.worker for answer in answers} == {0, 1}
        for answer in answers:
            crew.post(answer.worker, "echo", 0)
    crew.wait_all()


def test_pool_of_many_workers_answers(doomed):
    assert ask(doomed(*[Clerk] * 12), "echo", 0) == [0] * 12
