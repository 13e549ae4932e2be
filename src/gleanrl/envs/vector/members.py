"""A group of live environments in one process, stepped and reset by TensorDicts.

`SerialEnv` has one group of all its members. Each worker of a `ParallelEnv` has a group of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from gleanrl.errors import MissingKeyError


class MemberPosition(Protocol):
    """An array of integers: a list, or shared memory. Its first entry is the number of the environment at work."""

    def __getitem__(self, position: int, /) -> int:
        """Return an entry."""

    def __setitem__(self, position: int, value: int, /) -> None:
        """Set an entry."""


STEP, RESET = "step", "reset"


@dataclass(frozen=True)
class ResetRequest:
    """A reset of one environment.

    Attributes:
        tensordict: the input of its `reset`, with the ``"_reset"`` masks; None for no input.
        kwargs: keyword arguments of its `reset`.
    """

    tensordict: TensorDictBase | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RandomRequest:
    """A draw of random actions by one environment.

    Attributes:
        tensordict: its root.
        seed: seed of torch's global generator during the draw.
    """

    tensordict: TensorDictBase
    seed: int


class MemberGroup:
    """Owns several environments and calls them one after the other. One thread at a time may use it.

    Args:
        envs: the environments.
        position: its first entry is set to the number of an environment before that environment is called. In a worker
            it is shared memory: the owner process reads it to report where the worker hangs or died.
    """

    def __init__(self, envs: Sequence[Any], position: MemberPosition | None = None) -> None:
        self.envs = tuple(envs)
        self.position: MemberPosition = [0] if position is None else position
        self._masks = [MaskWatch(env) for env in self.envs]

    def __len__(self) -> int:
        """Return the number of environments."""
        return len(self.envs)

    def each(self) -> Iterator[Any]:
        """Yield the environments in order, and set `position` to the number of each."""
        for index, env in enumerate(self.envs):
            self.position[0] = index
            yield env

    # ------------------------------------------------------------------ steps
    def step(self, roots: Sequence[TensorDictBase | None]) -> list[Any]:
        """Step each environment that has a root; return the contents of ``"next"``, None for the other environments.

        Raises:
            StepFault: if an environment raised. The environments before it have been stepped.
        """
        with self._faults(STEP):
            return [
                None if root is None else env.step(root).get("next")
                for env, root in zip(self.each(), roots, strict=True)
            ]

    def reset(self, requests: Mapping[int, ResetRequest]) -> dict[int, TensorDictBase]:
        """Reset the environments of `requests`, which are keyed by number; return their roots.

        Raises:
            StepFault: if an environment raised. The environments before it have been reset.
        """
        out = {}
        with self._faults(RESET):
            for index, request in requests.items():
                self.position[0] = index
                out[index] = self.envs[index].reset(request.tensordict, **request.kwargs)
        return out

    # -------------------------------------------------------- random actions
    def action_specs(self) -> list[Any]:
        """Return a copy of each environment's action spec with its present masks; None if it has no mask."""
        specs = [from_torchrl(live_actions(env)) for env in self.each()]
        return [spec.clone() if is_masked(spec) else None for spec in specs]

    def masked(self) -> bool:
        """Return whether a mask restricts an environment's actions at present; fast as long as there is none."""
        return any(mask.present() for mask in self._masks)

    def rand_actions(self, requests: Mapping[int, RandomRequest]) -> dict[int, TensorDictBase]:
        """Return random actions of the environments of `requests`, which are keyed by number, without other entries.

        Torch's global generator is seeded for each draw, and restored after it.

        Raises:
            StepFault: if an environment raised.
        """
        out = {}
        with self._faults("rand_action"):
            for index, request in requests.items():
                self.position[0] = index
                env = self.envs[index]
                with OwnedTorchGenerator(request.seed).as_global():
                    out[index] = env.rand_action(request.tensordict).select(*env.action_keys)
        return out

    @contextmanager
    def _faults(self, during: str) -> Iterator[None]:
        try:
            yield
        except Exception as cause:
            raise StepFault(0, self.position[0], during, cause) from cause

    # -------------------------------------------------------------- dispatch
    def seed(self, seeds: Sequence[int], static_seed: bool) -> None:
        """Seed each environment, in order. An error of one is raised unchanged, also in the methods below."""
        for env, seed in zip(self.each(), seeds, strict=True):
            env.set_seed(seed, static_seed=static_seed)

    def attribute(self, name: str) -> list[Any]:
        """Return the attribute of each environment."""
        return [getattr(env, name) for env in self.each()]

    def call(self, name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of each environment and return the results."""
        return [getattr(env, name)(*args, **kwargs) for env in self.each()]

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state of each environment."""
        return [dict(env.state_dict()) for env in self.each()]

    def parse_states(self, states: Sequence[Any], strict: bool) -> list[Any]:
        """Parse a state for each environment and return the values; change no environment."""
        return [parse_state(env, state, strict) for env, state in zip(self.each(), states, strict=True)]

    def adopt_states(self, values: Sequence[Any]) -> None:
        """Let each environment continue from its parsed state."""
        for env, value in zip(self.each(), values, strict=True):
            adopt_state(env, value)

    # ------------------------------------------------------------------ ends
    def steppers(self, rules: EpisodeRules, on_host: bool = False) -> list[Stepper]:
        """Return a new stepper for each environment; see `make_stepper`."""
        return [make_stepper(env, rules, on_host) for env in self.each()]

    def close(self) -> None:
        """Close every environment that isn't closed, then raise the first error that one of them raised."""
        close_all([env.close for env in self.envs if not is_closed(env)])


def make_all(factories: Sequence[Factory], position: MemberPosition | None = None) -> list[Any]:
    """Return one environment of each factory. If an error occurs, close the environments before it, existing ones too.

    An existing environment that several factories hold is copied for all but the first.

    Args:
        factories: one for each environment.
        position: its first entry is set to the number of an environment before it is made; None for no record.

    Raises:
        InvalidArgumentError: two of them step the same object.
        Exception: any error of a factory.
    """
    made: list[Any] = []
    try:
        for index, factory in enumerate(with_own_copies(factories)):
            if position is not None:
                position[0] = index
            made.append(factory())
        require_independent(made)
    except BaseException:
        with suppress(Exception):  # the error of the construction matters more than one of the clean-up
            close_all([env.close for env in made])
        raise
    return made


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
