"""gymnasium environments that hang or end their process on purpose, at a step or a reset of an oracle stream."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from gleanrl.envs import GymWrapper
from tests.envs.vector.makers import SCRIPT
from tests.fakes import OracleEnv


class AwkwardEnv(OracleEnv):
    """Calls `act` in its `at`-th step (from 1), or in its `at`-th reset."""

    def __init__(self, act: Callable[[], Any], at: int, where: str = "step", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.act, self.at, self.where = act, at, where

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or act."""
        result = super().reset(**kwargs)
        if self.where == "reset" and len(self.resets) == self.at:
            self.act()
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step, or act."""
        result = super().step(action)
        if self.where == "step" and self.steps_taken == self.at:
            self.act()
        return result


def kill(number: int = signal.SIGKILL) -> None:
    """End this process by a signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)
    wait()


def wait() -> None:
    """Wait for ever."""
    threading.Event().wait()


def leave() -> None:
    """End this process at once."""
    os._exit(5)


def interrupt() -> None:
    """Raise the exception of Ctrl-C."""
    raise KeyboardInterrupt


def awkward(act: Callable[[], Any], at: int, where: str = "step", stream: int = 0) -> GymWrapper:
    """Return an environment that acts once."""
    return GymWrapper(AwkwardEnv(act, at, where, stream=stream, script=SCRIPT))


def pass_through(gate: str) -> None:
    """Wait until any process calls `open_gate`."""
    with open(gate) as fifo:
        fifo.read()


def open_gate(gate: str) -> None:
    """Let one waiting process pass, or wait for one."""
    with open(gate, "w"):
        pass
