"""Policies whose parameters are made by their first call: that call is made once, before copies go to the workers."""

from __future__ import annotations

from typing import Any

from gleanrl.envs.vector.factories import Factory
from gleanrl.rollouts.plan import plan_rollout
from gleanrl.rollouts.probing import is_unmade


def initialised(policy: Any, factory: Factory) -> Any:
    """Return a policy that has its parameters.

    Args:
        policy: the user's; called once, on the first observation, if it lacks any.
        factory: makes an environment, which is closed again.
    """
    if is_unmade(policy):
        _, env = factory.own_copy().probed()
        try:
            plan_rollout(env, policy)
        finally:
            env.close()
    return policy
