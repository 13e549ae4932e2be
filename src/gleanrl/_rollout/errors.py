"""`StepFault`: an environment's failure with its position, and the errors that users get from it."""

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
"""The environment index of a `StepFault` that concerns a whole batch of environments."""

_MAX_TEXT = 200
"""Maximum number of characters of an action in an error message."""


def error_of(check: Callable[[], object], *kinds: type[Exception]) -> Any:
    """Call `check` and return its error if that is one of `kinds`; otherwise None.

    For checks after another error. An unrelated error of the check is dropped, since a check may fail on an incomplete
    block.
    """
    try:
        check()
    except kinds as found:
        return found
    except Exception:
        return None
    return None


class StepFault(Portable):
    """An environment's failure and its position in the block. The rollout's owner turns it into an error for the user.

    All processes use this form for failures of environments.

    Args:
        t: row of the block at which it happened.
        env: index of the environment in the flattened batch; below 0 for the batch as a whole.
        during: ``"step"``, ``"reset"``, or another request to the environment.
        cause: the original error, or an error that tells how the worker ended or hung.
        made: for each environment of the flattened batch, the number of steps completed in this block. None if each
            completed the rows before `t`, and also row `t` if a reset failed.
    """

    def __init__(
        self, t: int, env: int, during: str, cause: BaseException, made: Sequence[int] | None = None
    ) -> None:
        super().__init__(t, env, during, cause, made)
        self.t, self.env, self.during, self.cause = t, env, during, cause
        self._made = made

    def made(self, num_envs: int) -> list[int]:
        """Return the number of steps of this block that each of the `num_envs` environments has completed."""
        return [self.t + (self.during == "reset")] * num_envs if self._made is None else list(self._made)

    def counted_from(self, first: int, made: Sequence[int] | None = None) -> StepFault:
        """Return the same fault for a larger batch, which contains this batch's environments from index `first`.

        Args:
            first: index of this batch's first environment in the larger batch.
            made: see the class, for the larger batch.
        """
        env = self.env if self.env < 0 else first + self.env
        return StepFault(self.t, env, self.during, self.cause, made)

    def because(self, cause: BaseException) -> StepFault:
        """Return the same fault with another cause."""
        return StepFault(self.t, self.env, self.during, cause, self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fault with its cause as a `Report`, which can always be pickled."""
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
    """Return the user's error for `fault`: it names the environment, the episode, the step and the cause.

    Errors of gleanrl for contracts, policies, environments and workers keep their type. Any other cause gives an
    `EnvironmentFailure`, which can usually also be caught as the type of the cause. The cause is its ``__cause__``.

    Args:
        fault: the failure.
        env: the environment, or the batch of them.
        episode: the trajectory's id.
        step: number of the trajectory's steps before this one.
        action: the action that the environment received.
    """
    where = type(env).__name__
    if fault.env != BATCH:
        where = f"environment {fault.env} ({where})"
    if episode is not None:
        where += f", episode {episode}"
    if step is not None:
        where += f", step {step}"
    suffix = "" if action is None else f" (action {_as_text(action)})"
    cause = fault.cause
    if isinstance(cause, (EnvironmentContractError, PolicyError, EnvironmentFailure, WorkerError)):
        error = type(cause)(f"{where}: {cause}{suffix}")
        error.__cause__ = cause
        return error
    return failure_from(cause, f"{where}: {fault.during} raised {type(cause).__name__}: {cause}{suffix}")


def _as_text(action: torch.Tensor) -> str:
    text = str(action.tolist())
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
