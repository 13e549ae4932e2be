"""Servants for tests of the worker layer: what a worker can do, and how it can go wrong."""

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

from gleanrl._process.shared_columns import PLACE, STEP, Region
from gleanrl._process.worker_main import WorkerContext


class PrivateError(Exception):
    """Takes two arguments and keeps them."""

    def __init__(self, a: int, b: str) -> None:
        super().__init__(a, b)
        self.a, self.b = a, b


class UnpicklableError(Exception):
    """Can't be sent: it holds a lock."""

    def __init__(self) -> None:
        super().__init__("held back")
        self.lock = threading.Lock()


class Clerk:
    """Counts signals; does what is asked of it."""

    def __init__(self, station: WorkerContext) -> None:
        self.station, self.signals = station, 0
        station.progress[PLACE] = 7

    def signal(self, code: bytes) -> None:
        """Count; raise at "r", die at "d", wait for ever at "h"."""
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
        """Raise."""
        raise PrivateError(self.station.index, "request")

    def fail_privately(self) -> None:
        """Raise what can't be sent."""
        raise UnpicklableError

    def unsendable(self) -> Any:
        """Return what can't be sent."""
        return threading.Lock()

    def die(self, number: int) -> None:
        """End by a signal."""
        if number == signal.SIGSEGV:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        os.kill(os.getpid(), number)
        threading.Event().wait()

    def leave(self, code: int) -> None:
        """End without a word."""
        os._exit(code)

    def hang(self) -> None:
        """Wait for what never comes."""
        threading.Event().wait()

    def stop_itself(self) -> None:
        """Stop as by Ctrl-Z."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def walk(self, steps: int) -> int:
        """Go from item to item, each for a tenth of a second."""
        for place in range(steps):
            self.station.progress[PLACE] = place
            threading.Event().wait(0.1)
        return steps

    def draws(self) -> tuple[float, float, float]:
        """Draw from every global generator."""
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def surroundings(self) -> dict[str, Any]:
        """Tell what the process finds around it."""
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
            "mark": os.environ.get("GLEANRL_TEST_MARK"),
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def fill(self, region: Region, number: int, value: int) -> int:
        """Fill a block of the shared memory, row by row; return the value."""
        column = self.station.segment.block(region, number).column(("x",))
        for t in range(len(column)):
            column[t] = value
        return value


class Unmade(Clerk):
    """Can't be made."""

    def __init__(self, station: WorkerContext) -> None:
        super().__init__(station)
        raise PrivateError(station.index, "construction")


class NeverMade(Clerk):
    """Hangs when it's made."""

    def __init__(self, station: WorkerContext) -> None:
        super().__init__(station)
        self.hang()


class Grudging(Clerk):
    """Raises when it's closed."""

    def close(self) -> None:
        """Raise."""
        raise PrivateError(self.station.index, "close")


class Stubborn(Clerk):
    """Doesn't come back from its close, nor from SIGTERM."""

    def close(self) -> None:
        """Wait for ever."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.hang()
