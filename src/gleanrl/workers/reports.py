"""Exceptions on their way from a worker to its owner: the original type where that can be, and the traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import cast

from gleanrl.errors import WorkerError
from gleanrl.workers.channel import decode, encode


class RemoteTraceback(Exception):
    """Stands as the cause of an exception that was raised in a worker, and shows where."""

    def __str__(self) -> str:
        """Return the worker's traceback."""
        return f"\n\n{self.args[0]}" if self.args else ""


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

    def error(self) -> BaseException:
        """Return the exception, with the worker's traceback as its cause."""
        found: BaseException
        try:
            if self.data is None:
                raise WorkerError
            found = cast(BaseException, decode(self.data))
        except Exception:  # its class can't be restored here
            found = WorkerError(self.words)
        found.__cause__ = RemoteTraceback(self.trace)
        return found


def _bytes(error: BaseException) -> bytes | None:
    """Return `error` as bytes if an equal one comes back from them."""
    try:
        data = encode(error)
        found = type(decode(data))
        # Classes that are made for one error (`failure_from`) come back as others of the same bases.
        return data if found is type(error) or found.__mro__[1:] == type(error).__mro__[1:] else None
    except Exception:  # whatever its constructor or its attributes raise
        return None
