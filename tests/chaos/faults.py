"""A fault of an environment in a worker, which happens once: its kind and its moment."""

from __future__ import annotations

import os
import resource
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import FakeFailure

FAULTS = ("kill", "segv", "stop", "exit", "raise", "hang", "memory", "data")
MOMENTS = ("construction", "first reset", "first step", "within a batch", "last step", "later reset")
EXIT_CODE = 5


@dataclass(frozen=True)
class Fault:
    """A fault that happens once, in the first environment that reaches its moment.

    Args:
        kind: one of `FAULTS`.
        moment: one of `MOMENTS`.
        token: a file that the fault creates, so that it never happens again.
        owner: the process in which the fault never happens.
        steps: steps of a worker's batch.
    """

    kind: str
    moment: str
    token: Path
    owner: int
    steps: int

    def constructed(self, env: Any) -> None:
        """Apply the fault at the construction of an environment."""
        if self.moment == "construction" and self._is_due():
            if self.kind == "data":
                env.observation_space = type(env.observation_space)(-1.0, 1.0, (3,), np.float32)
            else:
                self._happen()

    def passed(self, where: str, number: int, row: np.ndarray) -> Any:
        """Return the result of the `number`-th reset or step, unless the fault prevents it."""
        place, due = {
            "construction": ("", 0),
            "first reset": ("reset", 1),
            "first step": ("step", 1),
            "within a batch": ("step", self.steps + self.steps // 2),
            "last step": ("step", 2 * self.steps),
            "later reset": ("reset", 4),
        }[self.moment]
        if where == place and number >= due and self._is_due():
            if self.kind == "data":
                return row[:3]
            self._happen()
        return row

    def _is_due(self) -> bool:
        if os.getpid() == self.owner:
            return False
        try:
            self.token.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _happen(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.kind in ("kill", "segv", "stop"):
            number = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[self.kind]
            os.kill(os.getpid(), number)
            threading.Event().wait(30)
        elif self.kind == "exit":
            os._exit(EXIT_CODE)
        elif self.kind == "raise":
            raise FakeFailure("the fake broke on purpose")
        elif self.kind == "hang":
            threading.Event().wait(30)
        else:
            raise_for_memory()


def raise_for_memory() -> None:
    """Request more memory than this process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        np.ones(1 << 28, np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
