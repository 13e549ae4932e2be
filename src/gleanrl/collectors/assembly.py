"""How one process collects: an environment, a policy and a recipe become a collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gleanrl.collectors.collection import Collection
from gleanrl.collectors.devices import Devices
from gleanrl.collectors.environments import has_truncated, innermost
from gleanrl.collectors.options import CollectionOptions
from gleanrl.collectors.tracking import Numbering
from gleanrl.collectors.weights import PolicyWeights
from gleanrl.devices import columns_device, same_device
from gleanrl.envs.policy_state import with_policy_state
from gleanrl.envs.transforms.env import TransformedEnv
from gleanrl.envs.vector.factories import know_truncated
from gleanrl.errors import UnsupportedError
from gleanrl.rollouts.compiling import compiler_of
from gleanrl.rollouts.plan import Handling, plan_rollout
from gleanrl.rollouts.policies import drawing_device
from gleanrl.rollouts.probing import is_unmade, place_of_policy
from gleanrl.rollouts.protocol import EpisodeRules
from gleanrl.rollouts.traits import extra
from gleanrl.seeding import OwnedTorchGenerator


@dataclass(frozen=True)
class Recipe:
    """How one process collects; it can be sent to another process.

    Attributes:
        options: how batches are collected.
        device: fills whichever of the following are unset.
        env_device: where the environment is moved to.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        set_truncated: whether the environment needs a truncated flag.
        trust_policy: whether the policy is called on TensorDicts, whatever its signature says.
        compile_policy: whether, or how, the policy is compiled.
        cudagraph_policy: whether, or how, it is captured.
    """

    options: CollectionOptions
    device: Any = None
    env_device: Any = None
    policy_device: Any = None
    storing_device: Any = None
    set_truncated: bool = False
    trust_policy: bool = False
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None

    @property
    def places_policy(self) -> bool:
        """Whether it says where the policy runs."""
        return self.device is not None or self.policy_device is not None

    def runs_on(self, device: Any) -> bool:
        """Return whether the policy was sent to a device."""
        own = self.device if self.policy_device is None else self.policy_device
        return own is not None and same_device(torch.device(own), torch.device(device))


class Assembly(NamedTuple):
    """A collection, and what it was made of."""

    collection: Collection
    devices: Devices
    moved_to: torch.device | None
    """Where its batches have to be moved; None for nowhere."""


def assemble(
    env: Any,
    policy: Any,
    recipe: Recipe,
    weights_for: Callable[[Any, torch.device | None], PolicyWeights] = PolicyWeights,
    prepared: Callable[[Any], Any] | None = None,
    numbering: Numbering | None = None,
    first_id: int = 0,
) -> Assembly:
    """Return what collects.

    Args:
        env: the environment; the collection's may be a wrapper around it.
        policy: as users give it.
        recipe: how.
        weights_for: makes the holder of the policy.
        prepared: called on the environment once it is where it should be.
        numbering: of the trajectories' ids.
        first_id: the first local id that may be used.

    Raises:
        UnsupportedError: the environment has no flag to truncate by; or a device isn't there.
        InvalidTypeError, PolicyError: the policy doesn't fit.
    """
    if (reopen := extra(env, "_reopen")) is not None:  # another collector's end closed it
        reopen()
    devices = Devices.of(
        recipe.device, recipe.env_device, recipe.policy_device, recipe.storing_device, env.device
    )
    if devices.env is not None and env.device != devices.env:
        env = env.to(devices.env)
    if prepared is not None:
        prepared(env)
    if recipe.set_truncated and not has_truncated(env):
        raise UnsupportedError(
            "set_truncated: the environment has no 'truncated' flag; call env.add_truncated_keys() first"
        )
    options = recipe.options
    if options.max_steps is not None and not has_truncated(innermost(env)):
        know_truncated(env)  # the limit needs a flag to set: one that only transforms write is theirs
    env = with_policy_state(env, policy, place_of_policy(policy) or devices.policy)
    if is_unmade(policy):
        plan_rollout(env, policy, place_of_policy(policy))  # its first call, where it is
    generator = OwnedTorchGenerator(device=drawing_device(env.full_action_spec))
    weights = weights_for(policy, devices.policy)
    plan = plan_rollout(
        env,
        weights.policy,
        devices.policy,
        rules=EpisodeRules(max_steps=options.max_steps),
        generator=generator,
        handling=Handling(recipe.trust_policy, compiler_of(recipe.compile_policy, recipe.cudagraph_policy)),
        on_host=True,
    )
    here = columns_device(plan.stepper.device)
    target = devices.storing
    if target is None and not same_device(here, env.device):
        target = env.device
    shown = here if target == here else plan.device
    collection = Collection(env, plan, options, shown, weights, generator, numbering, first_id)
    return Assembly(collection, devices, None if target == here else target)


def registered(collector: Any) -> Callable[[Any], None]:
    """Return what tells an environment with transforms which collector it belongs to."""

    def tell(env: Any) -> None:
        if isinstance(env, TransformedEnv):
            env.register_collector(collector)

    return tell
