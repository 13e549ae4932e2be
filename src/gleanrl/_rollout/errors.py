"""What goes wrong in an environment: told by the stepper that it happened in, explained to the user by the owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gleanrl._process.remote_errors import Portable, Report
from gleanrl._rollout.env_traits import Env
from gleanrl.errors import (
    EnvironmentContractError,
    EnvironmentFailure,
    GleanError,
    PolicyError,
    WorkerError,
    failure_from,
)

BATCH = -1
"""The environment index in a `StepFault` that concerns a batch of environments as a whole."""

_MOST_SHOWN = 200
"""Characters of an action in an error message."""


def error_of(check: Callable[[], object], *kinds: type[Exception]) -> Any:
    """Return the error of one of these kinds that a check raises; None if it raises none, or another one.

    For checks after another error, which matters more: a check may fail on a block that isn't whole.
    """
    try:
        check()
    except kinds as found:
        return found
    except Exception:
        return None
    return None


class StepFault(Portable):
    """What went wrong in a stepper, and where; the rollout's owner turns it into an error for the user.

    It's the one form of a fault between the place where it happens, in whatever process, and that error.

    Args:
        t: row of the block at which it happened.
        env: index of the environment in the flattened batch; below 0 for the batch as a whole.
        during: ``"step"`` or ``"reset"``, or what else the environment was asked for.
        cause: the original error; or how the worker ended or hung.
        made: the steps of this block that each environment of the flattened batch has made; None if each has made
            those before row `t`, and that one too if a reset failed.
    """

    def __init__(
        self, t: int, env: int, during: str, cause: BaseException, made: Sequence[int] | None = None
    ) -> None:
        super().__init__(t, env, during, cause, made)
        self.t, self.env, self.during, self.cause = t, env, during, cause
        self._made = made

    def made(self, num_envs: int) -> list[int]:
        """Return the steps of this block that each of the `num_envs` environments has made."""
        return [self.t + (self.during == "reset")] * num_envs if self._made is None else list(self._made)

    def counted_from(self, first: int, made: Sequence[int] | None = None) -> StepFault:
        """Return the same fault in a larger batch, in which these environments are those from `first` on.

        Args:
            first: see above.
            made: see the class, for the larger batch.
        """
        env = self.env if self.env < 0 else first + self.env
        return StepFault(self.t, env, self.during, self.cause, made)

    def because(self, cause: BaseException) -> StepFault:
        """Return the same fault for a better reason."""
        return StepFault(self.t, self.env, self.during, cause, self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the cause in a form that can always be sent."""
        return _arrived, (self.t, self.env, self.during, Report.of(self.cause), self._made)


def _arrived(t: int, env: int, during: str, cause: Report, made: Sequence[int] | None) -> StepFault:
    return StepFault(t, env, during, cause.error(), made)


def explain(
    fault: StepFault,
    env: Env,
    episode: int | None = None,
    step: int | None = None,
    action: torch.Tensor | None = None,
) -> GleanError:
    """Return the error that tells a user what `fault` was: which environment, episode and step, and why.

    Args:
        fault: what happened.
        env: the environment, or the batch of them.
        episode: the trajectory's id.
        step: steps of the trajectory before this one.
        action: the action that the environment had been given.
    """
    place = type(env).__name__
    if fault.env != BATCH:
        place = f"environment {fault.env} ({place})"
    if episode is not None:
        place += f", episode {episode}"
    if step is not None:
        place += f", step {step}"
    given = "" if action is None else f" (action {_shown(action)})"
    cause = fault.cause
    if isinstance(cause, (EnvironmentContractError, PolicyError, EnvironmentFailure, WorkerError)):
        error = type(cause)(f"{place}: {cause}{given}")
        error.__cause__ = cause
        return error
    return failure_from(cause, f"{place}: {fault.during} raised {type(cause).__name__}: {cause}{given}")


def _shown(action: torch.Tensor) -> str:
    text = str(action.tolist())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
