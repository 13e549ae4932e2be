"""Background threads keep the order of jobs, pass errors on, and handle interrupts, forks and the interpreter's end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Activity, Waiter, Workers, alone, current, for_each, stack_of
from tests.interrupts import in_another_thread, interruptions


def alive(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_result_returns_the_value_or_raises_the_error():
    workers = Workers(2, "test-results")
    jobs = [workers.start(lambda n=n: 10 // n) for n in (5, 0, 2)]
    assert jobs[0].result() == 2 and jobs[2].result() == 5 and jobs[2].result() == 5
    with pytest.raises(ZeroDivisionError):
        jobs[1].result()


def test_timed_wait_returns_whether_the_job_ended():
    workers, go = Workers(1, "test-wait"), threading.Event()
    job = workers.start(go.wait)
    assert not job.ended and not job.wait(0.02)
    go.set()
    assert job.wait(60) and job.ended and job.wait(0)


def test_stack_of_a_running_job_is_reported():
    workers, go, numbers = Workers(1, "test-stack"), threading.Event(), []

    def stands_still():
        numbers.append(threading.get_ident())
        go.wait()

    job = workers.start(stands_still)
    while not numbers:
        job.wait(0.001)
    assert "in stands_still" in stack_of(numbers[0])
    go.set()
    job.result()
    assert stack_of(None) == stack_of(-1) == "it has no stack to show"


@pytest.mark.parametrize("count", [1, 3])
def test_threads_start_with_the_first_call_and_end_with_the_object(count):
    workers = Workers(count, f"test-end-{count}")
    assert not alive(f"test-end-{count}")
    for _ in range(5):
        workers.start(lambda: None).result()
    threads = alive(f"test-end-{count}")
    assert len(threads) == count
    del workers
    gc.collect()
    for thread in threads:
        thread.join(timeout=20)
    assert not alive(f"test-end-{count}")


@pytest.mark.parametrize("count", [1, 3])
def test_workers_are_usable_after_an_interrupted_start_or_wait(count):
    def call(workers: Workers) -> None:
        assert workers.start(lambda: 7).result() == 7

    for workers, place in interruptions(lambda: Workers(count, "test-interrupts"), call):
        assert in_another_thread(lambda workers=workers: workers.start(lambda: 8).result()) == 8, place


def test_forked_process_starts_new_threads():
    workers = Workers(2, "test-fork")
    assert workers.start(lambda: 1).result() == 1 and not workers.forked
    child = os.fork()
    if child == 0:
        try:
            good = workers.forked and workers.start(lambda: 2).result() == 2
        except BaseException:
            good = False
        os._exit(int(not good))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROGRAM = """
import threading
import torch
from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Activity, Waiter, Workers, alone, current
workers = Workers(3, "late")
begun = threading.Event()
x = torch.arange(200_000)
def work():
    begun.set()
    for _ in range(20):
        x[torch.randperm(200_000)]
jobs = [workers.start(work) for _ in range(50)]
begun.wait()
print("end")
"""


def test_the_interpreter_ends_while_threads_work():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_a_wait_ends_when_an_activity_that_it_watches_is_hurried_or_over():
    for name in ("hurry", "end"):
        for before in (True, False):  # whether the wait begins before the call
            activity, waiter = Activity(), Waiter()
            waiter.watch(activity)
            thread = threading.Thread(target=waiter.wait, args=[Deadline(60)])
            if not before:
                getattr(activity, name)()
            thread.start()
            if before:
                getattr(activity, name)()
            thread.join(30)
            assert not thread.is_alive() and (activity.hurried, activity.over) == (
                name == "hurry",
                name == "end",
            )
            waiter.close()
            assert not activity.waiters
            activity.begin()
            assert not activity.hurried and not activity.over


def test_each_thread_has_a_separate_activity():
    current.activity = activity = Activity()
    assert in_another_thread(lambda: current.activity) is None and current.activity is activity
    current.activity = None


def test_alone_is_true_with_one_thread():
    assert not in_another_thread(alone)
    child = os.fork()  # the child has one thread
    if child == 0:
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        before = alone()
        thread.start()
        between = alone()
        done.set()
        thread.join()
        os._exit((before, between, alone()) != (True, False, True))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_for_each_handles_items_once_and_stops_at_an_error(count):
    done = []
    for_each(done.append, range(100), count)
    assert sorted(done) == list(range(100)) and not alive("gleanrl-helper")
    for_each(done.append, [], count)

    def fail(item):
        done.append(item)
        if item == 5:
            raise KeyError(item)

    done.clear()
    with pytest.raises(KeyError):
        for_each(fail, range(100_000), count)
    assert len(done) < 100_000 and not alive("gleanrl-helper")


def test_calls_are_made_at_once():
    met = threading.Barrier(3)
    for_each(lambda item: met.wait(60), range(3), 3)
