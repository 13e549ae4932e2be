"""Exceptions on their way from a worker to its owner: the original type where that can be, and the traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import cast

from gleanrl._process.pipes import decode, encode
from gleanrl.errors import WorkerError


class RemoteTraceback(Exception):
    """Stands as the cause of an exception that was raised in a worker, and shows where."""

    def __str__(self) -> str:
        """Return the worker's traceback."""
        return f"\n\n{self.args[0]}" if self.args else ""


class Portable(Exception):
    """Abstract: an exception that is made to be sent: what it holds can always be pickled."""


@dataclass(frozen=True)
class Report:
    """An exception as bytes, or in words if it can't be sent.

    Attributes:
        data: the pickled exception; None if it can't be pickled or restored.
        words: its type and message.
        trace: the worker's traceback.
    """

    data: bytes | None
    words: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Report:
        """Return the report of `error`."""
        words = f"{type(error).__name__}: {error}"
        return cls(_bytes(error), words, "".join(traceback.format_exception(error)).rstrip())

    def error(self, origin: str = "the worker") -> BaseException:
        """Return the exception, with the traceback of `origin` as its cause."""
        found: BaseException
        try:
            if self.data is None:
                raise WorkerError
            found = cast(BaseException, decode(self.data))
        except Exception:  # its class can't be restored here
            found = WorkerError(self.words)
        found.__cause__ = RemoteTraceback(f"In {origin}:\n{self.trace}")
        return found


@dataclass(frozen=True)
class _Parts:
    """What an exception is made of whose constructor doesn't take its `args`, as pickle believes."""

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
    """Return `error` as bytes if an equal one comes back from them."""
    if isinstance(error, Portable):
        return encode(error)
    return _restorable(error, error) or _restorable(error, _Parts(type(error), error.args, vars(error)))


def _restorable(error: BaseException, sent: object) -> bytes | None:
    """Return `sent` as bytes if an exception like `error` comes back from them."""
    try:
        data = encode(sent)
        back = decode(data)
        found, wanted = type(back), type(error)
        # Classes that are made for one error (`failure_from`) come back as others of the same bases.
        alike = found is wanted or found.__mro__[1:] == wanted.__mro__[1:]
        return data if alike and str(back) == str(error) else None
    except Exception:  # whatever its constructor or its attributes raise
        return None
