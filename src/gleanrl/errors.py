"""The exceptions that gleanrl raises.

Every class derives from `GleanError` and from a built-in class for its kind of error. So `except GleanError` catches
it, and so does an existing `except ValueError` or `except RuntimeError`.
"""

from __future__ import annotations

from typing import Any


class GleanError(Exception):
    """Base class of every error that gleanrl raises on purpose."""


class InvalidArgumentError(GleanError, ValueError):
    """An argument has a value that the call can't accept; the message names the argument and the value."""


class LengthError(InvalidArgumentError, RuntimeError):
    """A list argument has a wrong length; the message gives the expected one."""


class MissingArgumentError(GleanError, RuntimeError, ValueError):
    """A call lacks an argument that it needs in this situation."""


class InvalidTypeError(GleanError, TypeError):
    """An argument has a type that the call can't accept."""


class ReservedNameError(InvalidArgumentError, AttributeError):
    """An entry has the name of an attribute, which it would hide; the message gives the name."""


class UnsupportedError(GleanError, NotImplementedError):
    """The call isn't supported, often since valid options don't work together; the message says what to do."""


class UnservedMemberError(UnsupportedError, AttributeError):
    """A class or module of a TorchRL release has an attribute that gleanrl lacks; the message says what to use."""


class UnservedKeywordError(UnsupportedError, TypeError):
    """A constructor of a TorchRL release has a keyword that gleanrl lacks; the message says what to use."""


class UnservedNameError(UnsupportedError, ImportError):
    """The program imported a name that a TorchRL release has and gleanrl lacks; the message says what to use."""


class UnservedModuleError(UnservedNameError, ModuleNotFoundError):
    """The program imported a module that a TorchRL release has and gleanrl lacks; the message says what to use."""


class EndlessError(UnsupportedError, TypeError):
    """An object without an end has no length; `list` and progress bars handle the TypeError."""


class SpaceError(UnsupportedError, NotImplementedError, ValueError):
    """Columns can't hold the values of a gymnasium space; the message names the space."""


class ClosedError(GleanError, RuntimeError):
    """A collector or an environment was used after it was closed."""


class MissingKeyError(GleanError, KeyError):
    """A key that the call needs is missing."""

    def __str__(self) -> str:
        """Return the message itself; `KeyError` would print its repr."""
        return str(self.args[0]) if self.args else ""


class SchemaError(GleanError, RuntimeError, ValueError):
    """Data have a missing key, an extra key, or another shape or dtype than the schema."""


class SpecError(GleanError, AssertionError, ValueError):
    """A value isn't in the domain of its spec."""


class BatchSizeError(GleanError, RuntimeError, ValueError):
    """A batch size isn't divisible into the requested parts."""


class IndexRangeError(GleanError, IndexError):
    """An index is out of range, for example beyond the filled part of a storage."""


class EmptyBufferError(GleanError, RuntimeError):
    """`sample` was called on an empty buffer."""


class RateLimiterTimeoutError(GleanError, RuntimeError, TimeoutError):
    """A call waited too long at a buffer's rate limiter; the message gives the counts. Nothing changed."""


class ContainerError(GleanError, AttributeError):
    """A transform was put into a second container."""


class CapacityError(GleanError, RuntimeError):
    """Memory or disk is too small for a requested allocation."""


class MissingLibraryError(GleanError, ImportError):
    """An optional library isn't installed; the message names the extra that installs it."""


class DatasetError(GleanError, ValueError):
    """A data set can't be converted; the message names file and key, the expected and the received value."""


class CheckpointError(GleanError, RuntimeError):
    """A checkpoint can't be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged; the message names the file and the place in it."""


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint has a later format, or belongs to another kind of object."""


class IncompleteCheckpointError(CheckpointError, FileNotFoundError):
    """A folder holds no complete checkpoint."""


class PolicyError(GleanError, RuntimeError):
    """A policy can't compute its input, or its output doesn't match the environment; the message names the key."""


class EnvironmentContractError(GleanError, RuntimeError):
    """An environment, or a transform in it, broke the contract of environments; the message says how.

    Examples: a key, shape or dtype differs from the specs, a reset returned done, or `_step` returned its input.
    """


class ConformanceError(GleanError, AssertionError):
    """An object breaks a rule of one of the conformance suites in `gleanrl.testing`.

    Args:
        rule: the name of the rule.
        where: the key, call or step that broke the rule.
        expected: the behaviour that the rule requires.
        got: the behaviour of the object.
    """

    def __init__(self, rule: str, where: str, expected: str, got: str) -> None:
        super().__init__(rule, where, expected, got)
        self.rule, self.where, self.expected, self.got = rule, where, expected, got

    def __str__(self) -> str:
        """Return the rule, the place, the expected and the actual behaviour."""
        return f"rule {self.rule!r}: {self.where}: expected {self.expected}, got {self.got}"


class NonFiniteError(GleanError, RuntimeError, ValueError):
    """An environment or a policy returned a NaN or an infinity."""


class WorkerError(GleanError, RuntimeError):
    """A worker process failed to carry out a request."""


class WorkerCrashedError(WorkerError):
    """A worker process ended unexpectedly; the message gives its exit status, and the call in which it ended."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process didn't answer in time; the message names its current call and shows its Python stack."""


class PendingError(GleanError, RuntimeError):
    """A new request was sent before the last answer was received, or more answers were requested than are due."""


class NotReadyError(GleanError, TimeoutError):
    """Fewer answers arrived in time than requested; the next call returns the answers that arrived."""


class EnvironmentFailure(GleanError, RuntimeError):
    """`step` or `reset` of an environment raised; `__cause__` holds the original error."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as cause and message: pickle can't find the classes that `failure_from` creates by their names."""
        if self.__cause__ is None:
            return type(self), self.args
        return failure_from, (self.__cause__, str(self))


def failure_from(cause: BaseException, message: str) -> EnvironmentFailure:
    """Return an `EnvironmentFailure` that can also be caught as the type of `cause`.

    Python refuses some types as a second base class: types that can't be subclassed, and types whose memory layout
    conflicts with that of `EnvironmentFailure`. Then the result is a plain `EnvironmentFailure` with this `__cause__`.
    """
    try:
        members = {"__str__": lambda self: message}
        kind: Any = type(type(cause).__name__, (EnvironmentFailure, type(cause)), members)
        # `__new__` of the base that determines the memory layout: that of the cause's type may need other arguments.
        failure: EnvironmentFailure = kind.__base__.__new__(kind, message)
        Exception.__init__(failure, message)
    except TypeError:
        failure = EnvironmentFailure(message)
    failure.__cause__ = cause
    return failure


class TakeoverError(GleanError, ImportError):
    """A program can't be taken over: TorchRL isn't installed, or was imported before; see `gleanrl.takeover`."""
