"""Fault points: off, at the n-th visit, nested, from threads."""

from __future__ import annotations

import threading

import pytest

from gleanrl.system import faults
from gleanrl.system.faults import At


def test_nothing_happens_outside_inject():
    faults.point("a.b")


def test_an_exception_is_raised_at_its_visit_only():
    with faults.inject({"disk": At(OSError("full"), visit=3)}) as visits:
        faults.point("disk")
        faults.point("disk")
        with pytest.raises(OSError, match="full"):
            faults.point("disk")
        faults.point("disk")
        faults.point("other")
    assert visits.counts == {"disk": 4, "other": 1}
    faults.point("disk")
    assert visits.counts["disk"] == 4


def test_repeat_goes_on():
    with faults.inject({"disk": At(KeyError, visit=2, repeat=True)}):
        faults.point("disk")
        for _ in range(3):
            with pytest.raises(KeyError):
                faults.point("disk")


def test_a_bare_action_happens_at_the_first_visit():
    calls = []
    with faults.inject({"call": lambda: calls.append(1), "raise": ValueError}):
        faults.point("call")
        faults.point("call")
        with pytest.raises(ValueError):
            faults.point("raise")
    assert calls == [1]


def test_an_empty_plan_counts_the_places_to_fail():
    with faults.inject({}) as visits:
        for _ in range(5):
            faults.point("x")
    assert visits.counts["x"] == 5


def test_nested_plans_end_in_order_even_by_an_exception():
    with faults.inject({"x": At(KeyError, repeat=True)}):
        with pytest.raises(RuntimeError), faults.inject({}):
            faults.point("x")
            raise RuntimeError
        with pytest.raises(KeyError):
            faults.point("x")
    faults.point("x")


def test_visits_from_threads_are_all_counted_and_one_of_them_fails():
    failed = []

    def work():
        for _ in range(500):
            try:
                faults.point("x")
            except KeyError:
                failed.append(1)

    with faults.inject({"x": At(KeyError, visit=700)}) as visits:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert visits.counts["x"] == 2000
    assert failed == [1]
