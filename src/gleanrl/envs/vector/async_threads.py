"""A pool's environments in threads of this process, one each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Workers, stack_of
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault
from gleanrl.envs.vector.async_requests import PoolMember, ReceivedAnswer
from gleanrl.envs.vector.factories import Factory, with_own_copies
from gleanrl.envs.vector.independence import require_independent
from gleanrl.errors import ClosedError, WorkerError, WorkerTimeoutError

_CLOSED = -1
"""The number of an environment that was closed."""


class _Thread:
    """An environment and its thread, which makes, steps and closes it."""

    def __init__(self, env: int, factory: Factory) -> None:
        self.workers = Workers(1, f"gleanrl-environment-{env}")
        self.member = PoolMember(factory)
        self.ident: int | None = None


class _Due(NamedTuple):
    number: int
    name: str
    seconds: float | None
    deadline: Deadline


class ThreadHost:
    """Environments in threads; see `Host`.

    A thread can't be ended from outside: that of an environment that hangs is left alone, and closes it if it ever
    goes on.

    Args:
        given: one factory for each environment.
        timeouts: how long they may take.
    """

    def __init__(self, given: Sequence[Factory], timeouts: Timeouts) -> None:
        self._given, self._timeouts = with_own_copies(given), timeouts
        self._arrivals: SimpleQueue[ReceivedAnswer] = SimpleQueue()
        self._due: dict[int, _Due] = {}
        self._lost: dict[int, WorkerError] = {}
        self._threads = [_Thread(env, factory) for env, factory in enumerate(self._given)]

    def start(self) -> None:
        """Make the environments, each in its thread."""
        for env in range(len(self._threads)):
            self.post(env, 0, "construct", ())
        while self._due:
            arrival = self.wait(Deadline(None))
            if arrival is not None and arrival.error is not None:
                with suppress(Exception):  # what the others' ends raise matters less
                    self.close()
                raise StepFault(0, arrival.env, "construction", arrival.error)
        require_independent(self.envs)  # `PooledEnv` closes the host

    @property
    def envs(self) -> list[Any]:
        """The environments, which were made."""
        return [thread.member.env for thread in self._threads]

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Have a method of a member called, in the grad mode of whoever asks."""
        thread = self._threads[env]
        if thread.workers.forked:
            raise ClosedError("threads serve the process that started them, not its forks")
        seconds = self._timeouts.start_s if thread.ident is None else self._timeouts.work_s
        self._due[env] = _Due(number, name, seconds, Deadline(seconds))
        call = partial(_answer, thread.member, number, name, arguments, torch.is_grad_enabled())
        thread.workers.start(partial(_work, thread, self._arrivals, env, number, call))

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return what arrives next."""
        while self._due:
            limits = [deadline, *(due.deadline for due in self._due.values())]
            left = [seconds for limit in limits if (seconds := limit.remaining()) is not None]
            try:
                arrival = self._arrivals.get(timeout=min(left, default=None))
            except Empty:
                late = next((env for env, due in self._due.items() if due.deadline.passed()), None)
                if late is not None:
                    return self._give_up(late)
                if deadline.passed():
                    return None
                continue
            due = self._due.get(arrival.env)
            if due is not None and due.number == arrival.number:
                del self._due[arrival.env]
                return arrival
        return None

    def _give_up(self, env: int) -> ReceivedAnswer:
        due, thread = self._due[env], self._threads[env]
        error = WorkerTimeoutError(
            f"its thread hasn't got on for {due.seconds:g} s during its {due.name}; {stack_of(thread.ident)}"
        )
        self._lost[env] = error
        thread.workers.start(thread.member.close)
        del self._due[env]
        return ReceivedAnswer(env, due.number, None, error)

    def loss(self, env: int) -> WorkerError | None:
        """Return why an environment is lost."""
        return self._lost.get(env)

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask restricted the actions of an environment after its last answer."""
        return self._threads[env].member.masked

    def renew(self, env: int) -> None:
        """Make an environment anew, in a thread of its own, when it's asked for something."""
        self._threads[env] = _Thread(env, self._given[env])
        self._lost.pop(env, None)

    def close(self) -> None:
        """Close the environments; those that are at work for too long are closed by their threads afterwards."""
        deadline, first = Deadline(self._timeouts.close_s), None
        threads = {
            env: thread
            for env, thread in enumerate(self._threads)
            if env not in self._lost and not thread.workers.forked
        }
        for env, thread in threads.items():
            thread.workers.start(partial(_work, thread, self._arrivals, env, _CLOSED, thread.member.close))
        waiting = set(threads)
        while waiting:
            try:
                arrival = self._arrivals.get(timeout=deadline.remaining())
            except Empty:
                break
            if arrival.number == _CLOSED:
                waiting.discard(arrival.env)
                first = first or arrival.error
        self._due, self._threads = {}, []
        if first is not None:
            raise first


def _work(
    thread: _Thread, arrivals: SimpleQueue[ReceivedAnswer], env: int, number: int, call: Callable[[], Any]
) -> None:
    """Do what was asked, in the thread."""
    thread.ident = threading.get_ident()
    try:
        value = call()
    except BaseException as error:
        arrivals.put(ReceivedAnswer(env, number, None, error))
    else:
        arrivals.put(ReceivedAnswer(env, number, value))


def _answer(member: PoolMember, number: int, name: str, arguments: tuple[Any, ...], has_grad: bool) -> Any:
    with torch.set_grad_enabled(has_grad):
        return _own(member.answer(number, name, _own(arguments)))


def _own(value: Any) -> Any:
    """Return `value` with copies of its TensorDicts: the environment may write into those it got or gave."""
    if type(value) is tuple:  # and no record or size
        return tuple(_own(item) for item in value)
    return value.clone() if isinstance(value, TensorDictBase) else value
