"""Workers that end, hang or are stopped are reported as lost and can be replaced."""

from __future__ import annotations

import os
import select
import signal

import pytest

from gleanrl._os import clock
from gleanrl._os.clock import Deadline
from gleanrl._os.proc import state_of
from gleanrl.errors import WorkerCrashedError, WorkerTimeoutError
from tests._process.crews import ROWS, ask, lost, started
from tests._process.servants import Clerk, NeverMade, Unmade


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM], ids=lambda number: number.name
)
def test_a_killed_worker_is_noticed_with_its_signal(doomed, number):
    crew = doomed()
    begin = clock.monotonic()
    crew.post(1, "die", number)
    answer = lost(crew)
    assert answer.worker == 1 and isinstance(answer.error, WorkerCrashedError)
    assert f"was killed by {number.name} at item 7, step 0" in str(answer.error)
    assert ("ran out of memory" in str(answer.error)) == (number == signal.SIGKILL)
    assert ("in die" in str(answer.error)) == (number in (signal.SIGSEGV, signal.SIGABRT))
    assert "MB" in str(answer.error)
    assert clock.monotonic() - begin < 30, "noticed by its end: one that hangs has 60 s"
    assert ask(crew, "echo", 1, workers=[0]) == [1], "the other one lives"
    request = crew.post(1, "echo", 1)
    again = lost(crew)
    assert again.request == request and again.error is answer.error and not crew.is_idle


def test_exited_worker_is_reported(doomed):
    crew = doomed()
    crew.post(0, "leave", 3)
    assert "exited with code 3" in str(lost(crew).error)


def test_worker_killed_between_requests_is_reported(doomed):
    crew = doomed()
    os.kill(crew.workers[1].pid, signal.SIGKILL)
    crew.workers[1].wait(Deadline(5))
    assert not crew.signal(b"s") and "SIGKILL" in str(lost(crew).error)


def test_worker_that_dies_in_a_signal_is_reported(doomed):
    crew = doomed()
    crew.signal(b"s")
    assert not crew.signal(b"d") and "SIGKILL at item 7, step 2" in str(lost(crew).error)


@pytest.mark.parametrize("hang", [lambda crew: crew.signal(b"h"), lambda crew: crew.post(1, "hang")])
def test_a_hung_worker_shows_its_stack(doomed, hang):
    crew = doomed(work_s=0.3)
    hang(crew)
    error = lost(crew).error
    assert isinstance(error, WorkerTimeoutError) and isinstance(error, TimeoutError)
    assert "made no progress for 0.3 s at item 7" in str(error)
    assert "servants.py" in str(error) and "in hang" in str(error)


def test_stopped_worker_is_reported(doomed):
    crew = doomed(work_s=0.3)
    crew.post(0, "stop_itself")
    assert "It is stopped" in str(lost(crew).error)


def test_hanging_worker_is_noticed_while_another_is_busy(doomed):
    crew = doomed(work_s=0.5)
    crew.post(1, "hang")
    while not (answer := crew.wait_any()).lost:
        crew.post(0, "walk", 1)
    assert answer.worker == 1


def test_slow_progress_is_not_a_hang(doomed):
    assert ask(doomed(work_s=0.5), "walk", 12, workers=[0]) == [12]


def test_failing_service_constructors_are_reported(doomed):
    crew = started(Clerk, Unmade)
    made, failed = crew.wait_all()
    assert made.error is None and failed.error.b == "construction" and not failed.lost
    crew.close()
    crew = started(Unmade)
    crew.workers[0].wait(Deadline(5))
    crew.post(0, "echo", 1)
    assert [type(answer.error).__name__ for answer in crew.wait_all()] == [
        "PrivateError",
        "WorkerCrashedError",
    ]
    crew.close()
    crew = started(Clerk, NeverMade, start_s=0.3, close_s=1.0)
    assert "in hang" in str(lost(crew).error)
    crew.close()


def test_a_killed_worker_is_replaced(doomed):
    crew = doomed()
    ask(crew, "count")
    former = crew.workers[1]
    os.kill(former.pid, signal.SIGKILL)
    crew.post(1, "echo", "never seen")
    assert lost(crew).worker == 1
    crew.replace(1, Clerk)
    assert (crew.workers[1].generation, crew.workers[0].generation) == (1, 0)
    assert crew.workers[1].pid != former.pid and crew.wait_any().worker == 1
    assert ask(crew, "echo", 5) == [5, 5] and crew.signal(b"s") and ask(crew, "count") == [1, 1]
    assert crew.is_idle


def test_hanging_or_stopped_worker_is_replaced_and_its_answers_are_dropped(doomed):
    crew = doomed()
    region = crew.segment.region("rows", ROWS)
    for name in ("stop_itself", "hang"):
        crew.post(1, "echo", "stale")
        crew.post(1, name)
        former = crew.workers[1]
        crew.replace(1, Clerk)
        assert state_of(former.pid) in ("", "Z"), "it can't write any more"
        made = crew.wait_any()
        assert (made.worker, made.value, made.error) == (1, None, None) and crew.wait_any() is None
        crew.post(1, "fill", region, 0, 3)
        assert crew.wait_any().error is None
    assert set(crew.segment.block(region).column(("x",)).tolist()) == {3}
    assert crew.workers[1].generation == 2


def test_worker_with_a_failed_service_is_replaced(doomed):
    crew = started(Unmade, Clerk)
    assert [type(answer.error).__name__ for answer in crew.wait_all()] == ["PrivateError", "NoneType"]
    crew.replace(0, Clerk)
    assert crew.wait_any().error is None and ask(crew, "echo", 1) == [1, 1]
    crew.close()


def test_replaced_workers_draw_other_random_numbers(doomed):
    crew = doomed(Clerk)
    (first,) = ask(crew, "draws")
    crew.replace(0, Clerk)
    crew.wait_any()
    (second,) = ask(crew, "draws")
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_worker_killed_while_sending_a_long_answer_is_reported(doomed):
    """The partial answer of the killed worker is dropped, and the other worker's answer arrives."""
    crew = doomed()
    crew.post(
        0, "echo", bytes(8 << 20)
    )  # many times the pipe's capacity, so the worker blocks until the owner reads
    assert select.select([crew.workers[0].channel.reading], [], [], 60)[0]
    os.kill(crew.workers[0].pid, signal.SIGKILL)
    crew.post(1, "echo", 5)
    answers = {answer.worker: answer for answer in iter(crew.wait_any, None)}
    assert answers[0].lost and isinstance(answers[0].error, WorkerCrashedError) and answers[0].value is None
    assert answers[1].value == 5 and not answers[1].lost
    crew.replace(0, Clerk)
    assert crew.wait_any().error is None and ask(crew, "echo", 7, workers=[0, 1]) == [7, 7]


def test_many_kills_leave_nothing(doomed):
    crew = doomed(*[Clerk] * 3)
    for number in range(60):
        index = number % 3
        crew.post(index, "echo", number)
        os.kill(crew.workers[index].pid, signal.SIGKILL)
        for other in {0, 1, 2} - {index}:
            crew.post(other, "echo", number)
        values = {answer.worker: answer.value for answer in iter(crew.wait_any, None) if not answer.lost}
        assert values.pop(index, number) == number and list(values.values()) == [number] * 2
        crew.replace(index, Clerk)
        assert crew.wait_any().error is None
    assert sum(worker.generation for worker in crew.workers) == 60
