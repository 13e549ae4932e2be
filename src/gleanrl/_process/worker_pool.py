"""Worker processes of one owner: asked one by one or all at once, waited for together, replaced, ended together.

This is mechanism. What an answer means, whether all wait for all, and whether the loss of one worker ends the others
or only gives it a successor, is for the owner to decide: a worker that ended or hung gives an answer like any other,
and so does one that is asked afterwards.

The owner waits on the pipes and the process sentinels at once, so that an end is noticed when it happens and waiting
costs nothing. What interrupts a call (Ctrl-C, a signal handler that raises) leaves the crew usable: an answer that an
interrupt kept from its owner may be lost, but is neither waited for again nor taken for another one, and `forget` drops
what is still to come.

How workers end: they are asked, then sent SIGTERM, then SIGKILL; all of them at once, within one time.
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
from gleanrl._process.worker_main import STOP, SYNC, MakeServant, WorkerReply, WorkerRequest, WorkerSetting
from gleanrl.errors import ClosedError, WorkerError

_ENDING_TERM_S = 1.0
_STOPPING = -1


def ask_to_end(workers: Sequence[Worker], seconds: float) -> list[BaseException]:
    """Let every worker close its servant and end, those that don't by SIGTERM; return what the servants raised.

    Args:
        workers: of one owner.
        seconds: how long they have all together to end by themselves.
    """
    deadline = Deadline(seconds)
    for worker in workers:
        worker.halt()
    asked = [worker for worker in workers if _ask_to_stop(worker, deadline)]
    raised = [error for worker in asked if (error := _last_words(worker, deadline)) is not None]
    for worker in workers:
        worker.wait(deadline)
    _signal(workers, signal.SIGTERM)
    return raised


def kill(workers: Sequence[Worker]) -> None:
    """End every worker that still lives."""
    _signal(workers, signal.SIGKILL)


def _ask_to_stop(worker: Worker, deadline: Deadline) -> bool:
    if worker.has_ended or worker.loss is not None:
        return False
    try:
        worker.channel.send(encode(WorkerRequest(_STOPPING, STOP)), deadline)
    except (ChannelClosed, ChannelFull):
        return False
    return True


def _last_words(worker: Worker, deadline: Deadline) -> BaseException | None:
    """Return what a worker's servant raised when it was closed; answers that were due before are dropped."""
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
    """Send a signal to those that live and wait for them."""
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
_crews = itertools.count()


class WorkerAnswer(NamedTuple):
    """What came of something that was asked.

    Attributes:
        worker: its number.
        request: the number that `WorkerPool.post` returned; 0 for a signal.
        value: what the servant's method returned.
        error: what was raised; or how the worker ended or hung.
        lost: whether the worker ended or hung: every request gets such an answer until it's replaced.
    """

    worker: int
    request: int
    value: Any = None
    error: BaseException | None = None
    lost: bool = False


class WorkerPool:
    """Worker processes that serve one owner. One thread at a time.

    The first answer of each worker says that its servant was made, or why it couldn't be.

    Args:
        makers: one function for each worker, which makes its servant there.
        plan: what they have in common.

    Raises:
        CapacityError: if this process can't have so many workers.
        UnsupportedError: if the system isn't Linux.
        LaunchError: if processes can't be started at all.
    """

    def __init__(self, makers: Sequence[MakeServant], plan: WorkerPlan) -> None:
        require_platform()
        require_descriptors(len(makers))
        self.plan = plan
        self.closed, self.ended, self._ending, self._reason = False, False, False, ""
        self._owner = os.getpid()
        self._family = (torch.initial_seed(), next(_crews))
        self._numbers = itertools.count(1)
        self._poller = select.poll()
        self._readers: dict[int, Worker] = {}
        self._signalled: set[int] = set()
        self._turn = 0  # whose answer is looked for first: none is passed over for quicker ones
        self.workers: list[Worker] = []
        self.segment = SharedSegment(len(makers))
        self._stacks = Stacks()
        try:
            for index, make in enumerate(makers):
                self._start(index, 0, len(makers), make)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, index: int, generation: int, num_workers: int, make: MakeServant) -> None:
        number = next(self._numbers)
        surroundings = (tuple(sys.path), os.getcwd(), dict(os.environ))
        entropy = (*self._family, index, generation)
        setting = WorkerSetting(number, index, num_workers, *surroundings, entropy, self.plan.num_threads)
        first_words = encode((setting, encode(make)))
        progress = self.segment.progress(index)
        worker = Worker(index, generation, progress, self._stacks, self.segment.descriptor, self.plan)
        try:
            self._readers[worker.channel.reading] = worker
            self._poller.register(worker.channel.reading, select.POLLIN)
            self._poller.register(worker.sentinel, select.POLLIN)
            self._write(worker, first_words)
            worker.due.append(number)
            self.workers[index : index + 1] = [worker]  # at last: what is there was started whole
        except BaseException:
            self._unregister(worker)  # the process ends with its pipes
            raise

    # --------------------------------------------------------------- asking
    def post(self, index: int, name: str, *arguments: Any) -> int:
        """Ask a worker to call a method of its servant; return the number of the request.

        A worker does one thing after the other, in the order of asking.

        Raises:
            WorkerError: if the arguments can't be sent; nothing was asked then.
            ClosedError: if the crew was closed, or this is a fork of the process that started it.
        """
        self.check()
        number = next(self._numbers)
        data = encode(WorkerRequest(number, name, arguments))
        self._check_open()
        worker = self.workers[index]
        if not worker.due:
            worker.begin()
        self._write(worker, data)
        worker.due.append(number)  # once it was sent: nothing is waited for that can't come
        return number

    def send(self, index: int, code: bytes) -> None:
        """Send a signal to one worker, whose answer `wait_any` gives; its number is 0. Others may be sent meanwhile.

        Raises:
            ClosedError: if the crew was closed.
        """
        self._check_open()
        worker = self.workers[index]
        if not worker.due:
            worker.begin()
        with suppress(BrokenPipeError):  # that it ended is seen where its answer is waited for
            os.write(worker.writing, code)
        worker.due.append(_SIGNAL)

    def signals_due(self, index: int) -> int:
        """Return how many signals a worker is still to answer, as far as is known: at least those that it is at."""
        return self.workers[index].due.count(_SIGNAL)

    def signal(self, code: bytes) -> bool:
        """Send a signal to every worker and wait; return whether all of them just did what it means.

        If not, one of them raised or was lost: the answers are for `wait_any`, also those of the others. This is
        what is called at every step: a write and a read for each worker and a poll or two, nothing else.
        """
        self._check_open()
        workers, pending, readers = self.workers, self._signalled, self._readers
        poll, read = self._poller.poll, os.read
        if pending:
            self.forget()
        whole = True
        for worker in workers:
            pending.add(worker.index)
            try:
                os.write(worker.writing, code)
            except BrokenPipeError:
                whole = False
        while whole and pending:
            ready = poll(LOOK_MS)
            whole = bool(ready)
            for descriptor, _ in ready:
                speaker = readers.get(descriptor)
                if speaker is None:
                    whole = False
                    break
                inbox = speaker.channel.inbox
                inbox.extend(map(read, (descriptor,), PIECE))
                if inbox != _JUST_DONE:
                    whole = False
                    break
                inbox.clear()
                pending.discard(speaker.index)
        self._check_open()
        if not whole:
            for worker in workers:
                worker.begin()
        return whole

    def forget(self) -> None:
        """Drop what is still to be answered, which an interrupt kept its owner from waiting for."""
        for worker in self.workers:
            worker.due.clear()
        # Whether a signal that was given up was answered isn't known: what comes before the answer to this was.
        for index in sorted(self._signalled):
            self.post(index, SYNC)
        while self._signalled and self.wait_any() is not None:
            pass

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that started the workers: they don't serve it."""
        return os.getpid() != self._owner

    def check(self) -> None:
        """Raise `ClosedError` if the crew was closed, or this is a fork of the process that started it."""
        if self.is_foreign:
            raise ClosedError("workers serve the process that started them, not its forks")
        self._check_open()

    def _check_open(self) -> None:
        """Raise if the crew was closed: also in the midst of a call, when a garbage collection ends another owner."""
        if self.closed:
            raise ClosedError(f"the workers have been ended{self._reason}")

    def _write(self, worker: Worker, data: bytes) -> None:
        seconds = self.plan.timeouts.work_s
        if worker.loss is not None:
            return
        try:
            worker.channel.send(data, Deadline(seconds))
        except ChannelClosed:
            pass  # what it said before it ended comes first: its end is seen where answers are waited for
        except ChannelFull:
            self._hung(worker, seconds)
        except BaseException:
            self._finish(worker)
            raise

    def _finish(self, worker: Worker) -> None:
        """Send the rest of a message after an interrupt; a worker that doesn't take it is lost."""
        try:
            worker.channel.finish(Deadline(_TERM_S))
        except (ChannelClosed, ChannelFull):
            pass
        finally:
            if worker.channel.is_midway:  # also if a second interrupt came
                self._lose(worker, WorkerError(f"a long message to worker {worker.index} was interrupted"))

    # -------------------------------------------------------------- waiting
    @property
    def is_idle(self) -> bool:
        """Whether the workers live, as far as is known, and have answered everything."""
        return not self.closed and not self._signalled and not any(w.due or w.loss for w in self.workers)

    def wait_any(self, deadline: Deadline | None = None) -> WorkerAnswer | None:
        """Return the next answer; None if none is due, or none has come by the deadline, which may have passed.

        Raises:
            ClosedError: if the crew was closed, also meanwhile.
        """
        has_looked = False
        while True:
            self._check_open()
            for worker in (*self.workers[self._turn :], *self.workers[: self._turn]):
                if (worker.due or worker.index in self._signalled) and (answer := self._next(worker)):
                    self._turn = worker.index + 1
                    return answer
            if not self._signalled and not any(worker.due for worker in self.workers):
                return None
            if has_looked and deadline is not None and deadline.passed():
                return None
            self._look(deadline)
            has_looked = True

    def wait_all(self) -> list[WorkerAnswer]:
        """Return every answer that is due, by worker; or those that came until a worker was lost."""
        answers: list[WorkerAnswer] = []
        while (answer := self.wait_any()) is not None:
            answers.append(answer)
            if answer.lost:
                break
        return sorted(answers, key=lambda answer: answer.worker)

    def _next(self, worker: Worker) -> WorkerAnswer | None:
        """Return the next answer of a worker if it has arrived; what nobody waits for any more is dropped."""
        index, due, inbox = worker.index, worker.due, worker.channel.inbox
        if worker.loss is None:
            if not inbox:
                return None
            # What a signal's answer mostly is. If an interrupt comes in between, the answer is dropped later.
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
                # An interrupt may come between any two of these: what isn't due any more is dropped.
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
        """Wait until something arrives, or somebody is late."""
        left = LOOK_MS if deadline is None else 1000 * (deadline.remaining() or 0.0)
        patience = [LOOK_MS if w.seconds is None else min(LOOK_MS, 1000 * w.seconds) for w in self.workers]
        ready = self._poller.poll(min(left, *patience))
        self._check_open()
        described = [descriptor for descriptor, _ in ready]
        speakers = [self._readers[descriptor] for descriptor in described if descriptor in self._readers]
        for worker in speakers:
            worker.channel.pull()
            worker.begin()
            if worker.channel.has_ended:
                self._unregister(worker)
        for worker in self.workers:
            if worker.loss is None and worker not in speakers:
                if worker.sentinel in described:
                    self._crashed(worker)
                elif (worker.due or worker.index in self._signalled) and worker.is_late():
                    self._hung(worker, worker.seconds)

    # ---------------------------------------------------------------- losses
    def _crashed(self, worker: Worker) -> None:
        worker.wait(Deadline(_TERM_S))  # its pipes are closed a moment before it has ended
        self._lose(worker, worker.crash(self._doing(worker)))

    def _hung(self, worker: Worker, seconds: float | None) -> None:
        self._lose(worker, worker.timeout(self._doing(worker), seconds or 0.0))

    def _doing(self, worker: Worker) -> str:
        return self.plan.where(worker.index, worker.place, worker.step)

    def _lose(self, worker: Worker, loss: WorkerError) -> None:
        worker.loss = loss
        worker.terminate()
        self._unregister(worker)

    def _unregister(self, worker: Worker) -> None:
        self._readers.pop(worker.channel.reading, None)
        for descriptor in (worker.channel.reading, worker.sentinel):
            with suppress(KeyError):
                self._poller.unregister(descriptor)

    def replace(self, index: int, make: MakeServant) -> None:
        """End a worker, if it still lives, and start another one in its place; what was due of it is dropped.

        The new one has pipes of its own, and the former one is dead before it starts: no answer and no row of the
        former one can come any more. Its `generation` is one higher. It finds the words from `OWN` on as they were.
        After an interrupt, there is either the former one, lost, or the new one, started whole.

        Raises:
            LaunchError: if it can't be started; the former one is lost.
            WorkerError: if the former one can't be killed.
            ClosedError: if the crew was closed.
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
        """End every worker: ask, then SIGTERM, then SIGKILL; again, it ends what an interrupt of the first call left.

        Args:
            seconds: how long they have all together to end by themselves; None for what the timeouts say.
            because: why, for the message of who uses the crew afterwards.

        Raises:
            Exception: what a servant's `close` raised first; the workers have ended all the same.
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
                known.clear()  # a call that this close interrupts finds nothing to go on with
            for worker in self.workers:
                worker.due.clear()
                worker.close()
            self._stacks.close()
            self.segment.close()
            self.plan = replace(
                self.plan, where=WorkerPlan.where
            )  # its owner isn't kept by what it has ended
            self.ended = True
        if raised:
            raise raised[0]
