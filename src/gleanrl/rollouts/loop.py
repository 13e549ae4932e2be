"""The loop: alternate an actor and a stepper over the rows of a block.

Everything that isn't needed at every step lives elsewhere: ids, counters and checks are filled in once a
batch, from whole columns, by whoever owns the rollout (a collector, `env.rollout`, a worker).
"""

from __future__ import annotations

from collections.abc import Callable

from gleanrl.block import Block
from gleanrl.errors import PolicyError, WorkerError
from gleanrl.rollouts.faults import StepFault
from gleanrl.rollouts.protocol import Actor, Stepper


def collect(actor: Actor, stepper: Stepper, block: Block, stop: Callable[[int], bool] | None = None) -> int:
    """Fill `block` and return the number of steps written: T, or fewer if `stop` ended the rollout.

    Args:
        actor: writes the actions.
        stepper: writes the outcomes.
        block: columns ``[*batch, T, *leaf]``, all of which are written.
        stop: called with `t` after every step; True ends the rollout after that step.
    """
    block.num_whole, block.policy_failed = 0, False
    try:
        act = actor.bind(block)
    except Exception:
        block.policy_failed = True
        raise
    stepper.bind(block, act is None, actor.primed)
    step = stepper.step
    t = 0
    count = block.num_steps
    try:
        if stop is not None:
            for t in range(count):
                if act is not None:
                    try:
                        act(t)
                    except Exception:
                        block.policy_failed = True
                        raise
                step(t)
                block.num_whole = t + 1
                if stop(t) and t + 1 < count:
                    stepper.stop(t + 1)
                    count = t + 1
                    break
        elif act is None:
            stepper.run(block)
        else:
            if not actor.overwrites:
                stepper.defer(actor.seen)
            for t in range(count):
                try:  # costs nothing unless it raises
                    act(t)
                except Exception:
                    block.policy_failed = True
                    raise
                step(t)
        stepper.confirm(count)
        block.num_whole = count
    except StepFault as fault:
        # The step before a failed reset is whole.
        block.num_whole = max(t, fault.t) + (fault.during == "reset")
        if (cause := _wrong_action(actor)) is not None:
            raise fault.because(cause) from cause
        raise
    except BaseException as error:
        # What the owner must account for: the steps before the one that failed, and this one if `stop` failed.
        block.num_whole = max(t, block.num_whole)
        if isinstance(error, Exception) and not isinstance(error, WorkerError):
            # An earlier action that was converted wrongly may have caused the policy's failure.
            cause = _wrong_action(actor)
            if cause is not None:
                raise cause from error
        raise
    finally:
        stepper.settle()
    actor.check()
    return count


def _wrong_action(actor: Actor) -> PolicyError | None:
    """Return the error for an action of the failed block that was converted wrongly; None if none is known."""
    try:
        actor.check()
    except PolicyError as found:
        return found
    except Exception:  # the check itself may fail on a block that isn't whole: the first error matters more
        return None
    return None
