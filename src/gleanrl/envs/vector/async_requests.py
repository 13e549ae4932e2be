"""Requests to the environments of an `AsyncEnvPool`, and the answers that wait to be received.

`RequestHost` is the interface of the places that environments run in, `PoolMember` the receiving end of requests
there, and `Requests` the sending end.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._rollout.errors import StepFault
from gleanrl.data.specs.mapping import Changes
from gleanrl.envs.vector.members import MemberGroup, RandomRequest
from gleanrl.errors import NotReadyError, PendingError, WorkerError


class ReceivedAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        env: number of the environment.
        number: number of the request.
        value: the result of the `PoolMember` method. Its TensorDicts are not shared with the environment.
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
        """Request a call of a method of an environment's `PoolMember`.

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


class PoolMember:
    """One environment of a pool, in its thread or process. It executes each request once.

    The owner numbers its requests in ascending order. After an interrupt the owner may send a request again, since it
    may not have sent all of it or may have dropped the answer. A request with the latest number isn't executed again:
    the stored answer is returned. A request with a lower number raises, since only the latest answer is stored.

    Args:
        make: makes the environment, at the first request.

    Attributes:
        masked: whether a mask restricted the environment's actions after the last answer without an error; True before
            the first one.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._group: MemberGroup | None = None
        # An interrupt while a thread starts may leave a second thread that serves the same environment.
        self._lock = threading.Lock()
        self._number = -1
        self._value: Any = None
        self._error: BaseException | None = None
        self._parsed: list[Any] = []
        self.masked = True

    def answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        """Execute a request once, and return or raise its stored result.

        Args:
            number: number of the request.
            name: one of the methods below.
            arguments: arguments of that method.

        Raises:
            WorkerError: if a request with a higher number came before.
            BaseException: the error of the request, also each time that it is sent again.
        """
        with self._lock:
            if number > self._number:
                self._number, self._value, self._error = number, None, None
                try:
                    self.construct()
                    self._value = getattr(self, name)(*arguments)
                    self.masked = self._live.masked()
                except BaseException as error:
                    self._error = error
            if number < self._number:
                raise WorkerError(
                    f"request {number} ({name}) came after request {self._number}; it wasn't executed"
                )
            if self._error is not None:
                raise self._error
            return self._value

    def construct(self) -> None:
        """Make the environment, unless it exists."""
        if self._group is None:
            self._group = MemberGroup([self._make()])

    @property
    def _live(self) -> MemberGroup:
        assert self._group is not None
        return self._group

    @property
    def env(self) -> Any:
        """The environment, which must exist."""
        return self._live.envs[0]

    def step(self, root: TensorDictBase) -> TensorDictBase:
        """Take the action in `root` and return the contents of ``"next"``."""
        outcome: TensorDictBase = self.env.step(root).get("next")
        return outcome

    def reset(self, root: TensorDictBase | None, kwargs: Mapping[str, Any]) -> TensorDictBase:
        """Reset the environment and return the root of the new episode."""
        result: TensorDictBase = self.env.reset(root, **kwargs)
        return result

    def step_and_maybe_reset(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the result of `step`, and the root of the following step."""
        stepped, after = self.env.step_and_maybe_reset(root)
        return stepped.get("next"), after

    def action_spec(self) -> Any:
        """Return the action spec with its present masks; None if it has no mask."""
        return self._live.action_specs()[0]

    def rand_action(self, root: TensorDictBase, seed: int) -> TensorDictBase:
        """Return random actions for `root`, drawn with this seed."""
        return self._live.rand_actions({0: RandomRequest(root, seed)})[0]

    def set_seed(self, seed: int, static_seed: bool) -> None:
        """Seed the environment."""
        self._live.seed([seed], static_seed)

    def attribute(self, name: str) -> tuple[bool, Any]:
        """Return whether the attribute is callable, and its value if it isn't.

        A bound method can't be sent to the owner, which calls it by name instead.
        """
        (value,) = self._live.attribute(name)
        return (True, None) if callable(value) else (False, value)

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the environment and return its result."""
        return self._live.call(name, args, kwargs)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the environment's state."""
        return self._live.state_dicts()[0]

    def parse_state(self, state: Any, strict: bool) -> None:
        """Parse a state, and keep the value for `adopt_state`."""
        self._parsed = self._live.parse_states([state], strict)

    def adopt_state(self) -> None:
        """Continue from the state that was parsed last."""
        self._live.adopt_states(self._parsed)

    def close(self) -> None:
        """Close the environment, if it exists, after the request that is being executed."""
        with self._lock:
            if self._group is not None:
                self._group.close()


STEP, STEP_AND_RESET, RESET = "step", "step_and_maybe_reset", "reset"
"""Methods of a `PoolMember`. Only a reset replaces a lost environment."""


@dataclass
class Request:
    """A request to one environment.

    Attributes:
        name: the method of its `PoolMember`.
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
    the same number. `PoolMember` executes it once.

    Args:
        host: runs the environments.
    """

    def __init__(self, host: RequestHost) -> None:
        self._host = host
        self._numbers, self._arrived = itertools.count(1), itertools.count()
        self._pending: dict[int, Request] = {}
        # False while a pending request may be unsent, or its answer dropped: `_look` then sends it again.
        self._sure = True

    @property
    def busy(self) -> list[int]:
        """The environments with a request that isn't received, ascending."""
        return sorted(self._pending)

    def close(self) -> None:
        """Forget the pending requests and close the environments; raise the first error that one of them raised."""
        self._pending = {}
        self._host.close()

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

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Send one request to each environment, wait for all answers, and return the values by environment.

        Answers of other environments that arrive meanwhile are stored.

        Raises:
            StepFault: if an environment raised or was lost meanwhile, or if the arguments of its request couldn't be
                sent. All requests have been answered then.
            WorkerError: if one was lost before and the request isn't a reset. No request is sent then.
            PendingError: if an answer of one of the environments wasn't received.
        """
        self._check_free(requests)
        self._renew(requests)
        for env, request in requests.items():
            request.number = next(self._numbers)
            self._post(env, request)
        while any(request.arrival is None for request in requests.values()):
            self._look(Deadline(None), requests)
        for env, request in sorted(requests.items()):
            if request.error is not None:
                raise StepFault(0, env, request.name, request.error)
        return {env: requests[env].value for env in sorted(requests)}

    def _check_free(self, envs: Collection[int]) -> None:
        busy = {env: request.name for env, request in self._pending.items() if env in envs}
        if busy:
            which = ", ".join(f"environment {env} ({name})" for env, name in sorted(busy.items()))
            raise PendingError(
                f"requests are under way or not received: {which}; receive their answers first"
            )

    def _renew(self, requests: Mapping[int, Request]) -> None:
        lost = {env: loss for env in requests if (loss := self._host.loss(env)) is not None}
        for env, loss in lost.items():
            if requests[env].name != RESET:
                raise type(loss)(f"environment {env} is lost until it is reset: {loss}") from loss
        for env in lost:
            self._sure = False  # the new process doesn't know the pending requests of its other environments
            self._host.renew(env)

    def _post(self, env: int, request: Request) -> None:
        loss = self._host.loss(env)
        try:
            if loss is None:
                self._host.post(env, request.number, request.name, request.arguments)
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
        arrival = self._host.wait(deadline)
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
