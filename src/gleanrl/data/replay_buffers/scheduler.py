"""Schedules for sampler parameters, for example `alpha` and `beta` of a prioritized sampler."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gleanrl._state.state import Stateful, StateReader
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["LambdaScheduler", "LinearScheduler", "ParameterScheduler", "SchedulerList", "StepScheduler"]

_CHANGES = {
    "multiplicative": lambda value, gamma: value * gamma,
    "additive": lambda value, gamma: value + gamma,
}


class ScheduleState(NamedTuple):
    """The number of steps of a schedule, and the initial value of its parameter."""

    steps: int
    initial: float


class SchedulesState(NamedTuple):
    """The states of several schedules, in their order."""

    schedulers: tuple[ScheduleState, ...]


class ParameterScheduler(Stateful[ScheduleState]):
    """Changes a parameter of a sampler at every `step`.

    The initial value is the parameter's value at construction, which isn't clipped to the bounds.

    Args:
        obj: the sampler, or a buffer. For a buffer, each step changes the buffer's sampler at that time.
        param_name: the attribute to change.
        min_value: its lower bound; None for none.
        max_value: its upper bound; None for none.

    Raises:
        InvalidTypeError: `obj` is neither a sampler nor a buffer.
        InvalidArgumentError: the sampler has no such attribute.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not isinstance(obj, (ReplayBuffer, Sampler)):
            raise InvalidTypeError(
                f"{type(self).__name__}: expected a ReplayBuffer or a Sampler, got {obj!r}"
            )
        self._of = obj
        self.param_name = param_name
        if not hasattr(self.sampler, param_name):
            raise InvalidArgumentError(
                f"param_name: a {type(self.sampler).__name__} has no attribute {param_name!r}"
            )
        self._least = -math.inf if min_value is None else min_value
        self._most = math.inf if max_value is None else max_value
        self._state = ScheduleState(0, getattr(self.sampler, param_name))

    @property
    def sampler(self) -> Sampler:
        """The sampler whose parameter changes; for a buffer, the buffer's present one."""
        return self._of.sampler if isinstance(self._of, ReplayBuffer) else self._of

    def step(self) -> None:
        """Set the parameter to its next value, clipped to the bounds, and count the step."""
        steps, sampler = self._state.steps + 1, self.sampler
        value = self._value(steps, self._state.initial, getattr(sampler, self.param_name))
        setattr(sampler, self.param_name, min(max(value, self._least), self._most))
        self._state = self._state._replace(steps=steps)

    @abstractmethod
    def _value(self, steps: int, initial: Any, current: Any) -> Any:
        """Return the value at step `steps` (1 or more) from the initial and the current value."""

    def snapshot(self) -> ScheduleState:
        """Return the schedule's progress. The parameter itself is part of the sampler's state."""
        return self._state

    def parse(self, state: Any) -> ScheduleState:
        """Return the value of a saved state; `SchemaError` for anything else."""
        reader = StateReader(state, f"a {type(self).__name__}")
        return ScheduleState(reader.integer("steps"), reader.number("initial"))

    def adopt(self, value: ScheduleState) -> None:
        """Take over the progress that `parse` returned. The parameter stays unchanged until the next `step`."""
        self._state = value


class LinearScheduler(ParameterScheduler):
    """Moves a parameter from its initial value to a final value, in equal steps.

    A step overwrites other changes of the parameter. Other arguments are documented in `ParameterScheduler`.

    Args:
        final_value: the value after `num_steps` steps and later.
        num_steps: number of steps, 1 or more.

    Raises:
        InvalidArgumentError: `num_steps` below 1.

    Examples:
        >>> from gleanrl.data import PrioritizedSampler
        >>> sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
        >>> schedule = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
        >>> for _ in range(3):
        ...     schedule.step()
        ...     print(sampler.beta)
        0.75
        1.0
        1.0
    """

    def __init__(
        self, obj: ReplayBuffer | Sampler, param_name: str, final_value: float, num_steps: int
    ) -> None:
        super().__init__(obj, param_name)
        if num_steps < 1:
            raise InvalidArgumentError(f"num_steps: expected 1 or more, got {num_steps}")
        self.final_value, self.num_steps = final_value, num_steps

    def _value(self, steps: int, initial: Any, current: Any) -> Any:
        if steps >= self.num_steps:
            return self.final_value
        return initial + (self.final_value - initial) * (steps / self.num_steps)


class StepScheduler(ParameterScheduler):
    """Multiplies a parameter by a factor, or adds a number to it, at every `n_steps`-th step.

    The present value is changed, so other changes of the parameter have a lasting effect. Other arguments are
    documented in `ParameterScheduler`.

    Args:
        gamma: the factor or summand.
        n_steps: a change comes at each step whose number is a multiple of this, 1 or more.
        mode: ``"multiplicative"`` or ``"additive"``.

    Raises:
        InvalidArgumentError: an unknown mode, or `n_steps` below 1.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in _CHANGES:
            raise InvalidArgumentError(f"mode: expected one of {tuple(_CHANGES)}, got {mode!r}")
        if n_steps < 1:
            raise InvalidArgumentError(f"n_steps: expected 1 or more, got {n_steps}")
        self.gamma, self.n_steps, self.mode = gamma, n_steps, mode

    def _value(self, steps: int, initial: Any, current: Any) -> Any:
        return current if steps % self.n_steps else _CHANGES[self.mode](current, self.gamma)


class LambdaScheduler(ParameterScheduler):
    """Sets a parameter to its initial value times a function of the step number.

    A step overwrites other changes of the parameter. Other arguments are documented in `ParameterScheduler`.

    Args:
        lambda_fn: maps the step number, 1 for the first step, to a factor.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = lambda_fn

    def _value(self, steps: int, initial: Any, current: Any) -> Any:
        return initial * self.lambda_fn(steps)


class SchedulerList(Stateful[SchedulesState]):
    """Several schedules that step together and share one state.

    Args:
        schedulers: the schedules.
    """

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]) -> None:
        items = [schedulers] if isinstance(schedulers, ParameterScheduler) else [*schedulers]
        self.schedulers: list[ParameterScheduler] = []
        for scheduler in items:
            self.append(scheduler)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a schedule; `InvalidTypeError` for any other object."""
        if not isinstance(scheduler, ParameterScheduler):
            raise InvalidTypeError(f"schedulers: expected a ParameterScheduler, got {scheduler!r}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step all schedules, in their order. An error leaves the earlier ones stepped."""
        for scheduler in self.schedulers:
            scheduler.step()

    def snapshot(self) -> SchedulesState:
        """Return the progress of each schedule."""
        return SchedulesState(tuple(scheduler.snapshot() for scheduler in self.schedulers))

    def parse(self, state: Any) -> SchedulesState:
        """Return the value of a saved state; `SchemaError` for anything else, or a different number of schedules."""
        reader = StateReader(state, "a SchedulerList")
        reader.parts("schedulers", len(self.schedulers))
        each = zip(self.schedulers, reader.get("schedulers"), strict=True)
        return SchedulesState(tuple(scheduler.parse(saved) for scheduler, saved in each))

    def adopt(self, value: SchedulesState) -> None:
        """Take over a value that `parse` returned."""
        for scheduler, saved in zip(self.schedulers, value.schedulers, strict=True):
            scheduler.adopt(saved)
