"""One worker, seen from its owner: started, signalled, and described when something is wrong with it."""

from __future__ import annotations

import math
import os
import select
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gleanrl._os import fork_server
from gleanrl._os.clock import Deadline
from gleanrl._os.files import Descriptors, memory, pipe
from gleanrl._os.proc import describe_exit, descriptors_left, signal_process, state_of
from gleanrl._process.pipes import OwnerEnd
from gleanrl._process.shared_columns import HALT, MEMORY, PLACE, STEP, WORK
from gleanrl._process.worker_main import ENTRY
from gleanrl.errors import (
    CapacityError,
    InvalidArgumentError,
    UnsupportedError,
    WorkerCrashedError,
    WorkerError,
    WorkerTimeoutError,
)

_PRELOAD = ("gleanrl._process.worker_main",)
LOOK_MS = 250.0
"""How often it's looked whether workers get on."""
_GRACE_S = 0.5
"""How long a worker that seems late is given to show that it isn't."""
_STACK_S = 2.0
_PAUSE_S = 0.02
_DESCRIPTORS = 3
_SPARE = 16


@dataclass(frozen=True)
class Timeouts:
    """How long a worker may stay at one piece of work, in seconds; None for ever.

    A worker that goes on from item to item (from environment to environment, say) has so long for each. How long
    nobody asks it anything doesn't matter.

    Attributes:
        start_s: until it has made what it works on.
        work_s: for an item of what it's asked to do.
        close_s: for all workers together to end; those that haven't then are killed.

    Raises:
        InvalidArgumentError: for what isn't a positive number (0 will do to close).
    """

    start_s: float | None = 120.0
    work_s: float | None = 60.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("start_s", self.start_s), ("work_s", self.work_s)):
            if value is not None and not (_is_number(value) and value > 0):
                raise InvalidArgumentError(f"{name}: expected seconds above 0, or None, got {value!r}")
        if not (_is_number(self.close_s) and self.close_s >= 0):
            raise InvalidArgumentError(f"close_s: expected seconds, got {self.close_s!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Stacks:
    """Where workers write their Python stacks: a file in memory that they all append to."""

    def __init__(self) -> None:
        self._held = Descriptors()
        (self.descriptor,) = self._held.take(memory("gleanrl-stacks"))

    def read(self) -> str:
        """Return what was written."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode(errors="replace").strip("\0\n ")

    def take(self) -> str:
        """Return what was written, and empty the file."""
        text = self.read()
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return text

    def close(self) -> None:
        """Close the file."""
        self._held.close()


@dataclass(frozen=True)
class WorkerPlan:
    """What all workers of a crew have in common.

    Attributes:
        timeouts: how long they may take.
        num_threads: torch threads of each.
        preload: modules that the launcher imports if this crew is the first one to need it.
        where: says where a worker is at work, for error messages: gets its number, place and step.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    num_threads: int = 1
    preload: tuple[str, ...] = ()
    where: Callable[[int, int, int], str] = lambda worker, place, step: ""


class Worker:
    """A worker process, the owner's ends of its pipes, and what it's still to answer.

    Args:
        index: its number in the crew.
        generation: how many had that number before it.
        progress: its words in the segment.
        stacks: where it writes its stacks.
        shared: the descriptor of the segment.
        plan: that of its crew.

    Attributes:
        due: the numbers of the requests that it's still to answer, in the order of asking.
        loss: why it's of no further use; None while it is.
        is_made: whether its servant was made.
        seconds: how long it may stay at one item.

    Raises:
        LaunchError: if it can't be started.
    """

    def __init__(
        self, index: int, generation: int, progress: memoryview, stacks: Stacks, shared: int, plan: WorkerPlan
    ) -> None:
        self.index, self.generation, self.progress, self._stacks = index, generation, progress, stacks
        self._held = Descriptors()
        self._launcher = fork_server.current(ENTRY, (*_PRELOAD, *plan.preload))
        its_reading, self.writing = self._held.take(pipe())
        reading, its_writing = self._held.take(pipe())
        given = [its_reading, its_writing, stacks.descriptor, shared]
        self.pid, self.sentinel = self._launcher.start(given, self._held)
        self._held.close(its_reading, its_writing)
        self.channel = OwnerEnd(reading, self.writing)
        self.due: deque[int] = deque()
        self.loss: WorkerError | None = None
        self.is_made = False
        self.seconds = plan.timeouts.start_s
        self.begin()

    # ---------------------------------------------------------------- patience
    def begin(self) -> None:
        """Give it its time, from now on."""
        self._mark, self._deadline = self._at(), Deadline(self.seconds)
        self._grace: Deadline | None = None

    def is_late(self) -> bool:
        """Return whether it has stayed at one item for too long; if it went on, it's given its time again."""
        if not self._deadline.passed():
            return False
        if self._mark != self._at():
            self.begin()
        elif self._grace is None:  # nobody may have looked for long, or the machine slept
            self._grace = Deadline(min(self.seconds or 0.0, _GRACE_S))
        return self._grace is not None and self._grace.passed()

    def _at(self) -> tuple[int, int, int]:
        """Return what changes whenever the worker goes on to another item."""
        return self.progress[PLACE], self.progress[STEP], self.progress[WORK]

    @property
    def place(self) -> int:
        """Which item it's at, or was at when it ended."""
        return self.progress[PLACE]

    @property
    def step(self) -> int:
        """Which step it's at, or was at when it ended."""
        return self.progress[STEP]

    def halt(self, wanted: bool = True) -> None:
        """Let the worker break off what is long, as soon as it looks; or let it work on from the next request."""
        self.progress[HALT] = wanted

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(0))

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the process to end; return whether it has."""
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        left = deadline.remaining()
        return bool(poller.poll(None if left is None else left * 1000))

    def terminate(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it still lives."""
        signal_process(self.sentinel, number)

    # ----------------------------------------------------------------- reports
    def crash(self, doing: str) -> WorkerCrashedError:
        """Return the error that tells how the process ended, and where it was at work.

        Args:
            doing: what it was to do.
        """
        code = self._launcher.exit_code(self.pid)
        lines = [f"worker {self.index} (process {self.pid}) {describe_exit(code)} {doing}"]
        peak = self.progress[MEMORY]
        if code == -signal.SIGKILL:
            lines.append("if nobody killed it, the system did for want of memory")
        if peak:
            lines.append(f"it had used up to {peak >> 20} MB")
        stack = self._stacks.take().partition("\n\nExtension modules:")[0]
        return WorkerCrashedError("; ".join(lines) + (f"\nIts stack at the end:\n{stack}" if stack else ""))

    def timeout(self, doing: str, seconds: float) -> WorkerTimeoutError:
        """Return the error that tells where the process hangs, with its Python stack.

        Args:
            doing: what it was to do.
            seconds: how long it had for that.
        """
        return WorkerTimeoutError(
            f"worker {self.index} (process {self.pid}) hasn't got on for {seconds:g} s {doing}\n{self.stack()}"
        )

    def stack(self) -> str:
        """Return the Python stack of the process, or why there is none."""
        if state_of(self.pid) == "T":
            return "It is stopped (by SIGSTOP or a debugger), so that it can't show its stack."
        self._stacks.take()
        signal_process(self.sentinel, signal.SIGUSR1)
        deadline, before = Deadline(_STACK_S), ""
        while not deadline.passed() and not self.wait(Deadline(_PAUSE_S)):
            now = self._stacks.read()
            if now and now == before:  # it has finished writing
                break
            before = now
        found = self._stacks.take()
        return f"Its Python stack:\n{found}" if found else "It doesn't show its stack."

    def close(self) -> None:
        """Close the owner's descriptors."""
        self._held.close()


def require_platform() -> None:
    """Raise where the system lacks what workers are made with.

    Raises:
        UnsupportedError: naming what is missing.
    """
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        raise UnsupportedError(
            f"worker processes need Linux (this system has no {' and no '.join(missing)}); "
            "use a SerialEnv, and collectors that work in this process"
        )


def require_descriptors(num_workers: int) -> None:
    """Raise if this process may not open the files that so many workers need.

    Raises:
        CapacityError: naming the limit.
    """
    needed, left = num_workers * _DESCRIPTORS + _SPARE, descriptors_left()
    if needed > left:
        raise CapacityError(
            f"{num_workers} workers need {needed} open files, this process may open {left} more; "
            "raise the limit (ulimit -n) or use fewer processes"
        )
