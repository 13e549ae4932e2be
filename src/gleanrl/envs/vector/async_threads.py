"""Host of an `AsyncEnvPool` that runs each environment in its own thread of this process."""

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
"""Request number in the answer that reports a closed environment."""


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
    """A `RequestHost` of environments in threads, one each.

    Python can't stop a thread from outside. The thread of a hanging environment is abandoned; it closes the
    environment if the hanging call ever returns.

    Args:
        makers: one factory for each environment.
        timeouts: how long environments may take.
    """

    def __init__(self, makers: Sequence[Factory], timeouts: Timeouts) -> None:
        self._makers, self._timeouts = with_own_copies(makers), timeouts
        self._arrivals: SimpleQueue[ReceivedAnswer] = SimpleQueue()
        self._due: dict[int, _Due] = {}
        self._lost: dict[int, WorkerError] = {}
        self._threads = [_Thread(env, factory) for env, factory in enumerate(self._makers)]

    def start(self) -> None:
        """Make the environments, each in its thread.

        Raises:
            StepFault: if one can't be made; all others are closed then.
            InvalidArgumentError: if two of them step the same object; the caller closes the host.
        """
        for env in range(len(self._threads)):
            self.post(env, 0, "construct", ())
        while self._due:
            arrival = self.wait(Deadline(None))
            if arrival is not None and arrival.error is not None:
                with suppress(Exception):  # the error of the construction matters more
                    self.close()
                raise StepFault(0, arrival.env, "construction", arrival.error)
        require_independent(self.envs)  # if it raises, the pool closes the host

    @property
    def envs(self) -> list[Any]:
        """The environments, which must exist."""
        return [thread.member.env for thread in self._threads]

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Request a call of a method of an environment's `PoolMember`, in the caller's grad mode."""
        thread = self._threads[env]
        if thread.workers.forked:
            raise ClosedError(
                "threads serve the process that started them, not its forks; make a new pool there"
            )
        seconds = self._timeouts.start_s if thread.ident is None else self._timeouts.work_s
        self._due[env] = _Due(number, name, seconds, Deadline(seconds))
        call = partial(_answer, thread.member, number, name, arguments, torch.is_grad_enabled())
        thread.workers.start(partial(_work, thread, self._arrivals, env, number, call))

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return the next answer; see `RequestHost.wait`. A request that takes too long is answered by its loss."""
        while self._due:
            # Waiting ends at the earliest of the caller's deadline and the deadlines of all requests.
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
            # An answer that isn't due is that of a request that was given up.
            due = self._due.get(arrival.env)
            if due is not None and due.number == arrival.number:
                del self._due[arrival.env]
                return arrival
        return None

    def _give_up(self, env: int) -> ReceivedAnswer:
        """Mark an environment as lost, and return the error as the answer to its request."""
        due, thread = self._due[env], self._threads[env]
        error = WorkerTimeoutError(
            f"its thread hasn't got on for {due.seconds:g} s during its {due.name}; {stack_of(thread.ident)}"
        )
        self._lost[env] = error
        # Runs in the same thread, once the hanging call has returned.
        thread.workers.start(thread.member.close)
        del self._due[env]
        return ReceivedAnswer(env, due.number, None, error)

    def loss(self, env: int) -> WorkerError | None:
        """Return the error of an environment's loss; None if it isn't lost."""
        return self._lost.get(env)

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask restricted the environment's actions after its last answer; True before the first."""
        return self._threads[env].member.masked

    def renew(self, env: int) -> None:
        """Replace a lost environment by a new one in a new thread, which makes it at the next request."""
        self._threads[env] = _Thread(env, self._makers[env])
        self._lost.pop(env, None)

    def close(self) -> None:
        """Close the environments, each in its thread.

        An environment that doesn't close within `Timeouts.close_s` is closed by its thread later. Lost environments
        are skipped, since their threads close them.

        Raises:
            Exception: the first error that one of them raised.
        """
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
    """Execute a request in the environment's thread, and queue its answer."""
    thread.ident = threading.get_ident()
    try:
        value = call()
    except BaseException as error:
        arrivals.put(ReceivedAnswer(env, number, None, error))
    else:
        arrivals.put(ReceivedAnswer(env, number, value))


def _answer(member: PoolMember, number: int, name: str, arguments: tuple[Any, ...], has_grad: bool) -> Any:
    """Call `PoolMember.answer` with copied TensorDicts, in the grad mode of the thread that sent the request."""
    with torch.set_grad_enabled(has_grad):
        return _own(member.answer(number, name, _own(arguments)))


def _own(value: Any) -> Any:
    """Return `value` with copies of its TensorDicts: the environment may write to its inputs and outputs later."""
    if type(value) is tuple:  # a NamedTuple or torch.Size would lose its type
        return tuple(_own(item) for item in value)
    return value.clone() if isinstance(value, TensorDictBase) else value
