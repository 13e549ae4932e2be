"""The environments of a batch that live in one process, and the requests to them.

`SerialEnv` has a group of all its members, and each worker process has a group of its share. A thread of an
`AsyncEnvPool` has one member. Add a kind of request as a method of `EnvMember`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tensordict import TensorDictBase

from gleanrl._rollout.env_traits import is_closed, live_actions
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.policies import MaskWatch
from gleanrl._rollout.protocol import EpisodeRules, Stepper
from gleanrl._rollout.tensordict_stepper import make_stepper
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl.data.specs import from_torchrl, is_masked
from gleanrl.envs.env_state import adopt_state, parse_state
from gleanrl.envs.vector.factories import Factory, with_own_copies
from gleanrl.envs.vector.independence import require_independent
from gleanrl.errors import MissingKeyError, WorkerError

STEP, STEP_AND_RESET, RESET, RANDOM = "step", "step_and_maybe_reset", "reset", "rand_action"
TENSORDICT_REQUESTS = (STEP, STEP_AND_RESET, RESET, RANDOM)
"""The methods of `EnvMember` that take and return TensorDicts."""


class EnvMember:
    """One environment of a batch. Its public methods are the requests to it; batches call them by name.

    The owner of a thread or process numbers its requests in ascending order (`answer`). After an interrupt the owner
    may send a request again, since it may not have sent all of it or may have dropped the answer. A request with the
    latest number isn't executed again: the stored answer is returned. A request with a lower number raises, since only
    the latest answer is stored.

    Args:
        make: makes the environment, at the first request.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._env: Any = None
        self._masks: MaskWatch | None = None
        # An interrupt while a thread starts may leave a second thread that serves the same environment.
        self._lock = threading.Lock()
        self._number = -1
        self._value: Any = None
        self._error: BaseException | None = None
        self._parsed: Any = None

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
        if self._env is None:
            env = self._make()
            self._env, self._masks = env, MaskWatch(env)

    @property
    def env(self) -> Any:
        """The environment, which must exist."""
        assert self._env is not None
        return self._env

    def masked(self) -> bool:
        """Return whether a mask restricts the actions at present; fast as long as there is none."""
        return self._masks is None or self._masks.present()

    def step(self, root: TensorDictBase) -> TensorDictBase:
        """Take the action in `root` and return the contents of ``"next"``."""
        outcome: TensorDictBase = self.env.step(root).get("next")
        return outcome

    def reset(self, root: TensorDictBase | None, kwargs: Mapping[str, Any]) -> TensorDictBase:
        """Reset the environment, for `root` with its ``"_reset"`` masks or None, and return the new root."""
        result: TensorDictBase = self.env.reset(root, **kwargs)
        return result

    def step_and_maybe_reset(self, root: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the result of `step`, and the root of the following step."""
        stepped, after = self.env.step_and_maybe_reset(root)
        return stepped.get("next"), after

    def action_spec(self) -> Any:
        """Return a copy of the action spec with its present masks; None if it has no mask."""
        spec = from_torchrl(live_actions(self.env))
        return spec.clone() if is_masked(spec) else None

    def rand_action(self, root: TensorDictBase, seed: int) -> TensorDictBase:
        """Return random actions for `root`, without other entries.

        Torch's global generator gets this seed for the draw, and its former state afterwards.
        """
        with OwnedTorchGenerator(seed).as_global():
            drawn: TensorDictBase = self.env.rand_action(root).select(*self.env.action_keys)
        return drawn

    def set_seed(self, seed: int, static_seed: bool) -> None:
        """Seed the environment."""
        self.env.set_seed(seed, static_seed=static_seed)

    def attribute(self, name: str) -> tuple[bool, Any]:
        """Return whether the attribute is callable, and its value if it isn't.

        A bound method can't be sent to the owner, which calls it by name instead.
        """
        value = getattr(self.env, name)
        return (True, None) if callable(value) else (False, value)

    def call(self, name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the environment and return its result."""
        return getattr(self.env, name)(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the environment's state."""
        return dict(self.env.state_dict())

    def parse_state(self, state: Any, strict: bool) -> None:
        """Parse a state, and keep the value for `adopt_state`."""
        self._parsed = parse_state(self.env, state, strict)

    def adopt_state(self) -> None:
        """Continue from the state that was parsed last."""
        adopt_state(self.env, self._parsed)

    def close(self) -> None:
        """Close the environment if it exists and isn't closed, after the request that is being executed."""
        with self._lock:
            if self._env is not None and not is_closed(self._env):
                self._env.close()


class MemberPosition(Protocol):
    """An array of integers: a list, or shared memory. Its first entry is the number of the environment at work."""

    def __getitem__(self, position: int, /) -> int:
        """Return an entry."""

    def __setitem__(self, position: int, value: int, /) -> None:
        """Set an entry."""


class MemberGroup:
    """Owns several environments and calls them one after the other. One thread at a time may use it.

    Args:
        factories: one for each environment. An existing environment that several factories hold is copied for all but
            the first.
        position: its first entry is set to the number of an environment before that environment is called. In a worker
            it is shared memory: the owner process reads it to report where the worker hangs or died.

    Attributes:
        members: the environments.
        is_started: whether all environments were made. It stays True after `close`.
        is_closed: whether the owner must make a new group; always False.
        is_idle: whether the members accept requests; always True.
    """

    is_closed, is_idle = False, True

    def __init__(self, factories: Sequence[Factory], position: MemberPosition | None = None) -> None:
        self.members = tuple(map(EnvMember, with_own_copies(factories)))
        self.position: MemberPosition = [0] if position is None else position
        self.is_started = False

    def __len__(self) -> int:
        """Return the number of environments."""
        return len(self.members)

    def start(self) -> None:
        """Make the environments. If an error occurs, close the environments before it, existing ones too.

        Raises:
            InvalidArgumentError: two of them step the same object.
            Exception: any error of a factory.
        """
        try:
            for member in self._each():
                member.construct()
            require_independent(self.envs)
        except BaseException:
            with suppress(Exception):  # the error of the construction matters more than one of the clean-up
                self.close()
            self.members = ()  # the owner's `close` has nothing left to close, unless an interrupt came before
            raise
        self.is_started = True

    @property
    def envs(self) -> tuple[Any, ...]:
        """The environments, which must exist."""
        return tuple(member.env for member in self.members)

    def _each(self) -> Iterator[EnvMember]:
        for index, member in enumerate(self.members):
            self.position[0] = index
            yield member

    # -------------------------------------------------------------- requests
    def ask(
        self, name: str, requests: Mapping[int, tuple[Any, ...]], during: str | None = None
    ) -> dict[int, Any]:
        """Call a method of some members and return the results by member.

        An error ends the call. The members before it have answered.

        Args:
            name: the method of `EnvMember`.
            requests: its arguments, by member.
            during: the operation, for messages; None for `name`.

        Raises:
            StepFault: if a step, a reset or a random action raised.
            Exception: an error of another request.
        """
        try:
            return {
                index: getattr(member, name)(*arguments) for index, member, arguments in self._named(requests)
            }
        except Exception as cause:
            if name not in TENSORDICT_REQUESTS:
                raise
            raise StepFault(0, self.position[0], during or name, cause) from cause

    def answer(self, number: int, name: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Let some members answer a request; see `EnvMember.answer`. Errors are raised unchanged."""
        return {
            index: member.answer(number, name, arguments)
            for index, member, arguments in self._named(requests)
        }

    def _named(
        self, requests: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[tuple[int, EnvMember, tuple[Any, ...]]]:
        for index, arguments in requests.items():
            self.position[0] = index
            yield index, self.members[index], arguments

    def may_be_masked(self, index: int) -> bool:
        """Return whether a mask restricts a member's actions at present."""
        return self.members[index].masked()

    # ------------------------------------------------------------------ ends
    def steppers(self, rules: EpisodeRules, on_host: bool = False) -> list[Stepper]:
        """Return a new stepper for each environment; see `make_stepper`."""
        return [make_stepper(member.env, rules, on_host) for member in self._each()]

    def close(self) -> None:
        """Close every environment that isn't closed, then raise the first error that one of them raised."""
        close_all([member.close for member in self.members])


def close_all(closers: Iterable[Callable[[], object]]) -> None:
    """Call every closer, then raise the first error that one of them raised."""
    first: Exception | None = None
    for close in closers:
        try:
            close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def member_states(state: Mapping[str, Any], num_envs: int) -> list[Mapping[str, Any]]:
    """Return one state for each environment: the entries ``worker0``, ``worker1``, …, or `state` itself for all.

    Raises:
        MissingKeyError: if only some of these entries exist.
    """
    names = [f"worker{index}" for index in range(num_envs)]
    if not any(name in state for name in names):
        return [state] * num_envs
    missing = [name for name in names if name not in state]
    if missing:
        raise MissingKeyError(f"load_state_dict: missing {missing}; got {sorted(state)}")
    return [state[name] for name in names]
