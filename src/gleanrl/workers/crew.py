"""All workers of one owner: started together, asked together, waited for together, ended together.

The owner waits on the pipes and the process sentinels at once, so that an end is noticed when it happens and waiting
costs nothing. What interrupts a wait (Ctrl-C, a signal handler that raises) leaves the crew usable: answers that are
still to come are taken and dropped before anything else is asked. The crew is closed when a worker has ended or has
hung, or when an interruption came while a long message was being sent.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

import torch

from gleanrl.errors import ClosedError, WorkerError
from gleanrl.system.clock import Deadline
from gleanrl.workers.channel import ATOMIC, DONE, PIECE, ChannelClosed, ChannelFull, decode, encode
from gleanrl.workers.handle import Stacks, Timeouts, Worker, require_descriptors, require_platform
from gleanrl.workers.main import STOP, SYNC, Answer, MakeServant, Setting
from gleanrl.workers.segment import Segment

_LOOK_MS = 250.0
"""How often a wait looks whether the workers get on."""
_JUST_DONE = [DONE]
_TERM_S = 1.0
_crews, _tokens = itertools.count(), itertools.count()


class WorkerFault(Exception):
    """What went wrong in a worker: what it raised, or how it ended or hung.

    Args:
        worker: its number.
        place: the item that it was at.
        cause: the error.
        lost: whether the worker ended or hung, so that the crew was closed.
    """

    def __init__(self, worker: int, place: int, cause: BaseException, lost: bool) -> None:
        super().__init__(worker, place, cause, lost)
        self.worker, self.place, self.cause, self.lost = worker, place, cause, lost


class Crew:
    """Worker processes that serve one owner. One thread at a time.

    Args:
        make_servants: one function for each worker, which makes its servant there.
        timeouts: how long they may take.
        num_threads: torch threads of each worker.
        where: says where a worker is at work, for error messages: gets its number, place and step.

    Raises:
        WorkerFault: if a servant couldn't be made; no worker is left.
        CapacityError: if this process can't have so many workers.
        UnsupportedError: if the system isn't Linux.
        LaunchError: if processes can't be started at all.
    """

    def __init__(
        self,
        make_servants: Sequence[MakeServant],
        timeouts: Timeouts | None = None,
        num_threads: int = 1,
        where: Callable[[int, int, int], str] = lambda worker, place, step: "",
    ) -> None:
        require_platform()
        require_descriptors(len(make_servants))
        self.timeouts = timeouts = timeouts or Timeouts()
        self._where, self._owner = where, os.getpid()
        self.closed, self._reason = False, ""
        self.segment = Segment(len(make_servants))
        self._stacks = Stacks()
        self.workers: list[Worker] = []
        self._pending: set[int] = set()
        self._poller = select.poll()
        self._readers: dict[int, Worker] = {}
        self._writers: list[tuple[int, int]] = []
        try:
            family = (torch.initial_seed(), next(_crews))
            shared = (tuple(sys.path), os.getcwd(), dict(os.environ))
            for index, make in enumerate(make_servants):
                worker = self._add(index)
                setting = Setting(index, len(make_servants), *shared, (*family, index), num_threads)
                self._post(worker, encode(setting))
                self._post(worker, encode(make))
            self._gather(timeouts.start_s)
        except BaseException:
            self.close(0.0)
            raise

    def _add(self, index: int) -> Worker:
        worker = Worker(index, self.segment.progress(index), self._stacks, self.segment.descriptor)
        self.workers.append(worker)
        self._readers[worker.channel.reading] = worker
        self._writers.append((index, worker.channel.writing))
        self._poller.register(worker.channel.reading, select.POLLIN)
        self._poller.register(worker.sentinel, select.POLLIN)
        return worker

    # --------------------------------------------------------------- asking
    def signal(self, code: bytes) -> None:
        """Send a signal to every worker and wait until all have done what it means.

        Raises:
            WorkerFault: for the first worker, by number, that raised; or for one that ended or hung.
        """
        self._settle()
        pending, readers, poll, read = self._pending, self._readers, self._poller.poll, os.read
        for index, writing in self._writers:
            pending.add(index)
            try:
                os.write(writing, code)
            except BrokenPipeError:
                self._crashed(self.workers[index])
        while pending:
            ready = poll(_LOOK_MS)
            for descriptor, _ in ready:
                worker = readers.get(descriptor)
                if worker is not None:
                    inbox = worker.channel.inbox
                    inbox.extend(map(read, (descriptor,), PIECE))
                    if inbox == _JUST_DONE:
                        inbox.clear()
                        pending.discard(worker.index)
                        continue
                self._gather(self.timeouts.work_s)
                return
            if not ready:
                self._gather(self.timeouts.work_s)
        self._check_open()

    def request(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some workers' servants and return what each gave, by number.

        Args:
            name: the method.
            arguments: its arguments, for each worker that is asked.

        Raises:
            WorkerFault: for the first worker, by number, that raised; or for one that ended or hung.
        """
        if os.getpid() != self._owner:
            raise ClosedError("workers serve the process that started them, not its forks")
        self._settle()
        for index, given in arguments.items():
            self._post(self.workers[index], encode((name, given)))
        return self._gather(self.timeouts.work_s)

    def request_all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's servant with the same arguments; return what each gave, in order."""
        return list(self.request(name, dict.fromkeys(range(len(self.workers)), arguments)).values())

    @property
    def is_idle(self) -> bool:
        """Whether the workers live, as far as is known, and have answered everything."""
        return not self.closed and not self._pending

    def _check_open(self) -> None:
        """Raise if the crew was closed: also in the midst of a call, when a garbage collection ends another owner."""
        if self.closed:
            raise ClosedError(f"the workers have been ended{self._reason}")

    def _settle(self) -> None:
        """Take and drop the answers that an interrupted wait left."""
        self._check_open()
        if not self._pending:
            return
        # An answer may have been read and not been noted: only the answer to this is sure to come.
        token = next(_tokens)
        for worker in self.workers:
            self._post(worker, encode((SYNC, (token,))))
        waiting = {worker.index for worker in self.workers}
        while waiting:
            answers = self._gather(self.timeouts.work_s, raising=False)
            waiting -= {index for index, value in answers.items() if value == token}
            self._pending |= waiting

    def _post(self, worker: Worker, data: bytes) -> None:
        seconds = self.timeouts.work_s
        self._check_open()
        self._pending.add(worker.index)
        try:
            worker.channel.send(data, Deadline(seconds))
        except ChannelClosed:
            self._crashed(worker)
        except ChannelFull:
            self._hung(worker, seconds)
        except BaseException:  # part of a long message may be in the pipe: nothing can follow it
            if len(data) > ATOMIC:
                self.close(0.0)
            raise

    # -------------------------------------------------------------- waiting
    def _gather(self, seconds: float | None, raising: bool = True) -> dict[int, Any]:
        """Wait for every answer that is due; return the values by worker.

        Args:
            seconds: how long each worker may stay at one item.
            raising: whether what a worker raised is raised here.

        Raises:
            WorkerFault: see `signal`.
        """
        answers: dict[int, Answer] = {}
        self._check_open()
        patience = _Patience(self.workers, seconds)
        while True:
            for worker in self.workers:
                self._take(worker, answers)
            if not self._pending:
                break
            ready = [descriptor for descriptor, _ in self._poller.poll(patience.look_ms)]
            self._check_open()
            speakers = [self._readers[descriptor] for descriptor in ready if descriptor in self._readers]
            for worker in speakers:
                worker.channel.pull()
                patience.renew(worker)
            if ready and not speakers:
                self._crashed(next(worker for worker in self.workers if worker.sentinel in ready))
            late = patience.late(self._pending)
            if late is not None:
                self._hung(late, seconds)
        for index, answer in sorted(answers.items()):
            if raising and answer.report is not None:
                raise WorkerFault(index, self.workers[index].place, answer.report.error(), lost=False)
        return {index: answer.value for index, answer in sorted(answers.items())}

    def _take(self, worker: Worker, answers: dict[int, Answer]) -> None:
        """Note the answers of a worker that have arrived; the last one counts."""
        try:
            while (arrived := worker.channel.take()) is not None:
                code, data = arrived
                answers[worker.index] = Answer() if code == DONE else cast(Answer, decode(data))
                self._pending.discard(worker.index)
        except ChannelClosed:
            if worker.index in self._pending:
                self._crashed(worker)
            # It ended after its last answer: the next time it's needed will tell.
            for descriptor in (worker.channel.reading, worker.sentinel):
                with suppress(KeyError):
                    self._poller.unregister(descriptor)

    def _crashed(self, worker: Worker) -> NoReturn:
        worker.wait(Deadline(_TERM_S))  # its pipes are closed a moment before it has ended
        self._lose(worker, worker.crash(self._doing(worker)))

    def _hung(self, worker: Worker, seconds: float | None) -> NoReturn:
        self._lose(worker, worker.timeout(self._doing(worker), seconds or 0.0))

    def _doing(self, worker: Worker) -> str:
        return self._where(worker.index, worker.place, worker.step)

    def _lose(self, worker: Worker, cause: WorkerError) -> NoReturn:
        """Close the crew because of one worker, and raise."""
        self._reason = f", because worker {worker.index} was lost: {type(cause).__name__}"
        fault = WorkerFault(worker.index, worker.place, cause, lost=True)
        worker.terminate()
        with suppress(Exception):  # what the others' ends raise matters less
            self.close()
        raise fault

    # --------------------------------------------------------------- ending
    def close(self, seconds: float | None = None) -> None:
        """End every worker: ask, then SIGTERM, then SIGKILL; calling it again does nothing.

        Args:
            seconds: how long they have all together to end by themselves; None for what the timeouts say.

        Raises:
            WorkerFault: if a servant's `close` raised; the workers have ended all the same.
        """
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        faults: list[BaseException] = []
        try:
            deadline = Deadline(self.timeouts.close_s if seconds is None else seconds)
            for worker in self.workers:
                worker.halt()
            asked = [worker for worker in self.workers if _ask_to_stop(worker, deadline)]
            faults = [error for worker in asked if (error := _last_words(worker, deadline)) is not None]
            for worker in self.workers:
                worker.wait(deadline)
            _end_all(self.workers, signal.SIGTERM, Deadline(_TERM_S))
        finally:
            _end_all(self.workers, signal.SIGKILL, Deadline(_TERM_S))
            for known in (self._pending, self._readers, self._writers):
                known.clear()  # a call that this close interrupts finds nothing to go on with
            for worker in self.workers:
                worker.close()
            self._stacks.close()
            self.segment.close()
        if faults:
            raise faults[0]


class _Patience:
    """Which worker has stayed at one item for too long."""

    def __init__(self, workers: Sequence[Worker], seconds: float | None) -> None:
        self._workers, self._seconds = workers, seconds
        self.look_ms = _LOOK_MS if seconds is None else min(_LOOK_MS, seconds * 1000)
        self._marks = {worker.index: worker.mark() for worker in workers}
        self._deadlines = {worker.index: Deadline(seconds) for worker in workers}

    def renew(self, worker: Worker) -> None:
        """Give a worker its time again."""
        self._deadlines[worker.index] = Deadline(self._seconds)

    def late(self, pending: set[int]) -> Worker | None:
        """Return one of the `pending` workers that is late, the one with the lowest number."""
        for index in sorted(pending):
            worker = self._workers[index]
            if not self._deadlines[index].passed():
                continue
            mark = worker.mark()
            if mark == self._marks[index]:
                return worker
            self._marks[index] = mark
            self.renew(worker)
        return None


def _ask_to_stop(worker: Worker, deadline: Deadline) -> bool:
    if worker.has_ended:
        return False
    try:
        worker.channel.send(encode(STOP), deadline)
    except (ChannelClosed, ChannelFull):
        return False
    return True


def _last_words(worker: Worker, deadline: Deadline) -> BaseException | None:
    """Return what a worker's servant raised when it was closed; answers that were due before are dropped."""
    words: BaseException | None = None
    poller = select.poll()
    poller.register(worker.channel.reading, select.POLLIN)
    with suppress(ChannelClosed):
        while poller.poll((deadline.remaining() or 0.0) * 1000):
            worker.channel.pull()
            while (arrived := worker.channel.take()) is not None:
                answer = Answer() if arrived[0] == DONE else cast(Answer, decode(arrived[1]))
                words = None if answer.report is None else answer.report.error()
    return words


def _end_all(workers: Sequence[Worker], number: int, deadline: Deadline) -> None:
    """Send a signal to those that live and wait for them."""
    alive = [worker for worker in workers if not worker.has_ended]
    for worker in alive:
        worker.terminate(number)
    for worker in alive:
        worker.wait(deadline)
