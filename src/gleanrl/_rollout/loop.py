"""The rollout loop, which alternates an actor and a stepper over the rows of a block.

Only work that every step needs is in the loop. The owner of a rollout (a collector, `env.rollout`, a worker) fills in
ids, counters and checks once per batch, from whole columns.

`with_gradients` and `exploring` set autograd and the exploration type for one call. Both restore the former mode after
an interrupt, too. `torch.no_grad` and similar context managers don't: they are written in Python, so an interrupt
during their exit leaves gradients off in the caller's thread. The C function that `with_gradients` calls completes
before a signal handler runs.
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

    `block.num_complete` is the number of complete steps, also after an error. `block.policy_failed` tells whether the
    actor raised that error. Once bound, the stepper is settled in any case.

    Args:
        actor: writes the actions.
        stepper: writes the outcomes.
        block: columns ``[*batch, T, *leaf]``, all of which are written.
        stop: called with `t` after every step; True ends the rollout after that step.

    Raises:
        StepFault: if the environment failed. If `Actor.check` fails then, its error is the fault's cause.
        PolicyError: if the conversion of an action changed its value. It replaces other errors, except `WorkerError`
            and interrupts.
    """
    block.num_complete, block.policy_failed = 0, False
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
                block.num_complete = t + 1
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
                try:  # a try block without an error costs nothing
                    act(t)
                except Exception:
                    block.policy_failed = True
                    raise
                step(t)
        stepper.confirm(count)
        block.num_complete = count
    except StepFault as fault:
        # A reset follows its step, so after a failed reset the step itself is complete.
        block.num_complete = max(t, fault.t) + (fault.during == "reset")
        # A wrongly converted action may have caused the environment's failure; then the conversion is the better error.
        if (cause := error_of(actor.check, PolicyError)) is not None:
            raise fault.because(cause) from cause
        raise
    except BaseException as error:
        # Complete are the steps before the failed one, and also the current one if `stop` failed.
        block.num_complete = max(t, block.num_complete)
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
    """Return `call(*arguments)`, called with autograd on or off; the former mode returns, also after an error."""
    former = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(enabled)
        return call(*arguments)
    finally:
        torch._C._set_grad_enabled(former)


def exploring(kind: InteractionType | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """Return `call(*arguments)`, called under this exploration type; None uses each module's default.

    The former type returns, also after an error.
    """
    former = interaction_type()
    try:
        with set_interaction_type(kind):
            return call(*arguments)
    except BaseException:
        # An interrupt during the exit of the context manager leaves `kind` set.
        if kind is not former and interaction_type() is kind:
            set_interaction_type(former).__enter__()
        raise
