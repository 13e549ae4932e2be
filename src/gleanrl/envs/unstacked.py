"""`env.rollout` of environments whose data can't be stacked densely: every step is a lazy stack, and so is the result.

It goes through the TensorDict protocol, step by step: columns can't hold data of unlike keys or shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.rollouts.policies import wrap_policy
from gleanrl.rollouts.stepping import advance, end_flags
from gleanrl.rollouts.traits import Env


def lazy_steps(
    env: Env,
    max_steps: int,
    policy: Any,
    root: TensorDictBase,
    callback: Any = None,
    break_when_any_done: bool = True,
) -> TensorDictBase:
    """Run `policy` from `root` on and return the steps, ``[n, *batch, T]``, lazily stacked along the first dimension.

    Args:
        env: a batch of unlike environments.
        max_steps: the most steps.
        policy: as in the collectors, but it gets lazy stacks.
        root: where to start from.
        callback: called as ``callback(env, step)`` after every step.
        break_when_any_done: whether to stop at the first end of any episode; if not, ended ones are reset.
    """
    wrapped = wrap_policy(policy, env, list(env.observation_spec.keys(True, True)))
    flags = end_flags(env)
    steps: list[TensorDictBase] = []
    with torch.no_grad():
        for _ in range(max_steps):
            stepped = env.step(wrapped(root.copy()))
            steps.append(stepped.clone())  # the environment may overwrite what it returned
            if callback is not None:
                callback(env, steps[-1])
            ended = any(bool(stepped.get(("next", *path)).any()) for path in flags)
            if ended and break_when_any_done:
                break
            root = advance(stepped, env)
            root = env.maybe_reset(root) if ended else root
    rows = zip(*(step.unbind(0) for step in steps), strict=True)
    return LazyStackedTensorDict.lazy_stack([_in_time(row) for row in rows], 0)


def _in_time(steps: tuple[TensorDictBase, ...]) -> TensorDictBase:
    """Return the steps of one environment, ``[*batch, T]``, the last dimension called ``"time"``."""
    dim = steps[0].ndim
    row: Any = torch.stack(steps, dim)
    row.refine_names(..., "time")
    return row
