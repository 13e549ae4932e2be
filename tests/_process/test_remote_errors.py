"""Exceptions reach the owner with their type, text and remote traceback."""

from __future__ import annotations

import pickle
import traceback

import pytest

from gleanrl._process.remote_errors import RemoteTraceback, Report
from gleanrl.errors import EnvironmentFailure, WorkerError, failure_from
from tests._process.servants import PrivateError, UnpicklableError


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


def test_unpicklable_exception_arrives_as_text():
    error = report_of(UnpicklableError()).error()
    assert type(error) is WorkerError and str(error) == "UnpicklableError: held back"


class Joining(Exception):
    """Its constructor doesn't accept the arguments that it passes to `super().__init__`."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")
        self.a = a


class Wording(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


class Naming(Exception):
    def __init__(self, *, code):
        super().__init__(code)


@pytest.mark.parametrize("sent", [Joining(1, 2), Wording(3), Naming(code=4)], ids=lambda e: type(e).__name__)
def test_exceptions_with_other_constructor_arguments_arrive(sent):
    error = report_of(sent).error()
    assert type(error) is type(sent) and str(error) == str(sent) and vars(error) == vars(sent)


def test_exception_that_cannot_be_restored_arrives_as_text():
    class Picky(Exception):
        def __new__(cls, *, secret):
            return super().__new__(cls)

        def __init__(self, *, secret):
            pass

    error = report_of(Picky(secret=1)).error()
    assert type(error) is WorkerError and str(error).startswith("Picky: ")


def test_errors_of_generated_classes_arrive():
    error = report_of(failure_from(PrivateError(3, "x"), "environment 1: x")).error()
    assert isinstance(error, EnvironmentFailure) and isinstance(error, PrivateError)
    assert str(error) == "environment 1: x"


def test_interrupts_are_reported_too():
    assert type(report_of(KeyboardInterrupt()).error()) is KeyboardInterrupt
