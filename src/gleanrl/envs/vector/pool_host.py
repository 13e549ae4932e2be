"""Where the environments of a pool live, and what each of them can be asked there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDictBase

from gleanrl.envs.vector.members import MemberGroup, RandomRequest
from gleanrl.errors import WorkerError
from gleanrl.system.clock import Deadline


class Arrival(NamedTuple):
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


class Host(Protocol):
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

    def wait(self, deadline: Deadline) -> Arrival | None:
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
