"""Exceptions on the way from a worker to its owner, with their traceback and, if possible, their type."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import cast

from gleanrl._process.pipes import decode, encode
from gleanrl.errors import WorkerError


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in a worker; its text is the worker's traceback."""

    def __str__(self) -> str:
        """Return the worker's traceback."""
        return f"\n\n{self.args[0]}" if self.args else ""


class Portable(Exception):
    """Base class of exceptions whose content can always be pickled."""


@dataclass(frozen=True)
class Report:
    """An exception as bytes, and as text in case that it can't be restored.

    Attributes:
        data: the pickled exception; None if it can't be pickled or restored.
        text: its type and message.
        trace: the worker's traceback.
    """

    data: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Report:
        """Return the report of `error`. To see whether it can be restored, the exception is pickled and unpickled."""
        text = f"{type(error).__name__}: {error}"
        return cls(_bytes(error), text, "".join(traceback.format_exception(error)).rstrip())

    def error(self, origin: str = "the worker") -> BaseException:
        """Return the exception, with the traceback of `origin` as its cause.

        If it can't be restored, return a `WorkerError`.
        """
        found: BaseException
        try:
            if self.data is None:
                raise WorkerError
            found = cast(BaseException, decode(self.data))
        # This process can't restore the exception, for example because it can't import its class.
        except Exception:
            found = WorkerError(self.text)
        found.__cause__ = RemoteTraceback(f"In {origin}:\n{self.trace}")
        return found


@dataclass(frozen=True)
class _Parts:
    """The content of an exception whose constructor doesn't accept its `args`, as pickle assumes."""

    kind: type[BaseException]
    args: tuple[object, ...]
    attributes: dict[str, object]

    def __reduce__(self) -> tuple[object, ...]:
        return _assembled, (self.kind, self.args, self.attributes)


def _assembled(
    kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _bytes(error: BaseException) -> bytes | None:
    """Return the bytes of `error` if an equal exception can be restored from them, or None."""
    if isinstance(error, Portable):
        return encode(error)
    return _restorable(error, error) or _restorable(error, _Parts(type(error), error.args, vars(error)))


def _restorable(error: BaseException, sent: object) -> bytes | None:
    """Return the bytes of `sent` if an exception like `error` can be restored from them, or None."""
    try:
        data = encode(sent)
        back = decode(data)
        found, wanted = type(back), type(error)
        # A class created for a single error (`failure_from`) is restored as a new class with the same bases.
        alike = found is wanted or found.__mro__[1:] == wanted.__mro__[1:]
        return data if alike and str(back) == str(error) else None
    except Exception:  # The constructor and the attributes may raise any error.
        return None
