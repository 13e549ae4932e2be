"""Services for tests of the worker pool: normal requests, and every way in which a service can fail."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch

from gleanrl._process.shared_columns import ITEM, STEP, Region
from gleanrl._process.worker_main import WorkerContext


class PrivateError(Exception):
    """An exception with two arguments; its default pickle works."""

    def __init__(self, a: int, b: str) -> None:
        super().__init__(a, b)
        self.a, self.b = a, b


class UnpicklableError(Exception):
    """An exception that can't be pickled, because it holds a lock."""

    def __init__(self) -> None:
        super().__init__("held back")
        self.lock = threading.Lock()


class Clerk:
    """Counts signals and answers requests."""

    def __init__(self, station: WorkerContext) -> None:
        self.station, self.signals = station, 0
        station.progress[ITEM] = 7

    def signal(self, code: bytes) -> None:
        """Count the signal; raise at "r", die at "d", hang at "h"."""
        self.signals += 1
        self.station.progress[STEP] = self.signals
        if code == b"r":
            raise PrivateError(self.station.index, "signal")
        if code == b"d" and self.station.index:
            os.kill(os.getpid(), signal.SIGKILL)
        if code == b"h" and self.station.index:
            self.hang()

    def close(self) -> None:
        """Do nothing."""

    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    def count(self) -> int:
        """Return the number of signals."""
        return self.signals

    def fail(self) -> None:
        """Raise an exception that can be pickled."""
        raise PrivateError(self.station.index, "request")

    def fail_privately(self) -> None:
        """Raise an exception that can't be pickled."""
        raise UnpicklableError

    def unsendable(self) -> Any:
        """Return a value that can't be pickled."""
        return threading.Lock()

    def die(self, number: int) -> None:
        """End by a signal."""
        if number == signal.SIGSEGV:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        os.kill(os.getpid(), number)
        threading.Event().wait()

    def leave(self, code: int) -> None:
        """Exit at once, without an answer."""
        os._exit(code)

    def hang(self) -> None:
        """Wait for ever."""
        threading.Event().wait()

    def stop_itself(self) -> None:
        """Stop this process, as Ctrl-Z does."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def walk(self, steps: int) -> int:
        """Report one place after the other as progress, each for a tenth of a second."""
        for place in range(steps):
            self.station.progress[ITEM] = place
            threading.Event().wait(0.1)
        return steps

    def draws(self) -> tuple[float, float, float]:
        """Draw from every global generator."""
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def surroundings(self) -> dict[str, Any]:
        """Return the process's surroundings: pid, threads, folder, a variable, main file, descriptors."""
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
            "mark": os.environ.get("GLEANRL_TEST_MARK"),
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def fill(self, region: Region, number: int, value: int) -> int:
        """Fill a block of the shared memory row by row; return the value."""
        column = self.station.segment.block(region, number).column(("x",))
        for t in range(len(column)):
            column[t] = value
        return value


class Unmade(Clerk):
    """Raises in its constructor."""

    def __init__(self, station: WorkerContext) -> None:
        super().__init__(station)
        raise PrivateError(station.index, "construction")


class NeverMade(Clerk):
    """Hangs in its constructor."""

    def __init__(self, station: WorkerContext) -> None:
        super().__init__(station)
        self.hang()


class Grudging(Clerk):
    """Raises in `close`."""

    def close(self) -> None:
        """Raise."""
        raise PrivateError(self.station.index, "close")


class Stubborn(Clerk):
    """Hangs in `close` and ignores SIGTERM."""

    def close(self) -> None:
        """Wait for ever."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.hang()
