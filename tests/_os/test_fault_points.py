"""Fault points are inert by default, and raise at the n-th visit, also when nested and in threads."""

from __future__ import annotations

import threading

import pytest

from gleanrl._os import fault_points
from gleanrl._os.fault_points import At


def test_nothing_happens_outside_inject():
    fault_points.point("a.b")


def test_an_exception_is_raised_at_its_visit_only():
    with fault_points.inject({"disk": At(OSError("full"), visit=3)}) as visits:
        fault_points.point("disk")
        fault_points.point("disk")
        with pytest.raises(OSError, match="full"):
            fault_points.point("disk")
        fault_points.point("disk")
        fault_points.point("other")
    assert visits.counts == {"disk": 4, "other": 1}
    fault_points.point("disk")
    assert visits.counts["disk"] == 4


def test_repeated_fault_is_raised_at_every_later_visit():
    with fault_points.inject({"disk": At(KeyError, visit=2, repeat=True)}):
        fault_points.point("disk")
        for _ in range(3):
            with pytest.raises(KeyError):
                fault_points.point("disk")


def test_a_bare_action_happens_at_the_first_visit():
    calls = []
    with fault_points.inject({"call": lambda: calls.append(1), "raise": ValueError}):
        fault_points.point("call")
        fault_points.point("call")
        with pytest.raises(ValueError):
            fault_points.point("raise")
    assert calls == [1]


def test_an_empty_plan_counts_the_places_to_fail():
    with fault_points.inject({}) as visits:
        for _ in range(5):
            fault_points.point("x")
    assert visits.counts["x"] == 5


def test_nested_plans_end_in_order_even_by_an_exception():
    with fault_points.inject({"x": At(KeyError, repeat=True)}):
        with pytest.raises(RuntimeError), fault_points.inject({}):
            fault_points.point("x")
            raise RuntimeError
        with pytest.raises(KeyError):
            fault_points.point("x")
    fault_points.point("x")


def test_visits_from_threads_are_all_counted_and_one_of_them_fails():
    failed = []

    def work():
        for _ in range(500):
            try:
                fault_points.point("x")
            except KeyError:
                failed.append(1)

    with fault_points.inject({"x": At(KeyError, visit=700)}) as visits:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert visits.counts["x"] == 2000
    assert failed == [1]
