"""The loop: alternate an actor and a stepper over the rows of a block.

Everything that isn't needed at every step lives elsewhere: ids, counters and checks are filled in once a
batch, from whole columns, by whoever owns the rollout (a collector, `env.rollout`, a worker).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gleanrl.block import Block
from gleanrl.rollouts.protocol import Actor, Stepper
from gleanrl.workers.reports import Portable, Report


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the cause in a form that can always be sent."""
        return _arrived, (self.t, self.env, self.during, Report.of(self.cause), self._made)


def _arrived(t: int, env: int, during: str, cause: Report, made: Sequence[int] | None) -> StepFault:
    return StepFault(t, env, during, cause.error(), made)


def collect(actor: Actor, stepper: Stepper, block: Block, stop: Callable[[int], bool] | None = None) -> int:
    """Fill `block` and return the number of steps written: T, or fewer if `stop` ended the rollout.

    Args:
        actor: writes the actions.
        stepper: writes the outcomes.
        block: fresh columns ``[*batch, T, *leaf]``.
        stop: called with `t` after every step; True ends the rollout after that step.
    """
    block.num_whole = 0
    act = actor.bind(block)
    stepper.bind(block, act is None, actor.primed)
    step = stepper.step
    t = 0
    try:
        if stop is not None:
            for t in range(block.num_steps):
                if act is not None:
                    act(t)
                step(t)
                block.num_whole = t + 1
                if stop(t) and t + 1 < block.num_steps:
                    stepper.stop(t + 1)
                    return t + 1
        elif act is None:
            stepper.run(block)
        else:
            for t in range(block.num_steps):
                act(t)
                step(t)
        block.num_whole = block.num_steps
        return block.num_steps
    except StepFault as fault:
        # The step before a failed reset is whole.
        block.num_whole = max(t, fault.t) + (fault.during == "reset")
        raise
    except BaseException:
        # What the owner must account for: the steps before the one that failed, and this one if `stop` failed.
        block.num_whole = max(t, block.num_whole)
        raise
