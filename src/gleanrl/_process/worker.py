"""One worker process, seen from its owner: its start, its deadlines, and the errors that describe its loss."""

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
from gleanrl._process.shared_columns import HALT, ITEM, MEMORY, STEP, WORK
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
"""The interval in ms at which the owner checks whether workers make progress."""
_GRACE_S = 0.5
"""The extra time in seconds for a worker that seems late."""
_STACK_S = 2.0
_PAUSE_S = 0.02
_DESCRIPTORS = 3
_SPARE = 16


@dataclass(frozen=True)
class Timeouts:
    """Time limits for one piece of a worker's work, in seconds; None for no limit.

    A worker that works on several items in turn (for example environments) has the full time for each item. Idle time
    doesn't count.

    Attributes:
        start_s: for the creation of the service.
        work_s: for each item of a request or signal.
        close_s: for the end of all workers together; the rest are killed.

    Raises:
        InvalidArgumentError: a value isn't a positive number; `close_s` may be 0.
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
            raise InvalidArgumentError(f"close_s: expected seconds of 0 or more, got {self.close_s!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Stacks:
    """The file in memory that all workers of a pool append their Python stacks to."""

    def __init__(self) -> None:
        self._owned = Descriptors()
        (self.descriptor,) = self._owned.take(memory("gleanrl-stacks"))

    def read(self) -> str:
        """Return the text in the file."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode(errors="replace").strip("\0\n ")

    def take(self) -> str:
        """Return the text in the file, and empty the file."""
        text = self.read()
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return text

    def close(self) -> None:
        """Close the file."""
        self._owned.close()


@dataclass(frozen=True)
class WorkerPlan:
    """The settings that all workers of a pool share.

    Attributes:
        timeouts: their time limits.
        num_threads: the number of torch threads in each worker.
        preload: modules that the fork server imports, if this pool is the first one to need it.
        where: describes a worker's current work for error messages. Arguments: the worker's number, its item and its
            step.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    num_threads: int = 1
    preload: tuple[str, ...] = ()
    where: Callable[[int, int, int], str] = lambda worker, item, step: ""


class Worker:
    """A worker process, the owner's ends of its pipes, and the answers that are due. The constructor starts it.

    Args:
        index: its number in the pool.
        generation: the number of earlier workers with this index.
        progress: its words in the segment.
        stacks: the file for its stacks.
        shared: the descriptor of the segment.
        plan: the settings of its pool.

    Attributes:
        due: the numbers of the unanswered requests, in the order of sending; 0 for a signal.
        loss: the reason why the worker is lost; None while it is usable.
        is_made: whether its service was created.
        seconds: the current time limit for one item.

    Raises:
        LaunchError: the worker can't be started.
    """

    def __init__(
        self, index: int, generation: int, progress: memoryview, stacks: Stacks, shared: int, plan: WorkerPlan
    ) -> None:
        self.index, self.generation, self.progress, self._stacks = index, generation, progress, stacks
        self._owned = Descriptors()
        self._launcher = fork_server.current(ENTRY, (*_PRELOAD, *plan.preload))
        worker_reading, self.writing = self._owned.take(pipe())
        reading, worker_writing = self._owned.take(pipe())
        descriptors = [worker_reading, worker_writing, stacks.descriptor, shared]
        self.pid, self.sentinel = self._launcher.start(descriptors, self._owned)
        # Only the worker may hold its ends, so that the owner reads the end of the pipe when the worker ends.
        self._owned.close(worker_reading, worker_writing)
        self.channel = OwnerEnd(reading, self.writing)
        self.due: deque[int] = deque()
        self.loss: WorkerError | None = None
        self.is_made = False
        self.seconds = plan.timeouts.start_s
        self.begin()

    # ---------------------------------------------------------------- patience
    def begin(self) -> None:
        """Restart the worker's time limit."""
        self._mark, self._deadline = self._at(), Deadline(self.seconds)
        self._grace: Deadline | None = None

    def is_late(self) -> bool:
        """Return whether the worker has stayed at one item for too long.

        If it made progress, restart its time limit. Otherwise a grace period of up to 0.5 s begins at the first call
        after the limit, and the worker is late after it.
        """
        if not self._deadline.passed():
            return False
        if self._mark != self._at():
            self.begin()
        # The owner may not have looked for long, or the machine was suspended. So the worker gets a grace period first.
        elif self._grace is None:
            self._grace = Deadline(min(self.seconds or 0.0, _GRACE_S))
        return self._grace is not None and self._grace.passed()

    def _at(self) -> tuple[int, int, int]:
        """Return a value that changes whenever the worker moves to another item."""
        return self.progress[ITEM], self.progress[STEP], self.progress[WORK]

    @property
    def item(self) -> int:
        """The index of the worker's current item, or of its last one if it has ended."""
        return self.progress[ITEM]

    @property
    def step(self) -> int:
        """The worker's current step, or its last one if it has ended."""
        return self.progress[STEP]

    def halt(self, wanted: bool = True) -> None:
        """Ask the worker to break off long work at its next check, or withdraw this."""
        self.progress[HALT] = wanted

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(0))

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the process to end; return whether it has ended by the deadline."""
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        left = deadline.remaining()
        return bool(poller.poll(None if left is None else left * 1000))

    def terminate(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, SIGKILL by default, to the process if it still lives; don't wait for its end."""
        signal_process(self.sentinel, number)

    # ----------------------------------------------------------------- reports
    def crash(self, doing: str) -> WorkerCrashedError:
        """Return the error for an ended process; it says how the process ended and where it was at work.

        The call empties the file of stacks. It waits up to 5 s for the exit code.

        Args:
            doing: a description of its work.
        """
        code = self._launcher.exit_code(self.pid)
        lines = [f"worker {self.index} (process {self.pid}) {describe_exit(code)} {doing}"]
        peak = self.progress[MEMORY]
        if code == -signal.SIGKILL:
            lines.append("unless another process killed it, the system ran out of memory")
        if peak:
            lines.append(f"it had used up to {peak >> 20} MB")
        stack = self._stacks.take().partition("\n\nExtension modules:")[0]
        return WorkerCrashedError("; ".join(lines) + (f"\nIts stack at the end:\n{stack}" if stack else ""))

    def timeout(self, doing: str, seconds: float) -> WorkerTimeoutError:
        """Return the error for a process that makes no progress; it contains the Python stack (see `stack`).

        Args:
            doing: a description of its work.
            seconds: its time limit.
        """
        return WorkerTimeoutError(
            f"worker {self.index} (process {self.pid}) made no progress for {seconds:g} s {doing}\n{self.stack()}"
        )

    def stack(self) -> str:
        """Return the Python stack of the process as text, or the reason why there is none.

        The call sends SIGUSR1 to the process, waits up to 2 s for the text, and empties the file of stacks.
        """
        if state_of(self.pid) == "T":
            return "It is stopped (by SIGSTOP or a debugger), so that it can't show its stack."
        self._stacks.take()
        signal_process(self.sentinel, signal.SIGUSR1)
        deadline, before = Deadline(_STACK_S), ""
        while not deadline.passed() and not self.wait(Deadline(_PAUSE_S)):
            now = self._stacks.read()
            if now and now == before:  # The text has stopped growing, so the worker has finished writing.
                break
            before = now
        found = self._stacks.take()
        return f"Its Python stack:\n{found}" if found else "It doesn't show its stack."

    def close(self) -> None:
        """Close the owner's descriptors. A worker that still lives ends when it next uses its pipes."""
        self._owned.close()


def require_platform() -> None:
    """Raise unless the system has the calls that workers need.

    Raises:
        UnsupportedError: the system lacks a call; the message names it.
    """
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        raise UnsupportedError(
            f"worker processes need Linux (this system has no {' and no '.join(missing)}); "
            "use a SerialEnv, and collectors that work in this process"
        )


def require_descriptors(num_workers: int) -> None:
    """Raise if this process may not open the files that `num_workers` workers need.

    Raises:
        CapacityError: too few files may be opened; the message names the limit.
    """
    needed, left = num_workers * _DESCRIPTORS + _SPARE, descriptors_left()
    if needed > left:
        raise CapacityError(
            f"{num_workers} workers need {needed} open files, this process may open {left} more; "
            "raise the limit (ulimit -n) or use fewer processes"
        )
