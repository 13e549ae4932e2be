"""What a pool's environments were asked for, and what came of it that nobody has received yet.

Where the environments of a pool live, and what each of them can be asked there.
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
    """What came of a request.

    Attributes:
        env: the environment that was asked.
        number: of the request.
        value: what the method of its `PoolMember` returned; its TensorDicts are nobody else's.
        error: what was raised, or why the environment is lost.
    """

    env: int
    number: int
    value: Any = None
    error: BaseException | None = None


class RequestHost(Protocol):
    """Threads or processes that environments live in. One thread at a time.

    An environment is *lost* when its process has ended, or when it stayed at one request for too long: each request
    under way arrives as an error then, and so does every further one, until it's renewed.
    """

    def start(self) -> None:
        """Make the environments.

        Raises:
            StepFault: if one can't be made; ``during`` is ``"construction"``.
        """

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Have a method of a member called.

        Raises:
            WorkerError: if the arguments can't be sent.
            ClosedError: in a fork of the process that started the host.
        """

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return what arrives next; None if nothing is due, or nothing came by the deadline. It looks at least once."""

    def loss(self, env: int) -> WorkerError | None:
        """Return why an environment is lost; None if it isn't."""

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict the actions of an environment since its last answer; it isn't asked."""

    def renew(self, env: int) -> None:
        """Make a lost environment anew."""

    def close(self) -> None:
        """Close the environments.

        Raises:
            Exception: what one of them raised first.
        """


class PoolMember:
    """One environment of a pool, in its thread or process.

    Its owner numbers its requests, upwards. A number that comes again, because an interrupt kept its owner from
    sending it whole or from taking the answer, isn't acted upon again: the same answer is given. A number below the
    latest one gets an error, since the answer that is kept is that of another request.

    Args:
        make: makes the environment, when it's asked for the first time.

    Attributes:
        masked: whether a mask restricted its actions after the last answer.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._group: MemberGroup | None = None
        self._lock = threading.Lock()  # an interrupt may have left a second thread
        self._number = -1
        self._value: Any = None
        self._error: BaseException | None = None
        self._parsed: list[Any] = []
        self.masked = True

    def answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call one of the methods below, unless that has happened; return what it returned, or raise what it raised."""
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
                    f"request {number} ({name}) came after request {self._number}; it was not carried out"
                )
            if self._error is not None:
                raise self._error
            return self._value

    def construct(self) -> None:
        """Make the environment, unless it's there."""
        if self._group is None:
            self._group = MemberGroup([self._make()])

    @property
    def _live(self) -> MemberGroup:
        assert self._group is not None
        return self._group

    @property
    def env(self) -> Any:
        """The environment, which was made."""
        return self._live.envs[0]

    def step(self, root: TensorDictBase) -> TensorDictBase:
        """Return what ``"next"`` holds after the action in `root`."""
        outcome: TensorDictBase = self.env.step(root).get("next")
        return outcome

    def reset(self, root: TensorDictBase | None, kwargs: Mapping[str, Any]) -> TensorDictBase:
        """Return the root of a new episode."""
        fresh: TensorDictBase = self.env.reset(root, **kwargs)
        return fresh

    def step_and_maybe_reset(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Return what `step` returns, and the root of the step that follows."""
        stepped, after = self.env.step_and_maybe_reset(root)
        return stepped.get("next"), after

    def action_spec(self) -> Any:
        """Return the action spec with its present masks; None if it has none."""
        return self._live.action_specs()[0]

    def rand_action(self, root: TensorDictBase, seed: int) -> TensorDictBase:
        """Return random actions for `root`."""
        return self._live.rand_actions({0: RandomRequest(root, seed)})[0]

    def set_seed(self, seed: int, static_seed: bool) -> None:
        """Seed the environment."""
        self._live.seed([seed], static_seed)

    def attribute(self, name: str) -> tuple[bool, Any]:
        """Return whether the attribute is callable, and its value if it isn't."""
        (value,) = self._live.attribute(name)
        return (True, None) if callable(value) else (False, value)

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the environment."""
        return self._live.call(name, args, kwargs)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the environment's state."""
        return self._live.state_dicts()[0]

    def parse_state(self, state: Any, strict: bool) -> None:
        """Parse a state, and keep the value for `adopt_state`."""
        self._parsed = self._live.parse_states([state], strict)

    def adopt_state(self) -> None:
        """Go on from the value that was parsed last."""
        self._live.adopt_states(self._parsed)

    def close(self) -> None:
        """Close the environment, if it was made."""
        with self._lock:
            if self._group is not None:
                self._group.close()


STEP, STEP_AND_RESET, RESET = "step", "step_and_maybe_reset", "reset"
"""Methods of a `PoolMember`. A reset brings a lost environment back."""


@dataclass
class Request:
    """Something that one environment is asked for.

    Attributes:
        name: the method of its `PoolMember`.
        arguments: the method's.
        number: its number.
        arrival: what came of it; None as long as nothing has.
        order: how many arrived before.
    """

    name: str
    arguments: tuple[Any, ...]
    number: int = 0
    arrival: ReceivedAnswer | None = None
    order: int = 0

    @property
    def error(self) -> BaseException | None:
        """What was raised."""
        return None if self.arrival is None else self.arrival.error

    @property
    def value(self) -> Any:
        """What the method returned."""
        return None if self.arrival is None else self.arrival.value


@dataclass(frozen=True)
class Wanted:
    """Which answers are to be received.

    Attributes:
        name: to requests of that method.
        least: at least so many.
        most: at most so many; None for all that have arrived.
        envs: of these environments; None for any.
    """

    name: str
    least: int
    most: int | None = None
    envs: Collection[int] | None = None


class Requests:
    """The requests to a pool's environments. One thread at a time.

    Each environment has at most one request under way. An interrupt (Ctrl-C, the exception of a signal handler) loses
    none: what may not have been sent, or whose answer may have been dropped, is asked for again by the same number.

    Args:
        host: where the environments are.
    """

    def __init__(self, host: RequestHost) -> None:
        self._host = host
        self._numbers, self._arrived = itertools.count(1), itertools.count()
        self._pending: dict[int, Request] = {}
        self._sure = True  # whether all that is pending was sent, and nothing of it was dropped

    @property
    def busy(self) -> list[int]:
        """The environments whose answers weren't received."""
        return sorted(self._pending)

    def close(self) -> None:
        """Close the environments; what is pending is forgotten."""
        self._pending = {}
        self._host.close()

    # ---------------------------------------------------------------- asking
    def send(self, requests: Mapping[int, Request]) -> None:
        """Send each environment its request: all of them, or none if it raises.

        Raises:
            PendingError: if an answer of one of them wasn't received.
            WorkerError: if one of them is lost, and this is no reset.
        """
        self._check_free(requests)
        self._renew(requests)
        for request in requests.values():
            request.number = next(self._numbers)
        sure, self._sure = self._sure, False
        self._pending = {**self._pending, **requests}
        for env, request in requests.items():
            self._post(env, request)
        self._sure = sure

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Send each environment its request, and wait for all answers; return them by environment.

        What arrives meanwhile of what others were sent is kept.

        Raises:
            StepFault: if one of them raised, or is lost; all have ended.
            PendingError: if an answer of one of them wasn't received.
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
            raise PendingError(f"still under way or not received: {which}; receive that first")

    def _renew(self, requests: Mapping[int, Request]) -> None:
        lost = {env: loss for env in requests if (loss := self._host.loss(env)) is not None}
        for env, loss in lost.items():
            if requests[env].name != RESET:
                raise type(loss)(f"environment {env} is lost until it is reset: {loss}") from loss
        for env in lost:
            self._sure = False  # what others were asked in the same process is gone
            self._host.renew(env)

    def _post(self, env: int, request: Request) -> None:
        loss = self._host.loss(env)
        try:
            if loss is None:
                self._host.post(env, request.number, request.name, request.arguments)
        except WorkerError as error:  # it can't be sent
            loss = error
        if loss is not None:
            self._take(ReceivedAnswer(env, request.number, None, loss), request)

    # -------------------------------------------------------------- receiving
    def received(self, wanted: Wanted, deadline: Deadline) -> dict[int, Request]:
        """Wait until so many answers are there, and return the requests by environment, in the order of these.

        If there are more than are wanted, those that arrived first are taken. They stay until they are `release`d.

        Raises:
            PendingError: if not so many are under way.
            StepFault: if an environment raised, or is lost.
            NotReadyError: if the deadline passes.
        """
        mine = {
            env: request
            for env, request in self._pending.items()
            if request.name == wanted.name and (wanted.envs is None or env in wanted.envs)
        }
        if len(mine) < wanted.least:
            raise PendingError(
                f"{wanted.name}: expected {wanted.least} answers to wait for, got {len(mine)}, of the environments "
                f"{sorted(mine)}; send first"
            )
        came = self._arrived_of(mine)
        while len(came) < wanted.least:
            if not self._look(deadline) and deadline.passed():
                raise NotReadyError(
                    f"{wanted.name}: {len(came)} of {wanted.least} answers arrived in time, of the environments "
                    f"{sorted(came)}; they are kept for the next call"
                )
            came = self._arrived_of(mine)
        while len(came) < min(len(mine), wanted.most or len(mine)) and self._look(Deadline(0.0)):
            came = self._arrived_of(mine)
        return dict(sorted([*came.items()][: wanted.most]))

    def _arrived_of(self, mine: Mapping[int, Request]) -> dict[int, Request]:
        """Return those whose answers have arrived, in the order of arrival."""
        here = [(env, request) for env, request in mine.items() if request.arrival is not None]
        came = dict(sorted(here, key=lambda item: item[1].order))
        for env, request in came.items():
            if request.error is not None:
                raise StepFault(0, env, request.name, request.error)
        return came

    def release(self, envs: Collection[int]) -> dict[int, Request]:
        """Let go of answers that are received, and return them."""
        released = {env: self._pending[env] for env in envs}
        self._pending = {env: request for env, request in self._pending.items() if env not in envs}
        return released

    def _look(self, deadline: Deadline, asked: Mapping[int, Request] | None = None) -> bool:
        """Take the next arrival; return whether there was one by the deadline.

        Args:
            deadline: see above.
            asked: requests that aren't pending, whose owner waits here.
        """
        if not self._sure and self._post_again():
            return True
        self._sure = False
        arrival = self._host.wait(deadline)
        Changes.note()  # the environment may have got a mask
        if arrival is not None:
            request = (asked or {}).get(arrival.env) or self._pending.get(arrival.env)
            if request is not None and request.number == arrival.number:
                self._take(arrival, request)
        self._sure = arrival is not None or deadline.passed()
        return arrival is not None

    def _post_again(self) -> bool:
        """Ask again for what nothing has come of; return whether something of it arrived at once, as lost."""
        missing = {env: request for env, request in self._pending.items() if request.arrival is None}
        for env, request in missing.items():
            self._post(env, request)
        self._sure = True
        return any(request.arrival is not None for request in missing.values())

    def _take(self, arrival: ReceivedAnswer, request: Request) -> None:
        if request.arrival is None:
            request.order, request.arrival = next(self._arrived), arrival
