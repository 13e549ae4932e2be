"""Every error belongs to one family and to the usual Python class. A failure can be caught as its cause."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from gleanrl import errors
from gleanrl.errors import (
    ConformanceError,
    EnvironmentFailure,
    GleanError,
    InvalidArgumentError,
    MissingKeyError,
    failure_from,
)

FAMILY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
USUAL: dict[str, tuple[type[Exception], ...]] = {
    "InvalidArgumentError": (ValueError,),
    "MissingArgumentError": (RuntimeError, ValueError),
    "InvalidTypeError": (TypeError,),
    "UnsupportedError": (NotImplementedError, RuntimeError),
    "SpaceError": (NotImplementedError, ValueError),
    "ClosedError": (RuntimeError,),
    "MissingKeyError": (KeyError,),
    "SchemaError": (RuntimeError, ValueError),
    "SpecError": (AssertionError, ValueError),
    "IndexRangeError": (IndexError,),
    "EmptyBufferError": (RuntimeError,),
    "CapacityError": (RuntimeError,),
    "PolicyError": (RuntimeError,),
    "EnvironmentContractError": (RuntimeError,),
    "NonFiniteError": (RuntimeError, ValueError),
    "EnvironmentFailure": (RuntimeError,),
}


@pytest.mark.parametrize(
    "kind", [kind for kind in FAMILY if kind is not ConformanceError], ids=lambda kind: kind.__name__
)
def test_each_error_is_of_the_family_and_of_a_python_class(kind: type[Exception]) -> None:
    assert issubclass(kind, GleanError) and kind.__doc__
    error = kind("what was expected")
    assert str(error) == "what was expected"
    if kind is not GleanError:
        assert any(not issubclass(base, GleanError) and base is not Exception for base in kind.__mro__[1:-3])


@pytest.mark.parametrize("name", USUAL)
def test_errors_derive_from_the_usual_python_class(name: str) -> None:
    assert issubclass(getattr(errors, name), USUAL[name])


def test_a_key_error_shows_its_message_not_a_repr() -> None:
    assert str(MissingKeyError("no 'x' here")) == "no 'x' here" and str(MissingKeyError()) == ""


def test_conformance_error_names_rule_place_and_values() -> None:
    error = ConformanceError("flags", "'done' of reset", "False", "True")
    assert isinstance(error, (GleanError, AssertionError)) and ConformanceError.__doc__
    assert str(error) == "rule 'flags': 'done' of reset: expected False, got True"
    again = pickle.loads(pickle.dumps(error))
    assert (again.rule, again.where, again.expected, again.got) == error.args


class Odd(Exception):
    """Has a constructor and a text with nonstandard arguments."""

    def __init__(self, code: int, *, place: str) -> None:
        super().__init__(code, place)
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Final(Exception):
    """Refuses to be subclassed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


class Made(Exception):
    """Has a `__new__` with two arguments."""

    def __new__(cls, code: int, place: str) -> Made:
        return super().__new__(cls, code, place)


DECODE = UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")
CAUSES = [
    *(ValueError("a"), KeyError("a"), RuntimeError("a"), AssertionError(), OSError(2, "gone"), DECODE),
    *(Odd(3, place="here"), StopIteration(1), Exception("a"), InvalidArgumentError("a"), GleanError("a")),
    *(NotImplementedError("a"), TimeoutError("a"), ImportError("a"), MemoryError("a")),
    Made(1, "a"),
]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
def test_a_failure_is_caught_as_its_cause(cause: Exception) -> None:
    with pytest.raises(type(cause)) as caught:
        raise failure_from(cause, "environment 1: it broke")
    error = caught.value
    assert isinstance(error, EnvironmentFailure) and error.__cause__ is cause
    assert str(error) == "environment 1: it broke" and error.args == ("environment 1: it broke",)
    assert type(error).__name__ == type(cause).__name__


@pytest.mark.parametrize("cause", [Final("a"), EnvironmentFailure("a")])
def test_types_that_cannot_be_combined(cause: Exception) -> None:
    error = failure_from(cause, "it broke")
    assert type(error) is EnvironmentFailure and error.__cause__ is cause and str(error) == "it broke"


def test_a_failure_survives_pickling_with_its_cause_and_both_its_types() -> None:
    cause = ValueError("what came")
    copied = pickle.loads(pickle.dumps(failure_from(cause, "environment 3: step raised")))
    assert isinstance(copied, EnvironmentFailure) and isinstance(copied, ValueError)
    assert str(copied) == "environment 3: step raised" and str(copied.__cause__) == "what came"
