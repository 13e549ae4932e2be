"""The loop: alternate an actor and a stepper over the rows of a block.

Everything that isn't needed at every step lives elsewhere: ids, counters and checks are filled in once a
batch, from whole columns, by whoever owns the rollout (a collector, `env.rollout`, a worker).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from tensordict import TensorDictBase

from gleanrl.block import Block, Schema


class Stepper(Protocol):
    """An environment, or a batch of them, that writes its outcome into the rows of a block.

    A stepper owns the root observations and flags and everything under ``"next"``. It keeps the *carry*, the
    root of the step to come, from one block to the next. Not thread-safe: one caller at a time.
    """

    batch_size: torch.Size
    """The environments' batch dimensions, ``()`` for one environment."""

    device: torch.device | None
    """Where the block's columns must live; None for the CPU."""

    reset_when_done: bool
    """Whether an episode's end resets its environment (the default); if not, the root of the following row is
    the last observation with its flags, and whoever owns the rollout stops there."""

    through_tensordicts: bool
    """Whether an environment is stepped through its `step`: only then gradients can flow through it."""

    @property
    def disturbed(self) -> bool:
        """Whether somebody else stepped or reset the environment since: the carry isn't its state any more."""

    def schema(self) -> Schema:
        """Return the columns that the stepper writes, root and ``next``; resets if there was no reset yet.

        A stepper with steps that are no frames has the column ``("collector", "mask")`` too, bool, one value a
        step, and writes it: False where an environment did nothing but reset.
        """

    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or those where `mask` (bool, ``batch_size``) is True, into the carry."""

    def root(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the carry's leaves: root paths only, ``[*batch, *leaf]``.

        They may be views: valid until the next step or reset.
        """

    def load(self, root: TensorDictBase) -> None:
        """Take the leaves of `root` as the carry, without a reset: environments keep their own state."""

    def limit(self, max_steps: int) -> None:
        """Truncate every episode at `max_steps` steps; called once, before the first block."""

    def bind(self, block: Block, actions_ready: bool) -> None:
        """Write into `block` from now on and copy the carry into its row 0.

        Args:
            block: fresh columns; it has at least the columns of `schema` and the action columns.
            actions_ready: whether all T actions stand in the block already.
        """

    def step(self, t: int) -> None:
        """Take the action of row `t`, write its ``next`` and the root of row ``t + 1``.

        After the last row that root becomes the carry.

        Where an episode ends, ``next`` holds the observation that ended it and the following root the one
        after the reset.

        Raises:
            StepFault: if the environment raised or broke its declaration.
        """

    def stop(self, num_steps: int) -> None:
        """End a block before it is full: row `num_steps` becomes the carry."""

    # A stepper may also have ``run(num_steps)``, which takes that many steps from row 0 on: it's called instead of
    # `step` where all actions are there already and nobody looks at the rows in between.


class Actor(Protocol):
    """A policy that reads the root columns of a row and writes its action columns."""

    def bind(self, block: Block) -> Callable[[int], None] | None:
        """Write into `block` from now on.

        Returns:
            What acts on row t, that is, writes its action and the policy's other outputs; None if all T actions
            were written at once.
        """

    def forget(self) -> None:
        """Drop what the policy carried from step to step: the environments were reset."""


class StepFault(Exception):
    """What went wrong in a stepper, and where; the rollout's owner turns it into an error for the user.

    Args:
        t: row of the block at which it happened.
        env: index of the environment in the flattened batch.
        during: ``"step"`` or ``"reset"``.
        cause: the original error.
    """

    def __init__(self, t: int, env: int, during: str, cause: BaseException) -> None:
        super().__init__(t, env, during, cause)
        self.t, self.env, self.during, self.cause = t, env, during, cause


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
    stepper.bind(block, actions_ready=act is None)
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
            run = getattr(stepper, "run", None)
            if run is not None:
                run(block.num_steps)
            else:
                for t in range(block.num_steps):
                    step(t)
        else:
            for t in range(block.num_steps):
                act(t)
                step(t)
    except StepFault as fault:
        # The step before a failed reset is whole.
        block.num_whole = max(t, fault.t) + (fault.during == "reset")
        raise
    except BaseException:
        # What the owner must account for: the steps before the one that failed, and this one if `stop` failed.
        block.num_whole = max(t, block.num_whole)
        raise
    block.num_whole = block.num_steps
    return block.num_steps
