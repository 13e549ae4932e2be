"""The worker pool: all worker processes of one owner, which it starts, calls, waits for, replaces and ends.

The pool provides the mechanism, and its owner decides the policy. The owner knows the meaning of an answer, and decides
whether all workers wait for each other. It replaces a lost worker or ends the pool. The pool reports the loss of a
worker as an answer, and so each later request to a lost worker.

The owner polls the pipes and the process descriptors together. So it notices the end of a process at once, and a wait
uses no processor time. An interrupt (Ctrl-C, a signal handler that raises) leaves the pool usable. The interrupted
caller may lose an answer, but a later call neither waits for it nor takes it for another one. `forget` drops the
answers that are still due.

Workers end in three steps: a request, SIGTERM, SIGKILL. Each step addresses all workers at once, within one common time
limit.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from gleanrl._os.clock import Deadline
from gleanrl._process.pipes import DONE, PIECE, ChannelClosed, ChannelFull, decode, encode
from gleanrl._process.shared_columns import OWN, SharedSegment
from gleanrl._process.worker import LOOK_MS, Stacks, Worker, WorkerPlan, require_descriptors, require_platform
from gleanrl._process.worker_main import STOP, SYNC, MakeService, WorkerReply, WorkerRequest, WorkerSetting
from gleanrl.errors import ClosedError, WorkerError

_ENDING_TERM_S = 1.0
_STOPPING = -1


def ask_to_end(workers: Sequence[Worker], seconds: float) -> list[BaseException]:
    """Ask each worker to close its service and end, and send SIGTERM to the rest; return the errors of the services.

    All earlier answers are dropped. Workers may still live when the call returns, a second after SIGTERM.

    Args:
        workers: the workers of one owner.
        seconds: their common time limit before SIGTERM.
    """
    deadline = Deadline(seconds)
    for worker in workers:
        worker.halt()
    notified = [worker for worker in workers if _ask_to_stop(worker, deadline)]
    raised = [error for worker in notified if (error := _closing_error(worker, deadline)) is not None]
    for worker in workers:
        worker.wait(deadline)
    _signal(workers, signal.SIGTERM)
    return raised


def kill(workers: Sequence[Worker]) -> None:
    """Kill every worker that still lives, and wait up to a second for their ends."""
    _signal(workers, signal.SIGKILL)


def _ask_to_stop(worker: Worker, deadline: Deadline) -> bool:
    if worker.has_ended or worker.loss is not None:
        return False
    try:
        worker.channel.send(encode(WorkerRequest(_STOPPING, STOP)), deadline)
    except (ChannelClosed, ChannelFull):
        return False
    return True


def _closing_error(worker: Worker, deadline: Deadline) -> BaseException | None:
    """Return the error that a worker's service raised when it was closed; None if it raised none by the deadline.

    Earlier answers are dropped.
    """
    poller = select.poll()
    poller.register(worker.channel.reading, select.POLLIN)
    with suppress(ChannelClosed):
        while poller.poll((deadline.remaining() or 0.0) * 1000):
            worker.channel.pull()
            while (arrived := worker.channel.take()) is not None:
                reply = WorkerReply(0) if arrived[0] == DONE else cast(WorkerReply, decode(arrived[1]))
                if reply.number == _STOPPING and reply.report is not None:
                    return reply.report.error(f"worker {worker.index} (process {worker.pid})")
    return None


def _signal(workers: Sequence[Worker], number: int) -> None:
    """Send a signal to the living workers and wait for their end."""
    alive = [worker for worker in workers if not worker.has_ended]
    for worker in alive:
        worker.terminate(number)
    deadline = Deadline(_ENDING_TERM_S)
    for worker in alive:
        worker.wait(deadline)


_JUST_DONE = [DONE]
_TERM_S = 1.0
_KILL_S = 10.0
_SIGNAL = 0
_pool_numbers = itertools.count()


class WorkerAnswer(NamedTuple):
    """The outcome of a request or a signal.

    Attributes:
        worker: the worker's number.
        request: the number that `WorkerPool.post` returned; 0 for a signal.
        value: the return value of the service's method.
        error: the exception that the service raised, or the error that describes the worker's loss.
        lost: whether the worker ended or hung. Until it is replaced, each of its requests gets such an answer.
    """

    worker: int
    request: int
    value: Any = None
    error: BaseException | None = None
    lost: bool = False


class WorkerPool:
    """Worker processes that serve one owner. For one thread at a time.

    The first answer of each worker reports whether its service was created, or the error.

    Args:
        makers: one function for each worker, which creates its service there.
        plan: the common settings.

    Raises:
        CapacityError: this process can't have so many workers.
        UnsupportedError: the system isn't Linux.
        LaunchError: no process can be started.
    """

    def __init__(self, makers: Sequence[MakeService], plan: WorkerPlan) -> None:
        require_platform()
        require_descriptors(len(makers))
        self.plan = plan
        self.closed, self.ended, self._ending, self._reason = False, False, False, ""
        self._owner = os.getpid()
        self._family = (torch.initial_seed(), next(_pool_numbers))
        self._numbers = itertools.count(1)
        self._poller = select.poll()
        self._readers: dict[int, Worker] = {}
        self._signalled: set[int] = set()
        # The worker whose answer is looked for first. It rotates, so that fast workers can't starve a slow one.
        self._rotation = 0
        self.workers: list[Worker] = []
        self.segment = SharedSegment(len(makers))
        self._stacks = Stacks()
        try:
            for index, make in enumerate(makers):
                self._start(index, 0, len(makers), make)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, index: int, generation: int, num_workers: int, make: MakeService) -> None:
        """Start a worker, send its settings, and put it in the list of workers, in place of a former one.

        The answer about its service is due then.
        """
        number = next(self._numbers)
        process_state = (tuple(sys.path), os.getcwd(), dict(os.environ))
        entropy = (*self._family, index, generation)
        setting = WorkerSetting(number, index, num_workers, *process_state, entropy, self.plan.num_threads)
        setup = encode((setting, encode(make)))
        progress = self.segment.progress(index)
        worker = Worker(index, generation, progress, self._stacks, self.segment.descriptor, self.plan)
        try:
            self._readers[worker.channel.reading] = worker
            self._poller.register(worker.channel.reading, select.POLLIN)
            self._poller.register(worker.sentinel, select.POLLIN)
            self._write(worker, setup)
            worker.due.append(number)
            # Last, so that the list never contains a worker whose start was interrupted.
            self.workers[index : index + 1] = [worker]
        except BaseException:
            self._unregister(worker)  # The process ends when its pipes are closed.
            raise

    # --------------------------------------------------------------- asking
    def post(self, index: int, name: str, *arguments: Any) -> int:
        """Send a request to call a method of a worker's service; return its number.

        A worker serves its requests one by one, in the order of sending. The call waits until the message is in the
        pipe. A worker that doesn't read it within its time limit is lost. To a lost worker nothing is sent, but its
        answer is due.

        Raises:
            WorkerError: the arguments can't be pickled; nothing was sent then.
            ClosedError: the pool was closed, or this is a fork of the process that started it.
        """
        self.check()
        number = next(self._numbers)
        data = encode(WorkerRequest(number, name, arguments))
        self._check_open()
        worker = self.workers[index]
        if not worker.due:
            worker.begin()
        self._write(worker, data)
        # After the write: if it raises, the pool must not wait for an answer that can't come.
        worker.due.append(number)
        return number

    def send(self, index: int, code: bytes) -> None:
        """Send a signal to one worker.

        `wait_any` returns its answer, with the number 0. More signals may be sent before. The call doesn't wait.

        Raises:
            ClosedError: the pool was closed.
        """
        self._check_open()
        worker = self.workers[index]
        if not worker.due:
            worker.begin()
        with suppress(BrokenPipeError):  # The wait for its answer detects that it ended.
            os.write(worker.writing, code)
        worker.due.append(_SIGNAL)

    def signals_due(self, index: int) -> int:
        """Return how many signals to a worker have no answer yet. Answers that arrived but weren't taken count, too."""
        return self.workers[index].due.count(_SIGNAL)

    def signal(self, code: bytes) -> bool:
        """Send a signal to all workers and wait; return whether all of them answered `DONE`.

        If not, a worker raised, was lost or returned a value; `wait_any` then returns all remaining answers. This call
        runs at every step. It therefore does only a write and a read for each worker, and a poll or two.
        """
        self._check_open()
        workers, pending, readers = self.workers, self._signalled, self._readers
        poll, read = self._poller.poll, os.read
        if pending:
            self.forget()
        all_done = True
        for worker in workers:
            # Before the write: after an interrupt, `forget` must expect an answer to a byte that may have been sent.
            pending.add(worker.index)
            try:
                os.write(worker.writing, code)
            except BrokenPipeError:
                all_done = False
        while all_done and pending:
            ready = poll(LOOK_MS)
            all_done = bool(ready)
            for descriptor, _ in ready:
                sender = readers.get(descriptor)
                if sender is None:
                    all_done = False
                    break
                inbox = sender.channel.inbox
                inbox.extend(map(read, (descriptor,), PIECE))
                if inbox != _JUST_DONE:
                    all_done = False
                    break
                inbox.clear()
                pending.discard(sender.index)
        self._check_open()
        if not all_done:
            for worker in workers:
                worker.begin()
        return all_done

    def forget(self) -> None:
        """Drop the answers that are still due, because an interrupt kept the owner from waiting for them.

        After abandoned calls of `signal`, wait until their workers have answered or are lost.
        """
        for worker in self.workers:
            worker.due.clear()
        # Answers to signals have no numbers. So a request follows each abandoned signal: everything before its answer
        # is old.
        for index in sorted(self._signalled):
            self.post(index, SYNC)
        while self._signalled and self.wait_any() is not None:
            pass

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the process that started the workers, which don't serve it."""
        return os.getpid() != self._owner

    def check(self) -> None:
        """Raise `ClosedError` if the pool was closed, or if this is a fork of the process that started it."""
        if self.is_foreign:
            raise ClosedError("workers serve the process that started them, not its forks")
        self._check_open()

    def _check_open(self) -> None:
        """Raise if the pool was closed.

        This may happen during a call, when a garbage collection runs the finalizer of another owner.
        """
        if self.closed:
            raise ClosedError(f"the workers have been ended{self._reason}")

    def _write(self, worker: Worker, data: bytes) -> None:
        seconds = self.plan.timeouts.work_s
        if worker.loss is not None:
            return
        try:
            worker.channel.send(data, Deadline(seconds))
        except ChannelClosed:
            # Its last answers may still be in the pipe. The wait for answers returns them before it reports the end.
            pass
        except ChannelFull:
            self._hung(worker, seconds)
        except BaseException:
            self._finish(worker)
            raise

    def _finish(self, worker: Worker) -> None:
        """Send the rest of a message after an interrupt. A worker that doesn't read it within 1 s is lost."""
        try:
            worker.channel.finish(Deadline(_TERM_S))
        except (ChannelClosed, ChannelFull):
            pass
        finally:
            if worker.channel.is_midway:  # also after a second interrupt
                self._lose(worker, WorkerError(f"a long message to worker {worker.index} was interrupted"))

    # -------------------------------------------------------------- waiting
    @property
    def is_idle(self) -> bool:
        """Whether all workers have answered everything and none is known to be lost."""
        return not self.closed and not self._signalled and not any(w.due or w.loss for w in self.workers)

    def wait_any(self, deadline: Deadline | None = None) -> WorkerAnswer | None:
        """Return the next answer. Return None if none is due, or if none has arrived by the deadline.

        Arrived answers are returned even if the deadline has already passed.

        Raises:
            ClosedError: the pool was closed, before or during the call.
        """
        has_looked = False
        while True:
            self._check_open()
            for worker in (*self.workers[self._rotation :], *self.workers[: self._rotation]):
                if (worker.due or worker.index in self._signalled) and (answer := self._next(worker)):
                    self._rotation = worker.index + 1
                    return answer
            if not self._signalled and not any(worker.due for worker in self.workers):
                return None
            if has_looked and deadline is not None and deadline.passed():
                return None
            self._look(deadline)
            has_looked = True

    def wait_all(self) -> list[WorkerAnswer]:
        """Return all due answers, sorted by worker.

        After the loss of a worker, return only the answers up to its loss; the others are still due.
        """
        answers: list[WorkerAnswer] = []
        while (answer := self.wait_any()) is not None:
            answers.append(answer)
            if answer.lost:
                break
        return sorted(answers, key=lambda answer: answer.worker)

    def _next(self, worker: Worker) -> WorkerAnswer | None:
        """Return the next answer of a worker, or None if none has arrived. Answers that are no longer due are dropped.

        A lost worker answers with its loss, after the answers that arrived before it. Each answer that arrives restarts
        the worker's time limit.
        """
        index, due, inbox = worker.index, worker.due, worker.channel.inbox
        if worker.loss is None:
            if not inbox:
                return None
            # The fast path for the usual answer to a signal. After an interrupt between the next two lines, the answer
            # stays in the inbox and is dropped later.
            if inbox == _JUST_DONE and due and due[0] == _SIGNAL and worker.is_made:
                due.popleft()
                inbox.clear()
                return WorkerAnswer(index, _SIGNAL)
        try:
            while worker.loss is None and (arrived := worker.channel.first()) is not None:
                code, data = arrived
                reply = WorkerReply(_SIGNAL) if code == DONE else cast(WorkerReply, decode(data))
                worker.seconds = self.plan.timeouts.work_s
                worker.is_made = worker.is_made or reply.report is None
                worker.begin()
                error = (
                    None
                    if reply.report is None
                    else reply.report.error(f"worker {index} (process {worker.pid})")
                )
                wanted = reply.number in due
                # `due` is updated before the inbox. After an interrupt in between, the answer isn't due any more and is
                # dropped later.
                while wanted and due.popleft() != reply.number:
                    pass
                if wanted or (reply.number == _SIGNAL and index in self._signalled and not due):
                    self._signalled.discard(index)
                    wanted = True
                worker.channel.drop()
                if wanted:
                    return WorkerAnswer(index, reply.number, reply.value, error)
        except ChannelClosed:
            self._crashed(worker)
        if worker.loss is None:
            return None
        number = due.popleft() if due else _SIGNAL
        self._signalled.discard(index)
        return WorkerAnswer(index, number, None, worker.loss, lost=True)

    def _look(self, deadline: Deadline | None) -> None:
        """Wait until bytes arrive or a process ends, and mark workers as lost that ended or are late."""
        left = LOOK_MS if deadline is None else 1000 * (deadline.remaining() or 0.0)
        patience = [LOOK_MS if w.seconds is None else min(LOOK_MS, 1000 * w.seconds) for w in self.workers]
        ready = self._poller.poll(min(left, *patience))
        self._check_open()
        described = [descriptor for descriptor, _ in ready]
        senders = [self._readers[descriptor] for descriptor in described if descriptor in self._readers]
        for worker in senders:
            worker.channel.pull()
            worker.begin()
            if worker.channel.has_ended:
                self._unregister(worker)
        for worker in self.workers:
            if worker.loss is None and worker not in senders:
                if worker.sentinel in described:
                    self._crashed(worker)
                elif (worker.due or worker.index in self._signalled) and worker.is_late():
                    self._hung(worker, worker.seconds)

    # ---------------------------------------------------------------- losses
    def _crashed(self, worker: Worker) -> None:
        # The kernel closes a process's pipes just before the process has ended.
        worker.wait(Deadline(_TERM_S))
        self._lose(worker, worker.crash(self._doing(worker)))

    def _hung(self, worker: Worker, seconds: float | None) -> None:
        self._lose(worker, worker.timeout(self._doing(worker), seconds or 0.0))

    def _doing(self, worker: Worker) -> str:
        return self.plan.where(worker.index, worker.item, worker.step)

    def _lose(self, worker: Worker, loss: WorkerError) -> None:
        worker.loss = loss
        worker.terminate()
        self._unregister(worker)

    def _unregister(self, worker: Worker) -> None:
        self._readers.pop(worker.channel.reading, None)
        for descriptor in (worker.channel.reading, worker.sentinel):
            with suppress(KeyError):
                self._poller.unregister(descriptor)

    def replace(self, index: int, make: MakeService) -> None:
        """Kill a worker if it still lives, and start another one in its place. Its due answers are dropped.

        The new worker has new pipes, and the former one is dead before it starts. So no answer and no row of the former
        one can arrive any more. The `generation` of the new worker is one higher. Its words from `OWN` on keep their
        values. An interrupt leaves either the former worker, lost, or the new one, completely started.

        Raises:
            LaunchError: the new worker can't be started; the former one is lost.
            WorkerError: the former worker can't be killed; or `make` can't be pickled, and the former worker is lost.
            ClosedError: the pool was closed, or this is a fork of the process that started it.
        """
        self.check()
        former = self.workers[index]
        self._lose(former, former.loss or WorkerError(f"worker {index} is being replaced"))
        if not former.wait(Deadline(_KILL_S)):
            raise WorkerError(
                f"worker {index} (process {former.pid}) can't be killed: the system keeps it busy"
            )
        former.due.clear()
        self._signalled.discard(index)
        for word in range(OWN):
            former.progress[word] = 0
        self._start(index, former.generation + 1, len(self.workers), make)
        former.close()

    # --------------------------------------------------------------- ending
    def close(self, seconds: float | None = None, because: str = "") -> None:
        """End all workers: by a request, by SIGTERM, and by SIGKILL.

        A second call ends workers that an interrupt of the first call left. The call does nothing in a fork of the
        process that started the workers. It also closes the shared segment.

        Args:
            seconds: their common time limit to end by themselves; None for the limit of the timeouts.
            because: the reason, for the message of later calls.

        Raises:
            Exception: the first error of a service's `close`; all workers have ended nevertheless.
        """
        if self.ended or self._ending or self.is_foreign:
            return
        raised: list[BaseException] = []
        try:
            self._ending = self.closed = True
            self._reason = because and f", because {because}"
            raised = ask_to_end(self.workers, self.plan.timeouts.close_s if seconds is None else seconds)
        finally:
            self._ending = False
            kill(self.workers)
            for known in (self._signalled, self._readers):
                known.clear()  # A call that this close interrupts must find no worker to wait for.
            for worker in self.workers:
                worker.due.clear()
                worker.close()
            self._stacks.close()
            self.segment.close()
            self.plan = replace(
                self.plan, where=WorkerPlan.where
            )  # `where` may refer to the owner, which a closed pool must not keep alive.
            self.ended = True
        if raised:
            raise raised[0]
