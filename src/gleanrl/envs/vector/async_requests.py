"""Requests to single environments of an `AsyncEnvPool`, and the answers that wait to be received.

`RequestHost` is the interface of the places that environments run in: `EnvThreads` here, and `EnvWorkerPool` for worker
processes. `Requests` is the sending end, and `EnvMember` the receiving end.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Workers, stack_of
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault
from gleanrl.data.specs.mapping import Changes
from gleanrl.envs.vector.factories import Factory, with_own_copies
from gleanrl.envs.vector.independence import require_independent
from gleanrl.envs.vector.members import RESET, EnvMember
from gleanrl.errors import ClosedError, NotReadyError, PendingError, WorkerError, WorkerTimeoutError


class ReceivedAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        env: number of the environment.
        number: number of the request.
        value: the result of the `EnvMember` method. Its TensorDicts are not shared with the environment.
        error: the exception that was raised, or the error of the environment's loss; None if there is none.
    """

    env: int
    number: int
    value: Any = None
    error: BaseException | None = None


class RequestHost(Protocol):
    """Threads or processes that run environments and answer requests. One thread at a time may use it.

    An environment is *lost* when its process has ended, or when one request took too long. From then on, the answer to
    each request is an error, requests under way included, until `renew`.
    """

    def start(self) -> None:
        """Make the environments.

        Raises:
            StepFault: if one can't be made; ``during`` is ``"construction"``.
        """

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Request a call of a method of an environment's `EnvMember`.

        Raises:
            WorkerError: if the arguments can't be sent.
            ClosedError: in a fork of the process that started the host.
        """

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return the next answer; None if no request is under way, or if none arrived by the deadline.

        It looks at least once, even if the deadline has passed.
        """

    def loss(self, env: int) -> WorkerError | None:
        """Return the error of an environment's loss; None if it isn't lost."""

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict the environment's actions after its last answer, without asking it."""

    def renew(self, env: int) -> None:
        """Replace a lost environment by a new one."""

    def close(self) -> None:
        """Close the environments.

        Raises:
            Exception: the first error that one of them raised.
        """


@dataclass
class Request:
    """A request to one environment.

    Attributes:
        name: the method of its `EnvMember`.
        arguments: arguments of that method.
        number: number of the request.
        arrival: the answer; None before it arrives.
        order: number of answers that arrived before this one.
    """

    name: str
    arguments: tuple[Any, ...]
    number: int = 0
    arrival: ReceivedAnswer | None = None
    order: int = 0

    @property
    def error(self) -> BaseException | None:
        """The error of the answer; None if there is none."""
        return None if self.arrival is None else self.arrival.error

    @property
    def value(self) -> Any:
        """The value of the answer; None before it arrives."""
        return None if self.arrival is None else self.arrival.value


@dataclass(frozen=True)
class Wanted:
    """The answers that a ``recv`` call asks for.

    Attributes:
        name: answers to requests of this method.
        least: minimal number of answers.
        most: maximal number of answers; None for all that have arrived.
        envs: answers of these environments; None for any.
    """

    name: str
    least: int
    most: int | None = None
    envs: Collection[int] | None = None


class Requests:
    """Sends requests to the environments of a pool and stores their answers. One thread at a time may use it.

    Each environment has at most one request under way. An interrupt (Ctrl-C, or an exception of a signal handler)
    loses none of them. If a request may not have been sent, or its answer may have been dropped, it is sent again with
    the same number. `EnvMember` executes it once.

    Args:
        host: runs the environments.

    Attributes:
        host: see above.
        is_started: whether the environments were made. It stays True after `close`.
        is_closed: whether `close` was called.
    """

    def __init__(self, host: RequestHost) -> None:
        self.host = host
        self.is_started = self.is_closed = False
        self._numbers, self._arrived = itertools.count(1), itertools.count()
        self._pending: dict[int, Request] = {}
        # False while a pending request may be unsent, or its answer dropped: `_look` then sends it again.
        self._sure = True

    @property
    def busy(self) -> list[int]:
        """The environments with a request that isn't received, ascending."""
        return sorted(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way or waits to be received."""
        return not self._pending

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict an environment's actions; see `RequestHost`."""
        return self.host.may_be_masked(env)

    def start(self) -> None:
        """Make the environments; see `RequestHost.start`."""
        self.host.start()
        self.is_started = True

    def close(self) -> None:
        """Forget the pending requests and close the environments; raise the first error that one of them raised."""
        self.is_closed, self._pending = True, {}
        self.host.close()

    # ---------------------------------------------------------------- asking
    def send(self, requests: Mapping[int, Request]) -> None:
        """Send one request to each environment; send all of them, or none if this raises an error.

        An interrupt may come after the requests became pending; the next call then sends them. A lost environment is
        replaced before its reset. Arguments that can't be sent raise nothing here: their error becomes the answer.

        Raises:
            PendingError: if an answer of one of the environments wasn't received.
            WorkerError: if one of them is lost and the request isn't a reset.
        """
        self._check_free(requests)
        self._renew(requests)
        for request in requests.values():
            request.number = next(self._numbers)
        # An interrupt between here and the end leaves `_sure` False, so all requests are sent by a later call.
        sure, self._sure = self._sure, False
        self._pending = {**self._pending, **requests}  # one assignment: all are pending, or none
        for env, request in requests.items():
            self._post(env, request)
        self._sure = sure

    def ask(
        self, name: str, arguments: Mapping[int, tuple[Any, ...]], during: str | None = None
    ) -> dict[int, Any]:
        """Send one request to each environment, wait for all answers, and return the values by environment.

        Answers of other environments that arrive meanwhile are stored.

        Args:
            name: the method of `EnvMember`.
            arguments: its arguments, by environment.
            during: the operation, for messages; None for `name`.

        Raises:
            StepFault: if an environment raised or was lost meanwhile, or if the arguments of its request couldn't be
                sent. All requests have been answered then.
            WorkerError: if one was lost before and the request isn't a reset. No request is sent then.
            PendingError: if an answer of one of the environments wasn't received.
        """
        requests = {env: Request(name, own) for env, own in sorted(arguments.items())}
        self._check_free(requests)
        self._renew(requests)
        for env, request in requests.items():
            request.number = next(self._numbers)
            self._post(env, request)
        while any(request.arrival is None for request in requests.values()):
            self._look(Deadline(None), requests)
        for env, request in requests.items():
            if request.error is not None:
                raise StepFault(0, env, during or name, request.error)
        return {env: request.value for env, request in requests.items()}

    def _check_free(self, envs: Collection[int]) -> None:
        busy = {env: request.name for env, request in self._pending.items() if env in envs}
        if busy:
            which = ", ".join(f"environment {env} ({name})" for env, name in sorted(busy.items()))
            raise PendingError(
                f"requests are under way or not received: {which}; receive their answers first"
            )

    def _renew(self, requests: Mapping[int, Request]) -> None:
        lost = {env: loss for env in requests if (loss := self.host.loss(env)) is not None}
        for env, loss in lost.items():
            if requests[env].name != RESET:
                raise type(loss)(f"environment {env} is lost until it is reset: {loss}") from loss
        for env in lost:
            self._sure = False  # the new process doesn't know the pending requests of its other environments
            self.host.renew(env)

    def _post(self, env: int, request: Request) -> None:
        loss = self.host.loss(env)
        try:
            if loss is None:
                self.host.post(env, request.number, request.name, request.arguments)
        except WorkerError as error:  # the arguments can't be sent: the error becomes the answer
            loss = error
        if loss is not None:
            self._take(ReceivedAnswer(env, request.number, None, loss), request)

    # -------------------------------------------------------------- receiving
    def received(self, wanted: Wanted, deadline: Deadline) -> dict[int, Request]:
        """Wait for the wanted answers, and return their requests by environment, in ascending order.

        If more answers have arrived than wanted, the earliest ones are returned. The requests stay pending until
        `release`, so that an interrupt before the caller has them loses none.

        Raises:
            PendingError: if fewer requests are under way than answers are wanted.
            StepFault: if an environment raised or is lost.
            NotReadyError: if the deadline passes.
        """
        matching = {
            env: request
            for env, request in self._pending.items()
            if request.name == wanted.name and (wanted.envs is None or env in wanted.envs)
        }
        if len(matching) < wanted.least:
            raise PendingError(
                f"{wanted.name}: expected {wanted.least} requests under way, got {len(matching)}, of the environments "
                f"{sorted(matching)}; send requests first"
            )
        arrived = self._answered(matching)
        while len(arrived) < wanted.least:
            if not self._look(deadline) and deadline.passed():
                raise NotReadyError(
                    f"{wanted.name}: {len(arrived)} of {wanted.least} answers arrived in time, of the environments "
                    f"{sorted(arrived)}; they are kept for the next call"
                )
            arrived = self._answered(matching)
        while len(arrived) < min(len(matching), wanted.most or len(matching)) and self._look(Deadline(0.0)):
            arrived = self._answered(matching)
        return dict(sorted([*arrived.items()][: wanted.most]))

    def _answered(self, matching: Mapping[int, Request]) -> dict[int, Request]:
        """Return the requests that are answered, in the order of arrival; raise `StepFault` for an error among them."""
        here = [(env, request) for env, request in matching.items() if request.arrival is not None]
        arrived = dict(sorted(here, key=lambda item: item[1].order))
        for env, request in arrived.items():
            if request.error is not None:
                raise StepFault(0, env, request.name, request.error)
        return arrived

    def release(self, envs: Collection[int]) -> dict[int, Request]:
        """Remove the requests of `envs` from the pending ones, and return them by environment."""
        released = {env: self._pending[env] for env in envs}
        self._pending = {env: request for env, request in self._pending.items() if env not in envs}
        return released

    def _look(self, deadline: Deadline, direct: Mapping[int, Request] | None = None) -> bool:
        """Store the next answer; return whether one arrived by the deadline.

        Args:
            deadline: how long to wait.
            direct: the requests of `ask`, which aren't among the pending ones.
        """
        if not self._sure and self._post_again():
            return True
        self._sure = False  # an interrupt inside `wait` may drop an answer that has arrived
        arrival = self.host.wait(deadline)
        Changes.note()  # the environment may have set a mask: cached conclusions about specs become invalid
        if arrival is not None:
            request = (direct or {}).get(arrival.env) or self._pending.get(arrival.env)
            # Another number is the answer to a request that an interrupted `ask` gave up.
            if request is not None and request.number == arrival.number:
                self._take(arrival, request)
        self._sure = arrival is not None or deadline.passed()
        return arrival is not None

    def _post_again(self) -> bool:
        """Send all unanswered requests again; return whether one of them was answered at once, by an error."""
        missing = {env: request for env, request in self._pending.items() if request.arrival is None}
        for env, request in missing.items():
            self._post(env, request)
        self._sure = True
        return any(request.arrival is not None for request in missing.values())

    def _take(self, arrival: ReceivedAnswer, request: Request) -> None:
        if request.arrival is None:
            request.order, request.arrival = next(self._arrived), arrival


_CLOSED = -1
"""Request number in the answer that reports a closed environment."""


class _Thread:
    """An environment and its thread, which makes, steps and closes it."""

    def __init__(self, env: int, factory: Factory) -> None:
        self.workers = Workers(1, f"gleanrl-environment-{env}")
        self.member = EnvMember(factory)
        self.ident: int | None = None
        self.masked = True


class _Due(NamedTuple):
    number: int
    name: str
    seconds: float | None
    deadline: Deadline


class EnvThreads:
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
        """Make the environments, each in its thread; after an error, close them.

        Raises:
            StepFault: if one can't be made.
            InvalidArgumentError: if two of them step the same object.
        """
        try:
            for env in range(len(self._threads)):
                self.post(env, 0, "construct", ())
            while self._due:
                arrival = self.wait(Deadline(None))
                if arrival is not None and arrival.error is not None:
                    raise StepFault(0, arrival.env, "construction", arrival.error)
            require_independent(self.envs)
        except BaseException:
            with suppress(Exception):  # the error of the start matters more than one of the clean-up
                self.close()
            raise

    @property
    def envs(self) -> list[Any]:
        """The environments, which must exist."""
        return [thread.member.env for thread in self._threads]

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Request a call of a method of an environment's `EnvMember`, in the caller's grad mode."""
        thread = self._threads[env]
        if thread.workers.forked:
            raise ClosedError(
                "threads serve the process that started them, not its forks; make a new pool there"
            )
        seconds = self._timeouts.start_s if thread.ident is None else self._timeouts.work_s
        self._due[env] = _Due(number, name, seconds, Deadline(seconds))
        call = partial(_answer, thread, number, name, arguments, torch.is_grad_enabled())
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
        return self._threads[env].masked

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


def _answer(thread: _Thread, number: int, name: str, arguments: tuple[Any, ...], has_grad: bool) -> Any:
    """Call `EnvMember.answer` with copied TensorDicts, in the grad mode of the thread that sent the request."""
    with torch.set_grad_enabled(has_grad):
        value = _own(thread.member.answer(number, name, _own(arguments)))
        thread.masked = thread.member.masked()
    return value


def _own(value: Any) -> Any:
    """Return `value` with copies of its TensorDicts: the environment may write to its inputs and outputs later."""
    if type(value) is tuple:  # a NamedTuple or torch.Size would lose its type
        return tuple(_own(item) for item in value)
    return value.clone() if isinstance(value, TensorDictBase) else value
