"""Exceptions on their way to the owner."""

from __future__ import annotations

import pickle
import traceback

from gleanrl.errors import EnvironmentFailure, WorkerError, failure_from
from gleanrl.workers.reports import RemoteTraceback, Report
from tests.workers.servants import PrivateError, UnpicklableError


def report_of(error):
    try:
        raise error
    except BaseException as caught:
        return pickle.loads(pickle.dumps(Report.of(caught)))


def test_the_type_the_arguments_and_the_traceback_arrive():
    error = report_of(PrivateError(3, "x")).error()
    assert type(error) is PrivateError and (error.a, error.b) == (3, "x")
    assert isinstance(error.__cause__, RemoteTraceback) and "in report_of" in str(error.__cause__)
    assert "in report_of" in "".join(traceback.format_exception(error))
    assert str(RemoteTraceback()) == ""


def test_what_cannot_be_sent_arrives_in_words():
    error = report_of(UnpicklableError()).error()
    assert type(error) is WorkerError and str(error) == "UnpicklableError: held back"


def test_what_cannot_be_restored_arrives_in_words():
    class Picky(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} {b}")

    error = report_of(Picky(1, 2)).error()
    assert type(error) is WorkerError and str(error) == "Picky: 1 2"


def test_errors_of_classes_made_for_them_arrive():
    error = report_of(failure_from(PrivateError(3, "x"), "environment 1: x")).error()
    assert isinstance(error, EnvironmentFailure) and isinstance(error, PrivateError)
    assert str(error) == "environment 1: x"


def test_interrupts_are_reported_too():
    assert type(report_of(KeyboardInterrupt()).error()) is KeyboardInterrupt
