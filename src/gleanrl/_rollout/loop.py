"""The loop: alternate an actor and a stepper over the rows of a block.

Everything that isn't needed at every step lives elsewhere: ids, counters and checks are filled in once a
batch, from whole columns, by whoever owns the rollout (a collector, `env.rollout`, a worker).

Modes: autograd and the type of exploration for one call; afterwards they are as before, whatever interrupts it.

`torch.no_grad` and its like are left by functions written in Python: an interrupt there leaves gradients off in the
thread of the caller, who then trains nothing. A call of C, as here, is done before a signal handler runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from gleanrl._arrays.block import Block
from gleanrl._rollout.errors import StepFault, error_of
from gleanrl._rollout.protocol import Actor, Stepper
from gleanrl.errors import PolicyError, WorkerError


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
        if (cause := error_of(actor.check, PolicyError)) is not None:
            raise fault.because(cause) from cause
        raise
    except BaseException as error:
        # What the owner must account for: the steps before the one that failed, and this one if `stop` failed.
        block.num_whole = max(t, block.num_whole)
        if isinstance(error, Exception) and not isinstance(error, WorkerError):
            # An earlier action that was converted wrongly may have caused the policy's failure.
            cause = error_of(actor.check, PolicyError)
            if cause is not None:
                raise cause from error
        raise
    finally:
        stepper.settle()
    actor.check()
    return count


Result = TypeVar("Result")


def with_gradients(enabled: bool, call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `call(*arguments)` returns with autograd on or off."""
    former = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(enabled)
        return call(*arguments)
    finally:
        torch._C._set_grad_enabled(former)


def exploring(kind: InteractionType | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `call(*arguments)` returns where policies explore this way; None: as each module says."""
    former = interaction_type()
    try:
        with set_interaction_type(kind):
            return call(*arguments)
    except BaseException:
        if kind is not former and interaction_type() is kind:
            set_interaction_type(former).__enter__()
        raise
