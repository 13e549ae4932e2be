"""The one family of errors that gleanrl raises.

Every class derives from `GleanError` and from the usual Python class for its kind, so that both
`except GleanError` and an existing `except ValueError` or `except RuntimeError` catch it.
"""

from __future__ import annotations

from typing import Any


class GleanError(Exception):
    """Base class of every error that gleanrl raises on purpose."""


class InvalidArgumentError(GleanError, ValueError):
    """An argument has a value that the call can't accept; the message names the argument and the value."""


class LengthError(InvalidArgumentError, RuntimeError):
    """A list of arguments has another length than what it is for."""


class MissingArgumentError(GleanError, RuntimeError, ValueError):
    """A call lacks an argument that it needs here."""


class InvalidTypeError(GleanError, TypeError):
    """An argument has a type that the call can't accept."""


class ReservedNameError(InvalidArgumentError, AttributeError):
    """A name for an entry is that of an attribute, which the entry would hide; the message gives the name."""


class UnsupportedError(GleanError, NotImplementedError):
    """A combination of valid options that can't work together; the message says which and what to do."""


class UnservedMemberError(UnsupportedError, AttributeError):
    """An attribute that a class or a module has in another release, not here; the message says what to use."""


class UnservedKeywordError(UnsupportedError, TypeError):
    """A keyword of a constructor that another release has and this one doesn't; the message says what to use."""


class UnservedNameError(UnsupportedError, ImportError):
    """A name was imported that another release has and this one doesn't; the message says what to use."""


class UnservedModuleError(UnservedNameError, ModuleNotFoundError):
    """A module was imported that another release has and this one doesn't; the message says what to use."""


class EndlessError(UnsupportedError, TypeError):
    """The length of something endless was asked for; `list` and progress bars go by the TypeError."""


class SpaceError(UnsupportedError, NotImplementedError, ValueError):
    """A gymnasium space whose values columns can't hold; the message names the space."""


class ClosedError(GleanError, RuntimeError):
    """A collector or an environment was used after it was closed."""


class MissingKeyError(GleanError, KeyError):
    """A key that the call needs is absent."""

    def __str__(self) -> str:
        """Return the message itself; `KeyError` would print its repr."""
        return str(self.args[0]) if self.args else ""


class SchemaError(GleanError, RuntimeError, ValueError):
    """Data with a missing key, an extra key, or another shape or dtype than the schema."""


class SpecError(GleanError, AssertionError, ValueError):
    """A value that isn't in the domain of its spec."""


class BatchSizeError(GleanError, RuntimeError, ValueError):
    """A batch size that can't be divided into the parts that were asked for."""


class IndexRangeError(GleanError, IndexError):
    """An index outside the filled part of a storage."""


class EmptyBufferError(GleanError, RuntimeError):
    """A sample was asked for from a buffer that holds nothing."""


class RateLimiterTimeoutError(GleanError, RuntimeError, TimeoutError):
    """A call waited at a buffer's rate limiter in vain; the message says for whom, with the counts. Nothing changed."""


class ContainerError(GleanError, AttributeError):
    """A transform was put into a second container."""


class CapacityError(GleanError, RuntimeError):
    """Memory or disk can't hold what was asked for."""


class MissingLibraryError(GleanError, ImportError):
    """A library that an extra brings isn't installed; the message names the extra."""


class CheckpointError(GleanError, RuntimeError):
    """A checkpoint can't be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged; the message names the file and where."""


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint of a later format, or of other parts."""


class IncompleteCheckpointError(CheckpointError, FileNotFoundError):
    """A folder holds no complete checkpoint."""


class PolicyError(GleanError, RuntimeError):
    """A policy's output isn't what the environment needs; the message names the key."""


class EnvironmentContractError(GleanError, RuntimeError):
    """An environment broke its own declaration: a key, shape or dtype changed, or a reset returned done."""


class ConformanceError(GleanError, AssertionError):
    """An object breaks a rule of one of the conformance suites in `gleanrl.testing`.

    Args:
        rule: the rule's name.
        where: the key, call or step at which it was broken.
        expected: what the rule asks for.
        got: what was found.
    """

    def __init__(self, rule: str, where: str, expected: str, got: str) -> None:
        super().__init__(rule, where, expected, got)
        self.rule, self.where, self.expected, self.got = rule, where, expected, got

    def __str__(self) -> str:
        """Return the rule, the place, what was expected and what came."""
        return f"rule {self.rule!r}: {self.where}: expected {self.expected}, got {self.got}"


class NonFiniteError(GleanError, RuntimeError, ValueError):
    """A NaN or an infinity came out of an environment or a policy."""


class WorkerError(GleanError, RuntimeError):
    """A worker process couldn't do what it was asked to."""


class WorkerCrashedError(WorkerError):
    """A worker process ended by itself; the message says how, and where it was at work."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process didn't answer in time; the message says where it was at work, with its Python stack."""


class PendingError(GleanError, RuntimeError):
    """An environment was asked for something before its last answer was received, or for more answers than are due."""


class NotReadyError(GleanError, TimeoutError):
    """Fewer answers arrived in time than were to be received; those that did are there for the next call."""


class EnvironmentFailure(GleanError, RuntimeError):
    """`step` or `reset` of an environment raised; `__cause__` holds the original error."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by cause and message: the classes that `failure_from` makes have no name to be found by."""
        if self.__cause__ is None:
            return type(self), self.args
        return failure_from, (self.__cause__, str(self))


def failure_from(cause: BaseException, message: str) -> EnvironmentFailure:
    """Return an `EnvironmentFailure` that can also be caught as the type of `cause`.

    Types whose instances can't be laid out together with `EnvironmentFailure` (or that refuse to be
    subclassed) give a plain `EnvironmentFailure`; the cause is then reached through `__cause__` only.
    """
    try:
        members = {"__str__": lambda self: message}
        kind: Any = type(type(cause).__name__, (EnvironmentFailure, type(cause)), members)
        # The layout's own `__new__`: that of the cause's type may want other arguments, or refuse other types.
        failure: EnvironmentFailure = kind.__base__.__new__(kind, message)
        Exception.__init__(failure, message)
    except TypeError:
        failure = EnvironmentFailure(message)
    failure.__cause__ = cause
    return failure


class TakeoverError(GleanError, ImportError):
    """A program can't be taken over: torchrl isn't installed, or was imported before; see `gleanrl.takeover`."""
